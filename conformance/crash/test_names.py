"""Resources of an earlier platform are not confused with current ones: pids, id ranges, a lock, a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from e2b import Sandbox

from harness.hoststate import REGISTRY, HostState, holders, left_over, own, tree_of
from harness.inside import Marked
from harness.patience import within
from harness.platform import Platform
from harness.traffic import until

# How many regions of ids a host has.
REGIONS = 13
FILE_MAX = Path("/proc/sys/fs/file-max")


@contextmanager
def cleaned_up(*servers: Platform) -> Iterator[None]:
    """Puts the environment back, and compares the host with how it was."""
    own(*(server.data_dir for server in servers))
    before, environment = HostState.take(), dict(os.environ)
    try:
        yield
        for server in servers:
            if server.process:
                assert server.terminate() == 0
            assert server.down().returncode == 0, server.log_tail()
        assert left_over(before) == {}
    finally:
        for server in servers:
            server.close()
        os.environ.clear()
        os.environ.update(environment)


def ids_of(sandbox: Sandbox) -> range:
    """The range of ids on the host that a sandbox has."""
    process = Marked(sandbox)
    _, first, length = map(int, Path(f"/proc/{process.host_pid}/uid_map").read_text().split())
    return range(first, first + length)


def test_two_data_directories_never_share_ids(work_dir: Path) -> None:
    """Not even when the hashes of their paths lead to one region, and whichever of them was there first."""
    region = {path: int(tree_of(path).rpartition("-")[2], 16) % REGIONS for path in (work_dir / f"r{n}" for n in range(200))}
    first = next(iter(region))
    second = next(path for path in region if path != first and region[path] == region[first])
    one, two = Platform(first), Platform(second)
    file_max = FILE_MAX.read_text()
    alone = not holders()
    with cleaned_up(one, two):
        # At once, so that both look for a block in the same moment.
        for server in (one, two):
            server.launch()
        ids = []
        for server in (one, two):
            server.wait_ready()
            server.use()
            ids.append(ids_of(Sandbox.create(timeout=600)))
        assert ids[0].stop <= ids[1].start or ids[1].stop <= ids[0].start, ids
        # One that does not run keeps its block for its sandboxes, and the next start of it finds it again.
        assert one.terminate() == 0
        two.kill()
        two.start()
        one.start()
        for server, had in ((one, ids[0]), (two, ids[1])):
            server.use()
            [known] = Sandbox.list().next_items()
            assert ids_of(Sandbox.connect(known.sandbox_id)) == had
            have = ids_of(Sandbox.create(timeout=600))
            assert abs(have.start - had.start) == len(had), "the next slot of the same block"
        assert {str(first.resolve()), str(second.resolve())} <= holders()
    assert not {str(first.resolve()), str(second.resolve())} & holders()
    if alone:
        # The last platform of the host puts back what the first one found, and another may have come meanwhile.
        until(
            lambda: bool(holders()) or (FILE_MAX.read_text() == file_max and not REGISTRY.exists()),
            "the registry is gone, and the limit of the host is what it was",
        )


def test_a_number_of_a_process_is_not_believed_after_it_was_given_to_another(work_dir: Path) -> None:
    """Without control groups a file says which process an agent is. After a reboot, that number is anybody's."""
    server = Platform(work_dir / "bare", config="unlimited = true\n")
    real = server.binary
    # A host without control groups: its own mounts show none.
    server.binary = work_dir / "bare.sh"
    server.binary.write_text(f'#!/bin/sh\nexec unshare --mount sh -c \'umount -R /sys/fs/cgroup; exec "$0" "$@"\' {real} "$@"\n')
    server.binary.chmod(0o755)
    innocent = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        with cleaned_up(server):
            server.start()
            server.use()
            reused, kept = Sandbox.create(timeout=600), Sandbox.create(timeout=600)
            mark = Marked(kept)
            before = mark.host_pid
            records = {path: path.read_text() for path in (server.data_dir / "run").rglob("cgroup.procs") if path.read_text()}
            assert len(records) == 2, "the platform found control groups"
            [(path, text)] = [(path, text) for path, text in records.items() if reused.sandbox_id in str(path)]
            agent = int(re.split(r"\D", text)[0])
            server.kill()
            os.kill(agent, signal.SIGKILL)
            until(lambda: not Path(f"/proc/{agent}/exe").exists(), "the agent is gone")
            path.write_text(text.replace(str(agent), str(innocent.pid), 1))
            server.start()
            assert [box.sandbox_id for box in Sandbox.list().next_items()] == [kept.sandbox_id]
            assert Sandbox.kill(reused.sandbox_id) is False
            assert kept.commands.run("echo kept").stdout == "kept\n" and mark.host_pid == before
            assert innocent.poll() is None, "an innocent process was killed"
            # Not by `down` either, which looks at the same files.
            server.kill()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(str(innocent.pid))
            assert server.down().returncode == 0
            assert not Path(f"/proc/{before}/exe").exists()
        assert innocent.poll() is None, "an innocent process was killed"
    finally:
        innocent.kill()
        innocent.wait()


