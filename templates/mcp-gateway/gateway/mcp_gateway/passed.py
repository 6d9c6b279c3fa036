"""What servers say without being asked, passed on to the clients of the gateway: that a list has changed, how far a call is, and lines for logs.

Clients of version 2026-07-28 and later listen for changes by a request of theirs, and say with a call which lines they want. Older ones have a
stream beside their requests, and set a level. A client that does not read is left out, because the servers and the other clients would
wait for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, get_args

import mcp_types as types
from mcp import MCPError
from mcp.server.session import ServerSession
from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler, PromptsListChanged, ResourcesListChanged, ToolsListChanged

from mcp_gateway.asked import CURRENT, Asking, Call, Refused

LEVELS: tuple[str, ...] = get_args(types.LoggingLevel)
# Of a client that has set none.
DEFAULT_LEVEL = "info"
# Clients that are told of changes: those that asked for something last.
MOST_CLIENTS = 256
PATIENCE_S = 5.0
KINDS = {
    "tools": (ToolsListChanged, ServerSession.send_tool_list_changed),
    "prompts": (PromptsListChanged, ServerSession.send_prompt_list_changed),
    "resources": (ResourcesListChanged, ServerSession.send_resource_list_changed),
}


class Passed:
    """What is passed on, and to whom."""

    def __init__(self) -> None:
        self._bus = InMemorySubscriptionBus()
        self.listening = ListenHandler(self._bus, max_subscriptions=MOST_CLIENTS, max_buffered_events=64)
        # Of older clients, by the id of their session: by what it is reached, and its level.
        self._clients: OrderedDict[str, ServerSession] = OrderedDict()
        self._levels: dict[str, str] = {}
        self._changed: set[str] = set()
        self._wake = asyncio.Event()
        # Called with the kind of a list that is no longer what it was.
        self.forget: Callable[[str], object] = lambda _: None

    def seen(self, asking: Asking) -> None:
        """A client asks something, and is to hear of changes from now on."""
        if ident := session(asking):
            self._clients[ident] = asking.session
            self._clients.move_to_end(ident)
            while len(self._clients) > MOST_CLIENTS:
                self._forget(next(iter(self._clients)))

    def _forget(self, ident: str) -> None:
        self._clients.pop(ident, None)
        self._levels.pop(ident, None)

    async def set_level(self, asking: Asking, params: types.SetLevelRequestParams) -> types.EmptyResult:
        """An older client says which lines it wants."""
        self.seen(asking)
        if ident := session(asking):
            self._levels[ident] = params.level
        return types.EmptyResult()

    def changed(self, *kinds: str) -> None:
        """Some lists of a server are different."""
        for kind in kinds:
            self.forget(kind)
        self._changed.update(kinds)
        self._wake.set()

    async def run(self) -> None:
        """Tells clients what has changed. Changes that come meanwhile are told once."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            kinds, self._changed = sorted(self._changed), set()
            for kind in kinds:
                event, send = KINDS[kind]
                await self._bus.publish(event())
                for ident, client in list(self._clients.items()):
                    if not await in_time(send(client)):
                        self._forget(ident)

    async def completed(self, params: types.ElicitCompleteNotificationParams) -> None:
        """What a user was asked for by an address is there. The id is known to the client that was asked, and to no other."""
        for client in list(self._clients.values()):
            await in_time(client.send_elicit_complete(params.elicitation_id))

    def wants(self, asking: Asking, level: str) -> bool:
        """Whether a client wants lines of a level. For newer ones, the library knows it by their request."""
        ident = session(asking)
        return not ident or LEVELS.index(level) >= LEVELS.index(self._levels.get(ident, DEFAULT_LEVEL))


class Calls:
    """The calls of one server that are being answered: they get the lines that the server says meanwhile, and its questions."""

    def __init__(self, name: str, passed: Passed) -> None:
        self._name, self._passed = name, passed
        self._open: dict[int, Call] = {}

    @contextmanager
    def during(self, call: Call) -> Iterator[None]:
        self._open[id(call)] = call
        try:
            yield
        finally:
            self._open.pop(id(call), None)

    async def line(self, said: types.LoggingMessageNotificationParams) -> None:
        """A line of the server. Which call it belongs to is not said, so all that are open get it, with the name of the server."""
        name = f"{self._name}/{said.logger}" if said.logger else self._name
        for call in list(self._open.values()):
            asking = call.asking
            if call.hears and self._passed.wants(asking, said.level):
                call.hears = await in_time(asking.session.send_log_message(said.level, said.data, name, related_request_id=asking.request_id))

    def wait_for_a_client(self) -> bool:
        """Whether the server waits for an answer to a question of its own."""
        return any(call.waits for call in self._open.values())

    def _asked(self) -> Call:
        """The call that a question of the server belongs to."""
        if (call := CURRENT.get()) is not None:
            return call
        calls = list(self._open.values())
        if not calls:
            raise Refused("no call of a client is being answered")
        if len({session(call.asking) or id(call) for call in calls}) > 1:
            raise Refused("calls of several clients are being answered, and it is not said which of them this is for")
        return calls[-1]

    async def _answer(self, question: types.InputRequest) -> Any:
        try:
            return await self._asked().put(question)
        except Refused as why:
            return types.ErrorData(code=types.INVALID_REQUEST, message=f"{question.method} of the server {self._name} was put to nobody: {why}")
        except MCPError as error:
            return error.error

    async def sample(self, _: Any, params: types.CreateMessageRequestParams) -> Any:
        """The server asks for a text of a model."""
        return await self._answer(types.CreateMessageRequest(params=params))

    async def elicit(self, _: Any, params: types.ElicitRequestParams) -> Any:
        """The server asks for something of the user."""
        return await self._answer(types.ElicitRequest(params=params))

    async def roots(self, _: Any) -> Any:
        """The server asks for directories."""
        return await self._answer(types.ListRootsRequest())


async def progress(call: Call, done: float, total: float | None, message: str | None) -> None:
    """How far a call is, for a client that wants to know."""
    if call.hears:
        await in_time(call.asking.session.report_progress(done, total, message))


def session(asking: Asking) -> str | None:
    """The id of the session of an older client."""
    return asking.request.headers.get("mcp-session-id") if asking.request is not None else None


async def in_time(send: Awaitable[None]) -> bool:
    """Whether something was sent, or need not be; and not that the client does not read or has gone."""
    try:
        await asyncio.wait_for(send, PATIENCE_S)
    except Exception as error:
        logging.getLogger(__name__).info("a client was not told: %s", type(error).__name__)
        return False
    return True
