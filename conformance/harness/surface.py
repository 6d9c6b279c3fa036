"""One test for both APIs of the Python SDK, and an account of what was called.

A test is written once, with `await` before every call. It runs against `AsyncSandbox`, and against `Sandbox` with each
call on a thread, so that a call that waits does not keep the test from what it waits for.

Every call goes through a proxy that notes the method and the parameters that were passed. `untried` says what of a
class were not called, or never with some parameter, so that a suite cannot fall behind the SDK unnoticed.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from e2b import AsyncCommandHandle, AsyncSandbox, AsyncWatchHandle, CommandHandle, Sandbox, WatchHandle
from e2b.sandbox_async.commands.command import Commands as AsyncCommands
from e2b.sandbox_async.commands.pty import Pty as AsyncPty
from e2b.sandbox_async.filesystem.filesystem import Filesystem as AsyncFilesystem
from e2b.sandbox_async.git import Git as AsyncGit
from e2b.sandbox_sync.commands.command import Commands
from e2b.sandbox_sync.commands.pty import Pty
from e2b.sandbox_sync.filesystem.filesystem import Filesystem
from e2b.sandbox_sync.git import Git

from harness.platform import Platform
from harness.traffic import until_async

FLAVOURS = ("sync", "async")
SANDBOX = {"sync": Sandbox, "async": AsyncSandbox}
CLASSES: dict[str, dict[str, type]] = {
    "commands": {"sync": Commands, "async": AsyncCommands},
    "command handle": {"sync": CommandHandle, "async": AsyncCommandHandle},
    "pty": {"sync": Pty, "async": AsyncPty},
    "files": {"sync": Filesystem, "async": AsyncFilesystem},
    "watch handle": {"sync": WatchHandle, "async": AsyncWatchHandle},
    "git": {"sync": Git, "async": AsyncGit},
}
RECORDED = (Sandbox, AsyncSandbox, *(kind for pair in CLASSES.values() for kind in pair.values()))

# The parameters with which each method of each class was called so far.
called: dict[type, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))


def methods(kind: type) -> dict[str, inspect.Signature]:
    """The public methods of a class."""
    return {
        name: inspect.signature(member)
        for name, member in inspect.getmembers(kind, callable)
        if not name.startswith("_") and not inspect.isclass(member)
    }


def parameters(signature: inspect.Signature) -> set[str]:
    """The names of what can be passed, without `self` and catch-alls."""
    return {
        name
        for name, parameter in signature.parameters.items()
        if name != "self" and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }


def untried(kind: type) -> dict[str, set[str]]:
    """What of a class was not called yet: methods, each with the parameters that were never passed."""
    found = {}
    for name, signature in methods(kind).items():
        missing = parameters(signature) - called[kind].get(name, set())
        if missing or name not in called[kind]:
            found[name] = missing
    return found


class Recorded:
    """Passes everything on to an object of the SDK and notes what was called."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._kind = type(target)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if not callable(value):
            return wrapped(value)

        async def call(*positional: Any, **named: Any) -> Any:
            # The signature that the class has: what some methods of an instance say of themselves is not true.
            bound = inspect.signature(getattr(self._kind, name)).bind(None, *positional, **named)
            called[self._kind][name].update(bound.arguments)
            if self._kind.__module__.startswith("e2b.sandbox_sync"):
                result = await asyncio.to_thread(value, *positional, **named)
            else:
                result = value(*positional, **named)
            if inspect.isawaitable(result):
                result = await result
            return wrapped(result)

        return call


def wrapped(value: Any) -> Any:
    return Recorded(value) if isinstance(value, RECORDED) else value


class Box(Recorded):
    """A sandbox under test. `flavour` says which API drives it."""

    def __init__(self, flavour: str, target: Any) -> None:
        super().__init__(target)
        self.flavour = flavour

    @property
    def is_async(self) -> bool:
        return self.flavour == "async"

    async def shell(self, command: str, user: str | None = None) -> str:
        """Standard output of a command that must succeed; not part of the account."""
        result = self._target.commands.run(command, user=user)
        return (await result if inspect.isawaitable(result) else result).stdout

    async def until(self, condition: Callable[[], Awaitable[Any]], what: str, within_s: float = 20.0) -> Any:
        """Waits for something that another process does."""
        return await until_async(condition, what, within_s)


async def make(flavour: str, **options: Any) -> Box:
    """A new sandbox through one of the two APIs."""
    if flavour == "sync":
        return Box(flavour, await asyncio.to_thread(Sandbox.create, **options))
    return Box(flavour, await AsyncSandbox.create(**options))


def both(body: Callable[[Box], Awaitable[None]]) -> Callable[..., None]:
    """Makes a test of a coroutine that takes a sandbox; it runs once for each API."""

    @pytest.mark.parametrize("flavour", FLAVOURS)
    def test(platform: Platform, flavour: str) -> None:
        async def main() -> None:
            box = await make(flavour, timeout=180)
            try:
                await body(box)
            finally:
                await box.kill()

        asyncio.run(main())

    test.__name__ = test.__qualname__ = body.__name__
    test.__doc__, test.__module__ = body.__doc__, body.__module__
    return test
