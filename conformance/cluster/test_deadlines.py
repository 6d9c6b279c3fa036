"""Sandboxes whose timeouts are reached while no server is there: their node ends or pauses them, and the next server knows."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from e2b import NotFoundException, Sandbox, SandboxException, SandboxQuery, SandboxState

from harness.cluster import Cluster, running_cluster
from harness.criu import criu_config, processes
from harness.elapse import nothing_for
from harness.ports import free_port
from harness.traffic import until

METRICS = f"127.0.0.1:{free_port()}"
CONFIG = f'metrics_listen = "{METRICS}"\n[sandbox]\ndisk_mb = 256\n' + criu_config()
COUNT = "i=0; while :; do i=$((i+1)); echo $i > /tmp/count; sleep 0.05; done"
# How long a node waits for a server.
GRACE_S = 10.0
# How long it may take to end or pause a few sandboxes.
ACTS_S = 15.0
# Timeouts that are reached while no server is there: one that is told to sandboxes that run, and one that is told with the start.
TOLD_S, STARTED_S = 3, 8


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("l", numbered=True), CONFIG, more=1) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def shown(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[None]:
    """A failed test shows the logs."""
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        print(cluster.log_tail())


def ask(cluster: Cluster, path: str, **parameters: Any) -> Any:
    key = {"X-API-Key": cluster.credentials()["E2B_API_KEY"]}
    answer = httpx.get(f"{cluster.url}{path}", headers=key, params=parameters, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()


def place_of(cluster: Cluster, box: Sandbox) -> str:
    shown = cluster.run("sandbox", "show", box.sandbox_id, "--format", "json")
    assert shown.returncode == 0, shown.stderr
    return json.loads(shown.stdout)["node"]


def counting(timeout: int, on_timeout: str = "kill") -> Sandbox:
    box = Sandbox.create(timeout=timeout, lifecycle={"on_timeout": on_timeout})
    box.commands.run(f"setsid sh -c '{COUNT}' >/dev/null 2>&1 & echo $! > /tmp/pid", background=False)
    box.files.write("/tmp/of", box.sandbox_id)
    return box


def works(box: Sandbox) -> None:
    """The program in a sandbox is the same, and its files are."""
    again = Sandbox.connect(box.sandbox_id, timeout=600)
    assert again.commands.run("kill -0 $(cat /tmp/pid) && echo alive").stdout == "alive\n"
    assert again.files.read("/tmp/of") == box.sandbox_id
    before = again.files.read("/tmp/count")
    until(lambda: again.files.read("/tmp/count") not in ("", before), "it counts")


def paused(box: Sandbox) -> bool:
    listed = Sandbox.list(SandboxQuery(state=[SandboxState.PAUSED])).next_items()
    return box.sandbox_id in {info.sandbox_id for info in listed}


def told(cluster: Cluster, box: Sandbox) -> list[str]:
    """What clients are told of a sandbox, without changes of its timeout."""
    polled = ask(cluster, f"/events/sandboxes/{box.sandbox_id}", orderAsc="true", limit=100)
    words = [event["type"].rsplit(".", 1)[1] for event in polled]
    return [word for word in words if word != "updated"]


def counted(series: str) -> int:
    """What the server that runs has counted."""
    lines = httpx.get(f"http://{METRICS}/metrics", timeout=30).text.splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith(series))


def has_ended(cluster: Cluster, box: Sandbox, before: float) -> None:
    """Clients, the log and the events have a sandbox as one that a server has ended at its deadline. `before` is a moment before its start."""
    with pytest.raises(NotFoundException):
        Sandbox.connect(box.sandbox_id)
    until(lambda: told(cluster, box) == ["created", "killed"], lambda: f"its end is told: {told(cluster, box)}")
    (killed,) = [event for event in ask(cluster, f"/events/sandboxes/{box.sandbox_id}") if event["type"].endswith("killed")]
    assert 0 < killed["eventData"]["execution"]["execution_time"] <= (time.monotonic() - before) * 1000
    messages = [entry["message"] for entry in ask(cluster, f"/v2/sandboxes/{box.sandbox_id}/logs", limit=100)["logs"]]
    assert any("the timeout was reached" in message for message in messages), messages


def is_kept(cluster: Cluster, box: Sandbox) -> None:
    """The same of one that is paused; it goes on."""
    assert paused(box)
    until(lambda: told(cluster, box) == ["created", "paused"], lambda: f"its pause is told: {told(cluster, box)}")
    works(box)
    until(lambda: told(cluster, box) == ["created", "paused", "resumed"], lambda: f"its resume is told: {told(cluster, box)}")


@dataclass
class Left:
    """Sandboxes that a server has left when it was killed."""

    # Moments before their starts, and before the server was killed.
    before: float
    killed: float
    # By their nodes and by what they do at their timeouts, which they were told while they ran.
    by_node: dict[str, dict[str, Sandbox]]
    # One that was told its timeout with its start.
    started: Sandbox
    # One that was told a longer timeout after the one that the others have.
    extended: Sandbox

    @property
    def ending(self) -> list[Sandbox]:
        return [*(box for kinds in self.by_node.values() for box in kinds.values()), self.started]


def left(cluster: Cluster) -> Left | None:
    """Kills the server before a timeout is reached. If that came too late, the server runs again, and there are no sandboxes."""
    before = time.monotonic()
    by_node: dict[str, dict[str, Sandbox]] = {}
    boxes: list[Sandbox] = []

    def one(on_timeout: str) -> None:
        """A further sandbox, where there is none of this kind yet."""
        box = counting(600, on_timeout)
        if by_node.setdefault(place_of(cluster, box), {}).setdefault(on_timeout, box) is not box:
            box.kill()
        else:
            boxes.append(box)

    for kind in ("kill", "pause"):
        until(lambda: one(kind) or sum(kind in kinds for kinds in by_node.values()) == 2, "one is on each node")
    extended = counting(600)
    starts = time.monotonic()
    # A call that comes too late finds no sandbox.
    with contextlib.suppress(SandboxException):
        started = counting(STARTED_S)
        # What a server has not written yet when it is killed is lost, such as an event of a moment before.
        until(lambda: told(cluster, started)[:1] == ["created"], "its start is told", every_s=0.1)
        tells = time.monotonic()
        for box in (*boxes, extended):
            box.set_timeout(TOLD_S)
        extended.set_timeout(600)
        kills = time.monotonic()
        cluster.kill()
        killed = time.monotonic()
        if killed - tells < TOLD_S and killed - starts < STARTED_S:
            return Left(before, kills, by_node, started, extended)
        cluster.launch()
        cluster.wait_ready()
    for item in Sandbox.list().next_items():
        Sandbox.kill(item.sandbox_id)
    return None


def test_without_a_server_nodes_act_and_the_next_one_knows(cluster: Cluster) -> None:
    boxes = until(lambda: left(cluster), "a server is killed before a timeout is reached", 120)
    # One node keeps what it has taken over; the other is restarted, and nobody has told it anything since.
    other = cluster.others[0]
    other.kill()
    other.launch()
    nothing_for(GRACE_S - 1.0)
    are_alive = all(map(processes, boxes.ending))
    assert are_alive or time.monotonic() - boxes.killed >= GRACE_S, "a server would still be waited for"
    until(lambda: not any(map(processes, boxes.ending)), "they do not run any more", ACTS_S)
    assert time.monotonic() - boxes.killed > GRACE_S
    assert processes(boxes.extended)

    cluster.launch()
    cluster.wait_ready()
    for kinds in boxes.by_node.values():
        has_ended(cluster, kinds["kill"], boxes.before)
        is_kept(cluster, kinds["pause"])
    has_ended(cluster, boxes.started, boxes.before)
    works(boxes.extended)
    # Two were told to it while they ran, and one when it was started.
    assert counted('ringfence_sandbox_ends_total{reason="expired"}') == 3
    assert counted('ringfence_sandbox_pauses_total{reason="timeout"}') == 2
    for box in (boxes.extended, *(kinds["pause"] for kinds in boxes.by_node.values())):
        assert box.kill()


def test_a_server_that_cannot_reach_its_node_changes_no_timeout(cluster: Cluster) -> None:
    before = time.monotonic()
    ended, kept, lives = counting(600), counting(600, "pause"), counting(600)
    for box in (ended, kept):
        box.set_timeout(2)
    cluster.relay.cut()
    until(lambda: all(node["state"] == "away" for node in cluster.nodes()), "the nodes are away")
    key = {"X-API-Key": cluster.credentials()["E2B_API_KEY"]}
    path = f"{cluster.url}/sandboxes/{lives.sandbox_id}/timeout"
    refused = httpx.post(path, headers=key, json={"timeout": 1}, timeout=30)
    assert (refused.status_code, refused.json()["error_code"]) == (503, "node_away"), refused.text
    until(lambda: not processes(ended) and not processes(kept), "they do not run any more", GRACE_S + ACTS_S)
    assert processes(lives)
    cluster.relay.mend()
    until(lambda: all(node["state"] == "connected" for node in cluster.nodes()), "the nodes are back", 40)
    has_ended(cluster, ended, before)
    is_kept(cluster, kept)
    works(lives)
    for box in (kept, lives):
        assert box.kill()


def test_a_server_that_was_stopped_ends_nothing_that_was_extended(cluster: Cluster) -> None:
    def extended() -> Sandbox | None:
        box = counting(600)
        box.set_timeout(TOLD_S)
        try:
            box.set_timeout(600)
        except NotFoundException:
            return None
        return box

    box = until(extended, "a timeout is extended before it is reached", 60)
    assert cluster.process
    cluster.process.send_signal(signal.SIGSTOP)
    try:
        nothing_for(TOLD_S + 1.0)
        assert processes(box), "its timeout was extended"
    finally:
        cluster.process.send_signal(signal.SIGCONT)
    works(box)
    until(lambda: told(cluster, box) == ["created"], lambda: f"nothing but its start is told: {told(cluster, box)}")
    assert box.kill()
