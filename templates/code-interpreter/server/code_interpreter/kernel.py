"""What the server asks of a kernel, whichever way it is run.

A kernel runs one cell at a time; whoever calls sees to that. It yields events as the cell makes them and reads no faster than
they are taken, so that the output of a cell waits in the kernel and not here.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field

from code_interpreter.events import Event

HOME = "/home/user"


class KernelDied(Exception):
    """The process of a kernel has ended."""


class KernelFailed(Exception):
    """A kernel could not be started; the text is for the client."""


@dataclass(frozen=True)
class Environment:
    """Variables beside those that the kernel was started with."""

    # Of the sandbox, for as long as it does not get others.
    sandbox: Mapping[str, str] = field(default_factory=dict)
    # Of one call, undone after it.
    call: Mapping[str, str] = field(default_factory=dict)


class Kernel(ABC):
    """A process that keeps the state of a context."""

    # Seconds that a cell has to end after it was interrupted. Then the kernel is replaced.
    grace_s = 10.0

    @abstractmethod
    async def start(self) -> None:
        """Starts it, and returns when it can run a cell. Raises KernelFailed."""

    @abstractmethod
    def execute(self, code: str, environment: Environment) -> AsyncGenerator[Event, None]:
        """Runs a cell. Ends when the kernel is idle again; raises KernelDied."""

    @abstractmethod
    async def interrupt(self) -> None:
        """Does to the cell what Ctrl-C does."""

    @abstractmethod
    async def drain(self) -> None:
        """Discards what an abandoned cell still says, and returns when the kernel is idle. Raises KernelDied."""

    @abstractmethod
    async def kill(self) -> None:
        """Ends the process and leaves the rest to `stop`. Whoever waits for the cell gets KernelDied."""

    @abstractmethod
    async def stop(self) -> None:
        """Ends the process and everything that it has started."""


def directory(cwd: str) -> str:
    """The directory that a kernel begins in: the one asked for, or the nearest that can be entered."""
    for path in (cwd, HOME):
        if os.path.isdir(path) and os.access(path, os.X_OK):
            return path
    return "/"
