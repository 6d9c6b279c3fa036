"""Pausing in memory on a host with swap: the memory of a paused sandbox is moved there, and comes back as it was."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2b import Sandbox

from harness.beside import beside
from harness.criu import groups, processes
from harness.platform import Platform
from harness.traffic import until

pytestmark = pytest.mark.alone("it gives the host swap, to which every platform then moves the memory of paused sandboxes")

SIZE_MB = 200
# Says whether its memory is whole: one part of its own, and one that it shares.
HOLDER = """
import hashlib, mmap, os, sys
own = bytearray(os.urandom(1 << 20)) * 150
shared = mmap.mmap(-1, 50 << 20)
shared[:] = bytes(own[: 50 << 20])
digest = hashlib.sha256(own).digest() + hashlib.sha256(shared).digest()
open("/tmp/ready", "x").close()
for line in sys.stdin:
    print("whole" if hashlib.sha256(own).digest() + hashlib.sha256(shared).digest() == digest else "damaged", flush=True)
"""


@pytest.fixture(scope="module")
def swap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Swap of the host, for as long as these tests run."""
    file = tmp_path_factory.mktemp("swap") / "swap"
    file.touch(0o600)
    subprocess.run(["dd", "if=/dev/zero", f"of={file}", "bs=1M", "count=512"], check=True, capture_output=True)
    subprocess.run(["mkswap", file], check=True, capture_output=True)
    subprocess.run(["swapon", file], check=True)
    try:
        yield
    finally:
        subprocess.run(["swapoff", file], check=True)
        file.unlink()


def charged_mb(box: Sandbox) -> float:
    """Memory of the host that a sandbox is charged for."""
    for group in groups(box):
        for file in ("memory.usage_in_bytes", "memory.current"):
            if (group / file).exists():
                return int((group / file).read_text()) / 2**20
    raise AssertionError("it has no group that counts memory")


def memory_mb(box: Sandbox, *fields: str) -> float:
    """What all processes of a sandbox have, by fields of their status."""
    total = 0
    for pid in processes(box):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            total += int(value.split()[0]) if name in fields else 0
    return total / 1024


def holder(box: Sandbox) -> object:
    box.files.write("/tmp/holder.py", HOLDER)
    lines: list[str] = []
    command = box.commands.run("python3 /tmp/holder.py", background=True, stdin=True, timeout=0)
    until(lambda: box.files.exists("/tmp/ready"), "it has its memory")
    pid = command.pid
    command.disconnect()

    def is_whole() -> bool:
        lines.clear()
        again = box.commands.connect(pid, timeout=60)
        box.commands.send_stdin(pid, "check\n")
        for out, _, _ in again:
            lines.append(out or "")
            if "whole" in "".join(lines) or "damaged" in "".join(lines):
                break
        again.disconnect()
        return "".join(lines).strip().endswith("whole")

    return is_whole


@pytest.fixture
def box(swap: None, platform: Platform) -> Iterator[Sandbox]:
    box = Sandbox.create(timeout=300)
    try:
        yield box
    finally:
        box.kill()


def test_memory_of_a_paused_sandbox_is_moved_to_swap(box: Sandbox, platform: Platform) -> None:
    is_whole = holder(box)
    for _ in range(3):
        before = charged_mb(box)
        assert before > SIZE_MB
        assert box.pause() is True
        # 95 percent of it.
        until(lambda: charged_mb(box) < before * 0.05, "its memory is free", within_s=30)
        assert memory_mb(box, "VmSwap") > 100
        until(lambda: "moved the memory of a paused sandbox to swap" in platform.log_tail(100), "the log says so")
        box.connect(timeout=300)
        assert is_whole()


def test_a_resume_does_not_wait_for_it(box: Sandbox) -> None:
    is_whole = holder(box)
    for _ in range(10):
        assert box.pause() is True
        box.connect(timeout=300)
        assert box.commands.run("echo alive").stdout == "alive\n"
    assert is_whole()


def test_an_operator_can_turn_it_off(swap: None, platform: Platform, tmp_path: Path) -> None:
    with beside(platform, tmp_path, "[pause]\npage_out = false\n"), Sandbox.create(timeout=300) as box:
        holder(box)
        assert box.pause() is True
        with Sandbox.create(timeout=300) as other:
            other.commands.run("sleep 1")
        assert memory_mb(box, "VmSwap") == 0
