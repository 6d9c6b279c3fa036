"""Attacks on the process that brings a sandbox its next spawner, and on those who wait for it.

Root inside may kill the spawner whenever it likes, and the host makes another, so part of the host's work happens where
root can watch and signal. It must see nothing of the host there, and delay only its own sandbox.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2b import Sandbox, SandboxException

from harness.elapse import at_moment, slowly
from harness.hoststate import HostState, left_over
from harness.inside import attack_spawner, root
from harness.patience import within
from harness.platform import Platform
from harness.traffic import program, until

ATTACKERS = 4
RESPAWNS = int(os.environ.get("RINGFENCE_RESPAWNS", "60"))
# A create takes 10 ms, a delete 5 ms, a restart 0.2 s. The attacks made them take half a minute, or fail.
CALL_LIMIT_S = 5.0
READY_LIMIT_S = 10.0


@pytest.fixture
def attacked(work_dir: Path) -> Iterator[Platform]:
    """A platform of its own: it is killed in the middle."""
    before = HostState.take()
    server = Platform(work_dir / "attacked")
    environment = dict(os.environ)
    try:
        server.start()
        server.use()
        yield server
        if server.process:
            assert server.terminate() == 0
        assert server.down().returncode == 0, server.log_tail()
        assert left_over(before) == {}
    finally:
        server.close()
        os.environ.clear()
        os.environ.update(environment)


def attack(sandbox: Sandbox, *arguments: str):
    sandbox.files.write("/tmp/respawn.py", program("respawn.py"), user="root")
    words = " ".join(f"'{argument}'" for argument in arguments)
    return attack_spawner(sandbox, f"python3 /tmp/respawn.py {words}")


@contextmanager
def in_time(what: str, limit_s: float = CALL_LIMIT_S) -> Iterator[None]:
    begun = time.monotonic()
    yield
    took = time.monotonic() - begun
    assert took < within(limit_s), f"{what} took {took:.1f} s"


def refused_spawners(server: Platform) -> int:
    return server.log().count("replace the spawner: ")


def start_attacks(server: Platform) -> list[Sandbox]:
    """Sandboxes whose root stops whatever the host starts inside, once that has worked."""
    attackers = [Sandbox.create(timeout=600) for _ in range(ATTACKERS)]
    for attacker in attackers:
        handle = attack(attacker, "stop")
        assert next(iter(handle))[0] == "stopping\n"
    return attackers


def test_nothing_of_the_host_shows_while_a_spawner_is_replaced(attacked: Platform) -> None:
    name = f"rf-host-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as marker:
        marker.bind(f"\0{name}")
        marker.listen()
        assert name in Path("/proc/net/unix").read_text()
        marks = (name, f":{attacked.port:04X} ", str(attacked.data_dir), "launchers.lock")
        boxes = [Sandbox.create(timeout=600) for _ in range(ATTACKERS)]
        handles = [attack(box, "look", str(RESPAWNS), *marks) for box in boxes]
        outcomes = [json.loads(handle.wait().stdout) for handle in handles]
        for box in boxes:
            box.kill()
    print(outcomes)
    assert [outcome["found"] for outcome in outcomes] == [[]] * ATTACKERS
    for outcome in outcomes:
        assert outcome["respawns"] == RESPAWNS
    # Many replacements were seen on their way, so what they would have shown would have been found.
    assert sum(outcome["early"] for outcome in outcomes) >= ATTACKERS * RESPAWNS / 10


def on_the_next_spawner(sandbox: Sandbox, what: str) -> dict[str, Any]:
    """What root inside did to a spawner that has not started a process yet. The program has to be there before that one."""
    sandbox.files.write("/tmp/waiting.py", program("waiting_spawner.py"), user="root")
    return json.loads(attack_spawner(sandbox, f"python3 /tmp/waiting.py {what}").wait().stdout)


def test_root_inside_cannot_trace_or_end_a_spawner_that_waits(sandbox: Sandbox) -> None:
    outcome = on_the_next_spawner(sandbox, "look")
    print(outcome)
    assert outcome["worked"] == [] and outcome["left"]
    # The same attempts reach what root inside may trace.
    assert len(outcome["worked_on_own"]) == 8, outcome
    if platform.machine() == "x86_64":
        assert outcome["own_kb"] < 64, "it waits before it has a C library"
    # It was the one that was looked at that starts this.
    assert root(sandbox, "pgrep -f '^ringfence spawner'").split() == [str(outcome["spawner"])]


def test_a_spawner_without_memory_for_its_first_request_is_replaced(sandbox: Sandbox) -> None:
    starved = on_the_next_spawner(sandbox, "starve")

    def starts() -> str:
        try:
            return root(sandbox, "pgrep -f '^ringfence spawner'", timeout=20)
        except (SandboxException, httpx.HTTPError):
            return ""

    now = until(starts, "another spawner starts processes", 60)
    assert now.split() != [str(starved["spawner"])]


def test_a_stopped_replacement_delays_no_other_sandbox(attacked: Platform) -> None:
    neighbour = Sandbox.create(timeout=600)
    attackers = start_attacks(attacked)
    took: dict[str, float] = {}

    @contextmanager
    def timed(what: str) -> Iterator[None]:
        begun = time.monotonic()
        yield
        took[what] = time.monotonic() - begun

    for number in range(150):
        with timed(f"create {number}"):
            box = Sandbox.create(timeout=600)
        assert box.commands.run("echo fine").stdout == "fine\n"
        with timed(f"delete {number}"):
            assert box.kill()
        if number > 30 and refused_spawners(attacked) >= ATTACKERS:
            break
        slowly(0.1)
    assert refused_spawners(attacked) >= ATTACKERS, "the attack never caught a replacement"
    # The machine may delay a few. The attack would delay one or more for each replacement that it caught.
    slow = {what: seconds for what, seconds in took.items() if seconds >= within(CALL_LIMIT_S)}
    assert len(slow) < ATTACKERS, slow
    with in_time("the neighbour's delete"):
        assert neighbour.kill()
    for attacker in attackers:
        with in_time("the attacker's delete"):
            assert attacker.kill()


def test_kill_9_in_the_middle_of_the_attack(attacked: Platform) -> None:
    keeper = Sandbox.create(timeout=600)
    attackers = start_attacks(attacked)
    for _ in range(3):
        seen = refused_spawners(attacked)
        # The platform dies right when a replacement stands still, or is about to.
        until(lambda: attacked.log().count("the spawner ended and is replaced") > seen, "a replacement begins", 60)
        attacked.kill()
        with in_time("the restart", READY_LIMIT_S):
            attacked.start()
        assert keeper.commands.run("echo kept").stdout == "kept\n"
        with in_time("a create"):
            box = Sandbox.create(timeout=600)
        assert box.kill()
    for attacker in attackers:
        with in_time("the attacker's delete"):
            assert attacker.kill()
    attackers = start_attacks(attacked)
    attacked.kill()
    with in_time("down", READY_LIMIT_S):
        assert attacked.down().returncode == 0


def launchers(server: Platform) -> list[int]:
    """Processes that hold the launchers' lock of this data directory."""
    lock = str(server.data_dir.resolve() / "launchers.lock")
    found = []
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.readlink(f"/proc/{name}/fd/1") == lock:
                found.append(int(name))
        except OSError:
            continue
    return found


