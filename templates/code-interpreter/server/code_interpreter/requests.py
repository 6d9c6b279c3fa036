"""Bodies of requests: what is accepted, and what is said about everything else."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


class Invalid(ValueError):
    """A request that cannot be understood; the text is for the client."""


@dataclass(frozen=True)
class Execute:
    """A cell."""

    code: str
    context_id: str | None = None
    language: str | None = None
    env_vars: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Create:
    """A context."""

    language: str | None = None
    cwd: str | None = None


def fields(body: bytes) -> dict[str, Any]:
    """The object of a body."""
    try:
        found = json.loads(body or b"{}")
    except (ValueError, RecursionError) as failed:
        raise Invalid("the body is not JSON") from failed
    if not isinstance(found, dict):
        raise Invalid("the body must be an object")
    return found


def text(found: dict[str, Any], name: str) -> str | None:
    """A field that is a text or absent."""
    value = found.get(name)
    if value is not None and not isinstance(value, str):
        raise Invalid(f"{name} must be a string")
    if value is not None and name != "code" and (len(value) > 4096 or "\0" in value):
        raise Invalid(f"{name} is too long or has a NUL")
    return value


def execute(body: bytes) -> Execute:
    """The body of /execute."""
    found = fields(body)
    code = text(found, "code")
    if code is None:
        raise Invalid("code is missing")
    context, language = text(found, "context_id"), text(found, "language")
    if context and language:
        raise Invalid("give context_id or language, not both")
    variables = found.get("env_vars")
    variables = {} if variables is None else variables
    if not isinstance(variables, dict):
        raise Invalid("env_vars must be an object")
    for name, value in variables.items():
        if not isinstance(value, str) or not name or "=" in name or "\0" in name + value:
            raise Invalid("env_vars must have names without = and strings for values, both without NUL")
    return Execute(code, context or None, language, variables)


def create(body: bytes) -> Create:
    """The body of /contexts."""
    found = fields(body)
    return Create(text(found, "language"), text(found, "cwd"))
