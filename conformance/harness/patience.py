"""How long tests wait on this machine: deadlines are written for an idle machine of today, and grow where it is slower.

A deadline says when something that should have happened is given up. On a machine that is loaded or slow the same thing
takes longer without being wrong, so each deadline is multiplied by how slow the machine is: how long a fixed piece of work
and a few writes to the disk took at the start of the session, and how many programs wait for its processors now. It never
gets shorter. What a test measures is no deadline and is not scaled: such tests run alone, by the marker `alone`.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
import time

# What the work took on the idle machine on which the deadlines were chosen.
REFERENCE_CPU_S = 0.02
REFERENCE_DISK_S = 0.05
# A machine that is slower than this is not one to test on: a hang must show as a failure at some time.
MOST = 8.0


def within(seconds: float) -> float:
    """A deadline in seconds, adjusted to the speed of this machine now."""
    return seconds * factor()


def factor() -> float:
    """How many times slower this machine is, at least 1."""
    return min(MOST, max(1.0, measured(), waiting()))


def waiting() -> float:
    """How many programs there are for each processor, on average over the last minute."""
    try:
        return os.getloadavg()[0] / len(os.sched_getaffinity(0))
    except OSError:
        return 1.0


@functools.cache
def measured() -> float:
    """How many times slower the processor or the disk was than the reference. Once per session: it costs a moment."""
    return max(cpu_seconds() / REFERENCE_CPU_S, disk_seconds() / REFERENCE_DISK_S)


def cpu_seconds() -> float:
    """A fixed amount of hashing and of interpreted code, on the clock: waiting for a processor counts."""
    begun = time.monotonic()
    digest = hashlib.sha256()
    for _ in range(16):
        digest.update(bytes(1 << 20))
    sum(number * number for number in range(300_000))
    return time.monotonic() - begun


def disk_seconds() -> float:
    """Four small writes that have to reach the disk."""
    with tempfile.NamedTemporaryFile(prefix="rf-patience-") as file:
        begun = time.monotonic()
        for _ in range(4):
            file.write(bytes(256 << 10))
            file.flush()
            os.fsync(file.fileno())
        return time.monotonic() - begun
