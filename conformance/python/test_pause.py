"""Pausing sandboxes: their processes stand still, nothing of them is lost, and everything goes on after a resume."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2b import CommandExitException, NotFoundException, PtySize, Sandbox, SandboxException, SandboxQuery, SandboxState

from harness.platform import Platform
from harness.traffic import get, until, wait_served

# Counts as fast as it can.
COUNT = "i=0; while :; do i=$((i+1)); echo $i > /tmp/n.new; mv /tmp/n.new /tmp/n; done"


def api(platform: Platform, method: str, path: str, **body: Any) -> httpx.Response:
    headers = {"X-API-Key": platform.credentials()["E2B_API_KEY"]}
    more = {"json": body} if body else {}
    return httpx.request(method, f"{platform.url}{path}", headers=headers, timeout=60, **more)


def count(box: Sandbox) -> int:
    return int(box.files.read("/tmp/n") or 0)


def counting(box: Sandbox) -> int:
    """Starts a busy program, and returns a number that it has reached."""
    box.commands.run(COUNT, background=True)
    until(lambda: box.files.exists("/tmp/n") and count(box) > 100, "the program counts")
    return count(box)


def processor_time(box: Sandbox) -> dict[str, int]:
    """How long each process of a sandbox has run, in nanoseconds, as the host counts it."""
    found = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if f"/{box.sandbox_id}." in (process / "cgroup").read_text():
                    found[process.name] = int((process / "schedstat").read_text().split()[0])
            except OSError:
                continue
    assert found
    return found


def stands_still(box: Sandbox) -> bool:
    """Whether no process of a sandbox runs while this program does. The last microseconds before a stop are counted late."""
    used = processor_time(box)
    begun = time.process_time()
    while time.process_time() < begun + 0.3:
        pass
    return processor_time(box) == used


def test_it_stands_still_and_goes_on(sandbox: Sandbox, platform: Platform) -> None:
    before = counting(sandbox)
    started = sandbox.get_info().started_at
    assert sandbox.pause() is True
    until(lambda: stands_still(sandbox), "nothing of it uses a processor")
    info = sandbox.get_info()
    assert (info.state, info.started_at) == (SandboxState.PAUSED, started)
    assert abs((info.end_at.timestamp()) - time.time()) < 30
    detail = api(platform, "GET", f"/sandboxes/{sandbox.sandbox_id}").json()
    assert (detail["pauseMode"], detail["pauseStorage"]) == ("full", "memory")
    # Clients are told as they are of one that has ended, and at once.
    assert sandbox.is_running() is False
    with pytest.raises(SandboxException):
        sandbox.commands.run("true")
    assert sandbox.pause() is False
    again = sandbox.connect(timeout=120)
    assert again.is_running() is True
    until(lambda: count(sandbox) > before, "the program counts on")
    assert sandbox.get_info().state == SandboxState.RUNNING


def test_every_way_to_pause_and_resume(platform: Platform) -> None:
    box = Sandbox.create(timeout=120, metadata={"for": "pause"})
    try:
        box.files.write("kept", "here")
        for pause in (box.pause, lambda: Sandbox.pause(box.sandbox_id), box.beta_pause):
            assert pause() is True
            listed = Sandbox.list(query=SandboxQuery(metadata={"for": "pause"}, state=[SandboxState.PAUSED])).next_items()
            assert [each.sandbox_id for each in listed] == [box.sandbox_id]
            listed = Sandbox.list(query=SandboxQuery(metadata={"for": "pause"}, state=[SandboxState.RUNNING])).next_items()
            assert listed == []
            other = Sandbox.connect(box.sandbox_id, timeout=120)
            assert other.files.read("kept") == "here"
            assert other.get_info().metadata == {"for": "pause"}
        # The call that no SDK makes any more.
        assert box.pause() is True
        answer = api(platform, "POST", f"/sandboxes/{box.sandbox_id}/resume", timeout=120)
        assert answer.status_code == 201 and answer.json()["envdAccessToken"]
        assert api(platform, "POST", f"/sandboxes/{box.sandbox_id}/resume").status_code == 409
        assert box.commands.run("cat kept").stdout == "here"
        # Only with its processes.
        answer = api(platform, "POST", f"/sandboxes/{box.sandbox_id}/pause", memory=False)
        assert answer.status_code == 501 and "memory: false" in answer.json()["message"]
    finally:
        assert box.kill() is True
    with pytest.raises(NotFoundException):
        Sandbox.pause(box.sandbox_id)


def test_a_paused_one_is_killed_at_once(platform: Platform) -> None:
    box = Sandbox.create(timeout=120)
    counting(box)
    assert box.pause() is True
    assert box.kill() is True
    assert box.kill() is False
    with pytest.raises(NotFoundException):
        Sandbox.connect(box.sandbox_id)


def test_commands_and_terminals_go_on(sandbox: Sandbox) -> None:
    lines = "i=0; while :; do i=$((i+1)); echo line $i; sleep 0.05; done"
    command = sandbox.commands.run(lines, background=True)
    pty = sandbox.pty.create(size=PtySize(rows=24, cols=80), timeout=0)
    sandbox.pty.send_stdin(pty.pid, b"NAME=kept\n")
    ended: list[BaseException | None] = []

    def follow() -> None:
        try:
            command.wait()
            ended.append(None)
        except Exception as error:  # noqa: BLE001
            ended.append(error)

    following = threading.Thread(target=follow)
    following.start()
    assert sandbox.pause() is True
    # The stream ends with an error, and does not hang.
    following.join(60)
    assert not following.is_alive()
    assert ended and ended[0] is not None and not isinstance(ended[0], CommandExitException), ended
    sandbox.connect(timeout=120)
    # What the command writes reaches a client that connects again.
    seen: list[str] = []
    again = sandbox.commands.connect(command.pid)
    for out, _, _ in again:
        seen.append(out or "")
        if "".join(seen).count("line") > 3:
            break
    again.disconnect()
    assert sandbox.commands.kill(command.pid) is True
    # So does the terminal, with its state.
    output: list[bytes] = []
    terminal = sandbox.pty.connect(pty.pid)
    sandbox.pty.send_stdin(pty.pid, b"echo [$NAME]; exit\n")
    for _, _, data in terminal:
        output.append(data or b"")
        if b"[kept]" in b"".join(output):
            break
    terminal.disconnect()


def test_a_server_answers_again(sandbox: Sandbox, platform: Platform) -> None:
    sandbox.commands.run("cd /tmp && echo hello > page && python3 -m http.server 3000", background=True)
    host = sandbox.get_host(3000)
    assert wait_served(platform.url, host, "/page").text == "hello\n"
    assert sandbox.pause() is True
    answer = get(platform.url, host, "/page")
    assert answer.status_code == 502
    assert answer.json()["message"] == "The sandbox was not found"
    assert answer.json()["sandboxId"] == sandbox.sandbox_id
    sandbox.connect(timeout=120)
    assert get(platform.url, host, "/page").text == "hello\n"


def test_the_deadline_pauses_and_traffic_resumes(platform: Platform) -> None:
    lifecycle = {"on_timeout": "pause", "auto_resume": True}
    box = Sandbox.create(timeout=2, lifecycle=lifecycle)
    try:
        shown = api(platform, "GET", f"/sandboxes/{box.sandbox_id}").json()
        assert shown["lifecycle"] == {"onTimeout": "pause", "autoResume": True}
        state = lambda: api(platform, "GET", f"/sandboxes/{box.sandbox_id}").json()["state"]  # noqa: E731
        until(lambda: state() == "paused", "its deadline pauses it")
        # A request of a client resumes it and is answered.
        assert box.commands.run("echo awake").stdout == "awake\n"
        assert state() == "running"
        # Without the token of the agent, no request does.
        assert box.pause() is True
        answer = get(platform.url, box.get_host(49983), "/metrics")
        assert answer.status_code == 403
        assert state() == "paused"
        assert box.is_running() is True
    finally:
        assert box.kill() is True
    plain = Sandbox.create(timeout=2, lifecycle={"on_timeout": "pause"})
    try:
        until(lambda: plain.get_info().state == SandboxState.PAUSED, "its deadline pauses it")
        assert plain.is_running() is False
        assert plain.get_info().state == SandboxState.PAUSED
    finally:
        assert plain.kill() is True


@pytest.mark.parametrize("how", ["terminate", "kill"])
def test_it_survives_the_platform(platform: Platform, how: str) -> None:
    box = Sandbox.create(timeout=120)
    try:
        before = counting(box)
        assert box.pause() is True
        until(lambda: stands_still(box), "nothing of it uses a processor")
        used = processor_time(box)
        if how == "terminate":
            assert platform.terminate() == 0
        else:
            platform.kill()
        platform.start()
        platform.use()
        assert box.get_info().state == SandboxState.PAUSED
        assert box.is_running() is False
        assert processor_time(box) == used
        shown = platform.run("sandbox", "show", box.sandbox_id)
        assert shown.returncode == 0 and "paused" in shown.stdout
        box = Sandbox.connect(box.sandbox_id, timeout=120)
        until(lambda: count(box) > before, "the program counts on")
    finally:
        assert box.kill() is True
