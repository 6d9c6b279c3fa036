"""Memory that the kernel does not charge: a sandbox cannot exhaust host memory through its sockets."""

from __future__ import annotations

import json
import os
import socket
import uuid

import httpx
import pytest
from e2b import Sandbox

from harness.elapse import idle_for, nothing_for
from harness.inside import Background, host_pids, root
from harness.platform import Platform
from harness.traffic import program, until

# The attack ends itself here, so that a host that does not hold it lives.
ATTACK_MIB = 2600
# What a sandbox may have held when it was ended: what is allowed, and what it can take between two measurements and
# during one; a fast machine fills a gigabyte per second.
HELD_MIB = 1000
KINDS = {
    "user": ("netlink", "errors", "timestamps", "corked", "unaccepted"),
    "root": ("netlink", "raw"),
}


def start(sandbox: Sandbox, kind: str, user: str, *options: str, mib: int = ATTACK_MIB) -> None:
    sandbox.files.write("/tmp/sockets.py", program("sockets.py"), user="root")
    command = " ".join(["exec python3 /tmp/sockets.py", kind, str(mib), *options])
    sandbox.commands.run(command, background=True, user=user, timeout=0)


def logged(platform: Platform, sandbox_id: str) -> list[dict]:
    """What the sandbox's log says about the memory of its sockets."""
    headers = {"X-API-Key": os.environ["E2B_API_KEY"]}
    answer = httpx.get(f"{platform.url}/v2/sandboxes/{sandbox_id}/logs", params={"limit": 1000}, headers=headers, timeout=60)
    entries = answer.json()["logs"]
    return [entry for entry in entries if entry.get("fields", {}).get("event_type") == "socket_memory"]


@pytest.mark.alone("it takes up to gigabytes of memory of the host that no group is charged for")
@pytest.mark.parametrize("options", [(), ("raise",)], ids=["default buffers", "largest buffers"])
@pytest.mark.parametrize(("user", "kind"), [(user, kind) for user, kinds in KINDS.items() for kind in kinds])
def test_uncharged_socket_memory_is_limited(
    platform: Platform, neighbour: Sandbox, user: str, kind: str, options: tuple[str, ...]
) -> None:
    box = Sandbox.create(timeout=300)
    try:
        start(box, kind, user, *options)
        until(lambda: not box.is_running(), "the sandbox is ended", within_s=60)
        until(lambda: bool(logged(platform, box.sandbox_id)), "its log says why", within_s=10)
        held = int(logged(platform, box.sandbox_id)[0]["fields"]["held_bytes"])
        print(f"{user} {kind} held {held >> 20} MiB")
        assert held >> 20 < HELD_MIB
        assert root(neighbour, "echo untouched") == "untouched\n"
    finally:
        box.kill()


OPTIONS = """
import errno, fcntl, json, os, socket, struct
v4, v6 = socket.AF_INET, socket.AF_INET6
at = lambda family, address: struct.pack("=HH", family, 0) + (bytes(4) if family == v6 else b"") + address
storage = lambda family, address: at(family, address).ljust(128, b"\\0")
group, group6, source = bytes([239, 1, 2, 3]), b"\\xff\\x05" + bytes(13) + b"\\1", bytes([127, 0, 0, 1])
key = lambda family, address: storage(family, address) + struct.pack("=BBHi", 0, 0, 80, 0) + bytes(80)
label = bytes(15) + b"\\1" + struct.pack("=IBBHHHI", 0, 0, 1, 1, 6, 6, 0)
both = lambda family, group, source: struct.pack("=Ixxxx", 1) + storage(family, group) + storage(family, source)
table = {
    "md5": (v4, 1, 6, 14, key(v4, source)),
    "md5 of IPv6": (v6, 1, 6, 14, key(v6, group6)),
    "member": (v4, 2, 0, 35, group + bytes(4)),
    "member of IPv6": (v6, 2, 41, 20, group6 + struct.pack("i", 1)),
    "member of any": (v6, 2, 41, 42, struct.pack("=Ixxxx", 1) + storage(v6, group6)),
    "source": (v4, 2, 0, 39, group + bytes(4) + source),
    "source of IPv6": (v6, 2, 41, 46, both(v6, group6, group6)),
    "label": (v6, 2, 41, 32, label),
    "routing header": (v6, 2, 41, 57, bytes([7, 2, 4, 0]) + bytes(4)),
    "options": (v4, 2, 0, 4, b"\\x01\\x01\\x01\\x00"),
    "congestion": (v4, 1, 6, 13, b"reno"),
    "protocol above": (v4, 1, 6, 31, b"tls"),
    "zero copy": (v4, 1, 1, 60, struct.pack("i", 1)),
    "reserve": (v4, 1, 1, 73, struct.pack("i", 4096)),
    "iptables": (v4, 2, 0, 64, bytes(84)),
    "filter": (v4, 2, 1, 26, bytes(16)),
}
outcomes = {}
for name, (family, kind, level, option, value) in table.items():
    with socket.socket(family, kind) as made:
        try:
            made.setsockopt(level, option, value)
            outcomes[name] = "ok"
        except OSError as error:
            outcomes[name] = errno.errorcode[error.errno]
with socket.socket() as made:
    try:
        made.getsockopt(6, 35, 64)
        outcomes["map"] = "ok"
    except OSError as error:
        outcomes["map"] = errno.errorcode[error.errno]
    for name, request in (("bridge", 0x8940), ("vlan", 0x8982)):
        try:
            fcntl.ioctl(made, request, bytes(256))
            outcomes[name] = "ok"
        except OSError as error:
            outcomes[name] = errno.errorcode[error.errno]
ours, _ = os.openpty()
try:
    fcntl.ioctl(ours, 0x5423, struct.pack("i", 21))
    outcomes["discipline"] = "ok"
except OSError as error:
    outcomes["discipline"] = errno.errorcode[error.errno]
print(json.dumps(outcomes))
"""
# The errors of a kernel where filters of sockets are locked and line disciplines not loaded, and without modules for networks;
# the rest is absent.
ERRORS = {"filter": "EPERM", "discipline": "EPERM", "bridge": "ENOPKG", "vlan": "ENOPKG"}


