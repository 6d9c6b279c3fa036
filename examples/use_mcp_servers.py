"""MCP servers that run in a sandbox, used by a client that is elsewhere: it lists their tools and calls one without arguments.

    python use_mcp_servers.py TOOL COMMAND [ARGUMENT...]

Of the SDK, `e2b` starts the servers; the client is the official one, `mcp`. For instance, without a TOOL to call (`-`):

    python use_mcp_servers.py - npx -y @modelcontextprotocol/server-memory
"""

from __future__ import annotations

import asyncio
import ssl
import sys

import httpx2
from e2b import Sandbox
from mcp import Client
from mcp.client.streamable_http import streamable_http_client


async def use(url: str, token: str, tool: str) -> None:
    headers = {"Authorization": f"Bearer {token}"}
    async with httpx2.AsyncClient(headers=headers, verify=ssl.create_default_context(), timeout=60) as http:
        async with Client(streamable_http_client(url, http_client=http)) as client:
            for each in (await client.list_tools()).tools:
                print(each.name)
            if tool != "-":
                result = await client.call_tool(tool)
                print(*(part.text for part in result.content if part.type == "text"), sep="\n")


def main() -> None:
    tool, command, *arguments = sys.argv[1:]
    with Sandbox.create(mcp={"mine": {"command": command, "args": arguments}}, timeout=300) as box:
        asyncio.run(use(box.get_mcp_url(), box.get_mcp_token() or "", tool))


if __name__ == "__main__":
    main()
