"""The only ways in which a test lets time pass. Their names say why there is no condition to wait for.

What another process does is waited for with `until` of `harness.traffic`, which goes on at once and has a deadline; these have
none, so `patience` does not scale them. A slow machine may hide a fault from them, but makes no test fail. Programs that run
inside a sandbox are not tests, and sleep as they like. A test of the runner refuses every other sleep.
"""

from __future__ import annotations

import time
from typing import Any


def nothing_for(seconds: float) -> None:
    """Gives what must not happen the time to happen; the assertion after it says what that is."""
    time.sleep(seconds)


def idle_for(seconds: float) -> None:
    """Does nothing while others go on by themselves: sandboxes without a platform, or what is given up when it is not used."""
    time.sleep(seconds)


def at_moment(seconds: float) -> None:
    """Waits for the moment at which the test interrupts what it has started, and has drawn or tries one after the other. What
    is promised holds at every moment, so none of them is too early or too late."""
    time.sleep(seconds)


def slowly(seconds: float) -> None:
    """Waits between two steps of a client that is slow on purpose."""
    time.sleep(seconds)


def as_told(answer: Any) -> None:
    """Waits for as long as the server tells a client that comes too early."""
    time.sleep(float(answer.headers.get("Retry-After", 1)))
