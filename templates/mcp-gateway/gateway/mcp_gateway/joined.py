"""The servers behind the gateway, and what they offer as one server.

Each has a task of its own, which starts it again when it has ended. Names of tools and prompts are those of the servers. Where two
servers have the same name, both have the name of their server before it: `one__read` and `two__read`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import mcp_types as types
from mcp import Client, MCPError
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.subscriptions import SubscriptionLost
from mcp.server.lowlevel import NotificationOptions
from mcp.server.lowlevel import Server as Served
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from mcp_gateway.asked import Asking, Call, Waiting
from mcp_gateway.configuration import Server
from mcp_gateway.passed import KINDS, Calls, Passed, progress

LOGS = Path("/var/log/mcp-gateway")
# Servers are programs of others, and know neither the token nor the settings of their neighbours.
AS_USER = ("--reuid=user", "--regid=user", "--init-groups", "--")
HOME = "/home/user"
PATHS = f"{HOME}/.local/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ALIVE_S = 5.0
MOST_PAGES = 100


def environment(own: dict[str, str]) -> dict[str, str]:
    """The variables of a server: those of the sandbox, which say which certificates are trusted, as `user` has them; and its own."""
    return {**os.environ, "PATH": PATHS, "HOME": HOME, "USER": "user", "LOGNAME": "user", "SHELL": "/bin/bash", **own}


class Upstream:
    """One server, which runs for as long as the task of `run` does."""

    def __init__(self, server: Server, passed: Passed) -> None:
        self.server = server
        self.passed = passed
        self.calls = Calls(server.name, passed)
        self.client: Client | None = None
        # Set when the first start has succeeded or failed.
        self.tried = asyncio.Event()
        self.failure: str | None = None
        self._ended = asyncio.Event()
        # What it had of each kind when it was last asked.
        self._had: dict[str, list[Any]] = {}

    @property
    def log(self) -> Path:
        return LOGS / f"{self.server.name}.log"

    async def run(self) -> None:
        given = StdioServerParameters(
            command="setpriv",
            args=[*AS_USER, self.server.command, *self.server.args],
            env=environment(self.server.env),
            cwd=self.server.cwd or HOME,
        )
        while True:
            self._ended.clear()
            try:
                with open(self.log, "a") as log:
                    client = Client(
                        stdio_client(given, errlog=log),
                        logging_callback=self.calls.line,
                        # Clients of the gateway say which of the lines they want.
                        log_level="debug",
                        # Which of them can be asked for that is said when one is.
                        sampling_callback=self.calls.sample,
                        elicitation_callback=self.calls.elicit,
                        list_roots_callback=self.calls.roots,
                        message_handler=self._told,
                    )
                    async with client as self.client:
                        if self.tried.is_set():
                            # It has been started again, and may be another version of itself.
                            self.passed.changed(*KINDS)
                        self.tried.set()
                        await self._listen(client)
            except Exception as error:
                self.failure = f"{type(error).__name__}: {error}"
            self.client = None
            self.tried.set()
            # One that ends at once must not take the processor.
            await asyncio.sleep(1)

    async def _listen(self, client: Client) -> None:
        """Hears of changes until the server has ended."""
        if client.protocol_version not in MODERN_PROTOCOL_VERSIONS:
            # Those come by themselves; the level has to be set, if the server has levels.
            if client.server_capabilities.logging:
                with contextlib.suppress(MCPError):
                    await client.set_logging_level("debug")
            await self._ended.wait()
            return
        listening = asyncio.create_task(self._subscribe(client))
        try:
            await self._ended.wait()
        finally:
            listening.cancel()
            await asyncio.wait([listening])

    async def _subscribe(self, client: Client) -> None:
        # A server that has nothing to say refuses.
        with contextlib.suppress(MCPError, SubscriptionLost):
            async with client.listen(tools_list_changed=True, prompts_list_changed=True, resources_list_changed=True) as events:
                async for event in events:
                    self.passed.changed(next(kind for kind, (of, _) in KINDS.items() if isinstance(event, of)))

    async def _told(self, message: object) -> None:
        """What an older server says by itself."""
        match message:
            case types.ToolListChangedNotification():
                self.passed.changed("tools")
            case types.PromptListChangedNotification():
                self.passed.changed("prompts")
            case types.ResourceListChangedNotification():
                self.passed.changed("resources")
            case types.ElicitCompleteNotification(params=params):
                await self.passed.completed(params)

    async def ask(self, question: Callable[[Client], Awaitable[Any]]) -> Any:
        """What the server answers. If it answers nothing any more, it is started again."""
        if (client := self.client) is None:
            raise MCPError(types.INTERNAL_ERROR, f"the server {self.server.name} has ended and is being started again")
        try:
            return await question(client)
        except Exception as error:
            try:
                await asyncio.wait_for(client.send_ping(), ALIVE_S)
            except Exception as silent:
                # What is refused is answered, too: newer servers know no ping.
                if isinstance(silent, MCPError) and silent.code != types.CONNECTION_CLOSED:
                    raise error from None
                self._ended.set()
                raise MCPError(types.INTERNAL_ERROR, f"the server {self.server.name} has ended: {type(error).__name__}") from error
            raise

    async def pages(self, kind: str) -> list[Any]:
        """Everything of a kind that the server has; nothing if it has none or has ended."""
        capabilities = self.client and self.client.server_capabilities
        if not capabilities or getattr(capabilities, kind.partition("_")[0].rstrip("s") + "s", None) is None:
            return []
        if kind in self._had and self.calls.wait_for_a_client():
            # Some servers do one thing at a time, and answer nothing else before they are answered.
            return self._had[kind]
        found: list[Any] = []
        cursor: str | None = None
        for _ in range(MOST_PAGES):
            page = await self.ask(lambda client, at=cursor: getattr(client, f"list_{kind}")(cursor=at, cache_mode="bypass"))
            found += getattr(page, kind)
            cursor = page.next_cursor
            if not cursor:
                break
        self._had[kind] = found
        return found


class Announcing(Served[Any]):
    """A server that says to older clients as well that it tells them of changes."""

    def create_initialization_options(self, _: Any = None, *more: Any, **named: Any) -> Any:
        options = NotificationOptions(prompts_changed=True, resources_changed=True, tools_changed=True)
        return super().create_initialization_options(options, *more, **named)


class Joined:
    """All servers as one."""

    def __init__(self, upstreams: list[Upstream], passed: Passed) -> None:
        self.upstreams = upstreams
        self.passed = passed
        self._waiting = Waiting()
        # What was last listed, by kind, so that a call need not ask all servers again.
        self._listed: dict[str, dict[str, tuple[Upstream, Any]]] = {}
        passed.forget = lambda kind: self._listed.pop(kind, None)

    async def named(self, kind: str) -> dict[str, tuple[Upstream, Any]]:
        """Tools or prompts by the names that they have here."""
        listed = [(upstream, item) for upstream in self.upstreams for item in await self._of(upstream, kind)]
        often = Counter(item.name for _, item in listed)
        self._listed[kind] = {
            (item.name if often[item.name] == 1 else f"{upstream.server.name}__{item.name}"): (upstream, item) for upstream, item in listed
        }
        return self._listed[kind]

    async def _of(self, upstream: Upstream, kind: str) -> list[Any]:
        # What one server cannot say does not keep the others from being listed.
        with contextlib.suppress(MCPError):
            return await upstream.pages(kind)
        return []

    async def one(self, kind: str, name: str) -> tuple[Upstream, Any]:
        found = self._listed.get(kind, {}).get(name) or (await self.named(kind)).get(name)
        if found is None:
            raise MCPError(types.INVALID_PARAMS, f"there is nothing named {name!r} in {kind}")
        return found

    async def list_tools(self, _: Any, __: Any) -> types.ListToolsResult:
        found = await self.named("tools")
        return types.ListToolsResult(tools=[item.model_copy(update={"name": name}) for name, (_, item) in found.items()])

    async def answered(self, asking: Asking, params: Any, upstream: Upstream, question: Callable[[Client, Call], Awaitable[Any]]) -> Any:
        """What a server answers a client, or what it asks it first."""

        async def run(call: Call) -> Any:
            with upstream.calls.during(call):
                return await upstream.ask(lambda client: question(client, call))

        return await self._waiting.begun(asking, params, run)

    async def call_tool(self, asking: Asking, params: types.CallToolRequestParams) -> types.CallToolResult | types.InputRequiredResult:
        if params.request_state is not None:
            return await self._waiting.resumed(asking, params, params.request_state)
        upstream, tool = await self.one("tools", params.name)

        async def called(client: Client, call: Call) -> types.CallToolResult:
            async def tell(done: float, total: float | None, message: str | None) -> None:
                await progress(call, done, total, message)

            return await client.call_tool(tool.name, params.arguments, progress_callback=tell)

        return await self.answered(asking, params, upstream, called)

    async def list_prompts(self, _: Any, __: Any) -> types.ListPromptsResult:
        found = await self.named("prompts")
        return types.ListPromptsResult(prompts=[item.model_copy(update={"name": name}) for name, (_, item) in found.items()])

    async def get_prompt(self, asking: Asking, params: types.GetPromptRequestParams) -> types.GetPromptResult | types.InputRequiredResult:
        if params.request_state is not None:
            return await self._waiting.resumed(asking, params, params.request_state)
        upstream, prompt = await self.one("prompts", params.name)
        return await self.answered(asking, params, upstream, lambda client, _: client.get_prompt(prompt.name, params.arguments))

    async def list_resources(self, _: Any, __: Any) -> types.ListResourcesResult:
        return types.ListResourcesResult(resources=[item for each in self.upstreams for item in await self._of(each, "resources")])

    async def list_resource_templates(self, _: Any, __: Any) -> types.ListResourceTemplatesResult:
        found = [item for each in self.upstreams for item in await self._of(each, "resource_templates")]
        return types.ListResourceTemplatesResult(resource_templates=found)

    async def read_resource(self, asking: Asking, params: types.ReadResourceRequestParams) -> types.ReadResourceResult | types.InputRequiredResult:
        if params.request_state is not None:
            return await self._waiting.resumed(asking, params, params.request_state)
        uri = str(params.uri)

        async def read(client: Client, _: Call) -> types.ReadResourceResult:
            return await client.read_resource(uri)

        for upstream in self.upstreams:
            if any(str(item.uri) == uri for item in await self._of(upstream, "resources")):
                return await self.answered(asking, params, upstream, read)
        # One that is in no list may be of a template.
        for upstream in self.upstreams:
            if await self._of(upstream, "resource_templates"):
                with contextlib.suppress(MCPError):
                    return await self.answered(asking, params, upstream, read)
        raise MCPError(types.INVALID_PARAMS, f"there is no resource {uri!r}")

    async def _seen(self, asking: Asking, on: Callable[[Asking], Awaitable[Any]]) -> Any:
        self.passed.seen(asking)
        return await on(asking)

    def served(self) -> Served[Any]:
        """The server that clients of the gateway see."""
        made = Announcing(
            "mcp-gateway",
            on_list_tools=self.list_tools,
            on_call_tool=self.call_tool,
            on_list_prompts=self.list_prompts,
            on_get_prompt=self.get_prompt,
            on_list_resources=self.list_resources,
            on_list_resource_templates=self.list_resource_templates,
            on_read_resource=self.read_resource,
            on_subscriptions_listen=self.passed.listening,
            on_set_logging_level=self.passed.set_level,
        )
        made.middleware.append(self._seen)
        return made
