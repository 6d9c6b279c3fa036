"""Registries of packages in the fake internet, under the names that installers ask: the packages that ready-made templates pin, which an asset
of the tests has, so that recipes run as they are, without being told of another source; and two small MCP servers, which `npx` and `uvx` start under
the names of well-known ones.

The servers find them by RINGFENCE_AGENTS_PACKAGES and its like, where these are set.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import tempfile
from functools import cache
from html import escape
from pathlib import Path

from harness import packages as small

DOMAINS = ("pypi.org", "npmjs.org")
PYTHON, NODE = "pypi.org", "registry.npmjs.org"
LOCKS = Path(__file__).resolve().parents[2] / "templates"
ASSETS = ("RINGFENCE_AGENTS_PACKAGES", "RINGFENCE_MCP_GATEWAY_PACKAGES", "RINGFENCE_CODE_INTERPRETER_PACKAGES")


PROGRAMS = Path(__file__).resolve().parents[1] / "programs"
# The MCP servers: a package of each registry, under the names that the page of the gateway has in its first program.
OF_PYPI, OF_NPM = "mcp_server_time", "@modelcontextprotocol/server-filesystem"
OWN_NPM = OF_NPM.rpartition("/")[2]


@cache
def servers() -> dict[str, bytes]:
    """The archives of the MCP servers, by the names of their files."""
    with tempfile.TemporaryDirectory() as directory:
        made = (
            small.wheel(Path(directory), OF_PYPI, (PROGRAMS / "mcp_stdio.py").read_text()),
            small.tgz(Path(directory), OF_NPM, (PROGRAMS / "mcp_stdio.js").read_text()),
        )
        return {path.name: path.read_bytes() for path in made}


def directories() -> list[Path]:
    return [Path(os.environ[name]) for name in ASSETS if name in os.environ]


@cache
def wheels() -> dict[str, Path]:
    """Wheels by their names."""
    return {wheel.name: wheel for directory in directories() for wheel in (directory / "wheels").glob("*.whl")}


def project(wheel: str) -> str:
    return wheel.partition("-")[0].replace("_", "-").replace(".", "-").lower()


@cache
def packages() -> dict[str, dict[str, str]]:
    """The versions of packages of npm that the lock files pin, with their integrity."""
    found: dict[str, dict[str, str]] = {}
    for lock in LOCKS.rglob("package-lock.json"):
        for place, package in json.loads(lock.read_text())["packages"].items():
            if "integrity" in package:
                name = package.get("name") or place.rpartition("node_modules/")[2]
                found.setdefault(name, {})[package["version"]] = package["integrity"]
    return found


def tarball(name: str, version: str) -> str:
    return f"/{name}/-/{name.rpartition('/')[2]}-{version}.tgz"


def described(name: str) -> bytes:
    """What the registry says of a package."""
    if name == OF_NPM:
        integrities = {"1.0.0": f"sha512-{base64.b64encode(hashlib.sha512(servers()[f'{OWN_NPM}.tgz']).digest()).decode()}"}
    else:
        integrities = packages()[name]
    versions = {
        version: {
            **{"name": name, "version": version, "dist": {"tarball": f"https://{NODE}{tarball(name, version)}", "integrity": integrity}},
            **({"bin": {OWN_NPM: "run.js"}} if name == OF_NPM else {}),
        }
        for version, integrity in integrities.items()
    }
    return json.dumps({"name": name, "dist-tags": {"latest": next(iter(versions))}, "versions": versions}).encode()


@cache
def archives() -> dict[str, str]:
    """The integrity of archives of npm, by their paths at the registry."""
    return {tarball(name, version): integrity for name, versions in packages().items() for version, integrity in versions.items()}


def archive(path: str) -> Path | None:
    """An archive in a cache of npm, where contents are by their digests."""
    integrity = archives().get(path, "")
    kind, _, digest = integrity.partition("-")
    digest = base64.b64decode(digest).hex()
    places = [directory / "npm" / "_cacache" / "content-v2" / kind / digest[:2] / digest[2:4] / digest[4:] for directory in directories()]
    return next((place for place in places if digest and place.is_file()), None)


def answer(host: str, path: str) -> tuple[int, dict[str, str], bytes]:
    """What a registry answers."""
    if host == NODE and (found := archive(path)):
        return 200, {"Content-Type": "application/octet-stream"}, found.read_bytes()
    if host == NODE and path == tarball(OF_NPM, "1.0.0"):
        return 200, {"Content-Type": "application/octet-stream"}, servers()[f"{OWN_NPM}.tgz"]
    if host == NODE and (path.strip("/") in packages() or path.strip("/") == OF_NPM):
        return 200, {"Content-Type": "application/json"}, described(path.strip("/"))
    first, _, rest = path.strip("/").partition("/")
    if host == PYTHON and first == "simple":
        names = [*wheels(), *servers()]
        links = "".join(f'<a href="/files/{escape(name)}">{escape(name)}</a>' for name in names if name.endswith(".whl") and project(name) == rest)
        if links:
            return 200, {"Content-Type": "text/html"}, f"<!DOCTYPE html><html><body>{links}</body></html>".encode()
    if host == PYTHON and first == "files" and rest in servers():
        return 200, {"Content-Type": "application/octet-stream"}, servers()[rest]
    if host == PYTHON and first == "files" and rest in wheels():
        return 200, {"Content-Type": "application/octet-stream"}, wheels()[rest].read_bytes()
    return 404, {"Content-Type": "text/plain"}, b"there is no such package here\n"
