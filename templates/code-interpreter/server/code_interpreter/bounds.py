"""Bounds of the server: what one client can make it hold, start or wait for.

Output has no bound in sum, because it is passed on as fast as the client takes it and never collected here.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True)
class Bounds:
    """What the server allows."""

    # Contexts at the same time. Each is a process of some 50 MB.
    contexts: int = 64
    # Requests that wait for or run a cell, of all contexts together.
    executions: int = 256
    # Bytes of the body of a request: code, and the variables of a call.
    body: int = 32 * MIB
    # Seconds that a kernel may take to start.
    start_s: float = 45.0
    # Seconds between two lines of a stream on which nothing else happens.
    keepalive_s: float = 30.0
    # Seconds that a write waits for a client that takes nothing. It counts as gone then, and its cell is interrupted.
    stalled_s: float = 600.0
