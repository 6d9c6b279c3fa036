"""A small MCP server on standard input and output, in the environment of the gateway: `python server.py WORD`."""

from __future__ import annotations

import os
import sys

from mcp.server.mcpserver import Context, MCPServer

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


@server.tool(name=f"work_{sys.argv[1]}")
async def work(context: Context) -> str:
    """Says how far it is, and lines for a log."""
    for step in (1, 2):
        await context.report_progress(step, 2, f"step {step}")
    await context.debug(f"all of it by {sys.argv[1]}", logger_name="worker")
    await context.error(f"what matters of {sys.argv[1]}", logger_name="worker")
    return "worked"


@server.tool(name=f"grow_{sys.argv[1]}")
async def grow(context: Context) -> None:
    """Makes another tool."""
    server.add_tool(word, name=f"grown_{sys.argv[1]}")
    await context.notify_tools_changed()


server.run()
