"""Load that anybody who reaches the port can make, without credentials: `anonymous_load.py KIND HOST PORT NAME SECONDS CONNECTIONS`.

Kinds: `signed` floods with signed links whose paths are long and whose signatures are wrong, `heads` keeps connections
whose request never ends, `server` asks a hostile server in a sandbox, whose public name is NAME, `documentation` runs the
commands and searches of the documentation that take longest. Each uses that many connections (for `heads`, so many open
as many as they get) and ends by itself.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

# More than any one peer should get.
HEADS = 2000
# Of each of the connections that open more.
HEADS_EACH = HEADS // 16


async def signed(host: str, port: int, _name: str, until: float) -> None:
    path = "/home/user/" + "a" * 4000
    head = (
        f"GET /files?path={path}&username=user&signature=v1_{'A' * 43} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n"
    ).encode()
    while time.monotonic() < until:
        try:
            reader, writer = await asyncio.open_connection(host, port)
            while time.monotonic() < until:
                writer.write(head)
                await reader.readuntil(b"\r\n\r\n")
                # The body is small and comes with the head or right after it; whatever is left is read as the next one.
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            await asyncio.sleep(0.01)


async def server(host: str, port: int, name: str, until: float) -> None:
    head = f"GET / HTTP/1.1\r\nHost: {name}\r\n\r\n".encode()
    while time.monotonic() < until:
        try:
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(head)
            while time.monotonic() < until and await asyncio.wait_for(reader.read(65536), until - time.monotonic()):
                pass
            writer.close()
        except (OSError, TimeoutError):
            await asyncio.sleep(0.01)


async def heads(host: str, port: int, _name: str, until: float) -> None:
    head = f"GET /health HTTP/1.1\r\nHost: {host}\r\nX-Filler: ".encode() + b"a" * 8000
    held = []
    while time.monotonic() < until:
        try:
            if len(held) < HEADS_EACH:
                _, writer = await asyncio.open_connection(host, port)
                writer.write(head)
                held.append(writer)
            else:
                await asyncio.sleep(0.05)
        except OSError:
            await asyncio.sleep(0.05)


async def documentation(host: str, port: int, _name: str, until: float) -> None:
    words = " ".join(f"sandbox{number} network template" for number in range(5))
    calls = [("query_docs_filesystem_svc", {"command": r'rg -C 50 "(.*[a-z]{1,200}.*){1,20}x$" /'})]
    calls += [("search_docs_svc", {"query": words, "limit": 50})] * 8
    requests = []
    for name, arguments in calls:
        call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": name, "arguments": arguments}}
        body = json.dumps(call).encode()
        head = (
            f"POST /mcp HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
            f"MCP-Protocol-Version: 2025-06-18\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        requests.append(head.encode() + body)
    query = words.replace(" ", "+")[:200]
    requests.append(f"GET /docs/search?q={query} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
    while time.monotonic() < until:
        try:
            reader, writer = await asyncio.open_connection(host, port)
            while time.monotonic() < until:
                for request in requests:
                    writer.write(request)
                    head = await reader.readuntil(b"\r\n\r\n")
                    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
                    await reader.readexactly(int(length.split(b":")[1]))
        except (OSError, asyncio.IncompleteReadError):
            await asyncio.sleep(0.01)


async def main() -> None:
    kind, host, port, name, seconds, connections = sys.argv[1:]
    until = time.monotonic() + float(seconds)
    load = {"signed": signed, "heads": heads, "server": server, "documentation": documentation}[kind]
    print("begun", flush=True)
    await asyncio.gather(*(load(host, int(port), name, until) for _ in range(int(connections))))


asyncio.run(main())
