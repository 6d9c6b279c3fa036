"""A sandbox from create to gone: what the control plane promises an SDK program."""

from __future__ import annotations

import time
import uuid
from datetime import datetime, timedelta, timezone

import httpx
import pytest
from e2b import NotFoundException, Sandbox, SandboxException, SandboxQuery, SandboxState, TimeoutException

from harness.patience import within
from harness.platform import Platform
from harness.traffic import until


def test_create_answers_a_running_sandbox(sandbox: Sandbox) -> None:
    assert sandbox.sandbox_id.isalnum() and sandbox.sandbox_id.islower()
    assert sandbox.is_running()
    assert sandbox.commands.run("echo hello").stdout == "hello\n"


def test_create_with_a_context_manager_kills_at_the_end(platform: Platform) -> None:
    with Sandbox.create() as box:
        assert box.is_running()
    assert not box.is_running()


def test_get_info_describes_the_created_sandbox(platform: Platform) -> None:
    begun = datetime.now(timezone.utc)
    box = Sandbox.create(timeout=90, metadata={"who": "me", "näme": "wért & = %"})
    try:
        info = box.get_info()
        assert info.sandbox_id == box.sandbox_id
        assert info.state == SandboxState.RUNNING
        assert info.metadata == {"who": "me", "näme": "wért & = %"}
        assert info.template_id
        assert info.name == "base"
        assert (info.cpu_count, info.memory_mb) == (2, 1024)
        assert begun - timedelta(seconds=1) <= info.started_at <= datetime.now(timezone.utc)
        assert timedelta(seconds=89) < info.end_at - info.started_at <= timedelta(seconds=91)
        assert tuple(map(int, info.envd_version.split("."))) >= (0, 6, 4)
    finally:
        box.kill()


def test_the_default_timeout_is_five_minutes(sandbox: Sandbox, platform: Platform) -> None:
    with Sandbox.create() as box:
        info = box.get_info()
        assert timedelta(seconds=299) < info.end_at - info.started_at <= timedelta(seconds=301)


def test_set_timeout_counts_from_now_and_may_shorten(sandbox: Sandbox) -> None:
    for seconds in (1000, 30):
        before = datetime.now(timezone.utc)
        sandbox.set_timeout(seconds)
        after = datetime.now(timezone.utc)
        # A second for rounding.
        assert before + timedelta(seconds=seconds - 1) <= sandbox.get_info().end_at <= after + timedelta(seconds=seconds + 1)


def test_connect_finds_the_same_sandbox_and_never_shortens_its_life(sandbox: Sandbox) -> None:
    sandbox.commands.run("echo here > /tmp/mark")
    sandbox.set_timeout(600)
    before = sandbox.get_info().end_at
    again = Sandbox.connect(sandbox.sandbox_id, timeout=30)
    assert again.sandbox_id == sandbox.sandbox_id
    assert again.commands.run("cat /tmp/mark").stdout == "here\n"
    assert again.get_info().end_at == before
    Sandbox.connect(sandbox.sandbox_id, timeout=900)
    assert sandbox.get_info().end_at > before


def test_class_methods_take_an_id(sandbox: Sandbox) -> None:
    assert Sandbox.get_info(sandbox.sandbox_id).sandbox_id == sandbox.sandbox_id
    Sandbox.set_timeout(sandbox.sandbox_id, 200)
    assert Sandbox.kill(sandbox.sandbox_id) is True
    assert Sandbox.kill(sandbox.sandbox_id) is False


def test_kill_ends_it_for_everyone(platform: Platform) -> None:
    box = Sandbox.create()
    assert box.kill() is True
    assert box.kill() is False
    assert box.is_running() is False
    with pytest.raises(NotFoundException):
        box.get_info()
    with pytest.raises(NotFoundException):
        Sandbox.connect(box.sandbox_id)
    with pytest.raises(TimeoutException):
        box.commands.run("true")
    with pytest.raises(TimeoutException):
        box.files.read("/etc/hostname")
    assert box.sandbox_id not in {item.sandbox_id for item in Sandbox.list().next_items()}


def test_a_killed_sandbox_cuts_its_streams(sandbox: Sandbox) -> None:
    """The stream must break, not end: a program would take a clean end for a finished command."""
    handle = sandbox.commands.run("echo up; exec sleep 600", background=True, timeout=0)
    output = iter(handle)
    assert next(output)[0] == "up\n"
    assert sandbox.kill()
    with pytest.raises(TimeoutException):
        for _ in output:
            pass


