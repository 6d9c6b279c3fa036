"""The loop of a run, with small programs: what fails, what is ended, and that nothing is left."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from pathlib import Path
from unittest import mock

from testing import processes
from testing.display import Display
from testing.report import ENDED, FAILED, LEFT, PASSED, Outcome, read_log
from testing.runner import Runner, exit_code
from testing.tasks import CARGO, LANE, PREPARE, Task

UNTIL_READY = "while [ ! -e ready ]; do sleep 0.02; done"
ROOM = {PREPARE: 2, CARGO: 1, LANE: 2}


class Running(unittest.TestCase):
    def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name)
        self.said = io.StringIO()

    def shell(self, name: str, script: str, *needs: str, **other: object) -> Task:
        return Task(name, "step", ("sh", "-c", script), needs=frozenset(needs), cwd=self.directory, **other)  # type: ignore[arg-type]

    def runner(self, *tasks: Task, **other: object) -> Runner:
        return Runner(tasks, ROOM, self.directory / "logs", dict(os.environ), Display(self.said), **other)  # type: ignore[arg-type]

    def run_all(self, *tasks: Task, **other: object) -> tuple[Runner, dict[str, Outcome]]:
        runner = self.runner(*tasks, **other)
        return runner, {outcome.task.name: outcome for outcome in runner.go()}

    def test_tasks_run_in_their_order_and_pass(self) -> None:
        told: list[str] = []
        runner, found = self.run_all(
            self.shell("second", "echo second >> order", "first"),
            self.shell("first", "echo first >> order; echo out; echo err >&2"),
            passed=lambda task: told.append(task.name),
        )
        self.assertEqual([outcome.status for outcome in found.values()], [PASSED, PASSED])
        self.assertEqual((self.directory / "order").read_text(), "first\nsecond\n")
        self.assertEqual(read_log(found["first"].log), "out\nerr\n")
        self.assertEqual((exit_code(runner, list(found.values())), told, runner.leftovers), (0, ["first", "second"], []))

    def test_output_can_go_to_a_file_of_its_own(self) -> None:
        _, found = self.run_all(self.shell("task", "echo data; echo said >&2", output=self.directory / "data"))
        self.assertEqual((self.directory / "data").read_text(), "data\n")
        self.assertEqual(read_log(found["task"].log), "said\n")

    def test_the_first_failure_ends_the_rest_cleanly(self) -> None:
        # It puts something in order when it is asked to end, like a suite.
        cleans = "trap 'echo clean > cleaned; exit 3' INT; touch ready; while :; do sleep 0.05; done"
        runner, found = self.run_all(
            self.shell("runs", cleans, seconds=9),
            self.shell("fails", "while [ ! -e ready ]; do sleep 0.05; done; exit 7", seconds=8),
            self.shell("later", "touch later", seconds=1),
        )
        self.assertEqual({name: outcome.status for name, outcome in found.items()}, {"runs": ENDED, "fails": FAILED, "later": LEFT})
        self.assertEqual((found["fails"].why, found["fails"].beside), ("it ended with 7", ("runs",)))
        self.assertTrue(found["fails"].machine)
        self.assertTrue((self.directory / "cleaned").exists())
        self.assertFalse((self.directory / "later").exists())
        self.assertEqual(exit_code(runner, list(found.values())), 1)

    def test_a_hunt_goes_on(self) -> None:
        runner, found = self.run_all(self.shell("fails", "exit 1", seconds=9), self.shell("later", "true"), goes_on=True)
        self.assertEqual([outcome.status for outcome in found.values()], [FAILED, PASSED])
        self.assertEqual(exit_code(runner, list(found.values())), 1)

    def test_what_takes_too_long_has_failed(self) -> None:
        _, found = self.run_all(self.shell("hangs", "sleep 600", bound=0.3))
        self.assertEqual(found["hangs"].status, FAILED)
        self.assertIn("did not end within", found["hangs"].why)

    def test_what_does_not_end_when_it_is_asked_is_killed(self) -> None:
        _, found = self.run_all(self.shell("stubborn", "trap '' INT; sleep 600 & wait; wait", bound=0.3, grace=0.3))
        self.assertEqual(found["stubborn"].status, FAILED)

    def test_a_program_that_is_killed_says_so(self) -> None:
        _, found = self.run_all(self.shell("dies", "kill -KILL $$"))
        self.assertEqual(found["dies"].why, "it was killed by signal 9")

    def test_a_signal_ends_everything(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            with self.subTest(number):
                (self.directory / "up").unlink(missing_ok=True)
                runner = self.runner(self.shell("runs", "touch up; exec sleep 600"), self.shell("never", "true", "runs"))

                def send(number: int = number) -> None:
                    deadline = time.monotonic() + 30
                    while not (self.directory / "up").exists() and time.monotonic() < deadline:
                        time.sleep(0.02)
                    os.kill(os.getpid(), number)

                sender = threading.Thread(target=send)
                sender.start()
                outcomes = runner.go()
                sender.join()
                self.assertEqual([outcome.status for outcome in outcomes], [ENDED, LEFT])
                self.assertEqual(exit_code(runner, outcomes), 130)

    def test_what_a_task_leaves_is_ended(self) -> None:
        """Processes are ended also in a session of their own, as platforms are."""
        bystander = subprocess.Popen(["sleep", "600"])
        self.addCleanup(bystander.wait)
        self.addCleanup(bystander.kill)
        script = f"sleep 601 & setsid sh -c 'touch ready; exec sleep 602' & {UNTIL_READY}"
        runner, found = self.run_all(self.shell("leaves", script))
        self.assertEqual(found["leaves"].status, PASSED)
        # It may be found between its first line and its second.
        self.assertEqual(len(runner.leftovers), 1)
        self.assertIn("sleep 602", runner.leftovers[0])
        self.assertEqual(processes.marked(runner.mark), [])
        self.assertIsNone(bystander.poll(), "a process of another was ended")

    def test_what_loses_its_parent_is_waited_for(self) -> None:
        """Orphans are waited for while the task goes on, and in a session of their own, as agents of restored
        sandboxes are."""
        orphan = "setsid sh -c 'echo $$ > orphan; exec sleep 0.3' &"
        gone = "pid=$(cat orphan); for _ in $(seq 100); do [ -e /proc/$pid ] || exit 0; sleep 0.1; done; exit 9"
        lines = f"({orphan}); while [ ! -s orphan ]; do sleep 0.02; done; cut -d' ' -f4 /proc/$(cat orphan)/stat > parent; {gone}"
        runner, found = self.run_all(self.shell("leaves", lines), *(self.shell(f"other {number}", "exit 3") for number in range(20)), goes_on=True)
        self.assertEqual(found["leaves"].status, PASSED)
        # It would be the child of whatever is init here, which may wait for it as well.
        self.assertEqual((self.directory / "parent").read_text(), f"{os.getpid()}\n")
        # Those of tasks are left to those who want to know how they ended.
        self.assertEqual({outcome.why for name, outcome in found.items() if name != "leaves"}, {"it ended with 3"})
        self.assertEqual(runner.leftovers, [])

    def test_sandboxes_of_a_platform_that_is_left_are_ended(self) -> None:
        program = self.directory / "ringfence"
        program.write_text('#!/bin/sh\necho "$@" > "$0.said"\n')
        program.chmod(0o755)
        platform = 'exec -a "$PWD/ringfence" bash -c "touch ready; sleep 604; true" --data-dir /data/of/it'
        script = f"setsid bash -c '{platform}' & {UNTIL_READY}"
        runner, _ = self.run_all(self.shell("leaves", script))
        self.assertTrue(any("/data/of/it" in command for command in runner.leftovers), runner.leftovers)
        self.assertEqual(Path(f"{program}.said").read_text(), "down --data-dir /data/of/it\n")
        self.assertEqual(processes.marked(runner.mark), [])

    def test_timings_of_a_task_are_read(self) -> None:
        timings = self.directory / "timings"
        timings.write_text("those of an earlier run\n")
        line = '{"test": "a::b", "outcome": "passed", "seconds": {"setup": 1, "call": 2.5, "teardown": 0.5}}'
        _, found = self.run_all(self.shell("suite", f"echo '{line}' >> timings; printf '{{\"te' >> timings", timings=timings))
        (timing,) = found["suite"].timings
        self.assertEqual((timing.test, timing.seconds, timing.around_s, timing.failed), ("a::b", 2.5, 1.5, False))

    def test_what_a_task_and_its_children_use_of_the_processors_is_told(self) -> None:
        burn = "import time\nwhile time.process_time() < 0.2: pass"
        _, found = self.run_all(self.shell("burns", f"{sys.executable} -c '{burn}'; true"), self.shell("waits", "sleep 0.3"))
        self.assertGreaterEqual(found["burns"].processor_s, 0.2)
        self.assertLess(found["waits"].processor_s, 0.1)


class Showing(unittest.TestCase):
    def test_without_a_terminal_lines_are_plain_and_few(self) -> None:
        out = io.StringIO()
        display = Display(out)
        display.event("began a")
        for _ in range(100):
            display.running([("a", 1.0, "last line")], 3)
        self.assertEqual(out.getvalue(), "[  0:00] began a\n")

    def test_a_terminal_has_a_table_that_events_do_not_break(self) -> None:
        class Terminal(io.StringIO):
            def isatty(self) -> bool:
                return True

        out = Terminal()
        with mock.patch.dict(os.environ, TERM="xterm"):
            display = Display(out)
        display.running([("a", 1.0, "x" * 500), ("b", 2.0, "")], 3)
        self.assertTrue(all(len(line) < 500 for line in out.getvalue().splitlines()))
        self.assertEqual(out.getvalue().count("\n"), 3)
        display.event("passed b")
        self.assertIn("\x1b[3A\x1b[J[  0:00] passed b\n", out.getvalue())


if __name__ == "__main__":
    unittest.main()
