"""The order in which tasks begin."""

from __future__ import annotations

import unittest

from testing.schedule import check, next_tasks
from testing.tasks import CARGO, LANE, PREPARE, Task

ROOM = {PREPARE: 2, CARGO: 1, LANE: 2}


def task(name: str, *needs: str, place: str = LANE, seconds: float = 10, group: str | None = None, alone: bool = False) -> Task:
    return Task(name, "step", ("true",), place, frozenset(needs), seconds=seconds, group=group, alone=alone)


def names(tasks: list[Task], succeeded: tuple[str, ...] = (), running: tuple[str, ...] = ()) -> list[str]:
    return [task.name for task in next_tasks(tasks, succeeded, running, ROOM)]


class Choosing(unittest.TestCase):
    def test_the_longest_begin_first_as_far_as_there_is_room(self) -> None:
        tasks = [task("short", seconds=1), task("long", seconds=9), task("middle", seconds=5)]
        self.assertEqual(names(tasks), ["long", "middle"])
        self.assertEqual(names(tasks, running=("long",)), ["middle"])
        self.assertEqual(names(tasks, ("middle",), ("long",)), ["short"])
        self.assertEqual(names(tasks, running=("long", "middle")), [])

    def test_places_have_room_of_their_own(self) -> None:
        tasks = [task("cargo 1", place=CARGO), task("cargo 2", place=CARGO), task("suite"), task("fetch", place=PREPARE)]
        self.assertEqual(names(tasks), ["cargo 1", "suite", "fetch"])

    def test_needs_must_have_succeeded(self) -> None:
        tasks = [task("compile", place=CARGO), task("suite", "compile", "fetch"), task("fetch", place=PREPARE)]
        self.assertEqual(names(tasks), ["compile", "fetch"])
        self.assertEqual(names(tasks, ("compile",), ("fetch",)), [])
        self.assertEqual(names(tasks, ("compile", "fetch")), ["suite"])

    def test_a_group_runs_one_at_a_time(self) -> None:
        tasks = [task("a", group="g"), task("b", group="g"), task("c")]
        self.assertEqual(names(tasks), ["a", "c"])
        self.assertEqual(names(tasks, running=("b",)), ["c"])

    def test_what_runs_alone_comes_last_and_by_itself(self) -> None:
        tasks = [task("alone 1", alone=True, seconds=99), task("alone 2", alone=True), task("clippy", place=CARGO), task("suite")]
        self.assertEqual(names(tasks), ["clippy", "suite"])
        self.assertEqual(names(tasks, ("suite",), ("clippy",)), [])
        self.assertEqual(names(tasks, ("suite", "clippy")), ["alone 1"])
        self.assertEqual(names(tasks, ("suite", "clippy"), ("alone 1",)), [])
        self.assertEqual(names(tasks, ("suite", "clippy", "alone 1")), ["alone 2"])

    def test_what_failed_does_not_begin_again(self) -> None:
        tasks = [task("fails"), task("waits", "fails"), task("other"), task("alone", alone=True)]
        self.assertEqual([task.name for task in next_tasks(tasks, [], [], ROOM, ["fails"])], ["other"])
        found = next_tasks(tasks, ["other"], [], ROOM, ["fails"])
        self.assertEqual([task.name for task in found], ["alone"])

    def test_what_needs_something_that_failed_does_not_begin_however_far_away(self) -> None:
        tasks = [task("fails"), task("second", "fails"), task("third", "second"), task("alone", "third", alone=True)]
        self.assertEqual(next_tasks(tasks, [], [], ROOM, ["fails"]), [])

    def test_everything_runs_in_the_end_and_never_too_much_at_once(self) -> None:
        tasks = [task(f"t{number}", seconds=number, alone=number % 5 == 0, group="g" if number % 3 == 0 else None) for number in range(30)]
        done: list[str] = []
        running: list[str] = []
        alone = {task.name for task in tasks if task.alone}
        while len(done) < len(tasks):
            running += names(tasks, tuple(done), tuple(running))
            self.assertTrue(running)
            self.assertLessEqual(len(running), 2)
            self.assertTrue(len(running) == 1 or not alone & set(running))
            done.append(running.pop(0))
        self.assertEqual(set(done[-len(alone) :]), alone)


class Checking(unittest.TestCase):
    def test_a_plan_that_could_not_end_is_refused(self) -> None:
        for wrong in (
            [task("a"), task("a")],
            [task("a", "unknown")],
            [task("a", "b"), task("b", "a")],
            [task("a", "b"), task("b", alone=True)],
        ):
            with self.subTest(wrong=[task.name for task in wrong]), self.assertRaises(ValueError):
                check(wrong)
        check([task("a"), task("b", "a"), task("c", "a", alone=True)])


if __name__ == "__main__":
    unittest.main()
