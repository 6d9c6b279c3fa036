"""Reaching a server inside a sandbox from outside, the way a client does.

`get_host()` names a host below `localhost`, which plain resolvers do not resolve, so the connection goes to the
platform's address and the name travels in the Host header, exactly as it would after resolution.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx

from harness.patience import within
from harness.platform import Platform
from harness.secure import SecurePlatform

T = TypeVar("T")
PROGRAMS = Path(__file__).parent.parent / "programs"


def program(name: str) -> str:
    """The text of a program that the suites run inside sandboxes."""
    return (PROGRAMS / name).read_text()


def until(condition: Callable[[], T], what: str | Callable[[], str], within_s: float = 20.0, every_s: float = 0.02) -> T:
    """Waits for something that another process does, and returns what the condition returned."""
    waits_s = within(within_s)
    deadline = time.monotonic() + waits_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"still not so after {waits_s:.1f} s: {what if isinstance(what, str) else what()}"
        time.sleep(every_s)
    return value


async def until_async(condition: Callable[[], Awaitable[T]], what: str, within_s: float = 20.0) -> T:
    """The same where the condition is asked through an asynchronous client."""
    waits_s = within(within_s)
    deadline = time.monotonic() + waits_s
    while not (value := await condition()):
        assert time.monotonic() < deadline, f"still not so after {waits_s:.1f} s: {what}"
        await asyncio.sleep(0.02)
    return value


def get(url: str, host: str, path: str = "/", client: Any = httpx) -> httpx.Response:
    """One GET to a sandbox's port by its public host name."""
    return client.get(f"{url}{path}", headers={"Host": host}, timeout=30)


def by_name(platform: Platform, host: str, path: str = "/", http2: bool = False) -> httpx.Response:
    """One GET as a browser makes it: over HTTPS to the name itself where the platform serves that."""
    secure = isinstance(platform, SecurePlatform)
    with httpx.Client(http1=not http2, http2=http2, timeout=30) as client:
        return client.get(f"https://{host}{path}") if secure else get(platform.url, host, path, client=client)


def wait_served(url: str, host: str, path: str = "/") -> httpx.Response:
    """The first answer of a server that is just starting."""
    answers: list[httpx.Response] = []

    def answered() -> bool:
        answers.append(get(url, host, path))
        return answers[-1].status_code != 502

    until(answered, f"{host} is served")
    return answers[-1]
