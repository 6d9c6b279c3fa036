"""What a sandbox can reach of the kernel it shares: system calls, namespaces, sockets, capabilities, devices."""

from __future__ import annotations

import json
import subprocess

import pytest
from e2b import Sandbox

from harness.inside import Marked, probe, root
from harness.traffic import program

REFUSED = {"EPERM", "EACCES", "ENOSYS"}
# A default OCI container's bounding set.
CAPABILITIES = 0xA80425FB


def refused(outcomes: dict[str, str], allowed: set[str] = REFUSED) -> None:
    wrong = {name: outcome for name, outcome in outcomes.items() if outcome not in allowed}
    assert wrong == {}


def test_calls_that_reach_for_the_kernel_or_the_host(sandbox: Sandbox) -> None:
    outcomes = probe(sandbox, "calls")
    assert len(outcomes) > 45
    refused(outcomes)


def test_calls_that_look_as_if_the_kernel_lacked_them(sandbox: Sandbox) -> None:
    outcomes = probe(sandbox, "absent")
    assert set(outcomes.values()) == {"ENOSYS"}, outcomes


@pytest.mark.parametrize("user", ["root", "user"])
def test_the_filter_is_not_noticed_by_its_errors(sandbox: Sandbox, user: str) -> None:
    """What programs ask for to learn what there is fails as on a kernel without filter, for a process without privileges."""
    here = subprocess.run(
        ["/usr/bin/python3", "-c", program("probe.py"), "invalid"],
        check=True,
        capture_output=True,
        timeout=60,
        cwd="/",
        user=65_534,
        group=65_534,
        extra_groups=[],
    )
    want = json.loads(here.stdout)
    assert len(want) > 90
    assert {name: want[name] for name in ("memfd_all", "clone_NEWNS", "unshare_0x200")} == {
        "memfd_all": "EINVAL",
        "clone_NEWNS": "EPERM",
        "unshare_0x200": "ok",
    }
    found = probe(sandbox, "invalid", user=user)
    different = {name: (outcome, found[name]) for name, outcome in want.items() if found[name] != outcome}
    assert different == {}


def test_no_packet_socket_by_its_old_name(sandbox: Sandbox) -> None:
    """The kernel makes one of the type `SOCK_PACKET` of the family INET."""
    assert set(probe(sandbox, "old_packet_socket").values()) == {"EAFNOSUPPORT"}


def test_i386_calls(sandbox: Sandbox) -> None:
    refused(probe(sandbox, "i386"), REFUSED | {"SIGSYS", "SIGSEGV"})


def test_no_new_namespace_and_no_way_into_another(sandbox: Sandbox) -> None:
    for user in ("root", "user"):
        outcomes = probe(sandbox, "namespaces", user=user)
        assert len(outcomes) > 20
        refused(outcomes)


def test_socket_families(sandbox: Sandbox) -> None:
    outcomes = probe(sandbox, "families")
    # UNIX, INET and INET6; of netlink route (0) and sock_diag (4).
    assert set(outcomes) - {"netlink"} == {"1", "2", "10"}, outcomes
    assert outcomes["netlink"] == [0, 4]


def test_capabilities_and_filter_of_everything_that_runs(sandbox: Sandbox) -> None:
    text = root(sandbox, "cat /proc/self/status; sudo cat /proc/self/status; su -c 'cat /proc/self/status'")
    fields = [line.split() for line in text.splitlines() if line.startswith(("Cap", "Seccomp:"))]
    assert len(fields) == 18
    for name, value in fields:
        if name == "Seccomp:":
            assert value == "2"
        elif name == "CapInh:":
            # Inheritable ones would come back through a program whose file capabilities name them.
            assert int(value, 16) == 0
        else:
            assert int(value, 16) & ~CAPABILITIES == 0, (name, value)


def test_the_agent_cannot_be_entered(sandbox: Sandbox) -> None:
    before = root(sandbox, "stat -c %i /proc/1 && cat /proc/1/comm")
    outcomes = probe(sandbox, "agent")
    # Process 1 of a pid namespace does not get signals from inside that it has not asked for.
    assert outcomes.pop("kill") == "ok" and outcomes.pop("stop") == "ok"
    refused(outcomes, REFUSED | {"EBADF"})
    assert root(sandbox, "stat -c %i /proc/1 && cat /proc/1/comm") == before


def test_tracing_stays_with_the_same_user(sandbox: Sandbox) -> None:
    users = Marked(sandbox, "user")
    assert probe(sandbox, "ptrace_other", str(users.inner_pid)) == "EPERM"
    roots = Marked(sandbox, "root")
    assert probe(sandbox, "ptrace_other", str(roots.inner_pid), user="user") == "EPERM"


def test_no_device_of_the_host(sandbox: Sandbox) -> None:
    outcome = probe(sandbox, "devices")
    seen = outcome["seen"]
    assert not [path for path, kind in seen.items() if kind.startswith("block")]
    for path, kind in seen.items():
        if not path.startswith("/dev/pts/"):
            assert path in {
                "/dev/console",
                "/dev/full",
                "/dev/fuse",  # cannot be opened, see test_base.py
                "/dev/null",
                "/dev/ptmx",
                "/dev/random",
                "/dev/tty",
                "/dev/urandom",
                "/dev/zero",
            }, (path, kind)
    refused(outcome["attempts"], REFUSED | {"EROFS"})


def test_the_devices_work(sandbox: Sandbox) -> None:
    assert root(sandbox, "head -c 4 /dev/zero | wc -c; head -c 4 /dev/urandom | wc -c").split() == ["4", "4"]
    assert root(sandbox, "echo x > /dev/null; echo ok") == "ok\n"
    assert root(sandbox, "ls -l /dev/fd /dev/stdin /dev/stdout /dev/stderr | wc -l") == "4\n"
    assert root(sandbox, "echo x > /dev/shm/f && cat /dev/shm/f") == "x\n"


@pytest.mark.parametrize("user", ["root", "user"])
def test_debuggers_and_ordinary_programs_still_work(sandbox: Sandbox, user: str) -> None:
    """The fence is no good if it breaks what people run."""
    code = (
        "import subprocess,threading,multiprocessing,socket,os,tempfile,asyncio;"
        "t=threading.Thread(target=lambda:None);t.start();t.join();"
        "p=multiprocessing.Pool(2);assert p.map(abs,[-1,2])==[1,2];p.close();"
        "assert subprocess.check_output(['echo','x'])==b'x\\n';"
        "s=socket.socket();s.bind(('127.0.0.1',0));s.listen();c=socket.create_connection(s.getsockname());"
        "os.symlink('a',tempfile.mkdtemp()+'/b');asyncio.run(asyncio.sleep(0));print('fine')"
    )
    sandbox.files.write("/tmp/ordinary.py", code)
    assert sandbox.commands.run("python3 /tmp/ordinary.py", user=user).stdout == "fine\n"
