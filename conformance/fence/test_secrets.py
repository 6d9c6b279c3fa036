"""Secrets, and headers that refer to them, through the SDKs: the class `Secret` and `network.rules`."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Callable, Iterator

import httpx
import pytest
from e2b import AsyncSecret, Sandbox, Secret
from e2b.exceptions import InvalidArgumentException, SandboxException
from e2b.secret import SecretInfo

from harness.platform import Platform

SITE, OTHER = "www.example.com", "api.example.net"
VALUE = "sk-canary-0123456789-abcdef"


@pytest.fixture
def secret(platform: Platform) -> Iterator[SecretInfo]:
    info = Secret.create("API-Key", VALUE, metadata={"env": "test"})
    yield info
    Secret.destroy(info.name)


def seen(box: Sandbox, more: str = "", site: str = SITE) -> dict[str, str]:
    """The headers with which a request of the sandbox arrives, of each value the digest."""
    return json.loads(box.commands.run(f"curl -sS --http1.1 {more} https://{site}/headers/", timeout=30).stdout)


def digest(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()


def test_secrets(secret: SecretInfo) -> None:
    assert (secret.name, secret.version, secret.metadata) == ("api-key", 1, {"env": "test"})
    assert Secret.get_info("API-KEY") == Secret.get_info(secret.secret_id) == secret
    assert Secret.exists("api-key") and not Secret.exists("none")
    changed = Secret.update("api-key", "other")
    assert (changed.version, changed.metadata) == (2, {"env": "test"})
    assert Secret.update(secret.secret_id, VALUE, metadata={}).metadata == {}
    others = [Secret.create(f"other-{number}", "x") for number in range(5)]
    pages = Secret.list(limit=2)
    names = []
    while pages.has_next:
        names += [info.name for info in pages.next_items()]
    assert names[:5] == [f"other-{number}" for number in reversed(range(5))] and "api-key" in names
    for info in others:
        assert Secret.destroy(info.name) and not Secret.destroy(info.name)
    with pytest.raises(Exception, match="already exists"):
        Secret.create("api-KEY", "x")


def test_async_secrets(platform: Platform) -> None:
    async def all_of_it() -> None:
        made = await AsyncSecret.create("async", "x")
        assert (await AsyncSecret.update("async", "y")).version == 2
        assert (await AsyncSecret.get_info("async")).secret_id == made.secret_id
        assert "async" in [info.name for info in await AsyncSecret.list().next_items()]
        assert await AsyncSecret.destroy("async")

    asyncio.run(all_of_it())


def test_no_response_has_the_value(secret: SecretInfo) -> None:
    url, key = os.environ["E2B_API_URL"], os.environ["E2B_API_KEY"]
    with httpx.Client(base_url=url, headers={"X-API-Key": key}, timeout=60) as client:
        for path in ("/secrets", f"/secrets/{secret.secret_id}", "/secrets/api-key"):
            answer = client.get(path)
            assert answer.status_code == 200 and VALUE not in answer.text
            assert answer.headers["cache-control"] == "no-store"


def test_headers_are_set(create: Callable[..., Sandbox], secret: SecretInfo) -> None:
    box = create(
        network={
            "rules": {
                SITE: [{"transform": {"headers": {"Authorization": f"Bearer {Secret.fill('api-key')}"}}}],
                "*.example.net": [{"transform": {"headers": {"X-Key": Secret.fill("API-Key"), "X-Inline": "inline-value"}}}],
            }
        }
    )
    assert seen(box)["authorization"] == digest(f"Bearer {VALUE}")
    # That of the program is replaced.
    assert seen(box, more="-H 'authorization: mine'")["authorization"] == digest(f"Bearer {VALUE}")
    other = seen(box, site=OTHER)
    assert (other["x-key"], other["x-inline"]) == (digest(VALUE), digest("inline-value")) and "authorization" not in other
    assert "authorization" not in seen(box, site="www.example.org", more="-k")
    shown = box.get_info().network["rules"]
    assert shown[SITE][0]["transform"]["headers"] == {"Authorization": "Bearer ${e2b.secrets.api-key}"}
    assert shown["*.example.net"][0]["transform"]["headers"] == {"X-Key": "${e2b.secrets.API-Key}", "X-Inline": "inli****"}


def test_a_rule_opens_no_host(create: Callable[..., Sandbox], secret: SecretInfo) -> None:
    rules = {SITE: [{"transform": {"headers": {"x-key": Secret.fill("api-key")}}}]}
    box = create(allow_internet_access=False, network={"rules": rules})
    assert box.commands.run(f"curl -sS -m 10 https://{SITE}/ || echo closed").stdout.endswith("closed\n")
    # The SDK passes the hosts of the rules to the function.
    box.update_network({"rules": rules, "deny_out": ["0.0.0.0/0"], "allow_out": lambda ctx: list(ctx.rules)})
    assert seen(box)["x-key"] == digest(VALUE)


def test_changes_reach_a_running_sandbox(create: Callable[..., Sandbox], secret: SecretInfo, platform: Platform) -> None:
    rules = {SITE: [{"transform": {"headers": {"x-key": Secret.fill("api-key")}}}]}
    box = create(network={"rules": rules})
    assert seen(box)["x-key"] == digest(VALUE)
    Secret.update("api-key", "second")
    assert seen(box)["x-key"] == digest("second")
    platform.terminate()
    platform.start()
    assert seen(box)["x-key"] == digest("second")
    Secret.destroy("api-key")
    # Nothing is intercepted any more, and programs do not trust the authority of the site.
    assert "x-key" not in seen(box, more="-k")
    Secret.create("api-key", "third")
    assert seen(box)["x-key"] == digest("third")
    box.update_network({})
    assert "x-key" not in seen(box, more="-k")


def test_refusals(create: Callable[..., Sandbox], secret: SecretInfo) -> None:
    def rules(value: str) -> dict[str, object]:
        return {"rules": {SITE: [{"transform": {"headers": {"x-key": value}}}]}}

    box = create()
    for value, why in (
        (Secret.fill("none"), 'secret "none" does not exist'),
        ("${e2b.identity.tokens.aws}", "workload identity is not available"),
        ("${e2b.x}", "is not a placeholder"),
    ):
        with pytest.raises((SandboxException, InvalidArgumentException), match=why):
            create(network=rules(value))
        with pytest.raises((SandboxException, InvalidArgumentException), match=why):
            box.update_network(rules(value))
