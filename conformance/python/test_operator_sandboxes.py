"""What an operator sees and does across teams: `ringfence sandbox list|show|kill|logs`."""

from __future__ import annotations

import json
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2b import Sandbox

from harness.platform import Platform
from harness.traffic import until


def listed(platform: Platform, *options: str) -> list[dict[str, Any]]:
    """The sandboxes in the order of the list."""
    done = platform.run("sandbox", "list", "--format", "json", *options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def entry_of(platform: Platform, sandbox_id: str) -> dict[str, Any]:
    return next(item for item in listed(platform) if item["id"] == sandbox_id)


@pytest.fixture
def foreign(platform: Platform) -> Iterator[Sandbox]:
    """A sandbox of a team other than the one whose key the suite uses."""
    name = "operators-other-team"
    if name not in platform.run("team", "list").stdout:
        assert platform.run("team", "create", name).returncode == 0
    made = platform.run("key", "create", "--team", name)
    assert made.returncode == 0, made.stderr
    box = Sandbox.create(timeout=120, api_key=made.stdout.strip())
    yield box
    box.kill()


def test_sandboxes_of_all_teams_are_listed_with_their_team(
    platform: Platform, sandbox: Sandbox, foreign: Sandbox
) -> None:
    assert entry_of(platform, sandbox.sandbox_id)["team"] == "default"
    assert entry_of(platform, foreign.sandbox_id)["team"] == "operators-other-team"
    theirs = listed(platform, "--team", "operators-other-team")
    assert [item["id"] for item in theirs] == [foreign.sandbox_id]
    text = platform.run("sandbox", "list").stdout
    assert foreign.sandbox_id in text and "operators-other-team" in text


def test_the_list_shows_which_sandbox_uses_the_host(
    platform: Platform, sandbox: Sandbox, neighbour: Sandbox
) -> None:
    hog = "x = bytearray(200 << 20)\nwhile True: pass"
    neighbour.commands.run(f"exec python3 -c '{hog}'", background=True, timeout=0)

    def is_seen() -> bool:
        usage = entry_of(platform, neighbour.sandbox_id)["usage"]
        return usage is not None and usage["cpu_percent"] > 10 and usage["memory_bytes"] > 200 << 20

    until(is_seen, "the hog's use is told", within_s=30)

    # The first sample of any other sandbox covers its own start, which is all processor.
    def is_first(order: str) -> bool:
        return listed(platform, "--sort", order)[0]["id"] == neighbour.sandbox_id

    for order in ("cpu", "memory"):
        until(lambda order=order: is_first(order), f"the hog is first by {order}", within_s=30)
    shown = platform.run("sandbox", "show", neighbour.sandbox_id)
    assert shown.returncode == 0 and neighbour.sandbox_id in shown.stdout and "cpu used" in shown.stdout
    # What it used when it ran is not what it uses while it is paused.
    assert neighbour.pause() is True
    entry = entry_of(platform, neighbour.sandbox_id)
    assert (entry["state"], entry["usage"]) == ("paused", None)
    (row,) = [line for line in platform.run("sandbox", "list").stdout.splitlines() if neighbour.sandbox_id in line]
    assert row.split()[3:7] == ["paused", "-", "-", "-"], row


def test_a_sandbox_of_any_team_is_killed_and_its_log_says_by_whom(platform: Platform, foreign: Sandbox) -> None:
    foreign.commands.run("true")
    # Its log is written a moment later.
    until(lambda: "process_start" in platform.run("sandbox", "logs", foreign.sandbox_id).stdout, "the command is in the log")
    killed = platform.run("sandbox", "kill", foreign.sandbox_id)
    assert (killed.returncode, killed.stdout) == (0, f"killed {foreign.sandbox_id}\n"), killed.stderr
    assert not foreign.is_running()
    assert foreign.sandbox_id not in {item["id"] for item in listed(platform)}
    logs = platform.run("sandbox", "logs", foreign.sandbox_id)
    assert logs.returncode == 0, logs.stderr
    assert "operator" in logs.stdout and "process_start" in logs.stdout
    warned = json.loads(
        platform.run("sandbox", "logs", foreign.sandbox_id, "--level", "warn", "--format", "json").stdout
    )
    assert [entry["fields"]["reason"] for entry in warned] == ["operator"]


def test_a_step_of_a_build_is_listed_and_killed(platform: Platform) -> None:
    headers = {"X-API-Key": platform.credentials()["E2B_API_KEY"]}
    with httpx.Client(base_url=platform.url, headers=headers, timeout=30) as api:
        made = api.post("/v3/templates", json={"name": "operator-kills"}).json()
        path = f"/templates/{made['templateID']}/builds/{made['buildID']}"
        step = {"type": "RUN", "args": ["echo begun; exec sleep 300"]}
        assert api.post(f"/v2{path}", json={"fromTemplate": "base", "steps": [step]}).status_code == 202
        try:
            until(lambda: "begun" in api.get(f"{path}/logs").text, "the step runs")
            step_box = next(item for item in listed(platform) if item["template"] == made["templateID"])
            assert (step_box["state"], step_box["team"]) == ("building", "default")
            shown = platform.run("sandbox", "show", step_box["id"])
            assert shown.returncode == 0 and "building" in shown.stdout, shown.stderr
            # It is not one that clients know.
            assert api.get(f"/sandboxes/{step_box['id']}").status_code == 404
            assert platform.run("sandbox", "kill", step_box["id"]).returncode == 0
            until(lambda: api.get(f"{path}/status").json()["status"] == "error", "the build failed")
            assert step_box["id"] not in {item["id"] for item in listed(platform)}
        finally:
            assert api.delete(f"/templates/{made['templateID']}").status_code == 204


def test_what_is_not_there_is_said_and_the_others_are_killed(platform: Platform, sandbox: Sandbox) -> None:
    done = platform.run("sandbox", "kill", "inotthere", sandbox.sandbox_id, "../etc")
    assert done.returncode == 1
    assert done.stdout == f"killed {sandbox.sandbox_id}\n"
    assert "no sandbox inotthere" in done.stderr and "../etc" in done.stderr
    for command in (["show", "inotthere"], ["logs", "inotthere"]):
        missing = platform.run("sandbox", *command)
        assert missing.returncode == 1 and "no sandbox inotthere" in missing.stderr


def test_a_process_inside_does_not_steer_the_operators_terminal(platform: Platform, sandbox: Sandbox) -> None:
    sandbox.commands.run("printf '#!/bin/sh\n' > /tmp/$'\\e[2Jevil\\n'; chmod +x /tmp/*evil*; /tmp/*evil*")
    logs = platform.run("sandbox", "logs", sandbox.sandbox_id)
    assert logs.returncode == 0
    assert not [c for c in logs.stdout if ord(c) < 32 and c != "\n"]


def test_the_socket_is_for_the_platforms_user_alone(platform: Platform, sandbox: Sandbox) -> None:
    socket = platform.data_dir / "operator.sock"
    assert stat.S_ISSOCK(socket.stat().st_mode) and stat.S_IMODE(socket.stat().st_mode) == 0o600
    # Even where the directory were open, another user is refused by the socket itself.
    tried = subprocess.run(
        ["curl", "-sS", "--max-time", "5", "--unix-socket", socket, "http://operator/sandboxes"],
        user=65534,
        group=65534,
        extra_groups=[],
        capture_output=True,
        text=True,
    )
    assert tried.returncode != 0 and sandbox.sandbox_id not in tried.stdout


def test_without_a_platform_the_command_says_so(platform: Platform) -> None:
    with tempfile.TemporaryDirectory(prefix="rf-") as directory:
        # Longer than a socket's path may be.
        deep = Path(directory) / ("d" * 120)
        deep.mkdir()
        other = Platform(deep / "data")
        try:
            other.start()
            assert listed(other) == []
            assert other.terminate() == 0
            assert not (other.data_dir / "operator.sock").exists()
            refused = other.run("sandbox", "list")
            assert refused.returncode == 1 and "ringfence up" in refused.stderr
        finally:
            other.close()
            platform.use()
