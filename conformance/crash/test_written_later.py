"""What writes a paused sandbox to disk is killed: the sandbox stands still again, and goes on from memory."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox

from crash.test_checkpoints import criu_of, is_in_its_first_moments
from crash.test_pauses import Subject
from harness.criu import frozen_config
from harness.elapse import idle_for, nothing_for
from harness.patience import within
from harness.platform import Platform
from harness.traffic import until
from harness.witness import start, stood

pytestmark = pytest.mark.parametrize("crashing", [frozen_config], indirect=True, ids=["frozen"])


# How often it is tried to meet what writes.
ROUNDS = 10


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()[1])


def writing(server: Platform, storage: Callable[[], str]) -> int | None:
    """The pid of CRIU once it writes memory. None if all of it was written before anybody looked."""
    deadline = time.monotonic() + within(20)
    while True:
        assert time.monotonic() < deadline, "nothing is written"
        found = criu_of(server)
        for pid in found:
            try:
                if not is_in_its_first_moments(server, pid):
                    return pid
            except OSError:
                continue
        if not found and storage() == "disk":
            return None


@pytest.mark.parametrize("whom", ["criu", "the process for it"])
def test_what_writes_is_killed(crashing: Platform, whom: str) -> None:
    box = Sandbox.create(timeout=600)
    subject = Subject(box)
    pid = start(box, 400)
    api = httpx.Client(
        base_url=crashing.url,
        headers={"X-API-Key": crashing.credentials()["E2B_API_KEY"]},
        timeout=60,
    )
    path, interrupted = f"/sandboxes/{box.sandbox_id}", 0

    def storage() -> str:
        return api.get(path).json()["pauseStorage"]

    # What has been written before it could be killed is on disk, and does not count.
    for _ in range(ROUNDS):
        assert api.post(f"{path}/pause").status_code == 204
        if criu := writing(crashing, storage):
            with suppress(FileNotFoundError, ProcessLookupError):
                os.kill(criu if whom == "criu" else parent_of(criu), signal.SIGKILL)
        until(lambda: criu_of(crashing) == [], "it has ended")
        assert api.get(path).json()["state"] == "paused"
        # Killed once all of it was written, it may be written out still, and is on disk then.
        until(lambda: storage() == "disk" or subject.stands_still(), "nothing of it runs")
        interrupted += storage() == "memory"
        since = time.time()
        nothing_for(0.3)
        assert api.post(f"{path}/connect", json={"timeout": 600}).status_code == 201
        stood(box, pid, since, since + 0.3)
        assert box.commands.run("echo here").stdout == "here\n"
        if interrupted == 3:
            break
    assert interrupted > 0
    box.kill()


def test_it_stands_still_without_the_platform(crashing: Platform) -> None:
    """A platform that is killed while it writes leaves nothing running, although nobody starts another one."""
    box = Sandbox.create(timeout=600)
    pid = start(box, 400)
    headers = {"X-API-Key": crashing.credentials()["E2B_API_KEY"]}
    url = f"{crashing.url}/sandboxes/{box.sandbox_id}"
    interrupted = 0

    def storage() -> str:
        return httpx.get(url, headers=headers, timeout=60).json()["pauseStorage"]

    for _ in range(ROUNDS):
        assert httpx.post(f"{url}/pause", headers=headers, timeout=60).status_code == 204
        answered = time.time()
        if writing(crashing, storage):
            crashing.kill()
            interrupted += 1
            idle_for(2)
            crashing.start()
            crashing.use()
        assert httpx.get(url, headers=headers, timeout=60).json()["state"] == "paused"
        resuming = time.time()
        assert httpx.post(f"{url}/connect", headers=headers, json={"timeout": 600}, timeout=60).status_code == 201
        stood(box, pid, answered, resuming)
        if interrupted == 2:
            break
    assert interrupted == 2
    box.kill()
