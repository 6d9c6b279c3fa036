"""Keys: an invalid one is refused, one of another team gives no access, a revoked one stops working."""

from __future__ import annotations

import json
import uuid

import httpx
import pytest
from e2b import AuthenticationException, NotFoundException, Sandbox

from harness.patience import within
from harness.platform import Platform


def new_key(platform: Platform, team: str) -> str:
    """Makes a team and a key of it on the command line."""
    made = platform.run("team", "create", team)
    assert made.returncode == 0, made.stderr
    key = platform.run("key", "create", "--team", team)
    assert key.returncode == 0, key.stderr
    value = key.stdout.strip()
    assert value.startswith("e2b_") and len(value) == 44
    return value


@pytest.mark.parametrize("key", ["e2b_" + "0" * 40, "e2b_" + "ab" * 20])
def test_a_wrong_key_is_refused(platform: Platform, key: str) -> None:
    for call in (lambda: Sandbox.create(api_key=key), lambda: Sandbox.list(api_key=key).next_items()):
        with pytest.raises(AuthenticationException):
            call()


def test_no_key_is_refused_in_the_error_envelope(platform: Platform) -> None:
    for path in ("/sandboxes", "/v2/sandboxes", f"/sandboxes/i{'0' * 20}"):
        answer = httpx.get(f"{platform.url}{path}", timeout=within(30))
        assert answer.status_code == 401
        assert answer.json()["code"] == 401 and answer.json()["message"]


def test_another_team_sees_nothing(sandbox: Sandbox, platform: Platform) -> None:
    key = new_key(platform, f"other-{uuid.uuid4().hex[:8]}")
    assert Sandbox.list(api_key=key).next_items() == []
    for call in (Sandbox.get_info, Sandbox.connect):
        with pytest.raises(NotFoundException):
            call(sandbox.sandbox_id, api_key=key)
    with pytest.raises(NotFoundException):
        Sandbox.set_timeout(sandbox.sandbox_id, 1, api_key=key)
    assert Sandbox.kill(sandbox.sandbox_id, api_key=key) is False
    assert sandbox.is_running()
    with Sandbox.create(api_key=key) as theirs:
        assert [item.sandbox_id for item in Sandbox.list(api_key=key).next_items()] == [theirs.sandbox_id]
        assert theirs.sandbox_id not in {item.sandbox_id for item in Sandbox.list().next_items()}
        with pytest.raises(NotFoundException):
            Sandbox.get_info(theirs.sandbox_id)


def test_a_revoked_key_stops_working(platform: Platform) -> None:
    team = f"gone-{uuid.uuid4().hex[:8]}"
    key = new_key(platform, team)
    assert Sandbox.list(api_key=key).next_items() == []
    listed = platform.run("key", "list", "--team", team, "--format", "json")
    assert listed.returncode == 0, listed.stderr
    assert key not in listed.stdout
    (entry,) = [entry for entry in json.loads(listed.stdout) if entry["kind"] == "api"]
    assert platform.run("key", "revoke", entry["id"]).returncode == 0
    with pytest.raises(AuthenticationException):
        Sandbox.list(api_key=key).next_items()


def test_secrets_are_not_in_the_log(platform: Platform, sandbox: Sandbox, secrets: list[str]) -> None:
    log = platform.log()
    token = sandbox._envd_access_token
    assert secrets and token
    for secret in [*secrets, token]:
        assert secret not in log
