"""Killed processes that do not exit because they are blocked in the kernel: nothing else waits for them.

The freezer of cgroup version 1 stands for the disk or the driver that does this in life: what is frozen ends only once it
is thawed.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from e2b import Sandbox

from harness.hoststate import HostState, left_over, own
from harness.inside import Marked
from harness.patience import within
from harness.platform import Platform
from harness.traffic import until

# The platform waits 10 s for an end, and at its start 15 s for all of them together.
LIMIT_S = 30.0


@pytest.fixture
def group(work_dir: Path) -> Iterator[Path]:
    """A group in which processes can be frozen. Its hierarchy can be mounted beside version 2 as well."""
    freezer = work_dir / "freezer"
    freezer.mkdir()
    subprocess.run(["mount", "-t", "cgroup", "-o", "freezer", "freezer", freezer], check=True)
    path = freezer / f"rf-undead-{os.getpid()}"
    path.mkdir()
    try:
        yield path
    finally:
        (path / "freezer.state").write_text("THAWED")
        until(lambda: not (path / "cgroup.procs").read_text(), "the group is empty")
        path.rmdir()
        subprocess.run(["umount", freezer], check=True)
        freezer.rmdir()


def freeze(group: Path, sandbox: Sandbox) -> int:
    """Freezes a process of a sandbox, so that no signal ends it or the sandbox."""
    pid = Marked(sandbox).host_pid
    (group / "cgroup.procs").write_text(str(pid))
    (group / "freezer.state").write_text("FROZEN")
    until(lambda: (group / "freezer.state").read_text() == "FROZEN\n", "it is frozen")
    return pid


@contextmanager
def in_time(what: str) -> Iterator[None]:
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < within(LIMIT_S), what


def test_unkillable_processes_delay_nothing_else(work_dir: Path, group: Path) -> None:
    server = Platform(work_dir / "undead")
    own(server.data_dir)
    before, environment = HostState.take(), dict(os.environ)
    try:
        server.start()
        server.use()
        deleted, keeper = Sandbox.create(timeout=600), Sandbox.create(timeout=600)
        frozen = freeze(group, deleted)
        with in_time("the delete"):
            assert deleted.kill()
        assert Path(f"/proc/{frozen}").exists() and "have not exited" in server.log()
        assert [box.sandbox_id for box in Sandbox.list().next_items()] == [keeper.sandbox_id]
        box = Sandbox.create(timeout=600)
        assert box.commands.run("echo fine").stdout == "fine\n" and box.kill()

        # The next platform finds it, wants it no more, and starts all the same.
        server.kill()
        with in_time("the start"):
            server.start()
        assert keeper.commands.run("echo kept").stdout == "kept\n"
        with in_time("down beside it"):
            assert server.terminate() == 0
            down = server.down()
        assert down.returncode == 1 and deleted.sandbox_id in down.stderr, down.stderr
        assert keeper.sandbox_id not in down.stderr

        # Once the kernel lets go, nothing is left.
        server.start()
        (group / "freezer.state").write_text("THAWED")
        until(lambda: not Path(f"/proc/{frozen}").exists(), "it is gone")
        assert server.terminate() == 0
        assert server.down().returncode == 0
        assert left_over(before) == {}
    finally:
        if (group / "freezer.state").exists():
            (group / "freezer.state").write_text("THAWED")
        server.close()
        os.environ.clear()
        os.environ.update(environment)
