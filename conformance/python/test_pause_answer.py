"""Pauses that are answered when the processes are stopped (`pause.answer = "frozen"`), and written to disk afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import httpx
import pytest
from e2b import Sandbox

from harness.beside import beside
from harness.criu import frozen_config, groups, processes
from harness.elapse import at_moment
from harness.patience import within
from harness.platform import Platform
from harness.traffic import until
from harness.witness import is_whole, start, stood

@pytest.fixture(scope="module")
def frozen(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    with beside(platform, tmp_path_factory.mktemp("frozen"), frozen_config()) as server:
        yield server


@pytest.fixture
def box(frozen: Platform) -> Iterator[Sandbox]:
    frozen.use()
    box = Sandbox.create(timeout=300)
    try:
        yield box
    finally:
        box.kill()


class Client:
    """Requests about one sandbox."""

    def __init__(self, server: Platform, box: Sandbox) -> None:
        self.key = {"X-API-Key": server.credentials()["E2B_API_KEY"]}
        self.url = f"{server.url}/sandboxes/{box.sandbox_id}"

    def detail(self) -> dict[str, object]:
        return httpx.get(self.url, headers=self.key, timeout=60).json()

    def post(self, path: str, body: dict[str, object] | None = None) -> httpx.Response:
        return httpx.post(f"{self.url}/{path}", headers=self.key, json=body or {}, timeout=60)

    def storage(self) -> tuple[object, object, object]:
        detail = self.detail()
        return detail["state"], detail["pauseMode"], detail["pauseStorage"]


MEMORY, DISK = ("paused", "full", "memory"), ("paused", "full", "disk")


def test_the_witness_is_asked_by_a_file_of_its_own(box: Sandbox) -> None:
    """The witness is not lost when it sees an upload before the file is its user's, which a loaded host makes
    likely."""
    pid = start(box, 1)

    def looks() -> int:
        # It sleeps between two looks for the file.
        status = box.commands.run(f"cat /proc/{pid}/status").stdout
        return int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])

    box.commands.run("sudo touch /tmp/check")
    before = looks()
    until(lambda: looks() > before + 10, "it has seen the file")
    assert not box.files.exists("/tmp/whole")
    box.commands.run("sudo chown user /tmp/check")
    is_whole(box, pid)


def test_it_is_answered_before_its_memory_is_on_disk(frozen: Platform, box: Sandbox) -> None:
    client = Client(frozen, box)
    pid = start(box, 300)
    seen = []
    # Its memory may be on disk before a client that was held up looks, so there are several rounds.
    for _ in range(5):
        begun = time.time()
        assert client.post("pause").status_code == 204
        answered = time.time()
        first, was_there = client.storage(), processes(box) != []
        assert client.post("pause").status_code == 409
        assert client.post("fork").status_code == 409
        assert client.post("timeout", {"timeout": 100}).status_code == 404
        # None of these has interrupted or waited for it.
        second = client.storage()
        assert {first, second} <= {MEMORY, DISK}
        paused_at = client.detail()["endAt"]
        until(lambda: client.storage() == DISK, "it is on disk", within_s=30)
        written = time.time()
        assert client.detail()["endAt"] == paused_at
        until(lambda: processes(box) == [] and groups(box) == [], "nothing of it is on the host")
        resuming = time.time()
        assert client.post("connect", {"timeout": 300}).status_code == 201
        stood(box, pid, answered, resuming)
        seen.append((first, was_there, second, answered - begun < written - answered))
        if seen[-1] == (MEMORY, True, MEMORY, True):
            break
    assert (MEMORY, True, MEMORY, True) in seen, seen


def test_a_resume_goes_on_from_memory(frozen: Platform, box: Sandbox) -> None:
    client = Client(frozen, box)
    pid = start(box, 200)
    kept = []
    for attempt in range(12):
        assert client.post("pause").status_code == 204
        answered = time.time()
        at_moment(0.02 * attempt)
        path, body = [("connect", {"timeout": 200}), ("resume", {"timeout": 200, "autoPause": attempt % 4 == 1})][attempt % 2]
        kept.append(client.storage())
        resuming = time.time()
        assert client.post(path, body).status_code == 201
        # The spawner, the agent and what it serves are there at once.
        assert box.commands.run("echo here").stdout == "here\n"
        assert "MemTotal" in box.files.read("/proc/meminfo")
        stood(box, pid, answered, resuming)
    assert kept.count(MEMORY) >= 3, kept
    # One that gives up the processes does so from there.
    assert client.post("pause").status_code == 204
    assert client.post("connect", {"timeout": 200, "memory": False}).status_code == 201
    assert box.commands.run("pgrep -f '[w]itness'; true").stdout == ""


def test_traffic_resumes_it(frozen: Platform) -> None:
    frozen.use()
    box = Sandbox.create(timeout=60, lifecycle={"on_timeout": "pause", "auto_resume": True})
    try:
        client = Client(frozen, box)
        pid = start(box, 200)
        for wait in (0.0, 0.05, 0.15):
            assert client.post("pause").status_code == 204
            answered = time.time()
            at_moment(wait)
            resuming = time.time()
            assert box.commands.run("echo awake").stdout == "awake\n"
            stood(box, pid, answered, resuming)
    finally:
        box.kill()


def test_a_kill_ends_both(frozen: Platform) -> None:
    frozen.use()
    for wait in (0.0, 0.03, 0.06, 0.1, 0.2):
        box = Sandbox.create(timeout=60)
        client = Client(frozen, box)
        start(box, 200)
        assert client.post("pause").status_code == 204
        at_moment(wait)
        begun = time.time()
        assert httpx.delete(client.url, headers=client.key, timeout=60).status_code == 204
        assert time.time() - begun < within(5)
        assert processes(box) == []
        until(lambda box=box: groups(box) == [], "its groups are removed")
        kept = frozen.data_dir / "kept"
        until(
            lambda box=box: not any(entry.name.startswith(box.sandbox_id) for entry in kept.iterdir()),
            "nothing of it is kept",
        )
        assert client.detail()["code"] == 404


def test_what_cannot_be_written_stays_in_memory(frozen: Platform, box: Sandbox) -> None:
    client = Client(frozen, box)
    pid = start(box, 1)
    box.commands.run("sudo touch /dev/mqueue/queue")
    assert client.post("pause").status_code == 204
    answered = time.time()

    def reasons() -> str:
        logs = httpx.get(f"{client.url}/logs", headers=client.key, timeout=60).text
        return logs if "kept_in_memory" in logs else ""

    until(lambda: reasons() != "", "the attempt is over")
    assert "mqueue" in reasons()
    assert client.storage() == MEMORY
    resuming = time.time()
    assert client.post("connect", {"timeout": 300}).status_code == 201
    stood(box, pid, answered, resuming)


def test_the_next_start_goes_on_with_it(frozen: Platform, box: Sandbox) -> None:
    """After each end of the platform, the sandbox is paused, and in the end it is on disk."""
    client = Client(frozen, box)
    pid = start(box, 300)
    for wait, end in [(0.1, frozen.kill), (0.0, frozen.kill), (0.25, frozen.kill), (0.1, frozen.terminate)]:
        assert client.post("pause").status_code == 204
        answered = time.time()
        at_moment(wait)
        end()
        frozen.start()
        assert client.storage() in (MEMORY, DISK)
        until(lambda: client.storage() == DISK, "it is on disk", within_s=30)
        resuming = time.time()
        assert client.post("connect", {"timeout": 300}).status_code == 201
        stood(box, pid, answered, resuming)


def test_many_at_once(frozen: Platform) -> None:
    frozen.use()
    boxes = [Sandbox.create(timeout=100) for _ in range(6)]
    try:
        clients = [Client(frozen, box) for box in boxes]
        answers: list[int] = []
        pausing = [threading.Thread(target=lambda client=client: answers.append(client.post("pause").status_code)) for client in clients]
        for thread in pausing:
            thread.start()
        for thread in pausing:
            thread.join()
        assert answers == [204] * len(boxes)
        until(lambda: all(client.storage() == DISK for client in clients), "all are on disk", within_s=30)
        for client, box in zip(clients, boxes, strict=True):
            assert client.post("connect", {"timeout": 100}).status_code == 201
            assert box.commands.run("echo here").stdout == "here\n"
    finally:
        for box in boxes:
            box.kill()
