"""What the machine was like, for reports of failures: many are explained by memory, a full disk or the kernel's log."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

PRESSURES = ("cpu", "io", "memory")
KERNEL_LINES = 12
# What the kernel says about every sandbox: its links and its disk.
ORDINARY = (
    *("entered ", "link becomes", "renamed from", "detected capacity change", "mounting filesystem", "mounted filesystem"),
    "callbacks suppressed",
)


def describe(*directories: Path) -> list[str]:
    """Load, memory, disks and the last words of the kernel."""
    lines = [f"load {' '.join(f'{load:.1f}' for load in os.getloadavg())} on {len(os.sched_getaffinity(0))} processors"]
    lines += [f"pressure of {kind}: {text}" for kind in PRESSURES if (text := first_line(f"/proc/pressure/{kind}"))]
    memory = fields("/proc/meminfo")
    lines.append("memory " + ", ".join(f"{name} {memory.get(name, '?')}" for name in ("MemTotal", "MemAvailable", "Dirty", "SwapFree")))
    seen = set()
    for directory in directories:
        place = directory
        while not place.exists():
            place = place.parent
        device = place.stat().st_dev
        if device not in seen:
            seen.add(device)
            space = shutil.disk_usage(place)
            lines.append(f"disk of {place}: {space.free >> 20} of {space.total >> 20} MiB free")
    lines += kernel_log()
    return lines


def first_line(path: str) -> str:
    try:
        return Path(path).read_text().partition("\n")[0]
    except OSError:
        return ""


def fields(path: str) -> dict[str, str]:
    """Lines of `name: value`."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def kernel_log() -> list[str]:
    """The last lines of the kernel's log, without those that every sandbox causes."""
    try:
        ran = subprocess.run(["dmesg", "--ctime"], capture_output=True, text=True, errors="replace", timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ["the log of the kernel cannot be read"]
    lines = [line[:200] for line in ran.stdout.splitlines() if not any(words in line for words in ORDINARY)]
    return [f"kernel: {line}" for line in lines[-KERNEL_LINES:]]
