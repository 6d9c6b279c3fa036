"""A server of version 2026-07-28 that gives a call back with questions: `python newer.py`. It runs in the environment of the gateway."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import mcp_types as types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

QUESTIONS: dict[str, types.InputRequest] = {
    "sampling/createMessage": types.CreateMessageRequest(
        params=types.CreateMessageRequestParams(
            messages=[types.SamplingMessage(role="user", content=types.TextContent(type="text", text="Say a word"))], max_tokens=9
        )
    ),
    "elicitation/create": types.ElicitRequest(
        params=types.ElicitRequestFormParams(
            message="Your name?", requested_schema={"type": "object", "properties": {"name": {"type": "string"}}}
        )
    ),
    "roots/list": types.ListRootsRequest(),
}


async def list_tools(*_: Any) -> types.ListToolsResult:
    return types.ListToolsResult(tools=[types.Tool(name="newer_asks", input_schema={"type": "object"})])


async def call_tool(_: Any, params: types.CallToolRequestParams) -> types.CallToolResult | types.InputRequiredResult:
    wanted = (params.arguments or {})["what"]
    if params.request_state is None:
        return types.InputRequiredResult(input_requests={name: QUESTIONS[name] for name in wanted}, request_state="half of it")
    assert params.request_state == "half of it" and params.input_responses is not None
    said = [json.dumps(params.input_responses[name].model_dump(mode="json", by_alias=True, exclude_none=True)) for name in wanted]
    return types.CallToolResult(content=[types.TextContent(type="text", text=json.dumps(said))])


async def main() -> None:
    server: Server[Any] = Server("newer", on_list_tools=list_tools, on_call_tool=call_tool)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


asyncio.run(main())
