"""APIs of models of the fake internet: they answer to a key only, in the form of each vendor, as a stream where one was asked for.

There is no model behind them. A prompt has a command between `RUN ` and ` END`; the first answer asks the agent to run it with the tool
that the agent said it has for that, and the answer to what the tool returned is the text of it after `It printed: `. Everything an agent
does in between is its own.
"""

from __future__ import annotations

import json
import re
from typing import Any

# Of each host the header with the key, and the only value that is accepted.
KEYS = {
    "api.openai.com": ("authorization", "Bearer sk-canary-openai-0123456789"),
    "api.anthropic.com": ("x-api-key", "sk-ant-canary-0123456789"),
    "generativelanguage.googleapis.com": ("x-goog-api-key", "AIza-canary-gemini-0123456789"),
}
DOMAINS = tuple(".".join(host.split(".")[-2:]) for host in KEYS)
COMMAND = re.compile(r"RUN (.+?) END", re.DOTALL)
# Names of the tool that runs commands, and of the argument that has the command.
SHELLS = {"exec_command": "cmd", "shell_command": "command", "shell": "command", "Bash": "command", "bash": "command", "run_shell_command": "command"}
SAID = "It printed: "
Answer = tuple[int, dict[str, str], bytes]


def key(host: str) -> str:
    """The key of a host, without what the header has before it."""
    return KEYS[host][1].rpartition(" ")[2]


