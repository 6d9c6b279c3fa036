"""What the suites themselves see of the host: every kind of leak of one's own, and nothing of a neighbour's."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from harness import hoststate
from harness.hoststate import HostState, left_over
from harness.ports import BLOCK, free_port
from harness.traffic import until

HERE = Path(__file__).parent.parent


class Places:
    """The data directory of a suite and that of a neighbour, and processes that nobody of the two has as a child."""

    def __init__(self, root: Path) -> None:
        self.ours, self.theirs = root / "ours" / "data", root / "theirs" / "data"
        for directory in (self.ours, self.theirs):
            directory.mkdir(parents=True)
            (directory / "launchers.lock").touch()
        hoststate.own(self.ours)
        # A program that is called as the platform is.
        self.program = root / "ringfence-idle"
        shutil.copy(shutil.which("sleep") or "/usr/bin/sleep", self.program)
        self.started: list[int] = []

    def orphan(self, script: str, *words: str | Path) -> int:
        """Starts a shell that nobody waits for, and returns its pid."""
        said = subprocess.run(
            ["setsid", "--fork", "sh", "-c", f"echo $$; exec >/dev/null; {script}", *words],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True,
        ).stdout  # fmt: skip
        self.started.append(int(said))
        return self.started[-1]

    def end(self) -> None:
        for pid in self.started:
            # Each is the leader of its session, and of the group of what it has started.
            os.killpg(pid, signal.SIGKILL)
            until(lambda pid=pid: not any(hoststate._link(f"/proc/{pid}/{name}") for name in ("exe", "cwd")), f"{pid} has ended")


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    found = Places(tmp_path)
    try:
        yield found
    finally:
        found.end()


def test_processes_count_by_what_they_have_open(places: Places) -> None:
    before = HostState.take()
    idle = 'exec "$0" 600 >"$1" 2>&1'
    pids = [places.orphan(idle, places.program, directory / "launchers.lock") for directory in (places.ours, places.theirs)]
    until(lambda: all(map(hoststate._runs_platform, pids)), "they run")
    assert [hoststate._is_own_process(pid) for pid in pids] == [True, False]
    left = left_over(before, within_s=0.1)
    assert left == {"processes": {f"{places.program} 600": 1}}


def test_a_process_without_a_sign_counts_unless_another_program_has_it_as_a_child(places: Places) -> None:
    nobodys = places.orphan('exec "$0" 601 >/dev/null 2>&1', places.program)
    until(lambda: hoststate._runs_platform(nobodys), "it runs")
    assert hoststate._is_own_process(nobodys)
    parent = places.orphan('"$0" 602 >/dev/null 2>&1; exit', places.program)

    def children() -> list[int]:
        return [int(pid) for pid in hoststate._text(f"/proc/{parent}/task/{parent}/children").split()]

    until(lambda: any(map(hoststate._runs_platform, children())), "it runs")
    assert not any(map(hoststate._is_own_process, children()))


def test_data_directories_are_found_on_a_command_line(places: Places) -> None:
    for option in (["--data-dir", places.theirs], [f"--data-dir={places.theirs}"]):
        words = [str(word) for word in option]
        program = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)", *words]
        with subprocess.Popen(program, stdout=subprocess.PIPE) as started:
            assert started.stdout and started.stdout.readline() == b"\n"
            assert hoststate._data_dirs(started.pid) == {str(places.theirs)}
            started.kill()


def test_spare_disks_count_once_our_launchers_are_gone(places: Places) -> None:
    """Whatever a neighbour runs."""
    (places.ours / "disks").mkdir()
    (places.ours / "disks" / "spare-one.img").touch()
    idle = 'exec "$0" 603 >"$1" 2>&1'
    theirs = places.orphan(idle, places.program, places.theirs / "launchers.lock")
    until(lambda: hoststate._runs_platform(theirs), "it runs")
    assert "disks/spare-one.img" in hoststate.files(places.ours)
    ours = places.orphan(idle, places.program, places.ours / "launchers.lock")
    until(lambda: hoststate._runs_platform(ours), "it runs")
    assert "disks/spare-one.img" not in hoststate.files(places.ours)


def test_ids_are_those_of_whom_the_registry_names(places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hoststate, "REGISTRY", tmp_path)
    entries = {
        "regions/3": "several data directories",
        "regions/5": str(places.theirs),
        "blocks/9": f"0 {places.ours}",
        "blocks/10": f"1 {places.theirs}",
    }
    for name, text in entries.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert hoststate.holders() == {str(places.ours), str(places.theirs)}
    assert hoststate.registered() == {f"{tmp_path}: {places.ours}"}
    first = hoststate.FIRST_SANDBOX_ID
    theirs = [first + 5 * (4096 << 16), first + 6 * (4096 << 16) - 1, first + 10 * (256 << 16)]
    assert all(map(hoststate._is_of_others, theirs))
    assert not any(map(hoststate._is_of_others, [0, first, first + 9 * (256 << 16), theirs[1] + 1]))


def check(look: Callable[[], set[str] | Counter[str]], make: Callable[[Path], object], places: Places) -> None:
    """An object that is made for the neighbour is not seen, and one that is made for us is."""
    before = set(look())
    make(places.theirs)
    assert set(look()) == before
    make(places.ours)
    assert len(set(look()) - before) == 1


def test_mounts(places: Places) -> None:
    with ExitStack() as stack:

        def mount(data: Path) -> None:
            (data.parent / "mounted").mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "none", data.parent / "mounted"], check=True)
            stack.callback(subprocess.run, ["umount", data.parent / "mounted"], check=True)

        check(hoststate.mounts, mount, places)


def test_loop_devices(places: Places) -> None:
    with ExitStack() as stack:

        def attach(data: Path) -> None:
            with open(data / "disk.img", "wb") as disk:
                disk.truncate(1 << 20)
            command = ["losetup", "--find", "--show", disk.name]
            device = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
            stack.callback(subprocess.run, ["losetup", "--detach", device], check=True)

        check(hoststate.loop_devices, attach, places)


def test_cgroups(places: Places) -> None:
    root = next(path for path in (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup")) if path.exists())
    with ExitStack() as stack:

        def make(data: Path) -> None:
            tree = root / hoststate.tree_of(data)
            tree.mkdir()
            stack.callback(tree.rmdir)

        check(hoststate.cgroups, make, places)


def test_sockets(places: Places) -> None:
    listen = 'exec "$0" -c "import socket,time; s=socket.socket(socket.AF_UNIX); s.bind(chr(0)+\'ringfence-of-a-neighbour\'); time.sleep(600)"'
    before = hoststate.sockets()
    places.orphan(f"{listen} >/dev/null 2>&1", sys.executable)
    until(lambda: "@ringfence-of-a-neighbour" in Path("/proc/net/unix").read_text(), "it listens")
    assert hoststate.sockets() == before
    with socket.socket(socket.AF_UNIX) as ours:
        ours.bind("\0ringfence-of-ours")
        assert hoststate.sockets() - before == {"@ringfence-of-ours"}


def test_links(tmp_path: Path) -> None:
    """In a network namespace that is ours alone every interface counts, and in that of the host only the platform's."""
    hoststate.own(tmp_path / "data")
    assert hoststate.links() <= {hoststate.LINK}
    look = "from pathlib import Path; from harness import hoststate; hoststate.own(Path('/nowhere/data')); print(*sorted(hoststate.links()))"
    script = 'ip link add one type veth peer name two && exec "$0" -c "$1"'
    command = ["unshare", "--net", "sh", "-c", script, sys.executable, look]
    seen = subprocess.run(command, cwd=HERE, check=True, capture_output=True, text=True).stdout.split()
    assert {"one", "two"} <= set(seen)


def test_a_file_in_a_shared_place_is_left_when_it_is_there_at_every_look(monkeypatch: pytest.MonkeyPatch) -> None:
    before = HostState.take()
    looks = iter(range(10**6))
    monkeypatch.setattr(hoststate, "loose_files", lambda: {"/tmp/.criu.left", f"/tmp/.criu.{next(looks)}"})
    assert left_over(before, within_s=0.3)["loose"] == {"/tmp/.criu.left": 1}


def test_no_two_processes_are_given_one_port() -> None:
    ours = [free_port() for _ in range(3)]
    assert len(set(ours)) == 3
    code = "from harness.ports import free_port; print(*(free_port() for _ in range(3)), flush=True); input()"
    blocks = {port // BLOCK for port in ours}
    with ExitStack() as stack:
        for _ in range(2):
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            other = stack.enter_context(subprocess.Popen([sys.executable, "-c", code], cwd=HERE, **pipes))
            stack.callback(other.kill)
            theirs = {int(port) // BLOCK for port in other.stdout.readline().split()}
            assert len(theirs) == 1 and not theirs & blocks
            blocks |= theirs