def test_expiry_kills(platform: Platform) -> None:
    box = Sandbox.create(timeout=60)
    assert box.is_running()
    box.set_timeout(1)
    until(lambda: not box.is_running(), "the sandbox has expired", within_s=10)
    with pytest.raises(NotFoundException):
        box.get_info()


def test_a_timeout_of_zero_expires_at_once(sandbox: Sandbox) -> None:
    sandbox.set_timeout(0)
    until(lambda: not sandbox.is_running(), "the sandbox has expired", within_s=5)


def test_unknown_sandboxes_are_not_found(platform: Platform) -> None:
    unknown = "i" + "0" * 20
    assert Sandbox.kill(unknown) is False
    for call in (Sandbox.get_info, Sandbox.connect):
        with pytest.raises(NotFoundException):
            call(unknown)


def test_unknown_templates_are_not_found(platform: Platform) -> None:
    with pytest.raises(SandboxException, match="404"):
        Sandbox.create("no-such-template")


def test_list_filters_by_metadata(platform: Platform) -> None:
    mark = uuid.uuid4().hex
    values = ["plain", "a&b=c+d%e f", "ünï"]
    boxes = [Sandbox.create(metadata={"mark": mark, "us er": value}) for value in values]
    try:
        found = Sandbox.list(SandboxQuery(metadata={"mark": mark})).next_items()
        assert {item.sandbox_id for item in found} == {box.sandbox_id for box in boxes}
        for box, value in zip(boxes, values):
            found = Sandbox.list(SandboxQuery(metadata={"mark": mark, "us er": value})).next_items()
            assert [item.sandbox_id for item in found] == [box.sandbox_id]
            assert found[0].metadata == {"mark": mark, "us er": value}
        assert Sandbox.list(SandboxQuery(metadata={"mark": "other"})).next_items() == []
    finally:
        for box in boxes:
            box.kill()


def test_list_pages_newest_first(platform: Platform) -> None:
    mark = uuid.uuid4().hex
    boxes = [Sandbox.create(metadata={"mark": mark}) for _ in range(5)]
    try:
        pages = Sandbox.list(SandboxQuery(metadata={"mark": mark}), limit=2)
        sizes, found = [], []
        while pages.has_next:
            items = pages.next_items()
            sizes.append(len(items))
            found += [item.sandbox_id for item in items]
        assert sizes == [2, 2, 1]
        assert found == [box.sandbox_id for box in reversed(boxes)]
        first = Sandbox.list(SandboxQuery(metadata={"mark": mark}, state=[SandboxState.RUNNING]), limit=2)
        assert len(first.next_items()) == 2 and first.has_next
        rest = Sandbox.list(SandboxQuery(metadata={"mark": mark}), limit=100, next_token=first.next_token)
        assert [item.sandbox_id for item in rest.next_items()] == found[2:]
        paused = Sandbox.list(SandboxQuery(metadata={"mark": mark}, state=[SandboxState.PAUSED]))
        assert paused.next_items() == []
    finally:
        for box in boxes:
            box.kill()


def test_environment_of_the_sandbox_reaches_every_command(platform: Platform) -> None:
    with Sandbox.create(envs={"FROM_CREATE": "one", "BOTH": "create"}) as box:
        assert box.commands.run("echo $FROM_CREATE $BOTH").stdout == "one create\n"
        assert box.commands.run("echo $FROM_CREATE $BOTH", envs={"BOTH": "run"}).stdout == "one run\n"


def test_ten_at_once(platform: Platform) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def whole_life(number: int) -> str:
        with Sandbox.create() as box:
            return box.commands.run(f"echo {number}").stdout

    with ThreadPoolExecutor(10) as pool:
        assert list(pool.map(whole_life, range(20))) == [f"{number}\n" for number in range(20)]


def test_create_reports_its_stages(platform: Platform) -> None:
    """`Server-Timing` shows the duration of each stage of a create request."""
    headers = {"X-API-Key": platform.credentials()["E2B_API_KEY"]}
    begun = time.monotonic()
    answer = httpx.post(f"{platform.url}/sandboxes", json={"templateID": "base"}, headers=headers, timeout=30)
    took_ms = (time.monotonic() - begun) * 1000
    assert answer.status_code == 201, answer.text
    httpx.delete(f"{platform.url}/sandboxes/{answer.json()['sandboxID']}", headers=headers, timeout=within(30))
    stages = {}
    for entry in answer.headers["server-timing"].split(","):
        name, _, rest = entry.strip().partition(";")
        stages[name] = float(rest.partition("dur=")[2])
    assert stages and all(0 <= value <= took_ms for value in stages.values()), stages
