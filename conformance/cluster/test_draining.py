"""A server with two nodes of which one drains: it gets no new sandboxes, what it has goes on, and its host can be restarted."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
from e2b import Sandbox, Template

from harness.cluster import Cluster, Other, running_cluster
from harness.criu import criu_config
from harness.patience import within
from harness.traffic import until

CONFIG = "[sandbox]\ndisk_mb = 256\n" + criu_config()
COUNT = "i=0; while :; do i=$((i+1)); echo $i > /tmp/count; sleep 0.05; done"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("d", numbered=True), CONFIG, more=1) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def ready(cluster: Cluster) -> Iterator[None]:
    """No node drains afterwards, and no sandbox is left."""
    yield
    for node in cluster.nodes():
        undrain(cluster, node["id"])
    for item in Sandbox.list().next_items():
        Sandbox.kill(item.sandbox_id)


def drain(cluster: Cluster, node: str, *flags: str) -> str:
    drained = cluster.run("node", "drain", node, *flags)
    assert drained.returncode == 0, drained.stderr
    return drained.stdout


def undrain(cluster: Cluster, node: str) -> None:
    undrained = cluster.run("node", "undrain", node)
    assert undrained.returncode == 0, undrained.stderr


def place_of(cluster: Cluster, sandbox_id: str) -> str:
    shown = cluster.run("sandbox", "show", sandbox_id, "--format", "json")
    assert shown.returncode == 0, shown.stderr
    return json.loads(shown.stdout)["node"]


def node_of(cluster: Cluster, node_id: str) -> dict[str, object]:
    return next(node for node in cluster.nodes() if node["id"] == node_id)


def one_on(cluster: Cluster, node: str, template: str | None = None) -> Sandbox:
    """A sandbox on a node, with a program that counts."""

    def made() -> Sandbox | None:
        sandbox = Sandbox.create(template, timeout=600)
        if place_of(cluster, sandbox.sandbox_id) == node:
            return sandbox
        sandbox.kill()
        return None

    sandbox = until(made, "a sandbox is on the node")
    sandbox.commands.run(f"setsid sh -c '{COUNT}' >/dev/null 2>&1 & echo $! > /tmp/pid")
    return sandbox


def works(sandbox_id: str) -> None:
    sandbox = Sandbox.connect(sandbox_id, timeout=600)
    assert sandbox.commands.run("kill -0 $(cat /tmp/pid) && echo alive").stdout == "alive\n"


def test_none_comes_after_the_answer_and_its_own_go_on(cluster: Cluster) -> None:
    drained, left = cluster.others[0].id, next(node["id"] for node in cluster.nodes() if node["id"] != cluster.others[0].id)
    kept = one_on(cluster, drained)
    created: list[tuple[float, str]] = []
    stop = threading.Event()

    def create() -> None:
        while not stop.is_set():
            begun = time.monotonic()
            sandbox = Sandbox.create(timeout=120)
            created.append((begun, place_of(cluster, sandbox.sandbox_id)))
            sandbox.kill()

    creating = [threading.Thread(target=create) for _ in range(2)]
    for thread in creating:
        thread.start()
    try:
        until(lambda: {place for _, place in list(created)} == {drained, left}, "both get some")
        said = drain(cluster, drained)
        answered = time.monotonic()
        until(lambda: sum(begun > answered for begun, _ in list(created)) >= 12, "more were created")
    finally:
        stop.set()
        for thread in creating:
            thread.join()
    assert {place for begun, place in created if begun > answered} == {left}
    assert "no new sandboxes" in said and "running" in said
    until(lambda: node_of(cluster, drained)["sandboxes"] == 1, "what was kept ready there has ended")
    shown = node_of(cluster, drained)
    assert shown["draining_at"] and shown["left"]["running"] == 1, shown
    listed = cluster.run("node", "list").stdout.splitlines()
    assert [("connected, draining" in line) for line in listed if drained in line] == [True]

    # Traffic, commands, a pause and a resume in place.
    works(kept.sandbox_id)
    kept.pause()
    works(kept.sandbox_id)
    assert place_of(cluster, kept.sandbox_id) == drained
    key = {"X-API-Key": cluster.credentials()["E2B_API_KEY"]}
    forked = httpx.post(f"{cluster.url}/sandboxes/{kept.sandbox_id}/fork", headers=key, json={"timeout": 60}, timeout=60)
    assert (forked.status_code, forked.json()["error_code"]) == (503, "node_draining")
    drain(cluster, left)
    refused = httpx.post(f"{cluster.url}/sandboxes", headers=key, json={"templateID": "base", "timeout": 60}, timeout=60)
    assert (refused.status_code, refused.json()["error_code"]) == (503, "node_draining")
    undrain(cluster, drained)
    again = Sandbox.create(timeout=60)
    assert place_of(cluster, again.sandbox_id) == drained
    assert kept.kill()


def test_a_drain_outlives_the_server_and_the_node(cluster: Cluster) -> None:
    other: Other = cluster.others[0]
    kept = one_on(cluster, other.id)
    drain(cluster, other.id)
    cluster.kill()
    cluster.launch()
    cluster.wait_ready()
    places = {place_of(cluster, Sandbox.create(timeout=60).sandbox_id) for _ in range(6)}
    assert other.id not in places
    other.kill()
    other.launch()
    cluster.wait_ready()
    until(lambda: node_of(cluster, other.id)["state"] == "connected", "it is back", 40)
    places = {place_of(cluster, Sandbox.create(timeout=60).sandbox_id) for _ in range(6)}
    assert other.id not in places
    works(kept.sandbox_id)
    undrain(cluster, other.id)
    one_on(cluster, other.id)


def test_the_command_waits_until_none_is_left_or_pauses_them(cluster: Cluster) -> None:
    node = cluster.others[0].id
    kept = one_on(cluster, node)
    waiting = subprocess.Popen(
        [cluster.binary, "node", "drain", node, "--wait", "--data-dir", cluster.data_dir],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=cluster.environment(),
    )
    try:
        until(lambda: "draining_at" in node_of(cluster, node), "it drains")
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(3)
        # Every other one there, as of the tests before.
        for item in Sandbox.list().next_items():
            if place_of(cluster, item.sandbox_id) == node:
                Sandbox.kill(item.sandbox_id)
        said, error = waiting.communicate(timeout=within(30))
    finally:
        waiting.kill()
        waiting.wait()
    assert waiting.returncode == 0, error
    assert "nothing is left" in said
    undrain(cluster, node)

    kept = one_on(cluster, node)
    said = drain(cluster, node, "--within", "1")
    assert "paused 1 on disk" in said and "nothing is left" in said
    left = {"running": 0, "paused_in_memory": 0, "paused_on_disk": 1}
    assert node_of(cluster, node)["left"] == left
    # Its processes are on the disk, and it goes on there.
    works(kept.sandbox_id)
    assert place_of(cluster, kept.sandbox_id) == node


def test_a_template_that_only_the_node_has(cluster: Cluster) -> None:
    """Without a blob store, its layers are on the node that has built it, where its sandboxes go on."""
    node = cluster.others[0].id
    rest = next(one["id"] for one in cluster.nodes() if one["id"] != node)
    drain(cluster, rest)
    Template.build(Template().from_template("base").run_cmd("echo built > /home/user/of"), alias="of-one-node")
    undrain(cluster, rest)
    kept = one_on(cluster, node, "of-one-node")
    drain(cluster, node)
    kept.pause()
    works(kept.sandbox_id)
    assert kept.commands.run("cat /home/user/of").stdout == "built\n"
    key = {"X-API-Key": cluster.credentials()["E2B_API_KEY"]}
    refused = httpx.post(f"{cluster.url}/sandboxes", headers=key, json={"templateID": "of-one-node", "timeout": 60}, timeout=60)
    assert (refused.status_code, refused.json()["error_code"]) == (503, "node_draining"), refused.text
    # Others are not affected, and builds are not either.
    assert place_of(cluster, Sandbox.create(timeout=60).sandbox_id) == rest
    Template.build(Template().from_template("base").run_cmd("echo other > /home/user/of"), alias="of-the-other")
    assert place_of(cluster, Sandbox.create("of-the-other", timeout=60).sandbox_id) == rest
    undrain(cluster, node)
    assert one_on(cluster, node, "of-one-node").commands.run("cat /home/user/of").stdout == "built\n"
