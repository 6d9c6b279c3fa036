"""A program that uses the official Python client of the Model Context Protocol: connects, lists and calls every tool, and
prints what it got as JSON. Runs with version 1 and with version 2 of the client.

Usage: official_client.py URL VERSION   where VERSION is the protocol version that the client offers, or `default`
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import mcp
from mcp.client import session as client_session
from mcp.client import streamable_http
from mcp.shared import exceptions

CALLS: list[tuple[str, dict[str, Any]]] = json.loads(sys.stdin.read())


def offer(version: str) -> None:
    """Makes the client one that prefers another version; the name of the constant differs."""
    if hasattr(client_session, "LATEST_HANDSHAKE_VERSION"):
        client_session.LATEST_HANDSHAKE_VERSION = version
    else:
        client_session.types.LATEST_PROTOCOL_VERSION = version


def plain(model: Any) -> Any:
    return model.model_dump(by_alias=True, mode="json", exclude_none=True)


async def use(session: Any) -> dict[str, Any]:
    report: dict[str, Any] = {"tools": plain(await session.list_tools())["tools"], "results": [], "errors": []}
    for name, arguments in CALLS:
        report["results"].append(plain(await session.call_tool(name, arguments)))
    # Version 1 has McpError, version 2 MCPError.
    error_type = getattr(exceptions, "MCPError", None) or exceptions.McpError
    for name, arguments in [("no_such_tool", {}), (CALLS[0][0], {})]:
        try:
            await session.call_tool(name, arguments)
        except error_type as error:
            report["errors"].append(error.error.code)
    return report


async def by_session(url: str) -> dict[str, Any]:
    async with streamable_http.streamable_http_client(url) as (read, write, *_):
        async with mcp.ClientSession(read, write) as session:
            initialized = plain(await session.initialize())
            await session.send_ping()
            return {"initialized": initialized, **await use(session)}


async def by_default(url: str) -> dict[str, Any]:
    """Connects as the client's documentation shows: version 2 first tries protocols that are newer than ours."""
    if not hasattr(mcp, "Client"):
        return await by_session(url)
    async with mcp.Client(url) as client:
        info = {"protocolVersion": client.protocol_version, "serverInfo": plain(client.server_info)}
        return {"initialized": info, **await use(client)}


def main() -> None:
    _, url, version = sys.argv
    if version == "default":
        report = asyncio.run(by_default(url))
    else:
        offer(version)
        report = asyncio.run(by_session(url))
    json.dump(report, sys.stdout)


main()
