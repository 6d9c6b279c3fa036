"""A server of version 2025-06-18, which says what it has to say without being asked: `python older.py`. Libraries of today speak the newer
version with each other, so this one is written by hand.
"""

from __future__ import annotations

import json
import sys
from typing import Any

tools = ["older"]
level = "none"


def send(**message: Any) -> None:
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


for line in sys.stdin:
    asked = json.loads(line)
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
    elif method == "tools/call":
        if token := given.get("_meta", {}).get("progressToken"):
            send(method="notifications/progress", params={"progressToken": token, "progress": 1, "message": "half"})
        send(method="notifications/message", params={"level": "warning", "data": f"level {level}"})
        tools.append("older_grown")
        send(method="notifications/tools/list_changed")
        send(id=ident, result={"content": [{"type": "text", "text": "done"}]})
    else:
        send(id=ident, error={"code": -32601, "message": f"there is no {method}"})
