"""Entries about outbound connections in the log of a sandbox, as clients read them."""

from __future__ import annotations

import os
from typing import Any

import httpx
from e2b import Sandbox

from harness.platform import Platform


def entries(platform: Platform, sandbox: Sandbox) -> list[dict[str, Any]]:
    answer = httpx.get(
        f"{platform.url}/sandboxes/{sandbox.sandbox_id}/logs",
        headers={"X-API-Key": os.environ["E2B_API_KEY"]},
        params={"limit": 1000},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    return [entry for entry in answer.json()["logEntries"] if entry["fields"].get("logger") == "egress"]


def said(platform: Platform, sandbox: Sandbox, *words: str) -> list[str]:
    """Entries that contain all of these, fields included."""
    lines = [f"{entry['level']} {entry['message']} {entry['fields']}" for entry in entries(platform, sandbox)]
    return [line for line in lines if all(word in line for word in words)]