# Takes the lock in the way of a platform, and leaves a child that has the descriptor for a moment longer than its input lasts.
HOLDER = """
import fcntl, os, sys, time
file = open(sys.argv[1], "r+")
fcntl.flock(file, fcntl.LOCK_EX)
file.truncate(0)
file.write(f"{os.getpid()}\\n")
file.flush()
if os.fork() == 0:
    print("held", flush=True)
    sys.stdin.read()
    time.sleep(float(sys.argv[2]))
    os._exit(0)
"""


@pytest.mark.parametrize("command", ["up", "down"])
def test_a_lock_of_the_dead_is_waited_for(work_dir: Path, command: str) -> None:
    """A child between clone and exec has the lock's descriptor, and outlives a platform that is killed."""
    server = Platform(work_dir / f"lock-{command}")
    with cleaned_up(server):
        server.start()
        assert server.terminate() == 0
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, server.data_dir / "lock", "0.7"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert holder.stdin and holder.stdout and holder.stdout.readline() == "held\n"
        holder.wait()
        with open(server.data_dir / "lock") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        holder.stdin.close()
        if command == "up":
            server.start()
        else:
            down = server.down()
            assert down.returncode == 0, down.stderr
        holder.stdout.close()


def test_a_platform_that_runs_is_named_at_once(work_dir: Path) -> None:
    server = Platform(work_dir / "running")
    with cleaned_up(server):
        server.start()
        assert server.process
        took = []
        # The machine may delay one of them; the wait for a lock would delay each.
        for _ in range(3):
            begun = time.monotonic()
            second = server.run("up", "--listen", "127.0.0.1:0")
            took.append(time.monotonic() - begun)
            assert second.returncode == 1 and f"another ringfence (process {server.process.pid})" in second.stderr
        assert min(took) < within(4), "it waited for a lock whose owner lives"


def test_what_is_typed_at_the_terminal_of_the_platform_stays_there(work_dir: Path) -> None:
    """An operator runs `up` in a terminal and ends it with Ctrl-C, which goes to every process of the terminal."""
    server = Platform(work_dir / "typed")
    with cleaned_up(server):
        server.start()
        server.use()
        assert server.terminate() == 0
        pid, terminal = pty.fork()
        if pid == 0:
            os.execve(
                server.binary,
                [str(server.binary), "up", "--data-dir", str(server.data_dir), "--listen", f"127.0.0.1:{server.port}", "--log-level", "info"],
                server.environment(),
            )
        said = b""

        def read_until(text: bytes, within_s: float = 30) -> None:
            nonlocal said
            deadline = time.monotonic() + within(within_s)
            while text not in said:
                ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
                assert ready, f"{text!r} was not said: {said.decode(errors='replace')}"
                try:
                    more = os.read(terminal, 65536)
                except OSError:
                    more = b""
                assert more, f"the platform ended without {text!r}: {said.decode(errors='replace')}"
                said += more

        try:
            read_until(b"ringfence is ready")
            box = Sandbox.create(timeout=600)
            plain, asleep = Marked(box), Marked(box, user="user")
            # The shell in a terminal of the sandbox has signals of its own, which Ctrl-C out here is not.
            pids = [plain.host_pid, asleep.host_pid]
            sessions = {os.getsid(process) for process in pids} | {os.getpgid(process) for process in pids}
            assert os.getsid(pid) not in sessions and pid not in sessions
            os.write(terminal, b"\x03")
            read_until(b"SIGINT: draining")
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            assert [plain.host_pid, asleep.host_pid] == pids, "programs inside were interrupted"
        finally:
            os.close(terminal)
        server.start()
        box = Sandbox.connect(box.sandbox_id)
        assert box.commands.run("echo on").stdout == "on\n"
        assert [plain.host_pid, asleep.host_pid] == pids
