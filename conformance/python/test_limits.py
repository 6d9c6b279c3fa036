"""Limits of teams and of the host, as reported by the SDK."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import e2b
import httpx
import pytest
from e2b import RateLimitException, Sandbox, SandboxException

from harness.beside import beside
from harness.patience import within
from harness.platform import Platform

CONFIG = """
[capacity]
max_sandboxes = 4

[team.few.limits]
sandboxes = 2

[team.slow.limits]
requests_per_second = 2

[team.rare.limits]
creates_per_minute = 1
"""
# Current versions try again by themselves and have a word for a host without room.
RETRIES = hasattr(e2b, "ServiceBusyException")


@pytest.fixture(scope="module")
def limited(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """A platform of its own beside the session's, whose credentials return afterwards."""
    with beside(platform, tmp_path_factory.mktemp("limited"), CONFIG) as server:
        yield server


def team(server: Platform, name: str) -> str:
    """Makes a team and returns a key of it."""
    assert server.run("team", "create", name).returncode == 0
    made = server.run("key", "create", "--team", name)
    assert made.returncode == 0, made.stderr
    return made.stdout.strip()


def test_a_team_with_its_share_is_refused_at_once(limited: Platform) -> None:
    key = team(limited, "few")
    first, second = (Sandbox.create(api_key=key) for _ in range(2))
    try:
        begun = time.monotonic()
        with pytest.raises(RateLimitException, match="(?i)sandboxes"):
            Sandbox.create(api_key=key)
        # A retry cannot succeed before a sandbox ends, and the response says so.
        assert time.monotonic() - begun < within(5)
        assert second.kill()
        with Sandbox.create(api_key=key) as third:
            assert third.is_running()
    finally:
        for box in (first, second):
            box.kill()


def test_a_team_that_asks_too_often(limited: Platform) -> None:
    key = team(limited, "slow")

    def ask(_: int) -> httpx.Response:
        return httpx.get(f"{limited.url}/v2/sandboxes", headers={"X-API-Key": key}, timeout=60)

    # At once: on a busy machine they would be within the limit one after another.
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(ask, range(20)))
    (refused, *_) = [answer for answer in answers if answer.status_code == 429]
    assert int(refused.headers["retry-after"]) >= 1 and refused.json()["code"] == 429
    assert {"ratelimit-limit", "ratelimit-remaining", "ratelimit-reset"} <= set(refused.headers)
    if RETRIES:
        # The SDK waits for the time in `Retry-After`, and every call succeeds in the end.
        for _ in range(6):
            assert Sandbox.list(api_key=key).next_items() == []
    else:
        with pytest.raises(RateLimitException):
            with ThreadPoolExecutor(20) as pool:
                list(pool.map(lambda _: Sandbox.list(api_key=key).next_items(), range(20)))
    # Others are not slowed down.
    for _ in range(20):
        assert isinstance(Sandbox.list().next_items(), list)


def test_a_team_that_creates_too_often(limited: Platform) -> None:
    key = team(limited, "rare")
    with Sandbox.create(api_key=key):
        # A minute is longer than the request may take, so the SDK gives up at once.
        with pytest.raises(RateLimitException):
            Sandbox.create(api_key=key, request_timeout=10)


def test_a_host_that_is_full(limited: Platform) -> None:
    boxes = [Sandbox.create(timeout=300) for _ in range(4)]
    try:
        with pytest.raises(Exception, match="503") as refused:
            Sandbox.create(request_timeout=10)
        assert type(refused.value) is (e2b.ServiceBusyException if RETRIES else SandboxException)
        boxes.pop().kill()
        boxes.append(Sandbox.create(timeout=300))
    finally:
        for box in boxes:
            box.kill()
