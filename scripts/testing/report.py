"""What is said at the end: the runners' own closing lines, a table of times, the slowest tests, and all that explains a failure.

A log of CI may keep only its last lines, so what explains a failure comes last, and everything after the whole output of what
failed fits in 200 lines.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from testing.tasks import Task
from testing.timings import Budgets, Timing, table

PASSED, FAILED, ENDED, LEFT = "passed", "failed", "ended", "not begun"
CLOSING = re.compile(
    r"^(=+ .*\b(?:passed|failed|errors?|skipped|no tests ran)\b.* in [\d.]+s.*=+"
    r"|(?:[\w:-]+: )?test result: .*"
    r"|[\w:-]+: \d+ passed, \d+ failed \(.*"
    r"|Ran \d+ tests? in .*|OK|FAILED \(.*\)"
    r"|skipped tests count as failed|\s*Finished `.*)$"
)
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# Of what explains failures, so that all of it and the tables fit.
FAILURE_LINES = 95
TESTS_IN_FULL = 3


@dataclass(frozen=True)
class Outcome:
    """What became of a task."""

    task: Task
    status: str
    seconds: float = 0.0
    log: Path | None = None
    # Why it failed or was ended.
    why: str = ""
    # What the machine was like, and what ran beside, when it failed.
    machine: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    timings: tuple[Timing, ...] = field(default=(), compare=False)
    # Seconds of processors. What a sandbox used counts where its platform waited for it.
    processor_s: float = 0.0


def read_log(path: Path | None) -> str:
    try:
        return COLOURS.sub("", path.read_text(errors="replace")) if path else ""
    except OSError:
        return ""


def closing(text: str) -> list[str]:
    """The closing lines of whatever runner wrote an output."""
    return [line.strip() for line in text.splitlines() if CLOSING.match(line.rstrip())]


def last_line(path: Path) -> str:
    """The last line of an output that is being written."""
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 2000))
            lines = COLOURS.sub("", file.read().decode(errors="replace")).split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def times(outcomes: Sequence[Outcome], install_s: float, total_s: float) -> list[str]:
    """A line per task, in order of their steps, and the sums."""
    lines = [f"{'seconds':>8}  {'processor':>9}  what", f"{install_s:8.0f}  {'':9}  installing packages"]
    kept = [outcome for outcome in outcomes if outcome.task.step == "prepare" and outcome.status == PASSED and outcome.seconds < 5]
    if kept:
        lines.append(f"{sums(kept)}  {len(kept)} assets that were kept, together")
    for outcome in outcomes:
        if outcome not in kept:
            tests = f", {len(outcome.timings)} tests" if outcome.timings else ""
            alone = ", alone" if outcome.task.alone else ""
            lines.append(f"{sums([outcome])}  {outcome.task.name} ({outcome.task.step}): {outcome.status}{tests}{alone}")
    worked = sum(outcome.seconds for outcome in outcomes)
    used = sum(outcome.processor_s for outcome in outcomes)
    lines.append(f"{total_s:8.0f}  {used:9.0f}  in all, for {worked:.0f} s of work side by side")
    return lines


def sums(outcomes: Sequence[Outcome]) -> str:
    """Two columns: how long some tasks took, and what they used of the processors."""
    seconds, used = (sum(column) for column in zip(*((outcome.seconds, outcome.processor_s) for outcome in outcomes)))
    return f"{seconds:8.0f}  {used:9.0f}"


def failure(outcome: Outcome, seed: int, again: str, room: int = FAILURE_LINES) -> list[str]:
    """What explains one failure, in a limited number of lines."""
    lines = [
        f"FAILED: {outcome.task.name} (step {outcome.task.step}) after {outcome.seconds:.0f} s: {outcome.why}",
        f"  beside it ran: {', '.join(outcome.beside) or 'nothing'}",
        # Repeats of a hunt have seeds of their own.
        f"  seed: {outcome.task.environment.get('RINGFENCE_CRASH_SEED', seed)}",
        f"  again: {again}",
        f"  whole output: {outcome.log}",
    ]
    failed = [timing for timing in outcome.timings if timing.failed]
    unfinished = room - len(lines) - len(outcome.machine) - 2
    if failed:
        lines.append(f"  tests: {len(failed)} of {len(outcome.timings)} did not pass")
        names = [f"    {timing.outcome}: {timing.test}" for timing in failed]
        lines += names[:10] + ([f"    and {len(names) - 10} more"] if len(names) > 10 else [])
        unfinished = max(20, unfinished - min(len(names), 11) - 1)
        shown = failed[:TESTS_IN_FULL]
        for timing in shown:
            lines += sections(timing, unfinished // len(shown))
    else:
        lines.append("  the end of its output:")
        lines += [f"    {line}" for line in read_log(outcome.log).splitlines()[-max(20, unfinished) :]]
    lines.append("  the machine when it failed:")
    lines += [f"    {line}" for line in outcome.machine]
    return lines


def sections(timing: Timing, room: int) -> list[str]:
    """The report of a test, the log of its platform, and what it printed; the end of each, in equal shares."""
    lines = [f"  -- {timing.test} ({timing.seconds:.1f} s)"]
    # The same capture is in the report of each phase.
    found = list(dict.fromkeys(timing.sections))
    share = max(4, (room - 1) // max(1, len(found)) - 1)
    for name, text in found:
        lines.append(f"    [{name}]")
        lines += [f"    {line[:220]}" for line in text.splitlines()[-share:]]
    return lines


def command_again(task: Task, inherited: Mapping[str, str]) -> str:
    """What repeats a task alone, as it is typed into a shell."""
    shown = {name: value for name, value in task.environment.items() if name.startswith("RINGFENCE_")}
    shown |= {name: value for name, value in inherited.items() if name == "RINGFENCE_CRASH_SEED"}
    words = [f"{name}={shlex.quote(value)}" for name, value in sorted(shown.items())]
    where = f"cd {shlex.quote(str(task.cwd))} && " if task.cwd else ""
    return f"{where}{' '.join([*words, shlex.join(task.command)])}"


def closing_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """The closing lines of every task that has some."""
    lines = []
    for outcome in outcomes:
        for line in closing(read_log(outcome.log)) if outcome.status == PASSED else []:
            lines.append(f"{outcome.task.name}: {line}")
    return lines


def slowest_tests(outcomes: Sequence[Outcome], budgets: Budgets) -> list[str]:
    return table([timing for outcome in outcomes for timing in outcome.timings], budgets)
