"""A small MCP server on standard input and output, in the environment of the gateway: `python server.py WORD`."""

from __future__ import annotations

import os
import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("small")


@server.tool()
def word() -> str:
    """The word of this server, and a variable."""
    return f"{sys.argv[1]} {os.environ.get('SETTING', '')} {os.getuid()} {os.getcwd()}"


@server.tool(name=f"add_{sys.argv[1]}")
def add(a: int, b: int) -> int:
    """A sum."""
    return a + b


@server.tool(name=f"end_{sys.argv[1]}")
def end() -> None:
    """Ends this process."""
    os._exit(3)


@server.resource(f"note://{sys.argv[1]}")
def note() -> str:
    return f"note of {sys.argv[1]}"


@server.prompt(name=f"greet_{sys.argv[1]}")
def greet(name: str) -> str:
    return f"Greet {name}"


server.run()
