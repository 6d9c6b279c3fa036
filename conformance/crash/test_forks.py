"""kill -9 at random moments of forks: the sandbox runs on, a child is whole or there is none, and no copy is left.

A client forks a sandbox in which a program counts and checks its memory, again and again. Each cycle kills the platform at a
random moment, and checks after the restart:

- the sandbox runs, and its program, the same process, goes on with all of its memory;
- every child that was answered runs, and so does every other one that is listed: its program goes on, too;
- there is a disk for each of these and no other, and no process stands still.

RINGFENCE_FORK_CYCLES sets the number of cycles, RINGFENCE_CRASH_SEED the moments. A failure names both.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox

from crash.test_checkpoints import Holder, criu_of, kill_criu
from harness.criu import criu_config, groups, processes
from harness.elapse import at_moment
from harness.platform import Platform
from harness.traffic import until

pytestmark = pytest.mark.parametrize("crashing", [criu_config], indirect=True, ids=["criu"])

CYCLES = int(os.environ.get("RINGFENCE_FORK_CYCLES", "20"))
SEED = int(os.environ.get("RINGFENCE_CRASH_SEED", str(time.time_ns() % 1_000_000)))
CHILDREN = 3
# Enough memory that writing and reading it takes a while.
HOLDER = """
import hashlib, os, time
memory = bytearray(os.urandom(1 << 20)) * 100
want = hashlib.sha256(memory).hexdigest()
count = 0
while True:
    with open("/tmp/new", "w") as file: file.write(f"{count} {os.getpid()} {hashlib.sha256(memory).hexdigest() == want}")
    os.replace("/tmp/new", "/tmp/seen")
    count += 1
    time.sleep(0.05)
