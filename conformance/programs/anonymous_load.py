"""Load that anybody who reaches the port can make, without credentials: `anonymous_load.py KIND HOST PORT NAME SECONDS`.

Kinds: `signed` floods with signed links whose paths are long and whose signatures are wrong, `heads` keeps connections
whose request never ends, `server` asks a hostile server in a sandbox, whose public name is NAME. Each uses 16
connections (`heads` opens as many as it gets) and ends by itself.
"""

from __future__ import annotations

import asyncio
import sys
import time

CONNECTIONS = 16
# More than any one peer should get.
HEADS = 2000


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
            if len(held) < HEADS // CONNECTIONS:
                _, writer = await asyncio.open_connection(host, port)
                writer.write(head)
                held.append(writer)
            else:
                await asyncio.sleep(0.05)
        except OSError:
            await asyncio.sleep(0.05)


async def main() -> None:
    kind, host, port, name, seconds = sys.argv[1:]
    until = time.monotonic() + float(seconds)
    load = {"signed": signed, "heads": heads, "server": server}[kind]
    print("begun", flush=True)
    await asyncio.gather(*(load(host, int(port), name, until) for _ in range(CONNECTIONS)))


asyncio.run(main())
