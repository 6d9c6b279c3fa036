"""The HTTP surface: cells as streams of events, and contexts.

The headers of a stream are sent before the cell has its turn, and the body of a cell never ends in order without having said
what became of it. A client that closes its connection cancels the handler, which interrupts the cell.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from aiohttp import web

from code_interpreter import events, requests
from code_interpreter.access import HEADER, Access, Refused, Unanswered
from code_interpreter.bounds import Bounds
from code_interpreter.contexts import Contexts, TooMany, UnknownContext
from code_interpreter.events import Event
from code_interpreter.kernel import Environment, KernelFailed
from code_interpreter.languages import UnknownLanguage

LOG = logging.getLogger(__name__)
CORS = {
    "Access-Control-Allow-Origin": "*",
    "Access-Control-Allow-Methods": "*",
    "Access-Control-Allow-Headers": "*",
    "Access-Control-Expose-Headers": "*",
}
# Seconds that a line waits for the next, and bytes that need not.
TOGETHER_S, TOGETHER = 0.002, 1 << 16
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# What each failure is for a client. 502 means to clients that the sandbox has gone, so it is none of these.
STATUS: dict[type[Exception], int] = {
    requests.Invalid: 400,
    Refused: 401,
    UnknownContext: 404,
    TooMany: 429,
    UnknownLanguage: 500,
    KernelFailed: 500,
    Unanswered: 500,
}


@web.middleware
async def plain_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Says failures in one line of text."""
    if request.method == "OPTIONS":
        return web.Response(status=204, headers=CORS)
    try:
        answer = await handler(request)
    except web.HTTPException as failed:
        answer = web.Response(status=failed.status, text=failed.reason)
    except tuple(STATUS) as failed:
        text = "the access token is missing or not that of this sandbox" if isinstance(failed, Refused) else str(failed)
        answer = web.Response(status=STATUS[type(failed)], text=text)
    except Exception:
        LOG.exception("%s %s", request.method, request.path)
        answer = web.Response(status=500, text="the code interpreter failed; its log says why")
    if not answer.prepared:
        answer.headers.update(CORS)
    return answer


class Interpreter:
    """The handlers."""

    def __init__(self, contexts: Contexts, access: Access, bounds: Bounds) -> None:
        self._contexts = contexts
        self._access = access
        self._bounds = bounds
        self._executions = 0

    def app(self) -> web.Application:
        """The application of the server."""
        app = web.Application(middlewares=[plain_errors], client_max_size=self._bounds.body)
        app.router.add_get("/health", self.health)
        app.router.add_post("/execute", self.execute)
        app.router.add_get("/contexts", self.list)
        app.router.add_post("/contexts", self.create)
        app.router.add_post("/contexts/{id}/restart", self.restart)
        app.router.add_delete("/contexts/{id}", self.remove)
        return app

    async def health(self, _: web.Request) -> web.Response:
        """Says that cells can run."""
        return web.json_response("OK")

    async def list(self, _: web.Request) -> web.Response:
        """All contexts."""
        return web.json_response([context.shown() for context in self._contexts.list()])

    async def create(self, request: web.Request) -> web.Response:
        """Another context."""
        asked = requests.create(await request.read())
        context = await self._contexts.create(asked.language, asked.cwd)
        return web.json_response(context.shown())

    async def restart(self, request: web.Request) -> web.Response:
        """Another kernel for a context."""
        await self._contexts.get(request.match_info["id"]).restart()
        return web.json_response(None)

    async def remove(self, request: web.Request) -> web.Response:
        """One context less."""
        await self._contexts.remove(request.match_info["id"])
        return web.json_response(None)

    async def execute(self, request: web.Request) -> web.StreamResponse:
        """Runs a cell."""
        sandbox = await self._access.variables(request.headers.get(HEADER))
        asked = requests.execute(await request.read())
        if asked.context_id:
            context = self._contexts.get(asked.context_id)
        else:
            context = self._contexts.of_language(asked.language)
        if self._executions >= self._bounds.executions:
            raise TooMany(f"{self._executions} cells run or wait, and no more are allowed")
        self._executions += 1
        try:
            answer = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-store", **CORS})
            await answer.prepare(request)
            async with aclosing(context.run(asked.code, Environment(sandbox, asked.env_vars))) as said:
                left = await self._stream(answer, said)
            async with asyncio.timeout(self._bounds.stalled_s):
                await answer.write_eof(left + events.line(events.END))
        except Exception:
            # The headers are gone, so that only the connection can say that something is wrong.
            LOG.exception("a stream was cut")
            if request.transport is not None:
                request.transport.abort()
            raise
        finally:
            self._executions -= 1
        return answer

    async def _stream(self, answer: web.StreamResponse, said: AsyncGenerator[Event, None]) -> bytes:
        """Writes events as the client takes them, and a sign of life where there are none. Returns what is unwritten at the end.

        Older clients take the time between two lines for the timeout of a cell, so there is no sign of life before it is needed:
        none at the beginning, since headers are on the way at once. Lines that come at nearly the same time are written together,
        because each write costs everybody on the way a turn.
        """
        lines = bytearray()
        while True:
            following = asyncio.ensure_future(anext(said, None))
            try:
                while not (await asyncio.wait({following}, timeout=TOGETHER_S if lines else self._bounds.keepalive_s))[0]:
                    await self._write(answer, lines or events.line(events.KEEPALIVE))
                    lines = bytearray()
            except BaseException:
                following.cancel()
                await asyncio.wait({following})
                raise
            event = following.result()
            if event is None:
                return bytes(lines)
            lines += events.line(event)
            if len(lines) >= TOGETHER:
                await self._write(answer, lines)
                lines = bytearray()

    async def _write(self, answer: web.StreamResponse, lines: bytes | bytearray) -> None:
        async with asyncio.timeout(self._bounds.stalled_s):
            await answer.write(bytes(lines))