@pytest.mark.parametrize("user", ["user", "root"])
def test_options_that_take_uncharged_memory_are_absent(sandbox: Sandbox, user: str) -> None:
    """Also IPv6 flow labels, of which all sandboxes share a few thousand."""
    sandbox.files.write("/tmp/options.py", OPTIONS, user="root")
    outcomes = json.loads(sandbox.commands.run("python3 /tmp/options.py", user=user).stdout)
    wanted = {name: ERRORS.get(name, "ENOPROTOOPT") for name in outcomes}
    assert outcomes == wanted
    limits = {"core/optmem_max": "20480", "ipv4/tcp_syn_retries": "3"}
    for name, limit in limits.items():
        path = f"/proc/sys/net/{name}"
        assert root(sandbox, f"cat {path}").strip() == limit
        assert root(sandbox, f"(echo 131072 > {path}) 2>/dev/null || echo refused") == "refused\n"


ORDINARY = """
import socket, struct
stream = socket.create_server(("127.0.0.1", 0), reuse_port=True)
client = socket.create_connection(stream.getsockname())
on = 1
for made in (stream, client):
    for option in (2, 5, 6, 7, 8, 9, 10, 12, 15, 18, 29, 35, 37, 46, 49):
        made.setsockopt(1, option, on)
    made.setsockopt(1, 13, struct.pack("ii", 1, 0))
    made.setsockopt(1, 20, struct.pack("ll", 1, 0))
    for option in (1, 3, 4, 5, 6, 7, 8, 9, 12, 18, 23, 25, 36):
        made.setsockopt(6, option, on) if (made, option) != (client, 23) else None
    for option in (1, 2, 24):
        made.setsockopt(0, option, 16)
with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as made:
    for option in (16, 18, 19, 23, 25, 26, 49, 51, 62, 66, 67, 70, 72):
        made.setsockopt(41, option, on)
    for option in (1, 2, 8, 10, 11, 12, 13, 33, 34, 49):
        made.setsockopt(0, option, on)
    for option in (101, 102, 103, 104):
        made.setsockopt(17, option, on)
with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as made:
    made.setsockopt(270, 1, 1)
    for option in (3, 4, 5, 10, 11, 12):
        made.setsockopt(270, option, on)
with socket.socket(socket.AF_UNIX) as made:
    made.setsockopt(1, 16, on)
    made.setsockopt(1, 34, on)
print("fine")
"""


@pytest.mark.parametrize("user", ["user", "root"])
def test_options_of_ordinary_programs_work(sandbox: Sandbox, user: str) -> None:
    sandbox.files.write("/tmp/ordinary.py", ORDINARY, user="root")
    assert sandbox.commands.run("python3 /tmp/ordinary.py", user=user).stdout == "fine\n"


HONEST = """
import resource, socket, time
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
keep = []
listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
for _ in range(400):
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    for end in (client, server):
        end.setblocking(False)
        try:
            while end.send(bytes(65536)): pass
        except BlockingIOError: pass
    keep += [client, server]
for _ in range(200):
    end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    end.bind(("127.0.0.1", 0))
    end.setblocking(False)
    for _ in range(50): end.sendto(bytes(2000), end.getsockname())
    keep.append(end)
print("full", flush=True)
while True:
    socket.getaddrinfo("localhost", 80)
    time.sleep(0.01)
"""


@pytest.mark.alone("it takes up to gigabytes of memory of the host that no group is charged for")
def test_a_server_with_full_buffers_is_not_terminated(platform: Platform, neighbour: Sandbox) -> None:
    """What is charged is not held against a sandbox, even while another one is caught."""
    assert Background(neighbour, HONEST).said == "full\n"
    box = Sandbox.create(timeout=300)
    try:
        start(box, "netlink", "user")
        until(lambda: not box.is_running(), "the other one is ended", within_s=60)
    finally:
        box.kill()
    nothing_for(1)
    assert neighbour.is_running()
    assert logged(platform, neighbour.sandbox_id) == []
    assert root(neighbour, "echo untouched") == "untouched\n"