def test_launchers_that_stand_still(attacked: Platform) -> None:
    """Deletes do not wait behind creates, and the next platform gets rid of launchers that do not end by themselves."""
    neighbour, keeper = Sandbox.create(timeout=600), Sandbox.create(timeout=600)
    stopped = launchers(attacked)
    assert len(stopped) >= 2
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    headers = {"X-API-Key": os.environ["E2B_API_KEY"]}
    with httpx.Client(timeout=None, limits=httpx.Limits(max_connections=700)) as client:
        with ThreadPoolExecutor(530) as pool:

            def create() -> None:
                # It loses its connection, or learns before that how long its launcher takes.
                with suppress(httpx.HTTPError):
                    assert client.post(f"{attacked.url}/sandboxes", headers=headers, json={"templateID": "base"}).status_code >= 500

            creates = [pool.submit(create) for _ in range(530)]
            until(lambda: len(Sandbox.list(limit=100).next_items()) >= 2, "the API answers")
            at_moment(2)
            with in_time("the neighbour's delete"):
                assert neighbour.kill()
            attacked.kill()
            for waiting in creates:
                waiting.result()
    with in_time("the restart", READY_LIMIT_S):
        attacked.start()
    assert not set(stopped) & set(launchers(attacked))
    assert keeper.commands.run("echo kept").stdout == "kept\n"
    assert [box.sandbox_id for box in Sandbox.list().next_items()] == [keeper.sandbox_id]
