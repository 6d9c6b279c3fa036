"""Every kind of object that a sandbox can make in the kernel: who pays for it?

For each kind, a program inside makes as many as it can within a second or two, and what the kernel of the host has taken
meanwhile is compared with what the sandbox is charged for. Whatever is not charged must be bounded: by a limit, or by the
platform, which ends the sandbox and says so in its log. A kind that only a new kernel has, and that is neither, fails here.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import Any

import pytest
from e2b import Sandbox

from harness.platform import Platform
from harness.traffic import PROGRAMS, program, until

from escape.test_kernel_memory import logged

sys.path.insert(0, str(PROGRAMS))
from kernel_objects import KINDS  # noqa: E402

MIB = 1 << 20
# What may be lost to one sandbox.
BOUND_MIB = 64
# What other programs of the host take and give back meanwhile.
NOISE_MIB = 16
# How much the objects of a kind are charged at most, and how long making them may take: small objects are made at about
# 100 MiB in a second.
CHARGE_MIB, SECONDS = 160, 0.8
# What differs for root: its sockets, and options that require its capabilities.
OF_ROOT = [name for name in KINDS if name.startswith(("raw", "options", "netlink", "memberships"))]
OF_USERS = [name for name in KINDS if not name.startswith("raw") and name not in ("options-6", "options-7")]


def kernel_bytes() -> int:
    """What the kernel of the host has taken for itself."""
    lines = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in open("/proc/meminfo")}
    others = ("MemFree", "Buffers", "Cached", "SwapCached", "AnonPages", "Hugetlb")
    return lines["MemTotal"] - sum(lines.get(name, 0) for name in others)


def settled() -> int:
    """The same, once what ended before has been given back."""
    lowest, deadline = kernel_bytes(), time.monotonic() + 2
    while time.monotonic() < deadline:
        time.sleep(0.06)
        now = kernel_bytes()
        if now > lowest - 2 * MIB:
            return min(now, lowest)
        lowest = now
    return lowest


@dataclass
class Made:
    """What became of an attempt: what the program printed, or nothing if the sandbox was ended, and bytes."""

    said: dict[str, Any]
    lost: int
    entries: list[dict[str, Any]]

    @property
    def uncharged_mib(self) -> int:
        return (self.lost - self.said.get("charged", 0)) // MIB


def make(platform: Platform, kind: str, user: str) -> Made:
    box = Sandbox.create(timeout=120)
    try:
        box.files.write("/tmp/kernel_objects.py", program("kernel_objects.py"), user="root")
        handle = box.commands.run(
            f"exec python3 -u /tmp/kernel_objects.py {kind} {CHARGE_MIB} {SECONDS}", background=True, user=user, timeout=30
        )
        output = iter(handle)
        said = ""
        while not said.endswith("\n"):
            said += next(output)[0] or ""
        assert said == "begun\n"
        before = settled()
        box.files.write("/tmp/begin", "", user="root")
        said = ""
        try:
            while not said.endswith("\n"):
                said += next(output)[0] or ""
        except Exception:  # noqa: BLE001
            # The stream ends in one of several ways with the sandbox.
            until(lambda: not box.is_running(), "the sandbox is ended", within_s=10)
            until(lambda: bool(logged(platform, box.sandbox_id)), "its log says why", within_s=10)
        most = kernel_bytes()
        entries = logged(platform, box.sandbox_id)
    finally:
        begun = time.monotonic()
        box.kill()
        took = time.monotonic() - begun
    assert took < 3, f"the sandbox took {took:.1f} s to delete"
    # What it gives back was the sandbox's, whatever other programs did meanwhile; so was what it took.
    lost = min(most - before, most - settled())
    return Made(json.loads(said) if said.endswith("\n") else {}, lost, entries)


@pytest.mark.parametrize(
    ("user", "kind"), [*(("user", kind) for kind in OF_USERS), *(("root", kind) for kind in OF_ROOT)]
)
def test_what_the_kernel_takes_is_charged_or_bounded(platform: Platform, user: str, kind: str) -> None:
    for is_last in (False, True):
        made = make(platform, kind, user)
        print(f"\n{user} {kind}: {made.said}, lost {made.lost // MIB} MiB, uncharged {made.uncharged_mib} MiB")
        if made.entries:
            # Ended by the platform.
            assert int(made.entries[0]["fields"]["held_bytes"]) <= BOUND_MIB * MIB
            return
        assert made.said["made"] > 0 or made.said["refused"], made
        # Another program of the host may have taken it.
        if made.uncharged_mib <= BOUND_MIB + NOISE_MIB:
            return
        assert not is_last, made