@pytest.mark.alone("it takes up to gigabytes of memory of the host that no group is charged for")
def test_what_was_taken_while_no_platform_ran_is_found(platform: Platform) -> None:
    box = Sandbox.create(timeout=300)
    # More than the platform allows, and less than the agent does.
    start(box, "errors", "user", mib=100)
    platform.kill()
    idle_for(2)
    platform.start()
    platform.use()
    until(lambda: not box.is_running(), "the sandbox is ended", within_s=60)


@pytest.mark.alone("it takes up to gigabytes of memory of the host that no group is charged for")
def test_what_is_taken_while_no_platform_runs_is_given_back(platform: Platform) -> None:
    """The agent checks while no platform runs; the sandbox and its files are kept."""
    for kind, user in (("netlink", "user"), ("errors", "user"), ("raw", "root")):
        box = Sandbox.create(timeout=300)
        box.files.write("/tmp/sockets.py", program("sockets.py"), user="root")
        box.files.write("/home/user/kept", "content")
        mark = f"rf-{uuid.uuid4().hex[:10]}"
        attack = f"exec -a {mark} python3 /tmp/sockets.py {kind} {ATTACK_MIB}"
        box.commands.run(f"until [ -e /tmp/go ]; do sleep 0.1; done; {attack}", background=True, user=user, timeout=0)
        box.commands.run("(sleep 3; touch /tmp/go) >/dev/null 2>&1 &", user="root")
        platform.kill()
        try:
            until(lambda: bool(host_pids(mark)), "the attack runs", within_s=20)
            until(lambda: not host_pids(mark), "the attack is ended", within_s=60)
        finally:
            platform.start()
            platform.use()
        assert box.is_running()
        assert box.files.read("/home/user/kept") == "content"
        until(lambda: box.commands.run("echo works").stdout == "works\n", "commands run again")
        until(lambda: bool(logged(platform, box.sandbox_id)), "its log says why", within_s=10)
        assert int(logged(platform, box.sandbox_id)[0]["fields"]["held_bytes"]) >> 20 < HELD_MIB
        assert box.kill()


STUCK = """
import socket, time
listener = socket.create_server(("0.0.0.0", 8000), backlog=128)
keep = []
print("listens", flush=True)
while True:
    keep.append(listener.accept())
"""


@pytest.mark.alone("it takes up to gigabytes of memory of the host that no group is charged for")
def test_clients_that_give_up_on_a_stuck_server_do_not_end_its_sandbox(platform: Platform, neighbour: Sandbox) -> None:
    """What the platform could not deliver to a server inside is not the sandbox's."""
    assert Background(neighbour, STUCK).said == "listens\n"
    head = f"POST / HTTP/1.1\r\nHost: {neighbour.get_host(8000)}\r\nContent-Length: 100000000\r\n\r\n".encode()
    for _ in range(40):
        with socket.create_connection(("127.0.0.1", platform.port)) as client:
            client.settimeout(0.05)
            client.sendall(head)
            try:
                for _ in range(100):
                    client.send(bytes(1 << 20))
            except (TimeoutError, ConnectionError):
                pass
    box = Sandbox.create(timeout=300)
    try:
        start(box, "netlink", "user")
        until(lambda: not box.is_running(), "a hog elsewhere is ended", within_s=60)
    finally:
        box.kill()
    nothing_for(1)
    assert neighbour.is_running()
    assert logged(platform, neighbour.sandbox_id) == []


# Opens files in children, and prints how many there are after each batch that it is told to.
OPENER = """
import os, resource, signal, sys
each = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1] - 64, 10_000)
held, (done, tell) = 0, os.pipe()
for total in ({below}, {above}):
    while held < total:
        if os.fork() == 0:
            for _ in range(each):
                os.eventfd(0)
            os.write(tell, b"x")
            signal.pause()
        held += each
        os.read(done, 1)
    print(held, flush=True)
    signal.sigwait([signal.SIGUSR1]) if total == {below} else signal.pause()
"""


@pytest.mark.alone("it opens half a million files, and the limit is one of the host")
@pytest.mark.parametrize("user", ["user", "root"])
def test_open_files_are_limited_in_sum(platform: Platform, neighbour: Sandbox, user: str) -> None:
    below, above = 480_000, 540_000
    box = Sandbox.create(timeout=300)
    try:
        code = "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
        opener = Background(box, code + OPENER.format(below=below, above=above), user)
        assert int(opener.said) >= below
        # Below the limit it stays, for more than one measurement of the host.
        for _ in range(50):
            assert root(box, "echo fine") == "fine\n"
        assert logged(platform, box.sandbox_id) == []
        root(box, f"kill -USR1 {opener.handle.pid}")
        until(lambda: not box.is_running(), "the sandbox is ended", within_s=60)
        until(lambda: bool(logged(platform, box.sandbox_id)), "its log says why", within_s=10)
        assert "files open" in logged(platform, box.sandbox_id)[0]["message"]
        assert root(neighbour, "echo untouched") == "untouched\n"
    finally:
        box.kill()
