"""kill -9 at random moments of snapshots: the sandbox runs on, a snapshot is complete or there is none, and no copy is left.

A client makes snapshots of a sandbox in which a program counts, one after another. Each cycle kills the platform at a random
moment, and checks after the restart:

- the sandbox runs, and its program, the same process, counts on;
- every snapshot that was answered is listed, and at most one more; the newest has all the files;
- the only disk is that of the sandbox, and no process stands still.

RINGFENCE_SNAPSHOT_CYCLES sets the number of cycles, RINGFENCE_CRASH_SEED the moments. A failure names both.
"""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path

import httpx
from e2b import Sandbox

from harness.platform import Platform
from harness.traffic import until

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
    box.commands.run(COUNT, background=True)
    until(lambda: box.files.exists("/tmp/n"), "it counts")
    pid = box.files.read("/tmp/pid")
    answered: list[str] = []
    for cycle in range(CYCLES):
        try:
            kill_and_check(crashing, chance, box, answered)
            assert box.files.read("/tmp/pid") == pid
        except BaseException as error:
            error.add_note(f"in cycle {cycle} of {CYCLES}; again with RINGFENCE_CRASH_SEED={SEED}")
            raise
    assert answered, "no snapshot was ever complete"


def kill_and_check(server: Platform, chance: random.Random, box: Sandbox, answered: list[str]) -> None:
    headers = {"X-API-Key": server.credentials()["E2B_API_KEY"]}
    failures: list[BaseException] = []
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as api:
        known = len(api.get("/snapshots", params={"sandboxID": box.sandbox_id}).json())

        def make() -> None:
            try:
                while True:
                    answer = api.post(f"/sandboxes/{box.sandbox_id}/snapshots", json={})
                    assert answer.status_code == 201, answer.text
                    made.append(answer.json()["snapshotID"])
            except httpx.TransportError:
                pass
            except BaseException as error:  # noqa: BLE001
                failures.append(error)

        made: list[str] = []
        client = threading.Thread(target=make)
        client.start()
        time.sleep(chance.uniform(0.0, 1.2))
        server.kill()
        client.join(60)
        assert failures == []
    server.start()
    server.use()
    answered += made
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as api:
        assert api.get(f"/sandboxes/{box.sandbox_id}").json()["state"] == "running"
        before = int(box.files.read("/tmp/n") or 0)
        until(lambda: int(box.files.read("/tmp/n") or 0) > before, "it counts on")
        until(lambda: len(list(Path(server.data_dir, "disks").glob("*.img"))) == 1, "only the disk of the sandbox is left")
        listed = [item["snapshotID"] for item in api.get("/snapshots", params={"sandboxID": box.sandbox_id}).json()]
        assert set(made) <= set(listed)
        assert len(listed) - known in (len(made), len(made) + 1)
        # All but the newest make room; what is listed is complete.
        for snapshot in listed[1:]:
            assert api.delete(f"/templates/{snapshot.replace(':', '%3A')}").status_code == 204
        if listed:
            with Sandbox.create(listed[0], timeout=60) as child:
                child.commands.run("sha256sum --check --quiet sum && [ $(cat /tmp/n) -gt 0 ]")
