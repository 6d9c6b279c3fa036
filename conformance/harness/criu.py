"""The CRIU with which platforms keep the processes of paused sandboxes on disk, and what is left of them on the host."""

from __future__ import annotations

import os
from pathlib import Path

from e2b import Sandbox


def criu_config() -> str:
    """The section of the configuration file."""
    return f'[pause]\ncriu = "{os.environ["RINGFENCE_CRIU"]}"\n'


def frozen_config() -> str:
    """Configuration like `criu_config`, with pauses that are answered when the processes are stopped."""
    return f'{criu_config()}answer = "frozen"\n'


def processes(box: Sandbox) -> list[str]:
    """Pids of the processes of a sandbox on the host."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                # One that has ended is there until its exit code is asked for.
                has_ended = (process / "stat").read_text().rsplit(") ", 1)[1][0] in "ZX"
                if not has_ended and f"/{box.sandbox_id}." in (process / "cgroup").read_text():
                    found.append(process.name)
            except OSError:
                continue
    return found


def groups(box: Sandbox) -> list[Path]:
    """The control groups of a sandbox on the host."""
    found = []
    for tree in [*Path("/sys/fs/cgroup").glob("ringfence-*"), *Path("/sys/fs/cgroup").glob("*/ringfence-*")]:
        try:
            found += [tree / name for name in os.listdir(tree) if name.startswith(box.sandbox_id)]
        except FileNotFoundError:
            continue
    return found


def pause(box: Sandbox) -> None:
    """Pauses a sandbox, of which nothing is left on the host then."""
    assert box.pause() is True
    assert processes(box) == []
    assert groups(box) == []
