"""A small MCP server on standard input and output, without libraries: what `uvx` starts in the tests, as a package of PyPI."""

import json
import os
import sys


def main():
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" not in asked:
            continue
        method, given = asked["method"], asked.get("params") or {}
        answer = {"jsonrpc": "2.0", "id": asked["id"]}
        if method == "initialize":
            about = {"name": "of-pypi", "version": "1.0"}
            answer["result"] = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": about}
        elif method == "ping":
            answer["result"] = {}
        elif method == "tools/list":
            answer["result"] = {"tools": [{"name": "of_pypi", "inputSchema": {"type": "object"}}]}
        elif method == "tools/call":
            text = f"python {given['arguments']['word']} {os.getuid()}"
            answer["result"] = {"content": [{"type": "text", "text": text}]}
        else:
            answer["error"] = {"code": -32601, "message": f"there is no {method}"}
        print(json.dumps(answer), flush=True)
