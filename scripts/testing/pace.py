"""When a suite may begin beside others, so that a slow machine is not asked for more than it can do.

Suites begin with what costs most: they start a platform, make sandboxes, and read everything for the first time. Two that begin
together wait for each other, and so do the tests in them. So where the processors are busy, a suite begins some time
after the one before; and beyond a
number of them that always run together, another one begins only where the processors have room for it. What waits for
processors shows in the average of the last minute, which the machine counts.
"""

from __future__ import annotations

import os
from collections.abc import Callable

# Seconds from the beginning of a suite to that of the next one: starting a platform and its first sandboxes takes 5 to 15 s.
APART_S = 20.0
# Programs that want to run, for each processor, up to which suites need not begin apart. One suite alone makes 0.5 to 1; the short
# ones at the end of a run would wait for nothing otherwise.
CALM = 1.5
# Suites that run together whatever the load is: fewer would leave processors idle, because tests mostly wait.
ALWAYS = 2
# Programs that want to run, for each processor, up to which one more suite begins. Two suites and a compile make 2 to 3; with 5
# and more, tests met their deadlines on a slow machine.
ROOM = 3.5


def load() -> float:
    """Programs that want to run, for each processor, on average over the last minute; 0 where the machine does not say."""
    try:
        return os.getloadavg()[0] / len(os.sched_getaffinity(0))
    except OSError:
        return 0.0


class Pace:
    """Says whether one more suite may begin."""

    def __init__(self, load: Callable[[], float] = load) -> None:
        self._load = load
        # When the last one began, in the seconds that the caller counts.
        self._last_s = float("-inf")

    def allows(self, running: int, now_s: float) -> bool:
        """Whether a suite may begin beside so many others. If nothing runs, there is nothing to wait for."""
        if running == 0:
            return True
        load = self._load()
        is_apart = load <= CALM or now_s - self._last_s >= APART_S
        return is_apart and (running < ALWAYS or load <= ROOM)

    def began(self, now_s: float) -> None:
        """A suite has begun."""
        self._last_s = now_s
