"""What is said at the end."""

from __future__ import annotations

import json
import tempfile
import unittest
from pathlib import Path

from testing import report
from testing.report import FAILED, PASSED, Outcome, closing, command_again, failure, last_line, times
from testing.tasks import Task
from testing.timings import Budgets, Timing, over, read, slowest, table

TASK = Task("python", "sdk", ("pytest", "-m", "not alone"), cwd=Path("/repo/conformance"), environment={"RINGFENCE_BIN": "/a b"})


class Closing(unittest.TestCase):
    def test_lines_of_the_runners_are_found(self) -> None:
        lines = [
            "======= 349 passed, 6 deselected in 312.20s (0:05:12) =======",
            "========= 1 failed, 2 passed in 3.1s =========",
            "test result: ok. 12 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.10s",
            "server::it: test result: ok. 302 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 60.10s (61.0 s)",
            "runtime::linux: 41 passed, 0 failed (99.1 s)",
            "Ran 51 tests in 1.019s",
            "OK",
            "    Finished `ci` profile [optimized] target(s) in 3m 04s",
        ]
        self.assertEqual(closing("\n".join(["noise", *lines, "=== FAILURES ===", "passed in 3 s"])), [line.strip() for line in lines])

    def test_the_last_line_is_that_with_something_in_it(self) -> None:
        with tempfile.NamedTemporaryFile("w") as file:
            file.write("one\n\x1b[32mtwo\x1b[0m\n\n")
            file.flush()
            self.assertEqual(last_line(Path(file.name)), "two")
        self.assertEqual(last_line(Path("/nowhere")), "")


class Failures(unittest.TestCase):
    def outcome(self, tests: int, lines: int) -> Outcome:
        sections = (("report", "\n".join(f"r{number}" for number in range(lines))), ("log of the platform", "\n".join(["l"] * lines)))
        timings = tuple(Timing("python", f"python/test_x.py::test_{number}", "failed", 1.0, 0.0, sections) for number in range(tests))
        return Outcome(TASK, FAILED, 10, Path("/nowhere"), "it ended with 1", ("load 1",) * 20, ("fence",), timings)

    def test_everything_that_explains_one_fits(self) -> None:
        for tests in (1, 2, 40):
            said = failure(self.outcome(tests, 500), 42, "again")
            text = "\n".join(said)
            self.assertLess(len(said), 130)
            for wanted in ("test_0", "seed: 42", "fence", "again: again", "load 1", "log of the platform", "r499"):
                self.assertIn(wanted, text)

    def test_without_tests_the_end_of_the_output_is_shown(self) -> None:
        with tempfile.NamedTemporaryFile("w") as file:
            file.write("\n".join(f"line {number}" for number in range(1000)))
            file.flush()
            said = failure(Outcome(TASK, FAILED, 10, Path(file.name), "it ended with 1"), 42, "again")
        self.assertIn("    line 999", said)
        self.assertLess(len(said), 130)

    def test_a_task_can_be_repeated(self) -> None:
        self.assertEqual(
            command_again(TASK, {"RINGFENCE_CRASH_SEED": "42", "PATH": "x"}),
            "cd /repo/conformance && RINGFENCE_BIN='/a b' RINGFENCE_CRASH_SEED=42 pytest -m 'not alone'",
        )

    def test_times_name_every_task(self) -> None:
        kept = Outcome(Task("prepare go", "prepare", ("true",)), PASSED, 1)
        said = "\n".join(times([Outcome(TASK, PASSED, 300, timings=self.outcome(3, 1).timings, processor_s=97.4), kept], 12, 400))
        self.assertIn("300         97  python (sdk): passed, 3 tests", said)
        self.assertIn("12             installing packages", said)
        self.assertIn("1          0  1 assets that were kept", said)


class Times(unittest.TestCase):
    def test_a_file_that_was_cut_off_is_read_as_far_as_it_goes(self) -> None:
        with tempfile.NamedTemporaryFile("w") as file:
            record = {"test": "t", "outcome": "failed in setup", "seconds": {"setup": 2.0}, "sections": [["report", "r"]]}
            file.write(json.dumps(record) + '\n{"test": "u", "outc')
            file.flush()
            (timing,) = read("python", Path(file.name))
        self.assertEqual((timing.outcome, timing.seconds, timing.failed), ("failed in setup", 0.0, True))
        self.assertEqual(timing.sections, (("report", "r"),))
        self.assertEqual(read("python", Path("/nowhere")), [])

    def test_a_skipped_test_counts_as_failed(self) -> None:
        self.assertTrue(Timing("s", "t", "skipped", 1.0).failed)

    def test_the_first_budget_that_fits_counts(self) -> None:
        budgets = Budgets(20, (("a/test_x.py::test_one", 50), ("a/test_x.py::*", 30), ("crate::it", 60)))
        for test, seconds in (
            ("a/test_x.py::test_one[root]", 50),
            ("a/test_x.py::test_two[a-b]", 30),
            ("a/test_y.py::test_one", 20),
            ("crate::it", 60),
        ):
            self.assertEqual(budgets.of(test), seconds, test)

    def test_slow_tests_are_listed_and_what_exceeds_its_budget_is_named(self) -> None:
        timings = [Timing("s", f"t{number}", "passed", float(number)) for number in range(40)]
        budgets = Budgets(18, (("t39", 100),))
        self.assertEqual([timing.test for timing in slowest(timings, 2)], ["t39", "t38"])
        self.assertEqual(len(over(timings, budgets)), 20)
        said = table(timings, budgets)
        self.assertEqual(sum("OVER" in line for line in said), 19)
        self.assertTrue(any("t19 is over its budget" in line for line in said))
        self.assertEqual(table([], budgets), [])

    def test_the_budgets_of_the_repository_can_be_read(self) -> None:
        self.assertGreater(Budgets.load().default, 0)
        self.assertEqual(report.slowest_tests([], Budgets.load()), [])


if __name__ == "__main__":
    unittest.main()
