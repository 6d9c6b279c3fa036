"""Sandboxes with a program that counts, which shows whether they go on as they were, and how often."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from e2b import Sandbox

from harness.criu import processes
from harness.s3 import Gateway
from harness.servers import Node
from harness.traffic import until

COUNT = "i=0; while :; do i=$((i+1)); echo $i > /tmp/count; sleep 0.05; done"
BLOCK = "head -c 3000000 /dev/urandom > ~/random && sync && md5sum ~/random"


def made() -> tuple[Sandbox, str]:
    """A sandbox with a program that counts, and a file. Traffic resumes it."""
    sandbox = Sandbox.create(timeout=600, lifecycle={"on_timeout": "pause", "auto_resume": True})
    sandbox.commands.run(f"setsid sh -c '{COUNT}' >/dev/null 2>&1 & echo $! > /tmp/pid")
    return sandbox, sandbox.commands.run(BLOCK).stdout


def count(sandbox: Sandbox) -> int:
    return int(until(lambda: sandbox.files.read("/tmp/count").strip(), "it counts"))


def goes_on(sandbox: Sandbox, before: int, hash_before: str) -> None:
    """Its program and its files are what they were, and it runs once."""
    assert sandbox.commands.run("kill -0 $(cat /tmp/pid) && echo alive").stdout == "alive\n"
    assert sandbox.commands.run("md5sum ~/random").stdout == hash_before
    until(lambda: count(sandbox) > before, "it counts further")


def runs_once(sandbox: Sandbox) -> None:
    agents = []
    for pid in processes(sandbox):
        # What it counts with ends all the time.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if "agent" in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "):
                agents.append(pid)
    assert len(agents) == 1, agents


def memories(gateway: Gateway) -> list[Path]:
    return [Path(folder) / name for folder, _, names in os.walk(gateway.objects / "memories") for name in names]


def memories_of(node: Node) -> list[str]:
    return [path.name for path in (node.node_dir / "memories").iterdir()]
