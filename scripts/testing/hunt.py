"""Repeats tests under load and says how often each of them failed: `scripts/test.sh --hunt N [NAME]`.

NAME is a suite or a step (`crash`, `python-tls`), `unit` or `unit:CRATE`, a file or a test of a suite (`fence/test_ssh.py`,
`crash/test_pauses.py::test_x`), or `SUITE:WORDS` with what pytest's `-k` takes. Without it, everything is hunted, which
takes days for thirty times.

Each repeat is a run of its own, with platforms of its own and another seed. Beside it, every processor has a program that
does nothing else than use it, and one program writes to the disk. What runs alone has no load: such tests measure the
machine, and would rightly fail.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from testing import report, suites
from testing.options import CLIENTS, STEPS, UsageError
from testing.plan import Selection
from testing.report import PASSED, Outcome
from testing.suites import ALL, BY_NAME, Suite, of_step
from testing.tasks import Task

BURNERS = 2


@dataclass
class Rate:
    """How often a test ran and failed."""

    runs: int = 0
    failures: int = 0


def select(name: str | None, long: bool) -> Selection:
    """What a name names."""
    if name is None:
        return Selection(unit=True, suites=tuple((suite, suite.chosen(long)) for suite in ALL if suite.chosen(long)))
    if name == "unit":
        return Selection(unit=True)
    if name.startswith("unit:"):
        return Selection(unit=True, crates=(name.removeprefix("unit:"),))
    if name in BY_NAME:
        return Selection(suites=(arguments_of(BY_NAME[name], long),))
    if name in (*STEPS, *CLIENTS):
        found = of_step(name, long)
        if found:
            return Selection(suites=tuple((suite, suite.chosen(long)) for suite in found))
    suite, colon, words = name.partition(":")
    if "/" in name and name.partition("/")[0] in suites.DIRECTORIES:
        return Selection(suites=(suites.of_file(name),))
    if colon and suite in BY_NAME:
        chosen, arguments = arguments_of(BY_NAME[suite], long)
        return Selection(suites=((chosen, (*arguments, "-k", words)),))
    raise UsageError(f"--hunt knows no {name!r}: name a suite ({' '.join(BY_NAME)}), a step, unit[:CRATE], a file, or SUITE:WORDS")


def arguments_of(suite: Suite, long: bool) -> tuple[Suite, tuple[str, ...]]:
    """A suite, in the long form where the default has none of it."""
    return suite, suite.chosen(long) or suite.chosen(True)


def repeated(tasks: Sequence[Task], times: int, seed: int) -> tuple[list[Task], list[Task]]:
    """The tasks before what is hunted, and the repeats of what is."""
    once = [task for task in tasks if task.place != "lane"]
    repeats = []
    for number in range(times):
        for task in tasks:
            if task.place == "lane":
                timings = task.timings.with_suffix(f".{number}.timings") if task.timings else None
                environment = {**task.environment, "RINGFENCE_CRASH_SEED": str(seed + number)}
                if timings:
                    environment["CONFORMANCE_TIMINGS"] = str(timings)
                command = tuple(str(timings) if task.timings and word == str(task.timings) else word for word in task.command)
                repeats.append(
                    replace(
                        task,
                        name=f"{task.name}#{number + 1}",
                        command=command,
                        environment=environment,
                        timings=timings,
                        needs=frozenset(),
                        # A hang is a failure, and being slow beside the load is none.
                        bound=task.bound * 4,
                    )
                )
    return once, repeats


@contextmanager
def load(environment: Mapping[str, str]) -> Iterator[None]:
    """Uses the processors and the disk meanwhile."""
    commands = [["burn"]] * BURNERS + [["disk", tempfile.gettempdir()]]
    started = [
        subprocess.Popen([sys.executable, "-m", "testing.load", *words], env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
        for words in commands
    ]
    try:
        yield
    finally:
        for process in started:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()


def rates(outcomes: Sequence[Outcome]) -> dict[str, Rate]:
    """How often each test failed, and each suite as a whole where no test did."""
    found: dict[str, Rate] = {}
    for outcome in outcomes:
        suite = outcome.task.name.partition("#")[0]
        for timing in outcome.timings:
            rate = found.setdefault(f"{suite}: {timing.test}", Rate())
            rate.runs += 1
            rate.failures += timing.failed
        whole = found.setdefault(f"{suite}: (what is outside of its tests)", Rate())
        whole.runs += 1
        whole.failures += outcome.status != PASSED and not any(timing.failed for timing in outcome.timings)
    return found


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """The tests that failed, with their rates, and how many did not."""
    found = rates(outcomes)
    bad = sorted(((rate.failures / rate.runs, name, rate) for name, rate in found.items() if rate.failures), reverse=True)
    lines = [f"{rate.failures:4d} of {rate.runs:4d} failed  {share:6.1%}  {name}" for share, name, rate in bad]
    lines += [f"  {outcome.task.name}: {outcome.log}" for outcome in outcomes if outcome.status != PASSED][:40]
    runs = [rate.runs for rate in found.values()]
    lines.append(f"{len(found) - len(bad)} of {len(found)} never failed; each ran {min(runs, default=0)} to {max(runs, default=0)} times")
    return lines


def explain(outcomes: Sequence[Outcome], seed: int, count: int = 5) -> list[str]:
    """What explains the first few failures."""
    lines = []
    for outcome in [outcome for outcome in outcomes if outcome.status == report.FAILED][:count]:
        lines += [*report.failure(outcome, seed, report.command_again(outcome.task, os.environ), 40), ""]
    return lines
