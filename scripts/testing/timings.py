"""What tests took and what became of them, and their budgets.

Suites write lines of JSON (`conformance/harness/durations.py`, and `rust` for the crates). A budget is what a test may take on
the machine of CI before it is named in the output; a test never fails for it.
"""

from __future__ import annotations

import fnmatch
import json
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

BUDGETS = Path(__file__).with_name("budgets.toml")


@dataclass(frozen=True)
class Timing:
    """One test of one suite."""

    suite: str
    test: str
    outcome: str
    seconds: float
    # Of preparation and clean-up; a platform is started by the first test and ended by the last one.
    around_s: float = 0.0
    sections: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    @property
    def failed(self) -> bool:
        # A skipped test proves nothing, so it counts as failed.
        return self.outcome != "passed"


def read(suite: str, path: Path) -> list[Timing]:
    """What a suite wrote; a last line that was cut off is left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        seconds = record.get("seconds", {})
        around = seconds.get("setup", 0.0) + seconds.get("teardown", 0.0)
        sections = tuple((name, text) for name, text in record.get("sections", []))
        found.append(Timing(suite, record["test"], record["outcome"], seconds.get("call", 0.0), around, sections))
    return found


@dataclass(frozen=True)
class Budgets:
    """Seconds per test: the first pattern that fits counts, and the default where none does."""

    default: float
    patterns: tuple[tuple[str, float], ...] = ()

    @classmethod
    def load(cls, path: Path = BUDGETS) -> Budgets:
        table = tomllib.loads(path.read_text())
        return cls(float(table["default"]), tuple((name, float(seconds)) for name, seconds in table["tests"].items()))

    def of(self, test: str) -> float:
        for pattern, seconds in self.patterns:
            # Brackets of parameters are no pattern.
            if fnmatch.fnmatchcase(test, pattern.replace("[", "[[]")) or test.partition("[")[0] == pattern:
                return seconds
        return self.default


def slowest(timings: Iterable[Timing], count: int = 20) -> list[Timing]:
    return sorted(timings, key=lambda timing: -timing.seconds)[:count]


def over(timings: Iterable[Timing], budgets: Budgets) -> list[Timing]:
    """The tests that took longer than their budget."""
    return [timing for timing in timings if timing.seconds > budgets.of(timing.test)]


def table(timings: Sequence[Timing], budgets: Budgets) -> list[str]:
    """The slowest tests with their budgets, and by name those that exceed them."""
    if not timings:
        return []
    lines = ["the slowest tests, in seconds, with their budgets:"]
    for timing in slowest(timings):
        budget = budgets.of(timing.test)
        mark = "  OVER ITS BUDGET" if timing.seconds > budget else ""
        lines.append(f"  {timing.seconds:7.1f} of {budget:5.0f}  {timing.suite}: {timing.test}{mark}")
    listed = set(slowest(timings))
    others = [timing for timing in over(timings, budgets) if timing not in listed]
    lines += [f"  {timing.seconds:7.1f}: {timing.suite}: {timing.test} is over its budget" for timing in others]
    return lines
