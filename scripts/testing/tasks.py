"""One process of a run, and what it waits for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

# Where a task runs: each place has room for so many at once. What is fetched mostly waits for the network, and cargo locks
# its directory, so only suites are many.
PREPARE, CARGO, LANE = "prepare", "cargo", "lane"


@dataclass(frozen=True)
class Task:
    """A command that is begun when what it needs has succeeded."""

    name: str
    step: str
    command: tuple[str, ...]
    place: str = LANE
    needs: frozenset[str] = frozenset()
    # Expected seconds: the longest begin first.
    seconds: float = 30
    # Seconds until it is ended, and has failed.
    bound: float = 900
    # What it may take to end after it was asked to, before it is killed: a suite puts the host in order.
    grace: float = 90
    cwd: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    nice: int = 0
    group: str | None = None
    # Begins when everything that is not alone has ended, and nothing runs beside it.
    alone: bool = False
    # Standard output goes to this file instead of the log.
    output: Path | None = None
    # What tests of the task write about themselves.
    timings: Path | None = None
