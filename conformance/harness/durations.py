"""Writes what became of each test to the file that CONFORMANCE_TIMINGS names: one JSON object per line and test.

`scripts/test.sh` makes of it the table of the slowest tests, and what it says about a failure: the last lines of its
report and of everything that was captured, among them the log of its platform and the seed.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

FILE = os.environ.get("CONFORMANCE_TIMINGS")
# Of each section of a failure, so that a few failures fit in what a log of CI keeps.
LINES = 25
# The test that runs, and its phases so far.
_current: dict[str, Any] = {}


def pytest_runtest_logstart(nodeid: str) -> None:
    _current.clear()
    _current.update(test=nodeid, outcome="passed", seconds={}, sections=[])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.nodeid != _current.get("test"):
        return
    _current["seconds"][report.when] = round(report.duration, 3)
    if report.failed:
        _current["outcome"] = "failed" if report.when == "call" else f"failed in {report.when}"
        _current["sections"] += [["report", tail(report.longreprtext)], *([name, tail(text)] for name, text in report.sections)]
    elif report.skipped and _current["outcome"] == "passed":
        _current["outcome"] = "skipped"


def pytest_runtest_logfinish(nodeid: str) -> None:
    write(_current)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be imported has no test that could fail."""
    if report.failed:
        sections = [["report", tail(report.longreprtext)]]
        write({"test": report.nodeid, "outcome": "failed in collection", "seconds": {}, "sections": sections})


def tail(text: str) -> str:
    return "\n".join(text.splitlines()[-LINES:])


def write(record: dict[str, Any]) -> None:
    """A line at a time, so that what is there is whole even when the run is ended."""
    if FILE and record:
        with open(FILE, "a", encoding="utf-8") as timings:
            timings.write(json.dumps(record) + "\n")
