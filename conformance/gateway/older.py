"""A server of version 2025-06-18, which says what it has to say without being asked: `python older.py`. Libraries of today speak the newer
version with each other, so this one is written by hand.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

tools = ["older", "older_asks"]
level = "none"


waiting: list[dict[str, Any]] = []
QUESTIONS = {
    "sampling/createMessage": {"messages": [{"role": "user", "content": {"type": "text", "text": "Say a word"}}], "maxTokens": 9},
    "elicitation/create": {"message": "Your name?", "requestedSchema": {"type": "object", "properties": {"name": {"type": "string"}}}},
    "roots/list": {},
}


def send(**message: Any) -> None:
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def messages() -> Iterator[dict[str, Any]]:
    """What came while an answer was waited for, and then what comes."""
    while True:
        if waiting:
            yield waiting.pop(0)
        elif line := sys.stdin.readline():
            yield json.loads(line)
        else:
            return


def ask(method: str) -> str:
    """What a client answers, or why it does not."""
    send(id=f"ask-{method}", method=method, params=QUESTIONS[method])
    while line := sys.stdin.readline():
        answer = json.loads(line)
        if answer.get("id") == f"ask-{method}" and "method" not in answer:
            return json.dumps(answer["result"]) if "result" in answer else f"error: {answer['error']['message']}"
        waiting.append(answer)
        send(method="notifications/message", params={"level": "warning", "data": "a call waits"})
    sys.exit("nobody is there to answer")


for asked in messages():
    ident, method, given = asked.get("id"), asked.get("method"), asked.get("params") or {}
    if ident is None:
        continue
    if method == "initialize":
        has = {"tools": {"listChanged": True}, "logging": {}}
        about = {"name": "older", "version": "1"}
        send(id=ident, result={"protocolVersion": "2025-06-18", "capabilities": has, "serverInfo": about})
    elif method == "logging/setLevel":
        level = given["level"]
        send(id=ident, result={})
    elif method == "ping":
        send(id=ident, result={})
    elif method == "tools/list":
        send(id=ident, result={"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in tools]})
    elif method == "tools/call" and given["name"] == "older_asks":
        said = [ask(question) for question in given["arguments"]["what"]]
        send(id=ident, result={"content": [{"type": "text", "text": json.dumps(said)}]})
    elif method == "tools/call":
        if token := given.get("_meta", {}).get("progressToken"):
            send(method="notifications/progress", params={"progressToken": token, "progress": 1, "message": "half"})
        send(method="notifications/message", params={"level": "warning", "data": f"level {level}"})
        tools.append("older_grown")
        send(method="notifications/tools/list_changed")
        send(id=ident, result={"content": [{"type": "text", "text": "done"}]})
    else:
        send(id=ident, error={"code": -32601, "message": f"there is no {method}"})
