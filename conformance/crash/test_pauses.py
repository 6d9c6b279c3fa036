"""kill -9 at random moments of pauses and resumes: each sandbox is either paused or running afterwards, and nothing of it is lost.

Clients pause and resume sandboxes, in each of which a program counts, as fast as they can. Each cycle kills the platform at
a random moment, and checks after the restart:

- the API says that a sandbox runs, and it counts on; or that it is paused, and no process of it runs;
- what was answered is true: after a 204 to a pause nobody has resumed it, and the other way round;
- a connect makes it run, with the same processes, and its count never went back;
- what was paused with its processes has not run from the answer to that until the connect.

All of this is done with processes that are stopped in memory, with processes that are written to disk before the pause is
answered, and with processes that are written afterwards, most of whose pauses are interrupted. Some of
the sandboxes are paused with their files alone. Of those nothing is on the host while they are paused, and the program is
started again, from the count in its file.

RINGFENCE_PAUSE_CYCLES sets the number of cycles, RINGFENCE_CRASH_SEED the moments. A failure names both.
"""

from __future__ import annotations

import os
import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox

from harness.criu import criu_config, frozen_config
from harness.elapse import at_moment
from harness.platform import Platform
from harness.traffic import until
from harness.witness import start, stood

CYCLES = int(os.environ.get("RINGFENCE_PAUSE_CYCLES", "20"))
SEED = int(os.environ.get("RINGFENCE_CRASH_SEED", str(time.time_ns() % 1_000_000)))
SANDBOXES = 2
# How long a sandbox is observed in which nothing may run, in seconds of this process.
OBSERVED_S = 0.1
COUNT = "i=$(cat /tmp/n || echo 0); while :; do i=$((i+1)); echo $i > /tmp/n.new; mv /tmp/n.new /tmp/n; done"


@dataclass
class Subject:
    """A sandbox, and what its client knows of it."""

    box: Sandbox
    # Whether it is paused with its processes.
    memory: bool = True
    # The pid of the witness, and when the last pause was answered.
    witness: str = ""
    answered: float = 0.0
    counted: int = 0
    # The state of the last answer; none while a request has got no answer.
    known: str | None = "running"
    seen: set[str] = field(default_factory=set)

    def count(self) -> int:
        return int(self.box.files.read("/tmp/n") or 0)

    def processes(self) -> dict[str, int]:
        """How long each of its processes has run, in nanoseconds."""
        found = {}
        for process in Path("/proc").iterdir():
            if process.name.isdigit():
                try:
                    if f"/{self.box.sandbox_id}." in (process / "cgroup").read_text():
                        found[process.name] = int((process / "schedstat").read_text().split()[0])
                except OSError:
                    continue
        return found

    def stands_still(self) -> bool:
        """Whether none of its processes runs while this program does. The last microseconds before a stop are counted late."""
        before = self.processes()
        begun = time.process_time()
        while time.process_time() < begun + OBSERVED_S:
            pass
        return self.processes() == before


@pytest.mark.parametrize(
    ("crashing", "within_s", "rest_s"),
    [(None, 0.25, 0.02), (criu_config, 1.0, 0.02), (frozen_config, 0.6, 0.2)],
    indirect=["crashing"],
    ids=["in memory", "on disk", "on disk afterwards"],
)
def test_kill_9_at_random_moments_of_pauses(crashing: Platform, within_s: float, rest_s: float) -> None:
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    subjects = []
    for number in range(SANDBOXES):
        subject = Subject(Sandbox.create(timeout=3000), memory=number % 2 == 0)
        subject.box.commands.run(COUNT, background=True, timeout=0)
        until(lambda subject=subject: subject.box.files.exists("/tmp/n") and subject.count() > 0, "it counts")
        if subject.memory:
            subject.witness = start(subject.box, 60)
        subjects.append(subject)
    for cycle in range(CYCLES):
        try:
            kill_and_check(crashing, chance, subjects, (within_s, rest_s))
        except BaseException as error:
            error.add_note(f"in cycle {cycle} of {CYCLES}; again with RINGFENCE_CRASH_SEED={SEED}")
            raise
    seen = set().union(*(subject.seen for subject in subjects))
    assert seen == {"running", "paused"}, f"every kill found the same state: {seen}"
    # One of each is paused when the platform is taken down, which ends it like any other.
    headers = {"X-API-Key": crashing.credentials()["E2B_API_KEY"]}
    for subject in subjects:
        url = f"{crashing.url}/sandboxes/{subject.box.sandbox_id}/pause"
        assert httpx.post(url, headers=headers, json={"memory": subject.memory}, timeout=60).status_code == 204


def alternate(api: httpx.Client, subject: Subject, chance: random.Random, rest_s: float) -> None:
    """Pauses and resumes, with rests in between, until the platform is gone."""
    path = f"/sandboxes/{subject.box.sandbox_id}"
    try:
        while True:
            subject.known = None
            answer = api.post(f"{path}/pause", json={"memory": subject.memory})
            assert answer.status_code == 204, answer.text
            subject.answered = time.time()
            subject.known = "paused"
            at_moment(chance.uniform(0.0, rest_s))
            subject.known = None
            answer = api.post(f"{path}/connect", json={"timeout": 3000})
            assert answer.status_code == 201, answer.text
            subject.known = "running"
            at_moment(chance.uniform(0.0, rest_s))
    except httpx.TransportError:
        pass


def kill_and_check(server: Platform, chance: random.Random, subjects: list[Subject], times: tuple[float, float]) -> None:
    within_s, rest_s = times
    headers = {"X-API-Key": server.credentials()["E2B_API_KEY"]}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as api:
        failures: list[BaseException] = []

        def work(subject: Subject, rests: random.Random) -> None:
            try:
                alternate(api, subject, rests, rest_s)
            except BaseException as error:  # noqa: BLE001
                failures.append(error)

        clients = [threading.Thread(target=work, args=[subject, random.Random(chance.random())]) for subject in subjects]
        for client in clients:
            client.start()
        at_moment(chance.uniform(0.0, within_s))
        server.kill()
        for client in clients:
            client.join(60)
        assert failures == []
    server.start()
    server.use()
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as api:
        for subject in subjects:
            check(api, subject)


def check(api: httpx.Client, subject: Subject) -> None:
    path = f"/sandboxes/{subject.box.sandbox_id}"
    detail = api.get(path).json()
    state = detail["state"]
    subject.seen.add(state)
    assert subject.known in (None, state)
    if state == "running":
        assert subject.processes()
    else:
        if detail["pauseStorage"] == "memory":
            # It may just have been written to disk.
            assert subject.processes() or api.get(path).json()["pauseStorage"] == "disk"
            until(subject.stands_still, "nothing of it uses a processor")
        else:
            until(lambda: subject.processes() == {}, "no process is left")
        resuming = time.time()
        answer = api.post(f"{path}/connect", json={"timeout": 3000})
        assert answer.status_code == 201, answer.text
        if subject.memory and subject.known == "paused":
            stood(subject.box, subject.witness, subject.answered, resuming)
    if not subject.memory:
        # It may have been started anew meanwhile, and then nothing counts until it is told to.
        assert subject.count() >= subject.counted
        subject.box.commands.run("pkill -f '[n][.]new'; true", user="root")
        subject.box.commands.run(COUNT, background=True, timeout=0)
        subject.counted = subject.count()
    until(lambda: subject.count() > subject.counted, "it counts on")
    subject.counted = subject.count()
    # What a pause gives up is there again.
    assert "MemTotal" in subject.box.files.read("/proc/meminfo")
    subject.known = "running"
