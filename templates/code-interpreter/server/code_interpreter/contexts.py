"""Contexts: what clients see of kernels, each with an id, a language and a directory.

Cells of a context run one after another. A cell whose client has gone is interrupted, and the next one waits until its kernel
is idle, or has been replaced because it would not stop.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any

from code_interpreter import events
from code_interpreter.bounds import Bounds
from code_interpreter.events import Event
from code_interpreter.kernel import HOME, Environment, Kernel, KernelDied, KernelFailed
from code_interpreter.languages import Languages

LOG = logging.getLogger(__name__)
# Contexts that are there without being asked for.
DEFAULTS = ("python", "javascript")


class UnknownContext(LookupError):
    """There is no context with an id; the text is for the client."""


class TooMany(Exception):
    """A bound is reached; the text is for the client."""


class Context:
    """The state of one client or more, in one language."""

    def __init__(self, languages: Languages, language: str, cwd: str, bounds: Bounds) -> None:
        self.id = str(uuid.uuid4())
        self.language = language
        self.cwd = cwd
        self._languages = languages
        self._bounds = bounds
        self._kernel: Kernel | None = None
        # Whoever holds it uses the kernel. A restart makes another one, so that it need not wait for a cell.
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def shown(self) -> dict[str, str]:
        """What clients get."""
        return {"id": self.id, "language": self.language, "cwd": self.cwd}

    async def start(self) -> None:
        """Starts the kernel, unless it runs."""
        lock = await self._acquired()
        try:
            await self._live()
        finally:
            lock.release()

    async def run(self, code: str, environment: Environment) -> AsyncGenerator[Event, None]:
        """Runs a cell when its turn has come."""
        lock = await self._acquired()
        kernel: Kernel | None = None
        is_released = False
        try:
            kernel = await self._live()
            async with aclosing(kernel.execute(code, environment)) as said:
                async for event in said:
                    yield event
        except KernelDied:
            yield events.error("ContextRestarting", "the kernel has ended, and the context has another one, without its variables")
            await self._replace(kernel)
        except KernelFailed as failed:
            yield events.error("ContextRestarting", str(failed))
        except (asyncio.CancelledError, GeneratorExit):
            if kernel is not None:
                is_released = True
                self._spawn(self._abandon(kernel, lock))
            raise
        finally:
            if not is_released:
                lock.release()

    async def restart(self) -> None:
        """Gives the context another kernel, whatever runs. Raises KernelFailed."""
        old, self._kernel, self._lock = self._kernel, None, asyncio.Lock()
        if old is not None:
            # Who runs a cell learns it from its end, and what is left of it is removed then.
            await old.kill()
            self._spawn(stopped(old))
        await self.start()

    async def close(self) -> None:
        """Ends the kernel for good."""
        self._closed = True
        old, self._kernel, self._lock = self._kernel, None, asyncio.Lock()
        if old is not None:
            await old.kill()
            await stopped(old)

    async def _acquired(self) -> asyncio.Lock:
        """The lock, which may have been replaced meanwhile."""
        while True:
            lock = self._lock
            await lock.acquire()
            if lock is self._lock:
                return lock
            lock.release()

    async def _live(self) -> Kernel:
        if self._closed:
            raise KernelFailed("the context was removed")
        if self._kernel is None:
            kernel = self._languages.make(self.language, self.cwd)
            await kernel.start()
            self._kernel = kernel
        return self._kernel

    async def _replace(self, kernel: Kernel | None) -> None:
        """Removes a kernel that has ended, and starts another one unless another request did."""
        if kernel is not None and kernel is self._kernel:
            self._kernel = None
            await stopped(kernel)
            try:
                await self._live()
            except KernelFailed as failed:
                LOG.warning("context %s: %s", self.id, failed)

    async def _abandon(self, kernel: Kernel, lock: asyncio.Lock) -> None:
        """Interrupts a cell whose client has gone, and frees the context when it has ended."""
        try:
            await kernel.interrupt()
            async with asyncio.timeout(kernel.grace_s):
                await kernel.drain()
        except (KernelDied, TimeoutError):
            LOG.warning("context %s: the kernel did not stop after an interrupt and is replaced", self.id)
            await kernel.kill()
            await self._replace(kernel)
        finally:
            lock.release()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def stopped(kernel: Kernel) -> None:
    """Ends a kernel; what cannot be removed of it is said and left."""
    try:
        await kernel.stop()
    except Exception:
        LOG.exception("a kernel was not removed")


class Contexts:
    """All contexts, in the order in which they were made."""

    def __init__(self, languages: Languages, bounds: Bounds) -> None:
        self._languages = languages
        self._bounds = bounds
        self._all: dict[str, Context] = {}
        # The id of the context of a language that is used when none is named.
        self._defaults: dict[str, str] = {}

    async def start(self) -> None:
        """Makes the contexts that are there without being asked for, with a running kernel for cells that name none."""
        for language in DEFAULTS:
            if language in self._languages.names():
                self._default(language)
        await self._default("python").start()

    def list(self) -> list[Context]:
        """All of them."""
        return list(self._all.values())

    def get(self, id: str) -> Context:
        """One by its id."""
        if id not in self._all:
            raise UnknownContext(f"there is no context {id[:64]!r}")
        return self._all[id]

    def of_language(self, language: str | None) -> Context:
        """The context of a language that is used when none is named."""
        return self._default(self._languages.named(language))

    def _default(self, language: str) -> Context:
        found = self._all.get(self._defaults.get(language, ""))
        if found is None:
            found = self._add(language, HOME)
            self._defaults[language] = found.id
        return found

    def _add(self, language: str, cwd: str) -> Context:
        if len(self._all) >= self._bounds.contexts:
            raise TooMany(f"there are {len(self._all)} contexts, and no more are allowed: remove one")
        context = Context(self._languages, language, cwd, self._bounds)
        self._all[context.id] = context
        return context

    async def create(self, language: str | None, cwd: str | None) -> Context:
        """Another context, with a kernel that runs."""
        context = self._add(self._languages.named(language), cwd or HOME)
        try:
            await context.start()
        except BaseException:
            await self.remove(context.id)
            raise
        return context

    async def remove(self, id: str) -> None:
        """Removes a context. That of a language is made again when it is used."""
        context = self.get(id)
        del self._all[id]
        await context.close()

    async def close(self) -> None:
        """Ends all kernels."""
        await asyncio.gather(*(context.close() for context in self.list()))
        self._all.clear()
