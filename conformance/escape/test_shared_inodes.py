"""What a sandbox can open is its own: no lock, watch or time of it is seen by another sandbox or by the host.

That holds as well after a resume from disk, in forks and in sandboxes from snapshots, which have the same mounts.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2b import Sandbox

from conftest import forks, fresh
from harness.asked import Asked
from harness.beside import beside
from harness.criu import criu_config, pause
from harness.inside import root, status
from harness.patience import within
from harness.platform import Platform
from harness.traffic import PROGRAMS, program

PROGRAM = "/tmp/inodes.py"
AGENT = "/run/ringfence/agent"
# Paths of the host that are the same kernel objects for all, where the host could meet a sandbox.
ON_THE_HOST = ("/dev/", "/proc/", "/sys/class/net", "/sys/devices/system/cpu", "/sys/fs/cgroup/cpuset")


def run(sandbox: Sandbox, what: str, user: str = "root") -> Any:
    sandbox.files.write(PROGRAM, program("inodes.py"), user="root")
    return json.loads(sandbox.commands.run(f"python3 {PROGRAM} {what}", user=user, timeout=60).stdout)


class Holder(Asked):
    """Holds everything that can be held in a sandbox."""

    def __init__(self, sandbox: Sandbox, user: str) -> None:
        sandbox.files.write(PROGRAM, program("inodes.py"), user="root")
        super().__init__(sandbox, f"ulimit -n $(ulimit -Hn); exec python3 -u {PROGRAM} hold", user=user)
        self.sandbox = sandbox
        locks, watches, _ = self.answer()
        assert min(locks, watches) > 1000

    def answer(self) -> Any:
        return json.loads(self.ask(self.sandbox, "").splitlines()[0])

    def seen(self) -> set[str]:
        """Paths that were used since the last call of this method."""
        return set(self.answer()[2])


def tried_by_the_host(paths: list[str]) -> dict[str, Any]:
    names = json.dumps([path for path in paths if path.startswith(ON_THE_HOST) and Path(path).exists()])
    with open(PROGRAMS / "inodes.py") as turn:
        # Those of two suites that try at the same moment would meet each other's locks.
        fcntl.flock(turn, fcntl.LOCK_EX)
        answer = subprocess.run([sys.executable, PROGRAMS / "inodes.py", "try", names], capture_output=True, text=True, check=True)
    return json.loads(answer.stdout)


@pytest.fixture
def neighbours(platform: Platform, sandbox: Sandbox, request: pytest.FixtureRequest) -> Iterator[list[Sandbox]]:
    """Sandboxes beside the one under test, one of which was started by the same launcher: there is one for each core, and two
    at least, which take turns.
    """
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(fresh(request.config)) for _ in range(max(2, os.cpu_count() or 1))]


@pytest.mark.parametrize("user", ["root", "user"])
def test_nothing_that_can_be_opened_is_shared(sandbox: Sandbox, neighbours: list[Sandbox], user: str) -> None:
    everywhere = list(run(neighbours[0], "rights", user))
    before = [run(neighbour, "times", user) for neighbour in neighbours]
    assert {"/dev/null", "/dev/urandom", "/proc/kallsyms", "/proc/acpi", "/proc/cgroups", "/sys", AGENT} <= set(everywhere)
    holder = Holder(sandbox, user)
    # Locks that are held are noticed: the sandbox itself meets them.
    assert {"/dev/null", "/sys", "/proc/cgroups", "/proc/acpi"} <= set(run(sandbox, "try", user))
    # And so is what is done; in the sandbox itself, nothing is done from here on.
    assert {"/dev/zero", "/sys", "/proc/cgroups"} <= holder.seen()
    assert [run(neighbour, "try", user) for neighbour in neighbours] == [{}] * len(neighbours)
    assert tried_by_the_host(everywhere) == {}
    after = [run(neighbour, "times", user) for neighbour in neighbours]
    assert [differences(*pair) for pair in zip(before, after, strict=True)] == [{}] * len(neighbours)
    # The platform reads the figures of its groups.
    assert {path for path in holder.seen() if not path.startswith("/sys/fs/cgroup")} == set()


def test_nothing_that_the_platform_has_put_there_can_be_changed(sandbox: Sandbox) -> None:
    there = ("/dev/null", "/dev/fuse", "/proc/kallsyms", "/proc/cgroups", "/sys/class/misc/hw_random/rng_current", AGENT)
    attempts = [f"{what} {path}" for path in there for what in ("rm -f", "chmod 600", "chown 1000", "ln -f /etc/passwd")]
    attempts += [f"setfattr -n user.a -v b {path} || mv {path} /tmp/moved || ln {path} /tmp/linked" for path in there]
    attempts += [f"{what} {path}/new" for path in ("/dev", "/sys", "/sys/class", "/proc/acpi") for what in ("touch", "mkdir")]
    for user in ("root", "user"):
        script = "; ".join(f"if ({attempt}) 2>/dev/null; then echo '{attempt}'; fi" for attempt in attempts)
        assert sandbox.commands.run(script, user=user).stdout == ""


def mounts(sandbox: Sandbox) -> dict[str, Any]:
    """The mount table without numbers: ids, devices."""
    lines = [line.split() for line in root(sandbox, "cat /proc/self/mountinfo").splitlines()]
    points = {line[0]: line[4] for line in lines}
    # Options name ids of the host.
    first = int(root(sandbox, "cat /proc/self/uid_map").split()[1])
    inner = lambda option: f"{option[1]}={int(option[2]) - first}"  # noqa: E731
    table: dict[str, Any] = {}
    for line in lines:
        assert line[4] not in table, f"two mounts at {line[4]}"
        table[line[4]] = [points.get(line[1]), line[3], *line[5:-1], re.sub(r"\b([ug]id)=(\d{5,})", inner, line[-1])]
    return table


def differences(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {path: (one.get(path), other.get(path)) for path in {**one, **other} if one.get(path) != other.get(path)}


def rights(sandbox: Sandbox, user: str) -> dict[str, Any]:
    found = run(sandbox, "rights", user)
    for path, seen in found.items():
        # In a fresh sandbox, interfaces may be created before its ids exist, and have no owner inside then. Nobody can write
        # there.
        if path.startswith("/sys/devices/virtual/net/") and isinstance(seen, list):
            assert "write" not in seen, path
            seen[1:3] = []
    return found


@pytest.fixture(scope="module")
def keeping(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    # With fewer cores than the host has, sandboxes have files of their own about their processors.
    config = f"[sandbox]\ndisk_mb = 256\ncpu_count = 1\n\n{criu_config()}"
    with beside(platform, tmp_path_factory.mktemp("inodes"), config) as server:
        yield server


def copies(stack: contextlib.ExitStack, box: Sandbox) -> Iterator[tuple[str, Sandbox]]:
    """The sandbox itself after a resume, then a fork of it, and one from a snapshot of it."""
    pause(box)
    yield "resumed", Sandbox.connect(box.sandbox_id, timeout=120)
    (fork,) = forks(box)
    yield "forked", stack.enter_context(Sandbox.connect(fork, timeout=120))
    snapshot = box.create_snapshot().snapshot_id
    stack.callback(Sandbox.delete_snapshot, snapshot)
    yield "from a snapshot", stack.enter_context(Sandbox.create(snapshot, timeout=120))
    pause(box)
    yield "resumed again", Sandbox.connect(box.sandbox_id, timeout=120)


def test_a_restored_sandbox_is_as_a_fresh_one(keeping: Platform) -> None:
    """Mounts with all their properties, and what root and a user may do with which path."""
    keeping.use()
    with contextlib.ExitStack() as stack:
        box = stack.enter_context(Sandbox.create(timeout=120))
        tables = mounts(box), rights(box, "root"), rights(box, "user")
        kind = tables[1][AGENT]
        assert kind[0] & 0o777 == 0o711 and "read" not in kind and "read" not in tables[2][AGENT]
        for what, copy in copies(stack, box):
            same = mounts(copy), rights(copy, "root"), rights(copy, "user")
            assert [differences(*pair) for pair in zip(tables, same, strict=True)] == [{}, {}, {}], what
            for user in ("root", "user"):
                # Nor in any other way.
                for path in (AGENT, "/proc/1/exe", "/proc/1/map_files/*", "/proc/1/mem"):
                    assert status(copy, f"head -c 1 {path} > /dev/null", user) != 0, (what, user, path)


# Has locks and a watch, and says on request whether they are still there.
KEEPER = """
import ctypes, fcntl, os, sys
inotify = ctypes.CDLL(None).inotify_init1(os.O_NONBLOCK)
held = []
for path in ("/dev/null", "/dev/urandom", "/proc/kallsyms", "/proc/keys", "/proc/cgroups", "/sys", "/proc/acpi"):
    file = os.open(path, os.O_RDONLY)
    # Two of these are the same file.
    fcntl.flock(file, fcntl.LOCK_SH)
    held.append((path, file))
