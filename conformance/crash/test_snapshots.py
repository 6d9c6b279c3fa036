"""kill -9 at random moments of snapshots: the sandbox runs on, a snapshot is complete or there is none, and no copy is left.

A client makes snapshots of a sandbox in which a program counts, with its memory and without in turn, and a sandbox from each,
one after another. Each cycle kills the platform at a random moment, and checks after the restart:

- the sandbox runs, and its program, the same process, counts on;
- every snapshot that was answered is listed, and at most one more; the newest has all the files, and, if it was made with memory,
  the process goes on in two sandboxes of it;
- every sandbox that is listed is whole: its program counts on if it was created with memory;
- the disks are those of the sandboxes, and of the memory of snapshots that exist; no process stands still.

A snapshot whose memory could not be kept is one of the files, and a sandbox whose memory could not be restored in time is started
from them: both are answered like any other, and their programs do not run. That is a choice of the platform which a slow disk makes
likely, so the log of the platform says of what programs have to run.

RINGFENCE_SNAPSHOT_CYCLES sets the number of cycles, RINGFENCE_CRASH_SEED the moments. A failure names both.
"""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox

from harness.criu import criu_config, groups, processes
from harness.elapse import at_moment
from harness.platform import Platform
from harness.traffic import until

pytestmark = pytest.mark.parametrize("crashing", [criu_config], indirect=True, ids=["criu"])

CYCLES = int(os.environ.get("RINGFENCE_SNAPSHOT_CYCLES", "20"))
SEED = int(os.environ.get("RINGFENCE_CRASH_SEED", str(time.time_ns() % 1_000_000)))
COUNT = "echo $$ > /tmp/pid; i=0; while :; do i=$((i+1)); echo $i > /tmp/n.new; mv /tmp/n.new /tmp/n; done"
# Large enough for a kill to meet the copy of the disk now and then.
FILL = "head -c 150000000 /dev/urandom > /home/user/big; sha256sum /home/user/big > /home/user/sum"


def test_kill_9_at_random_moments_of_snapshots(crashing: Platform) -> None:
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    box = Sandbox.create(timeout=3000)
    box.commands.run(FILL)
    box.commands.run(COUNT, background=True, timeout=0)
    until(lambda: box.files.exists("/tmp/n"), "it counts")
    pid = box.files.read("/tmp/pid")
    answered: list[str] = []
    kept: set[str] = set()
    for cycle in range(CYCLES):
        try:
            # On a busy machine no random moment may be late enough; the last one is, then.
            is_after_an_answer = cycle == CYCLES - 1 and not kept
            kill_and_check(crashing, chance, box, answered, kept, is_after_an_answer)
            assert box.files.read("/tmp/pid") == pid
        except BaseException as error:
            error.add_note(f"in cycle {cycle} of {CYCLES}; again with RINGFENCE_CRASH_SEED={SEED}")
            raise
    assert answered, "no snapshot was ever complete"
    assert kept, "no memory of a snapshot was ever kept"


def disks(server: Platform) -> int:
    return len(list(Path(server.data_dir, "disks").glob("*.img")))


def memories(server: Platform) -> int:
    return len(list(Path(server.data_dir, "memories").iterdir()))


def counts_on(box: Sandbox, pid: str) -> None:
    assert box.files.read("/tmp/pid") == pid
    before = int(box.files.read("/tmp/n") or 0)
    try:
        until(lambda: int(box.files.read("/tmp/n") or 0) > before, "it counts on")
    except AssertionError as error:
        # One that has ended is not one that stands still.
        state = box.commands.run(f"grep -E '^(Name|State|TracerPid)' /proc/{pid.strip()}/status 2>&1 || true").stdout
        error.add_note(f"sandbox {box.sandbox_id}: {state}")
        raise


def logged(api: httpx.Client, sandbox_id: str, event: str) -> list[dict[str, str]]:
    entries = api.get(f"/v2/sandboxes/{sandbox_id}/logs", params={"limit": 1000}).json()["logs"]
    return [entry["fields"] for entry in entries if entry["fields"].get("event_type") == event]


