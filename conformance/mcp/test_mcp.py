"""The documentation endpoint with the official clients of the Model Context Protocol, unmodified, over HTTP: they
connect without credentials, list the tools and call each, with both protocol versions and as they come.

RINGFENCE_MCP_PYTHON names the interpreters of environments with the pinned Python clients, separated by `:`;
RINGFENCE_NODE and RINGFENCE_NODE_MODULES Node and a directory with the pinned TypeScript client.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from harness.patience import within
from harness.platform import Platform

HERE = Path(__file__).parent
PYTHONS = os.environ["RINGFENCE_MCP_PYTHON"].split(":")
# What a client offers, and what it gets.
VERSIONS = {"2025-06-18": "2025-06-18", "2025-03-26": "2025-03-26", "default": "2025-06-18"}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("search_docs_svc", {"query": "limit the network of a sandbox", "limit": 3}),
    ("list_docs_svc", {}),
    ("get_doc_content_svc", {"path": "/configuration"}),
    ("query_docs_filesystem_svc", {"command": "ls"}),
    ("query_docs_filesystem_svc", {"command": "tree / -L 1"}),
    ("query_docs_filesystem_svc", {"command": "cat /configuration.md"}),
    ("query_docs_filesystem_svc", {"command": "head -n 1 /configuration.md"}),
    ("query_docs_filesystem_svc", {"command": "rg -C 1 '`mcp\\.path`' /"}),
    ("get_doc_content_svc", {"path": "/no/such/page"}),
]
# Whether the tool itself says that it failed.
FAILED = [False] * 8 + [True]


@pytest.mark.parametrize("offered", VERSIONS)
@pytest.mark.parametrize("python", PYTHONS, ids=lambda python: Path(python).parent.parent.name)
def test_the_python_client(platform: Platform, tmp_path: Path, python: str, offered: str) -> None:
    command = [python, str(HERE / "official_client.py"), f"{platform.url}/mcp", offered]
    check(platform, report(command, platform, tmp_path), VERSIONS[offered])


@pytest.mark.parametrize("offered", VERSIONS)
def test_the_typescript_client(platform: Platform, tmp_path: Path, offered: str) -> None:
    shutil.copy(HERE / "official_client.mjs", tmp_path)
    (tmp_path / "node_modules").symlink_to(Path(os.environ["RINGFENCE_NODE_MODULES"]).resolve())
    command = [os.environ["RINGFENCE_NODE"], "official_client.mjs", f"{platform.url}/mcp", offered]
    check(platform, report(command, platform, tmp_path), VERSIONS[offered])


def report(command: list[str], platform: Platform, directory: Path) -> dict[str, Any]:
    ran = subprocess.run(
        command,
        cwd=directory,
        env={**platform.environment(), "HOME": str(directory)},
        input=json.dumps(CALLS),
        capture_output=True,
        text=True,
        timeout=within(60),
    )
    assert ran.returncode == 0, ran.stderr
    answer: dict[str, Any] = json.loads(ran.stdout)
    return answer


def check(platform: Platform, got: dict[str, Any], version: str) -> None:
    assert got["initialized"]["protocolVersion"] == version
    assert got["initialized"]["serverInfo"]["name"] == "ringfence"
    assert {tool["name"] for tool in got["tools"]} == {name for name, _ in CALLS}
    for tool in got["tools"]:
        assert tool["inputSchema"]["type"] == "object"
        assert tool["annotations"]["readOnlyHint"] is True
    assert [result.get("isError", False) for result in got["results"]] == FAILED
    for result in got["results"]:
        assert [content["type"] for content in result["content"]] == ["text"]
    search, listed, page, ls, tree, cat, head, rg, missing = (result["content"][0]["text"] for result in got["results"])
    assert 1 <= search.count("Route: /") <= 3
    assert f"Route: /configuration\n   URL: {platform.url}/docs/configuration" in listed
    assert page == cat and page.startswith("# Configuration\n") and "`mcp.path`" in page
    assert "configuration.md\n" in ls and "── configuration.md" in tree
    assert head == "# Configuration\n"
    assert "/configuration.md:" in rg and "/configuration.md-" in rg
    assert "/no/such/page" in missing
    # Unknown tool, missing argument.
    assert got["errors"] == [-32602, -32602]
