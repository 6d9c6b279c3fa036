"""The process that stays: it starts the servers, says on its standard output that it is ready or why not, and answers HTTP.

It reads the servers and the token from its standard input, because arguments and variables of a process can be read by others.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import socket
import sys
from typing import Any

import uvicorn
from mcp.server.transport_security import TransportSecuritySettings

from mcp_gateway.configuration import Server
from mcp_gateway.joined import LOGS, Joined, Upstream
from mcp_gateway.passed import Passed

PORT = 50005
TAIL = 2000
# Less than the one who waits for this process has.
START_S = 45.0


class Guarded:
    """An application that only requests with the token reach."""

    def __init__(self, inner: Any, token: str) -> None:
        self.inner = inner
        self.want = f"Bearer {token}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self.want):
                text = b"the token of the gateway is missing or wrong: send it as Authorization: Bearer TOKEN\n"
                headers = [(b"content-type", b"text/plain"), (b"www-authenticate", b"Bearer"), (b"content-length", str(len(text)).encode())]
                await send({"type": "http.response.start", "status": 401, "headers": headers})
                await send({"type": "http.response.body", "body": text})
                return
        await self.inner(scope, receive, send)


def say(word: str) -> None:
    print(word, flush=True)


async def serve(servers: list[Server], token: str, listener: socket.socket) -> int:
    passed = Passed()
    upstreams = [Upstream(server, passed) for server in servers]
    loop = asyncio.get_running_loop()
    begun = loop.time()
    running = [asyncio.create_task(each.run()) for each in (passed, *upstreams)]
    for upstream in upstreams:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(upstream.tried.wait(), begun + START_S - loop.time())
        if upstream.client is None:
            upstream.failure = upstream.failure or "it has not answered in time"
            said = upstream.log.read_text(errors="replace")[-TAIL:].strip()
            say(f"the server {upstream.server.name} did not start: {upstream.failure}" + (f"; it said: {said}" if said else ""))
            return 1
    app = Joined(upstreams, passed).served().streamable_http_app(
        # Names of sandboxes are not known here, and nobody without the token is answered whatever name was used.
        host="0.0.0.0",
        transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
    )
    server = uvicorn.Server(uvicorn.Config(Guarded(app, token), log_level="warning", access_log=False))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if not serving.done():
        say("ready")
    await serving
    for task in running:
        task.cancel()
    return 0


def main() -> int:
    given = json.loads(sys.stdin.readline())
    LOGS.mkdir(mode=0o700, parents=True, exist_ok=True)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("0.0.0.0", PORT))
    except OSError as error:
        say(f"port {PORT} cannot be listened on, perhaps because a gateway runs already: {error.strerror}")
        return 1
    return asyncio.run(serve([Server(**each) for each in given["servers"]], given["token"], listener))
