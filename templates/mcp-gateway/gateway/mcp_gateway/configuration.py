"""What the `mcp` of a create request says: which servers there are, and how each is started.

A server is an object with `command`, `args`, `env` and `cwd`, as in the configuration of MCP clients; or a repository, whose key is
`github/OWNER/NAME`, with `runCmd`, `installCmd` and `envs`. The clients know names of a catalogue as well. Those servers are published as
container images, which do not run here, so they are refused with what to write instead.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

MOST_SERVERS = 32
REPOSITORY = re.compile(r"github/([A-Za-z0-9-]{1,39})/([A-Za-z0-9._-]{1,100})")
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Refused(Exception):
    """A configuration that cannot be followed, with what is wrong with it."""


@dataclass
class Server:
    """One server, and the repository that it comes from if there is one."""

    name: str
    command: str
    args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    cwd: str | None = None
    repository: str | None = None
    install: str | None = None


def parse(text: str) -> list[Server]:
    """The servers of a configuration."""
    try:
        given = json.loads(text)
    except ValueError as error:
        raise Refused(f"the configuration is not JSON: {error}") from None
    if not isinstance(given, dict) or not given:
        raise Refused("the configuration must be an object with at least one server")
    if len(given) > MOST_SERVERS:
        raise Refused(f"there are {len(given)} servers; at most {MOST_SERVERS} are started")
    servers = [server(name, what) for name, what in given.items()]
    names = [each.name for each in servers]
    for name in names:
        if names.count(name) > 1:
            raise Refused(f"{name}: two servers would have this name")
    return servers


def server(name: str, what: Any) -> Server:
    """One server of a configuration."""
    if not isinstance(what, dict):
        raise Refused(f"{name}: must be an object")
    if found := REPOSITORY.fullmatch(name):
        if set(found[2]) <= {"."}:
            raise Refused(f"{name}: is not a repository")
        known(name, what, ("runCmd", "installCmd", "envs"))
        run, install = text_of(name, what, "runCmd"), text_of(name, what, "installCmd")
        if not run:
            raise Refused(f"{name}: runCmd is missing")
        address = f"https://github.com/{found[1]}/{found[2]}"
        return Server(f"{found[1]}_{found[2]}", "bash", ["-c", run], variables(name, what, "envs"), None, address, install)
    if "command" not in what:
        raise Refused(
            f"{name}: there is no command. Servers of the catalogue are container images, which do not run here: give "
            '{"command": "npx", "args": ["-y", "PACKAGE"], "env": {}} for one of npm, or "uvx" for one of PyPI'
        )
    if not NAME.fullmatch(name):
        raise Refused(f"{name}: a name has letters, digits, '.', '_' and '-', at most 64")
    known(name, what, ("command", "args", "env", "cwd"))
    command = text_of(name, what, "command")
    if not command:
        raise Refused(f"{name}: command must not be empty")
    args = what.get("args", [])
    if not isinstance(args, list) or not all(isinstance(arg, str) for arg in args):
        raise Refused(f"{name}: args must be an array of strings")
    return Server(name, command, args, variables(name, what, "env"), text_of(name, what, "cwd"))


def known(name: str, what: dict[str, Any], keys: tuple[str, ...]) -> None:
    for key in what:
        if key not in keys:
            raise Refused(f"{name}: {key!r} is not known; there are {', '.join(keys)}")


def text_of(name: str, what: dict[str, Any], key: str) -> str | None:
    value = what.get(key)
    if value is not None and (not isinstance(value, str) or "\0" in value):
        raise Refused(f"{name}: {key} must be a string")
    return value


def variables(name: str, what: dict[str, Any], key: str) -> dict[str, str]:
    value = what.get(key) or {}
    if not isinstance(value, dict) or not all(isinstance(each, str) and "\0" not in each for each in value.values()):
        raise Refused(f"{name}: {key} must be an object of strings")
    if any(not each or "=" in each or "\0" in each for each in value):
        raise Refused(f"{name}: {key} must have names without =")
    return value
