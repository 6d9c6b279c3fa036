"""The template of the MCP gateway. RINGFENCE_MCP_GATEWAY_PACKAGES names a directory with `wheels` that its recipe pins. And a client of a
gateway without libraries, for suites that have no official one.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import httpx
from e2b import Sandbox

from harness import recipes
from harness.patience import within
from harness.platform import Platform


def build(platform: Platform, directory: Path, *options: str) -> str:
    """Builds the template on a platform, and returns the log."""
    packages = Path(os.environ["RINGFENCE_MCP_GATEWAY_PACKAGES"])
    return recipes.build(platform, recipes.context("mcp-gateway", packages, recipes.WHEELS, directory), *options)


class Session:
    """A session with the gateway of a sandbox, of the older version of the protocol, at the address of the platform."""

    def __init__(self, platform: Platform, box: Sandbox) -> None:
        headers = {"Host": box.get_host(50005), "Authorization": f"Bearer {box.get_mcp_token()}", "Accept": "application/json, text/event-stream"}
        self.client = httpx.Client(base_url=platform.url, headers=headers, timeout=within(60))
        self.numbers = itertools.count(1)
        about = {"name": "tests", "version": "1"}
        begun = self.ask("initialize", protocolVersion="2025-06-18", capabilities={}, clientInfo=about)
        self.client.headers["mcp-protocol-version"] = begun["protocolVersion"]
        self.client.post("/mcp", json={"jsonrpc": "2.0", "method": "notifications/initialized"}).raise_for_status()

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a request."""
        number = next(self.numbers)
        answer = self.client.post("/mcp", json={"jsonrpc": "2.0", "id": number, "method": method, "params": params})
        assert answer.status_code == 200, answer.text
        if session := answer.headers.get("mcp-session-id"):
            self.client.headers["mcp-session-id"] = session
        if answer.headers["content-type"].startswith("application/json"):
            said = [answer.json()]
        else:
            data = [line.removeprefix("data:").strip() for line in answer.text.splitlines() if line.startswith("data:")]
            said = [json.loads(text) for text in data if text]
        (found,) = [message for message in said if message.get("id") == number]
        return found["result"]