def answer(host: str, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
    """The answer to a request. Names of headers are small letters."""
    name, value = KEYS[host]
    if headers.get(name) != value:
        return as_json(401, {"error": {"type": "authentication_error", "message": "the key is wrong"}})
    asked = json.loads(body) if body.startswith(b"{") else {}
    if method == "POST" and path == "/v1/responses":
        return responses(asked)
    if method == "POST" and path == "/v1/messages":
        return messages(asked)
    if method == "POST" and path == "/v1/messages/count_tokens":
        return as_json(200, {"input_tokens": 10})
    if method == "POST" and (found := re.fullmatch(r"/v1beta/models/[^/:]+:(generateContent|streamGenerateContent|countTokens)", path)):
        return contents(found[1], asked)
    if headers.get("upgrade"):
        # What agents that would rather have a WebSocket take for an answer to use the other form.
        return as_json(426, {"error": {"type": "invalid_request_error", "message": "there is no WebSocket here"}})
    return as_json(404, {"error": {"type": "not_found_error", "message": f"there is no {method} {path}"}})


def as_json(status: int, content: Any) -> Answer:
    return status, {"Content-Type": "application/json"}, json.dumps(content).encode()


def as_events(events: list[dict[str, Any]], named: bool) -> Answer:
    """A stream of events, with their types as names or without."""
    lines = [(f"event: {event['type']}\n" if named else "") + f"data: {json.dumps(event)}\n\n" for event in events]
    return 200, {"Content-Type": "text/event-stream"}, "".join(lines).encode()


def command(asked: Any) -> str | None:
    """The command of the last prompt that has one."""
    found = [match[1] for text in texts(asked) for match in COMMAND.finditer(text)]
    return found[-1] if found else None


def texts(value: Any) -> list[str]:
    """All texts within a value, in their order."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [text for each in value for text in texts(each)] if isinstance(value, list) else []


def tool(names: list[str]) -> str | None:
    """The tool that runs commands, of those an agent has."""
    return next((name for name in SHELLS if name in names), None)


def arguments(name: str, run: str) -> dict[str, Any]:
    """What the tool is called with."""
    more = {"description": "does what was asked for"} if name in ("Bash", "bash", "run_shell_command") else {}
    return {SHELLS[name]: ["bash", "-c", run] if name == "shell" else run, **more}


def responses(asked: dict[str, Any]) -> Answer:
    """Of OpenAI, the API of responses."""
    inputs = asked["input"] if isinstance(asked["input"], list) else [asked["input"]]
    outputs = [item for item in inputs if isinstance(item, dict) and str(item.get("type", "")).endswith("call_output")]
    # Some models get their tools before the prompt, in namespaces.
    given = [*asked.get("tools", []), *(each for item in inputs if isinstance(item, dict) for each in item.get("tools", []))]
    given += [each for space in given for each in space.get("tools", [])]
    name = tool([str(each.get("name")) for each in given if each.get("type") == "function"])
    run = command([item for item in inputs if not isinstance(item, dict) or item.get("type", "message") == "message"])
    item: dict[str, Any]
    if run and not outputs and any((each.get("type"), each.get("name")) == ("custom", "exec") for each in given):
        # A tool that runs programs of JavaScript, within which are the other tools.
        script = f"text(await tools.exec_command({json.dumps({'cmd': run})}))"
        item = {"type": "custom_tool_call", "id": "ctc_1", "call_id": "call_1", "name": "exec", "input": script, "status": "completed"}
    elif run and name and not outputs:
        item = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": name, "arguments": json.dumps(arguments(name, run)), "status": "completed"}
    else:
        said = SAID + "\n".join(texts([each.get("output") for each in outputs]))
        content = [{"type": "output_text", "text": said, "annotations": []}]
        item = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": content}
    usage = {"input_tokens": 10, "output_tokens": 10, "total_tokens": 20}
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    whole = {"id": "resp_1", "object": "response", "created_at": 0, "status": "completed", "model": asked.get("model"), "output": [item], "usage": usage | details}
    if not asked.get("stream"):
        return as_json(200, whole)
    return as_events(
        [
            {"type": "response.created", "sequence_number": 0, "response": {**whole, "status": "in_progress", "output": []}},
            {"type": "response.output_item.added", "sequence_number": 1, "output_index": 0, "item": item},
            {"type": "response.output_item.done", "sequence_number": 2, "output_index": 0, "item": item},
            {"type": "response.completed", "sequence_number": 3, "response": whole},
        ],
        named=True,
    )


def messages(asked: dict[str, Any]) -> Answer:
    """Of Anthropic, the API of messages."""
    parts = [part for message in asked["messages"] if isinstance(message["content"], list) for part in message["content"]]
    results = [part.get("content") for part in parts if part.get("type") == "tool_result"]
    name = tool([str(each.get("name")) for each in asked.get("tools", [])])
    run = command(asked["messages"])
    block: dict[str, Any]
    if run and name and not results:
        block, reason = {"type": "tool_use", "id": "toolu_1", "name": name, "input": arguments(name, run)}, "tool_use"
        start, delta = {**block, "input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
    else:
        block, reason = {"type": "text", "text": SAID + "\n".join(texts(results))}, "end_turn"
        start, delta = {"type": "text", "text": ""}, {"type": "text_delta", "text": block["text"]}
    usage = {"input_tokens": 10, "output_tokens": 10}
    whole = {"id": "msg_1", "type": "message", "role": "assistant", "model": asked["model"], "content": [block], "stop_reason": reason, "stop_sequence": None, "usage": usage}
    if not asked.get("stream"):
        return as_json(200, whole)
    return as_events(
        [
            {"type": "message_start", "message": {**whole, "content": [], "stop_reason": None}},
            {"type": "content_block_start", "index": 0, "content_block": start},
            {"type": "content_block_delta", "index": 0, "delta": delta},
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": None}, "usage": usage},
            {"type": "message_stop"},
        ],
        named=True,
    )


def contents(what: str, asked: dict[str, Any]) -> Answer:
    """Of Gemini, the API of contents."""
    if what == "countTokens":
        return as_json(200, {"totalTokens": 10})
    declared = [each for tools in asked.get("tools", []) for each in tools.get("functionDeclarations", [])]
    parts = [part for content in asked["contents"] for part in content.get("parts", [])]
    results = [part["functionResponse"].get("response") for part in parts if "functionResponse" in part]
    name = tool([str(each.get("name")) for each in declared])
    run = command(asked["contents"])
    part: dict[str, Any]
    if run and name and not results:
        part = {"functionCall": {"name": name, "args": arguments(name, run)}}
    else:
        part = {"text": SAID + "\n".join(texts(results))}
    candidate = {"index": 0, "finishReason": "STOP", "content": {"role": "model", "parts": [part]}}
    whole = {"candidates": [candidate], "usageMetadata": {"promptTokenCount": 10, "candidatesTokenCount": 10, "totalTokenCount": 20}}
    return as_events([whole], named=False) if what == "streamGenerateContent" else as_json(200, whole)
