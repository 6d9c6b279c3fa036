"""Tests wait for conditions: only what `conformance/harness/elapse.py` names lets time pass."""

from __future__ import annotations

import ast
import unittest
from collections.abc import Iterator
from pathlib import Path

CONFORMANCE = Path(__file__).resolve().parents[3] / "conformance"
# What waits for tests, and programs that run inside sandboxes.
MAY_SLEEP = ("harness", "programs")
CLOCKS = ("time", "asyncio")


def sleeps(text: str) -> Iterator[int]:
    """The lines on which a program sleeps, or takes the name of what sleeps."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Attribute(value=ast.Name(id=module), attr="sleep") if module in CLOCKS:
                yield node.lineno
            case ast.ImportFrom(module=str(module), names=names) if module in CLOCKS:
                yield from (node.lineno for name in names if name.name == "sleep")


class Sleeps(unittest.TestCase):
    def test_tests_sleep_by_the_names_of_the_harness(self) -> None:
        for file in CONFORMANCE.rglob("*.py"):
            place = file.relative_to(CONFORMANCE)
            if place.parts[0] not in MAY_SLEEP:
                found = list(sleeps(file.read_text()))
                self.assertEqual(found, [], f"conformance/{place}: wait with `until`, or as `harness/elapse.py` names it")

    def test_sleeps_are_found(self) -> None:
        self.assertEqual(list(sleeps("import time\ntime.sleep(1)")), [2])
        self.assertEqual(list(sleeps("from time import monotonic, sleep")), [1])
        self.assertEqual(list(sleeps("async def f():\n await asyncio.sleep(1)")), [2])
        self.assertEqual(list(sleeps("PROGRAM = 'import time; time.sleep(1)'\nbox.run('sleep 1')\nnothing_for(1)")), [])


if __name__ == "__main__":
    unittest.main()
