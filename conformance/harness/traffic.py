"""Reaching a server inside a sandbox from outside, the way a client does.

`get_host()` names a host below `localhost`, which plain resolvers do not resolve, so the connection goes to the
platform's address and the name travels in the Host header, exactly as it would after resolution.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import httpx

PROGRAMS = Path(__file__).parent.parent / "programs"


def program(name: str) -> str:
    """The text of a program that the suites run inside sandboxes."""
    return (PROGRAMS / name).read_text()


def until(condition: Callable[[], bool], what: str, within_s: float = 20.0) -> None:
    """Waits for something that another process does."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {within_s} s: {what}"
        time.sleep(0.02)


def get(url: str, host: str, path: str = "/", **options: object) -> httpx.Response:
    """One GET to a sandbox's port by its public host name."""
    return httpx.get(f"{url}{path}", headers={"Host": host, **options.pop("headers", {})}, timeout=30, **options)


def wait_served(url: str, host: str, path: str = "/") -> httpx.Response:
    """The first answer of a server that is just starting."""
    answers: list[httpx.Response] = []

    def answered() -> bool:
        answers.append(get(url, host, path))
        return answers[-1].status_code != 502

    until(answered, f"{host} is served")
    return answers[-1]
