"""Pausing sandboxes: their processes stand still, nothing of them is lost, and everything goes on after a resume."""

from __future__ import annotations

import inspect
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2b import CommandExitException, NotFoundException, PtySize, Sandbox, SandboxException, SandboxQuery, SandboxState

from harness.criu import groups
from harness.elapse import nothing_for
from harness.inside import Timers
from harness.patience import within
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
    assert abs((info.end_at.timestamp()) - time.time()) < within(30)
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
    command = sandbox.commands.run(lines, background=True, timeout=0)
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


def test_in_memory_time_passes(sandbox: Sandbox) -> None:
    """For all clocks and timers. On disk it does not, see `test_pause_on_disk.py`."""
    timers = Timers(sandbox)
    assert sandbox.pause() is True
    paused = time.monotonic()
    until(lambda: time.monotonic() > paused + 1.5, "the short timer would have expired")
    stood_s = time.monotonic() - paused
    Sandbox.connect(sandbox.sandbox_id, timeout=120)
    wall_s, clocks, left, told = timers.passed(sandbox)
    for passed in (*clocks.values(), *left.values()):
        assert stood_s - 0.1 < passed < wall_s + 0.1, (stood_s, wall_s, clocks, left)
    assert told["expired"] is True


def test_a_server_answers_again(sandbox: Sandbox, platform: Platform) -> None:
    sandbox.commands.run("cd /tmp && echo hello > page && python3 -m http.server 3000", background=True, timeout=0)
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


def gone_from_the_host(box: Sandbox) -> bool:
    """Whether nothing of a sandbox is on the host but its disk: no process, no control group, no mount."""
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if f"/{box.sandbox_id}." in (process / "cgroup").read_text():
                    return False
            except OSError:
                continue
    return groups(box) == [] and box.sandbox_id not in Path("/proc/mounts").read_text()


def pause_to_disk(box: Sandbox) -> bool:
    """Pauses a sandbox with its files alone, as this version of the SDK does that."""
    if "mode" in inspect.signature(Sandbox.beta_pause).parameters:
        return box.pause(mode="filesystem")
    if "keep_memory" in inspect.signature(Sandbox.beta_pause).parameters:
        return box.pause(keep_memory=False)
    return api_of(box, "pause", memory=False) == 204


def api_of(box: Sandbox, what: str, **body: Any) -> int:
    headers = {"X-API-Key": os.environ["E2B_API_KEY"]}
    url = f"{os.environ['E2B_API_URL']}/sandboxes/{box.sandbox_id}/{what}"
    return httpx.post(url, headers=headers, timeout=60, json=body).status_code


def test_files_alone_are_kept(platform: Platform) -> None:
    box = Sandbox.create(timeout=120, envs={"STAGE": "test", "EMPTY": ""}, metadata={"for": "disk"})
    try:
        counting(box)
        box.files.write("notes", "kept")
        # In directories of the template, which it shares with others until it writes there.
        box.commands.run("echo own >/etc/own; rm /etc/shells; mkdir /usr/local/own; echo more >>/etc/profile", user="root")
        box.commands.run("dd if=/dev/urandom of=/var/tmp/big bs=1M count=64 && sha256sum /var/tmp/big >/var/tmp/sum", user="root")
        agent, name = box.commands.run("hostname").stdout, box.get_info().name
        for cycle in range(3):
            assert pause_to_disk(box) is True
            until(lambda: gone_from_the_host(box), "nothing of it is on the host")
            detail = api(platform, "GET", f"/sandboxes/{box.sandbox_id}").json()
            assert (detail["state"], detail["pauseMode"], detail["pauseStorage"]) == ("paused", "filesystem", "disk")
            assert detail["pauseDiskBytes"] >= 64 << 20
            assert box.is_running() is False
            assert pause_to_disk(box) is False or api_of(box, "pause", memory=False) == 409
            if cycle == 1:
                platform.kill()
                platform.start()
                platform.use()
                shown = platform.run("sandbox", "show", box.sandbox_id)
                assert shown.returncode == 0 and "filesystem" in shown.stdout
            box = Sandbox.connect(box.sandbox_id, timeout=120)
            assert box.files.read("notes") == "kept"
            run = lambda command: box.commands.run(command, user="root").stdout  # noqa: E731
            assert run("cat /etc/own; tail -n 1 /etc/profile; ls /usr/local | grep own; ls /etc/shells 2>&1 | grep -c No") == (
                "own\nmore\nown\n1\n"
            )
            run("sha256sum -c /var/tmp/sum")
            assert box.commands.run("echo $STAGE[$EMPTY]; pgrep -c sh || true").stdout.startswith("test[]\n")
            given = json.loads(box.files.read("/run/ringfence/sandbox.json"))
            assert (given["envVars"], given["metadata"]) == ({"STAGE": "test", "EMPTY": ""}, {"for": "disk"})
            assert (box.commands.run("hostname").stdout, box.get_info().name) == (agent, name)
            assert box.get_info().metadata == {"for": "disk"}
            # None of its processes is left, and new ones start as in any other.
            assert "mv /tmp/n.new" not in run("cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '")
            before = count(box)
            nothing_for(0.2)
            assert count(box) == before
    finally:
        assert box.kill() is True
    assert api(platform, "POST", f"/sandboxes/{box.sandbox_id}/connect", timeout=10).status_code == 404


def test_processes_are_given_up_on_request(platform: Platform) -> None:
    box = Sandbox.create(timeout=120)
    try:
        counting(box)
        assert box.pause() is True
        answer = api(platform, "POST", f"/sandboxes/{box.sandbox_id}/connect", timeout=120, memory=False)
        assert answer.status_code == 201 and "init;dur=" in answer.headers["server-timing"]
        before = count(box)
        nothing_for(0.2)
        assert count(box) == before
        # One that is killed while only its disk is there leaves nothing.
        assert pause_to_disk(box) is True
    finally:
        assert box.kill() is True
    assert box.kill() is False


def test_the_deadline_keeps_files_alone(platform: Platform) -> None:
    answer = api(platform, "POST", "/v2/sandboxes", templateID="base", timeout=2, autoPause=True, autoPauseMemory=False)
    assert answer.status_code == 201, answer.text
    path = f"/sandboxes/{answer.json()['sandboxID']}"
    try:
        until(lambda: api(platform, "GET", path).json().get("pauseMode") == "filesystem", "its deadline pauses it")
        box = Sandbox.connect(answer.json()["sandboxID"], timeout=60)
        assert box.commands.run("echo awake").stdout == "awake\n"
    finally:
        assert api(platform, "DELETE", path).status_code == 204
