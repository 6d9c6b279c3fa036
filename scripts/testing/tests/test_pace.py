"""When suites begin beside others: a pure decision, and the loop that keeps to it."""

from __future__ import annotations

import io
import os
import tempfile
import unittest
from pathlib import Path

from testing import pace
from testing.display import Display
from testing.pace import ALWAYS, APART_S, CALM, ROOM, Pace
from testing.report import PASSED
from testing.runner import Runner
from testing.tasks import CARGO, LANE, PREPARE, Task


class Deciding(unittest.TestCase):
    def test_suites_begin_apart_where_the_processors_are_busy(self) -> None:
        decides = Pace(lambda: CALM + 0.1)
        self.assertTrue(decides.allows(0, 100.0))
        decides.began(100.0)
        self.assertFalse(decides.allows(1, 100.0 + APART_S - 0.1))
        self.assertTrue(decides.allows(1, 100.0 + APART_S))

    def test_on_a_calm_machine_they_begin_at_once(self) -> None:
        decides = Pace(lambda: CALM)
        decides.began(100.0)
        self.assertTrue(decides.allows(1, 100.1))
        self.assertTrue(decides.allows(ALWAYS, 100.1))

    def test_nothing_is_waited_for_when_nothing_runs(self) -> None:
        decides = Pace(lambda: 100.0)
        decides.began(100.0)
        self.assertTrue(decides.allows(0, 100.1))

    def test_more_than_always_begin_only_where_there_is_room(self) -> None:
        for load, allowed in ((0.0, True), (ROOM, True), (ROOM + 0.1, False)):
            with self.subTest(load):
                decides = Pace(lambda load=load: load)  # type: ignore[misc]
                self.assertEqual(decides.allows(ALWAYS, 0.0), allowed)
                self.assertTrue(decides.allows(ALWAYS - 1, 0.0))

    def test_the_load_is_that_of_a_processor(self) -> None:
        self.assertAlmostEqual(pace.load() * len(os.sched_getaffinity(0)), os.getloadavg()[0], delta=2.0)


class Keeping(unittest.TestCase):
    def test_the_loop_asks_for_suites_only(self) -> None:
        asked: list[int] = []

        class Listening(Pace):
            def allows(self, running: int, now_s: float) -> bool:
                asked.append(running)
                # Each suite by itself, whatever else runs.
                return running == 0

        with tempfile.TemporaryDirectory() as directory:
            places = [PREPARE, CARGO, LANE, LANE, LANE]
            shell = 'for other in running-LANE-*; do [ -e "$other" ] && touch together; done; touch $NAME; sleep 0.2; rm $NAME'
            tasks = [
                Task(f"{place} {n}", "step", ("sh", "-c", shell if place == LANE else "sleep 0.3"), place, cwd=Path(directory),
                     environment={"NAME": f"running-LANE-{n}"})
                for n, place in enumerate(places)
            ]  # fmt: skip
            room = {PREPARE: 2, CARGO: 1, LANE: 3}
            runner = Runner(tasks, room, Path(directory, "logs"), dict(os.environ), Display(io.StringIO()), pace=Listening())
            self.assertEqual({outcome.status for outcome in runner.go()}, {PASSED})
            self.assertFalse(Path(directory, "together").exists())
        self.assertEqual(asked.count(0), 3)
        self.assertGreater(asked.count(1), 3)


if __name__ == "__main__":
    unittest.main()
