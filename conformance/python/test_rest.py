"""The REST surface beside the life of a sandbox: repeated creates, keys and tokens, closed traffic, order of the list."""

from __future__ import annotations

import asyncio
import inspect
import time
import uuid
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import httpx
import pytest
from e2b import AsyncSandbox, AuthenticationException, Sandbox, SandboxException, SandboxQuery

from harness.patience import within
from harness.platform import Platform
from harness.traffic import by_name, program, until, until_async, wait_served

NOWHERE = "i" + "0" * 20


@pytest.fixture
def api(platform: Platform) -> Iterator[httpx.Client]:
    """Requests with the key of the platform, as any HTTP client makes them."""
    headers = {"X-API-Key": platform.credentials()["E2B_API_KEY"]}
    with httpx.Client(base_url=platform.url, headers=headers, timeout=30) as client:
        yield client


def repeated(key: str) -> dict[str, Any]:
    """The options of a create with a key: current versions of the SDK have one, older ones pass headers on."""
    if "idempotency_key" in inspect.signature(Sandbox.create).parameters:
        return {"idempotency_key": key}
    return {"headers": {"Idempotency-Key": key}}


def test_a_repeated_create_finds_the_sandbox_of_the_first(platform: Platform) -> None:
    key = uuid.uuid4().hex
    with Sandbox.create(metadata={"n": "1"}, **repeated(key)) as first:
        again = Sandbox.create(metadata={"n": "1"}, **repeated(key))
        assert again.sandbox_id == first.sandbox_id
        assert again.commands.run("echo same").stdout == "same\n"
        # 422 on the current path, 409 on the older one, which is the one of older SDKs.
        status = 422 if "idempotency_key" in repeated(key) else 409
        with pytest.raises(SandboxException, match=f"{status}.*another request"):
            Sandbox.create(metadata={"n": "2"}, **repeated(key))
        with Sandbox.create(metadata={"n": "1"}, **repeated(uuid.uuid4().hex)) as other:
            assert other.sandbox_id != first.sandbox_id


def test_both_create_paths_and_their_defaults(api: httpx.Client) -> None:
    for path, seconds in (("/sandboxes", 15), ("/v2/sandboxes", 300)):
        made = api.post(path, json={"templateID": "base"})
        assert made.status_code == 201, made.text
        sandbox = made.json()["sandboxID"]
        info = api.get(f"/sandboxes/{sandbox}").json()
        left = datetime.fromisoformat(info["endAt"]) - datetime.fromisoformat(info["startedAt"])
        assert abs(left.total_seconds() - seconds) < 2, path
        assert api.delete(f"/sandboxes/{sandbox}").status_code == 204
        assert api.delete(f"/sandboxes/{sandbox}").status_code == 404


def test_refreshes_prolong_up_to_an_hour(api: httpx.Client, sandbox: Sandbox) -> None:
    path = f"/sandboxes/{sandbox.sandbox_id}/refreshes"
    before = datetime.now(timezone.utc)
    assert api.post(path, json={"duration": 3600}).status_code == 204
    after = datetime.now(timezone.utc)
    # A second for rounding.
    assert before + timedelta(seconds=3599) <= sandbox.get_info().end_at <= after + timedelta(seconds=3601)
    assert api.post(path, json={"duration": 3601}).status_code == 400
    assert api.post(f"/sandboxes/{NOWHERE}/refreshes", json={"duration": 1}).status_code == 404


def test_the_list_in_both_orders(platform: Platform) -> None:
    mark = uuid.uuid4().hex
    boxes = [Sandbox.create(metadata={"mark": mark}) for _ in range(3)]
    try:
        made = [box.sandbox_id for box in boxes]
        for order, expected in (("asc", made), ("desc", made[::-1])):
            pages, found = Sandbox.list(SandboxQuery(metadata={"mark": mark}), limit=2, order=order), []
            while pages.has_next:
                found += [item.sandbox_id for item in pages.next_items()]
            assert found == expected
    finally:
        for box in boxes:
            box.kill()


@pytest.mark.parametrize("state", ["state=running,paused", "state=running&state=paused", "state=running%2Cpaused"])
def test_the_list_reads_states_in_every_encoding(api: httpx.Client, sandbox: Sandbox, state: str) -> None:
    for path in ("/sandboxes", "/v2/sandboxes"):
        listed = api.get(f"{path}?{state}")
        assert sandbox.sandbox_id in {item["sandboxID"] for item in listed.json()}
    assert api.get("/v2/sandboxes?state=gone").status_code == 400
    assert api.get("/v2/sandboxes?limit=101").status_code == 400


def test_keys_are_made_and_ended_by_rest(api: httpx.Client) -> None:
    made = api.post("/api-keys", json={"name": "made by rest"})
    assert made.status_code == 201
    key, identity = made.json()["key"], made.json()["id"]
    assert identity in {item["id"] for item in api.get("/api-keys").json()}
    assert key not in api.get("/api-keys").text
    assert isinstance(Sandbox.list(api_key=key).next_items(), list)
    assert api.patch(f"/api-keys/{identity}", json={"name": "renamed"}).status_code == 200
    assert api.delete(f"/api-keys/{identity}").status_code == 204
    with pytest.raises(AuthenticationException):
        Sandbox.list(api_key=key).next_items()


