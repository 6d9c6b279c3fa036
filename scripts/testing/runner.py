"""Begins tasks, watches them, and ends them: the loop of a run.

The first failure ends the run: what has not begun is left, and what runs is asked to end, as Ctrl-C does, which is passed on in
the same way. A second signal ends everything at once. Whatever the end, no process of the run is left.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

from testing import machine, processes, report
from testing.display import Display
from testing.pace import Pace
from testing.processes import Process
from testing.report import ENDED, FAILED, LEFT, PASSED, Outcome
from testing.schedule import next_tasks
from testing.tasks import LANE, Task
from testing.timings import read

PAUSE_S = 0.1
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Runner:
    """One run of some tasks."""

    def __init__(
        self,
        tasks: Sequence[Task],
        room: Mapping[str, int],
        logs: Path,
        environment: Mapping[str, str],
        display: Display,
        passed: Callable[[Task], None] | None = None,
        goes_on: bool = False,
        pace: Pace | None = None,
    ) -> None:
        self.tasks = tasks
        self.room = room
        self.logs = logs
        self.display = display
        # Is told of each task that has passed.
        self.passed = passed
        # Whether a failure leaves the others as they are.
        self.goes_on = goes_on
        # Without one, suites begin as soon as there is a place for them.
        self.pace = pace
        self.mark = processes.new_mark()
        self.environment = {**environment, processes.MARK: self.mark}
        self.running: dict[str, Process] = {}
        self.outcomes: dict[str, Outcome] = {}
        # Why nothing begins any more.
        self.ending: str | None = None
        self.signals = 0
        self.leftovers: list[str] = []
        # Whether a task is being begun, whose process is not known yet.
        self.beginning = False

    def go(self) -> list[Outcome]:
        """Runs everything, and returns what became of each task, in the order of the tasks."""
        before = {number: signal.signal(number, self._signalled) for number in SIGNALS}
        processes.adopt()
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, self._child_ended)
        try:
            while self.running or self._begin():
                if self.ending is not None:
                    # Also what was being begun when a signal arrived.
                    self._end_all(self.ending)
                self._reap()
                self._begin()
                self.display.running(
                    [(name, process.seconds, report.last_line(process.log)) for name, process in self.running.items()],
                    len(self.tasks) - len(self.outcomes) - len(self.running),
                )
                if self.running:
                    time.sleep(PAUSE_S)
        finally:
            for process in self.running.values():
                process.kill()
                process.process.wait()
            self.leftovers = processes.end_rest(self.mark, self.environment)
            for number, handler in before.items():
                signal.signal(number, handler)
        return [self.outcomes.get(task.name, Outcome(task, LEFT)) for task in self.tasks]

    def _begin(self) -> bool:
        """Begins what may begin. Returns whether anything runs."""
        if self.ending is None:
            succeeded = {name for name, outcome in self.outcomes.items() if outcome.status == PASSED}
            failed = set(self.outcomes) - succeeded
            for task in next_tasks(self.tasks, succeeded, self.running, self.room, failed):
                if not self._in_pace(task):
                    continue
                if task.timings:
                    task.timings.unlink(missing_ok=True)
                self.beginning = True
                try:
                    self.running[task.name] = Process(task, self.logs / f"{task.name.replace(' ', '-')}.log", self.environment)
                finally:
                    self.beginning = False
                self._child_ended(signal.SIGCHLD, None)
                if task.place == "lane":
                    self.display.event(f"began {task.name}")
        return bool(self.running)

    def _in_pace(self, task: Task) -> bool:
        """Whether a task that may begin does so now. Only suites wait for each other."""
        if self.pace is None or task.place != LANE:
            return True
        beside = sum(process.task.place == LANE for process in self.running.values())
        now_s = time.monotonic()
        if not self.pace.allows(beside, now_s):
            return False
        self.pace.began(now_s)
        return True

    def _reap(self) -> None:
        for name, process in list(self.running.items()):
            code = process.poll()
            if code is not None:
                del self.running[name]
                self._ended(process, code)

    def _ended(self, process: Process, code: int) -> None:
        task = process.task
        timings = tuple(read(task.name, task.timings)) if task.timings else ()
        outcome = Outcome(task, PASSED, process.seconds, process.log, timings=timings, processor_s=process.processor_s)
        if code == 0 and process.stopped_for is None:
            self.outcomes[task.name] = outcome
            self._say_passed(outcome)
            if self.passed:
                self.passed(task)
            return
        # What was asked to end because of something else has not failed; what took too long has.
        if process.stopped_for is not None and self.ending is not None and process.stopped_for == self.ending:
            self.outcomes[task.name] = replace(outcome, status=ENDED, why=self.ending)
            self.display.event(f"ended {task.name}: {self.ending}")
            return
        why = process.stopped_for or (f"it was killed by signal {-code}" if code < 0 else f"it ended with {code}")
        state = tuple(machine.describe(self.logs, Path("/tmp"), Path("/dev/shm")))
        self.outcomes[task.name] = replace(outcome, status=FAILED, why=why, machine=state, beside=tuple(self.running))
        self.display.event(f"FAILED {task.name} after {process.seconds:.0f} s: {why}")
        if not self.goes_on:
            self._end_all(f"{task.name} failed")

    def _say_passed(self, outcome: Outcome) -> None:
        lines = report.closing(report.read_log(outcome.log))
        if outcome.task.step == "prepare":
            lines = [report.last_line(outcome.log)] if outcome.log else []
        said = f": {lines[-1]}" if lines else ""
        self.display.event(f"passed {outcome.task.name} in {outcome.seconds:.0f} s{said}")

    def _end_all(self, why: str) -> None:
        """Nothing begins any more, and what runs is asked to end."""
        self.ending = self.ending or why
        for process in self.running.values():
            process.stop(self.ending)

    def _child_ended(self, _number: int, _: FrameType | None) -> None:
        """Reaps adopted children immediately, because a pause of a sandbox takes as long as this does."""
        if not self.beginning:
            processes.wait_for_adopted({process.process.pid for process in self.running.values()})

    def _signalled(self, number: int, _: FrameType | None) -> None:
        self.signals += 1
        if self.signals == 1:
            self._end_all(f"{signal.Signals(number).name} was received")
        else:
            for process in self.running.values():
                process.kill()


def exit_code(runner: Runner, outcomes: Sequence[Outcome]) -> int:
    """0 if everything passed, 130 for an interruption, 1 otherwise."""
    if any(outcome.status == FAILED for outcome in outcomes):
        return 1
    if runner.signals:
        return 130
    return 0 if all(outcome.status == PASSED for outcome in outcomes) else 1