def has_memory(api: httpx.Client, sandbox_id: str, snapshot: str) -> bool:
    """Whether a snapshot of a sandbox was made with memory."""

    def made() -> list[dict[str, str]]:
        return [fields for fields in logged(api, sandbox_id, "snapshot_created") if snapshot.startswith(fields["template"])]

    (fields,) = until(made, "its log says that it was made")
    return fields["kept"] == "processes"


def is_restored(api: httpx.Client, sandbox_id: str) -> bool:
    """Whether a sandbox of a snapshot with memory goes on with it. If not, that is because of its disk, which was not copied in time."""
    # The entry of its start is written after the one that says that its memory was not restored.
    until(lambda: logged(api, sandbox_id, "sandbox_start"), "its log says that it was started")
    reasons = [fields["reason"] for fields in logged(api, sandbox_id, "memory_not_restored")]
    assert all(reason.endswith("the copy of its disk took too long") for reason in reasons), reasons
    return reasons == []


def kill_and_check(
    server: Platform, chance: random.Random, box: Sandbox, answered: list[str], kept: set[str], is_after_an_answer: bool
) -> None:
    headers = {"X-API-Key": server.credentials()["E2B_API_KEY"]}
    failures: list[BaseException] = []
    pid = box.files.read("/tmp/pid")
    # Those with memory, of the snapshots and sandboxes that were answered, as far as that could be asked before the kill.
    with_memory: set[str] = set()
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as api:
        known = len(api.get("/snapshots", params={"sandboxID": box.sandbox_id}).json())

        def make() -> None:
            try:
                for memory in [True, False] * 100:
                    answer = api.post(f"/sandboxes/{box.sandbox_id}/snapshots", json={"memory": memory})
                    assert answer.status_code == 201, answer.text
                    snapshot = answer.json()["snapshotID"]
                    made.append(snapshot)
                    answer = api.post("/sandboxes", json={"templateID": snapshot, "timeout": 600})
                    assert answer.status_code == 201, answer.text
                    child = answer.json()["sandboxID"]
                    if memory and has_memory(api, box.sandbox_id, snapshot):
                        with_memory.add(snapshot)
                        if is_restored(api, child):
                            with_memory.add(child)
            except httpx.TransportError:
                pass
            except BaseException as error:  # noqa: BLE001
                failures.append(error)

        made: list[str] = []
        client = threading.Thread(target=make)
        client.start()
        at_moment(chance.uniform(0.0, 2.5))
        if is_after_an_answer:
            until(lambda: bool(with_memory or failures), "a snapshot with memory is answered", 60)
        server.kill()
        client.join(60)
        assert failures == []
    server.start()
    server.use()
    answered += made
    kept |= with_memory
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as api:
        assert api.get(f"/sandboxes/{box.sandbox_id}").json()["state"] == "running"
        counts_on(box, pid)
        boxes = {item["sandboxID"] for item in api.get("/v2/sandboxes").json()}
        until(lambda: disks(server) == len(boxes) + memories(server), "every disk has an owner")
        for child in boxes - {box.sandbox_id}:
            connected = Sandbox.connect(child)
            connected.commands.run("sha256sum --check --quiet sum")
            if child in with_memory:
                counts_on(connected, pid)
            assert connected.kill() is True
            until(lambda connected=connected: processes(connected) == groups(connected) == [], "nothing is left of it")
        listed = [item["snapshotID"] for item in api.get("/snapshots", params={"sandboxID": box.sandbox_id}).json()]
        assert set(made) <= set(listed)
        assert len(listed) - known in (len(made), len(made) + 1)
        until(lambda: memories(server) <= len(listed), "no memory is left that no snapshot has")
        # All but the newest make room; what is listed is complete.
        for snapshot in listed[1:]:
            assert api.delete(f"/templates/{snapshot.replace(':', '%3A')}").status_code == 204
        if listed:
            until(lambda: memories(server) <= 1, "the memory of the others is gone")
            for _ in range(2):
                with Sandbox.create(listed[0], timeout=600) as child:
                    child.commands.run("sha256sum --check --quiet sum && [ $(cat /tmp/n) -gt 0 ]")
                    if listed[0] in with_memory and is_restored(api, child.sandbox_id):
                        counts_on(child, pid)
            assert memories(server) == 1 or listed[0] not in with_memory
        until(lambda: disks(server) == 1 + memories(server), "only the sandbox and the newest snapshot are left")