def test_an_access_token_works_as_bearer(api: httpx.Client, platform: Platform, sandbox: Sandbox) -> None:
    made = api.post("/access-tokens", json={"name": "laptop"})
    assert made.status_code == 201
    token, identity = made.json()["token"], made.json()["id"]
    assert token.startswith("sk_e2b_")
    with httpx.Client(base_url=platform.url, headers={"Authorization": f"Bearer {token}"}, timeout=within(30)) as bearer:
        assert sandbox.sandbox_id in {item["sandboxID"] for item in bearer.get("/v2/sandboxes").json()}
        assert bearer.get("/teams").json()[0]["name"] == "default"
        # Of two credentials the key decides, right or wrong.
        assert bearer.get("/v2/sandboxes", headers={"X-API-Key": "e2b_" + "0" * 40}).status_code == 401
        assert api.delete(f"/access-tokens/{identity}").status_code == 204
        assert bearer.get("/v2/sandboxes").status_code == 401
    key = platform.credentials()["E2B_API_KEY"]
    assert httpx.get(f"{platform.url}/teams", headers={"Authorization": f"Bearer {key}"}, timeout=within(30)).status_code == 200
    assert token not in platform.log()


def test_traffic_may_be_closed_to_the_public(platform: Platform) -> None:
    with Sandbox.create(network={"allow_public_traffic": False}) as box:
        # The agent's port has a token of its own.
        box.files.write("/tmp/http_server.py", program("http_server.py"))
        box.commands.run("python3 /tmp/http_server.py 0.0.0.0 8000", background=True, timeout=0)
        host, token = box.get_host(8000), box.traffic_access_token
        assert token
        assert by_name(platform, host).status_code == 403

        def answered(sent: str) -> int:
            headers = {"Host": host, "e2b-traffic-access-token": sent}
            return httpx.get(platform.url, headers=headers, timeout=30).status_code

        until(lambda: answered(token) != 502, "the server listens")
        assert [answered(sent) for sent in (token, token[:-1], "")] == [200, 403, 403]
        # A later connect returns the same token.
        assert Sandbox.connect(box.sandbox_id).traffic_access_token == token
    with Sandbox.create() as box:
        # There is a token because clients expect one, but it is not required.
        assert box.traffic_access_token
        box.files.write("/tmp/http_server.py", program("http_server.py"))
        box.commands.run("python3 /tmp/http_server.py 0.0.0.0 8000", background=True, timeout=0)
        assert wait_served(platform.url, box.get_host(8000)).status_code == 200


def test_metrics_of_a_sandbox(api: httpx.Client, request: pytest.FixtureRequest) -> None:
    # The sandbox is made after that, so that nothing of it was measured before.
    begun = datetime.now(timezone.utc) - timedelta(seconds=1)
    sandbox: Sandbox = request.getfixturevalue("sandbox")
    sandbox.commands.run("timeout 1.5 sh -c 'while :; do :; done' || true")
    until(lambda: len(sandbox.get_metrics()) > 0, "it was measured")
    first = sandbox.get_metrics()[0]
    info = sandbox.get_info()
    assert (first.cpu_count, first.mem_total) == (info.cpu_count, info.memory_mb << 20)
    assert 0 < first.mem_used < first.mem_total and 0 < first.disk_used < first.disk_total
    assert 0 <= first.cpu_used_pct <= 100 * first.cpu_count
    assert begun <= first.timestamp <= datetime.now(timezone.utc) + timedelta(seconds=1)
    later = datetime.now(timezone.utc) + timedelta(seconds=60)
    assert sandbox.get_metrics(start=later) == []
    assert Sandbox.get_metrics(sandbox.sandbox_id, start=begun, end=later)[0] == first
    several = api.get(f"/sandboxes/metrics?sandbox_ids={sandbox.sandbox_id},{NOWHERE}").json()["sandboxes"]
    assert set(several) == {sandbox.sandbox_id}
    many = ",".join(f"i{n:020}" for n in range(101))
    assert api.get(f"/sandboxes/metrics?sandbox_ids={many}").status_code == 400


def test_metrics_by_the_asynchronous_api(platform: Platform) -> None:
    async def main() -> None:
        async with await AsyncSandbox.create() as box:
            found = await until_async(box.get_metrics, "there are metrics")
            assert found[0] == (await AsyncSandbox.get_metrics(box.sandbox_id))[0]

    asyncio.run(asyncio.wait_for(main(), within(60)))


def test_logs_of_a_sandbox(api: httpx.Client, sandbox: Sandbox) -> None:
    path = f"/sandboxes/{sandbox.sandbox_id}/logs"
    sandbox.commands.run("cat", envs={"SECRET": "not-for-the-log"})

    def entries(**query: Any) -> list[dict[str, Any]]:
        answer = api.get(path, params=query)
        assert answer.status_code == 200, answer.text
        # Both forms hold the same.
        assert len(answer.json()["logs"]) == len(answer.json()["logEntries"])
        return answer.json()["logEntries"]

    until(lambda: "process" in {entry["fields"].get("logger") for entry in entries()}, "the process is in the log")
    first = entries(limit=1)
    assert len(first) == 1 and "started" in first[0]["message"] and first[0]["level"] == "info"
    assert len(entries()) > 1
    assert entries(start=int((time.time() + 60) * 1000)) == []
    assert "not-for-the-log" not in api.get(path).text
    # The response does not reveal what exists.
    assert api.get(f"/sandboxes/{NOWHERE}/logs").json() == {"logs": [], "logEntries": []}
    sandbox.kill()
    # A log outlives its sandbox.
    until(lambda: any("kill" in entry["message"] for entry in entries()), "the end is in the log")


def test_the_description_of_the_api(api: httpx.Client) -> None:
    described = httpx.get(f"{api.base_url}/openapi.json", timeout=within(30)).json()
    assert described["openapi"].startswith("3.")
    assert {"/sandboxes", "/v2/sandboxes", "/sandboxes/{sandboxID}/timeout"} <= set(described["paths"])