"""


def test_kill_9_at_random_moments_of_forks(crashing: Platform) -> None:
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    box = Sandbox.create(timeout=3000)
    box.files.write("/tmp/holder.py", HOLDER)
    box.commands.run("python3 /tmp/holder.py", background=True, timeout=0)
    until(lambda: box.files.exists("/tmp/seen"), "it holds its memory")
    _, pid = seen(box)
    answered = 0
    for cycle in range(CYCLES):
        try:
            # On a busy machine no random moment may be late enough; the last one is, then.
            is_after_an_answer = cycle == CYCLES - 1 and answered == 0
            answered += kill_and_check(crashing, chance, box, pid, is_after_an_answer)
        except BaseException as error:
            error.add_note(f"in cycle {cycle} of {CYCLES}; again with RINGFENCE_CRASH_SEED={SEED}")
            raise
    assert answered > 0, "no fork was ever answered"


def seen(box: Sandbox) -> tuple[int, int]:
    count, pid, whole = box.files.read("/tmp/seen").split()
    assert whole == "True"
    return int(count), int(pid)


def goes_on(box: Sandbox, pid: int) -> None:
    before, same = seen(box)
    assert same == pid
    until(lambda: seen(box)[0] > before, "it goes on")
    assert "MemTotal" in box.files.read("/proc/meminfo")


def kill_and_check(server: Platform, chance: random.Random, box: Sandbox, pid: int, is_after_an_answer: bool) -> int:
    headers = {"X-API-Key": server.credentials()["E2B_API_KEY"]}
    failures: list[BaseException] = []
    made: list[str] = []

    def make() -> None:
        try:
            with httpx.Client(base_url=server.url, headers=headers, timeout=60) as api:
                while True:
                    answer = api.post(f"/sandboxes/{box.sandbox_id}/fork", json={"count": CHILDREN, "timeout": 600})
                    assert answer.status_code == 201, answer.text
                    children = [entry["sandbox"]["sandboxID"] for entry in answer.json()]
                    made.extend(children)
                    # All but the last ones make room.
                    for child in made[:-CHILDREN]:
                        assert api.delete(f"/sandboxes/{child}").status_code == 204
                        made.remove(child)
        except httpx.TransportError:
            pass
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    client = threading.Thread(target=make)
    client.start()
    at_moment(chance.uniform(0.0, 2.5))
    if is_after_an_answer:
        until(lambda: bool(made or failures), "a fork is answered", 60)
    server.kill()
    client.join(60)
    assert failures == []
    server.start()
    server.use()
    goes_on(box, pid)
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as api:
        listed = {item["sandboxID"]: item["state"] for item in api.get("/v2/sandboxes").json()}
        assert set(listed.values()) == {"running"}
        assert box.sandbox_id in listed
        # One that was just removed may be gone although nobody was told.
        assert len(set(made) - set(listed)) <= 1, "a child that was answered is gone"
        assert len(set(listed) - set(made) - {box.sandbox_id}) <= CHILDREN
        disks = Path(server.data_dir, "disks")
        until(lambda: len(list(disks.glob("*.img"))) == len(listed), "there is a disk for each sandbox")
        kept = {entry.name.split(".")[0] for entry in Path(server.data_dir, "kept").iterdir()}
        assert kept <= set(listed), kept
        assert not list(Path(server.data_dir, "kept").glob("*/image*"))
        for child in set(listed) - {box.sandbox_id}:
            connected = Sandbox.connect(child)
            goes_on(connected, pid)
            assert connected.kill() is True
            until(lambda connected=connected: processes(connected) == groups(connected) == [], "nothing is left of it")
    until(lambda: len(list(disks.glob("*.img"))) == 1, "only the disk of the sandbox is left")
    goes_on(box, pid)
    return len(made)


def test_criu_is_killed(crashing: Platform) -> None:
    """The sandbox goes on, and each child is whole or has failed."""
    holder = Holder(crashing)
    disks = Path(crashing.data_dir, "disks")
    killed, statuses, failed = 0, [], 0
    for after_s in (0.0, 0.02, 0.05, 0.1, 0.2, 0.4):
        answers: list[httpx.Response] = []

        def fork(answers: list[httpx.Response] = answers) -> None:
            answers.append(holder.api.post(f"{holder.path}/fork", json={"count": 2, "timeout": 600}))

        killed += kill_criu(crashing, fork, after_s)
        (answer,) = answers
        statuses.append(answer.status_code)
        assert answer.status_code in (201, 409, 503), answer.text
        holder.goes_on()
        assert "MemTotal" in holder.box.files.read("/proc/meminfo")
        assert holder.box.commands.run("echo here").stdout == "here\n"
        for entry in answer.json() if answer.status_code == 201 else []:
            if "error" in entry:
                failed += 1
                continue
            child = Sandbox.connect(entry["sandbox"]["sandboxID"])
            goes_on(child, holder.pid)
            assert child.kill() is True
        until(lambda: len(list(disks.glob("*.img"))) == 1, "no disk of a child is left")
        assert not list(Path(crashing.data_dir, "kept").glob("*/image*"))
    print(f"killed {killed} times: {statuses}, {failed} children failed")
    assert killed > 0
    lived, met = 0, 0
    # A restore that is over before the killer looks is not met.
    for _ in range(12):
        answered = threading.Event()
        with httpx.Client(base_url=crashing.url, headers=holder.api.headers, timeout=60) as api:
            killer = threading.Thread(target=kill_a_restore, args=[crashing, answered])
            killer.start()
            try:
                answer = api.post(f"{holder.path}/fork", json={"count": 3, "timeout": 600})
            finally:
                answered.set()
                killer.join()
        assert answer.status_code == 201, answer.text
        entries = answer.json()
        # Children that wait for the same checkpoint while none of them has started share the failure of one.
        errors = [entry["error"] for entry in entries if "error" in entry]
        assert all(error["code"] == 500 for error in errors), entries
        if errors:
            met += 1
            lived += len(entries) - len(errors)
        holder.goes_on()
        for entry in entries:
            if "sandbox" in entry:
                child = Sandbox.connect(entry["sandbox"]["sandboxID"])
                goes_on(child, holder.pid)
                assert child.kill() is True
        until(lambda: len(list(disks.glob("*.img"))) == 1, "no disk of a child is left")
        assert len(holder.api.get("/v2/sandboxes").json()) == 1
        if met >= 3 and lived > 0:
            break
    assert met >= 3, "a restore was not met often enough"
    assert lived > 0, "no child of a fork lived"
    holder.box.kill()


def kill_a_restore(server: Platform, answered: threading.Event) -> None:
    """Kills the first CRIU that restores something, unless the fork is answered before."""
    while not answered.is_set():
        for pid in criu_of(server):
            try:
                if b"restore" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
                    return
            except OSError:
                continue