for path in (b"/dev", b"/proc/kallsyms", b"/sys/class"):
    assert ctypes.CDLL(None).inotify_add_watch(inotify, path, 0x20) > 0, path
for line in sys.stdin:
    try:
        while True: os.read(inotify, 1 << 16)
    except BlockingIOError:
        pass
    states = []
    for path, file in held:
        other = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            states.append(path)
        except BlockingIOError:
            pass
        os.close(other)
    try:
        seen = len(os.read(inotify, 1 << 16)) > 0
    except BlockingIOError:
        seen = False
    print("lost", *states, "seen" if seen else "unseen", "whole", flush=True)
"""


@pytest.mark.parametrize("user", ["root", "user"])
def test_a_lock_in_one_sandbox_keeps_no_other_from_being_resumed(keeping: Platform, user: str) -> None:
    keeping.use()
    with Sandbox.create(timeout=120) as first, Sandbox.create(timeout=120) as second:
        # What it has after a resume is what others could share with it.
        pause(first)
        first = Sandbox.connect(first.sandbox_id, timeout=120)
        Holder(first, user)
        second.files.write("/tmp/keeper.py", KEEPER)
        keeper = Asked(second, "exec python3 -u /tmp/keeper.py", user=user)
        assert keeper.ask(second, "") == "lost seen whole\n"
        pause(second)
        began = time.monotonic()
        second = Sandbox.connect(second.sandbox_id, timeout=120)
        assert time.monotonic() - began < within(10)
        # Its own locks and watches live on, and it meets them. The host's are nobody's.
        assert keeper.ask(second, "") == "lost seen whole\n"
        assert run(second, "try", user).keys() >= {"/dev/null", "/sys"}
        assert tried_by_the_host(["/dev/null", "/dev/urandom", "/proc/kallsyms"]) == {}
