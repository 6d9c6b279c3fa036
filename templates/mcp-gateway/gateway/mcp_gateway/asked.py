"""What servers ask of clients while they answer a call: a text of a model (sampling), something of the user (elicitation), and directories (roots).

A client of a version before 2026-07-28 is asked on the stream of its call. A newer one gets its call back with the questions, and sends it
again with the answers and a word by which the gateway finds the call, which waits meanwhile: so both can use servers of either version. A
newer server says with its answer what it asks. An older one only asks, and does not say for which call: it is asked on behalf of the
client whose calls alone it is answering, and nobody where there are several.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import mcp_types as types
from mcp import MCPError
from mcp.server.context import ServerRequestContext
from mcp.shared.message import ServerMessageMetadata
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

Asking = ServerRequestContext[Any, Any]
# Calls that wait for answers of clients, and for how long. People are among those who answer.
MOST_WAITING = 256
ANSWER_S = 600.0
RESULTS: dict[type, type[Any]] = {
    types.CreateMessageRequest: types.CreateMessageResult,
    types.ElicitRequest: types.ElicitResult,
    types.ListRootsRequest: types.ListRootsResult,
}


class Refused(Exception):
    """Why a question is put to nobody."""


class Call:
    """A call of a client that a server is answering, over one request of the client or several."""

    def __init__(self, asking: Asking, what: str) -> None:
        self.asking = asking
        # What the client has called. Another request cannot go on with it.
        self.what = what
        # Whether lines of the server reach the client: not while it has its questions, and not where it does not read.
        self.hears = True
        self._questions: dict[str, tuple[types.InputRequest, asyncio.Future[Any]]] = {}
        self._asked = asyncio.Event()
        self._number = 0
        # How many questions of older clients are open, which are asked on the stream of the call.
        self._on_stream = 0

    @property
    def waits(self) -> bool:
        """Whether its server waits for the client."""
        return bool(self._questions or self._on_stream)

    def begin(self, run: Callable[[Call], Awaitable[Any]]) -> None:
        self.task = asyncio.create_task(self._run(run))

    async def _run(self, run: Callable[[Call], Awaitable[Any]]) -> Any:
        CURRENT.set(self)
        return await run(self)

    async def put(self, question: types.InputRequest) -> Any:
        """What the client answers."""
        lacking = lacks(self.asking.session.client_capabilities, question)
        if lacking:
            raise Refused(f"the client of this call has no {lacking}")
        if self.asking.session.can_send_request:
            where = ServerMessageMetadata(related_request_id=self.asking.request_id)
            self._on_stream += 1
            try:
                return await self.asking.session.send_request(question, RESULTS[type(question)], ANSWER_S, where)
            finally:
                self._on_stream -= 1
        if self.asking.session.protocol_version not in MODERN_PROTOCOL_VERSIONS:
            raise Refused("the client of this call cannot be asked on its connection")
        self._number += 1
        key = f"question-{self._number}"
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._questions[key] = (question, answer)
        self._asked.set()
        try:
            return await answer
        finally:
            self._questions.pop(key, None)
            if not self._questions:
                self._asked.clear()

    async def until_asked(self) -> dict[str, types.InputRequest]:
        """Waits until the call has ended, which leaves no questions, or there are some."""
        asked = asyncio.create_task(self._asked.wait())
        try:
            await asyncio.wait({self.task, asked}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()
        return {} if self.task.done() else {key: question for key, (question, _) in self._questions.items()}

    def answer(self, answers: types.InputResponses) -> None:
        """Gives the answers to those who wait for them. What was not answered stays a question."""
        for key, value in answers.items():
            _, future = self._questions.pop(key, (None, None))
            if future is not None and not future.done():
                future.set_result(value)
        if not self._questions:
            self._asked.clear()

    def end(self) -> None:
        """The client will not answer any more."""
        for _, future in self._questions.values():
            if not future.done():
                future.set_exception(Refused("the client has not answered"))
        self.task.cancel()


# The call in whose task something happens.
CURRENT: ContextVar[Call | None] = ContextVar("call", default=None)


class Waiting:
    """Calls of newer clients that have gone back with questions, by the word that comes with the answers."""

    def __init__(self) -> None:
        self._calls: OrderedDict[str, tuple[Call, asyncio.TimerHandle]] = OrderedDict()

    async def begun(self, asking: Asking, params: types.InputResponseRequestParams, run: Callable[[Call], Awaitable[Any]]) -> Any:
        """The result of a call, or the questions that come before it."""
        call = Call(asking, identity(asking.method, params))
        call.begin(run)
        return await self._next(call)

    async def resumed(self, asking: Asking, params: types.InputResponseRequestParams, word: str) -> Any:
        """The result of a call that has its answers, or further questions."""
        call = self._taken(word, identity(asking.method, params))
        call.asking, call.hears = asking, True
        call.answer(params.input_responses or {})
        return await self._next(call)

    async def _next(self, call: Call) -> Any:
        try:
            questions = await call.until_asked()
        except asyncio.CancelledError:
            # The client has gone.
            call.end()
            raise
        if not questions:
            return call.task.result()
        return types.InputRequiredResult(input_requests=questions, request_state=self._kept(call))

    def _kept(self, call: Call) -> str:
        word = secrets.token_urlsafe(32)
        call.hears = False
        self._calls[word] = (call, asyncio.get_running_loop().call_later(ANSWER_S, self._drop, word))
        while len(self._calls) > MOST_WAITING:
            self._drop(next(iter(self._calls)))
        return word

    def _taken(self, word: str, what: str) -> Call:
        if word not in self._calls or self._calls[word][0].what != what:
            raise MCPError(types.INVALID_PARAMS, "nothing waits for these answers any more, or they are those of another call: call it again")
        call, timer = self._calls.pop(word)
        timer.cancel()
        return call

    def _drop(self, word: str) -> None:
        if word in self._calls:
            call, timer = self._calls.pop(word)
            timer.cancel()
            call.end()


def identity(method: str, params: types.InputResponseRequestParams) -> str:
    """What is called: the same when it is sent again with answers."""
    sent = params.model_dump(mode="json", by_alias=True, include={"name", "uri", "arguments"})
    return json.dumps([method, sent], sort_keys=True)


def lacks(capabilities: types.ClientCapabilities | None, question: types.InputRequest) -> str | None:
    """What a client would need for a question and does not have."""
    has = capabilities or types.ClientCapabilities()
    match question:
        case types.CreateMessageRequest():
            return None if has.sampling else "sampling"
        case types.ListRootsRequest():
            return None if has.roots else "roots"
        case types.ElicitRequest(params=types.ElicitRequestURLParams()):
            return None if has.elicitation and has.elicitation.url else "elicitation by an address"
        case _:
            # Of older versions, which had no other, one without any mode has forms.
            return None if has.elicitation and (has.elicitation.form or not has.elicitation.url) else "elicitation"
