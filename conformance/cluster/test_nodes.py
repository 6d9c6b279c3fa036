"""A server with three nodes: where sandboxes are placed, and what becomes of the others when a node or the server is gone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from e2b import NotFoundException, Sandbox

from harness.cluster import Cluster, Other, running_cluster
from harness.criu import criu_config
from harness.traffic import until

CONFIG = "[sandbox]\ndisk_mb = 256\n" + criu_config()
COUNT = "i=0; while :; do i=$((i+1)); echo $i > /tmp/count; sleep 0.05; done"
SANDBOXES = 9


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("n", numbered=True), CONFIG, more=2) as cluster:
        yield cluster


def nodes_of(cluster: Cluster) -> set[str]:
    """The ids of the nodes."""
    return {node["id"] for node in cluster.nodes() if node["state"] != "forgotten"}


def place_of(cluster: Cluster, sandbox_id: str) -> str:
    """The node that has a sandbox, as the operator is told."""
    shown = cluster.run("sandbox", "show", sandbox_id, "--format", "json")
    assert shown.returncode == 0, shown.stderr
    return json.loads(shown.stdout)["node"]


def counting() -> Sandbox:
    sandbox = Sandbox.create(timeout=600)
    sandbox.commands.run(f"setsid sh -c '{COUNT}' >/dev/null 2>&1 & echo $! > /tmp/pid", background=False)
    until(lambda: sandbox.files.exists("/tmp/count"), "it counts")
    return sandbox


def works(sandbox_id: str) -> None:
    """The program in a sandbox runs, and files come and go."""
    sandbox = Sandbox.connect(sandbox_id, timeout=600)
    assert sandbox.commands.run("kill -0 $(cat /tmp/pid) && echo alive").stdout == "alive\n"
    sandbox.files.write("/tmp/of", sandbox_id)
    assert sandbox.files.read("/tmp/of") == sandbox_id


@pytest.fixture(scope="module")
def spread(cluster: Cluster) -> Iterator[dict[str, list[str]]]:
    """Sandboxes that were created at the same time, by node. What uses them needs two on each node: those that are missing come later."""
    with ThreadPoolExecutor(SANDBOXES) as pool:
        made = [sandbox.sandbox_id for sandbox in pool.map(lambda _: counting(), range(SANDBOXES))]
    by_node: dict[str, list[str]] = {}
    for one in made:
        by_node.setdefault(place_of(cluster, one), []).append(one)

    def have_two() -> bool:
        if all(len(by_node.get(node, ())) >= 2 for node in nodes_of(cluster)):
            return True
        made.append(counting().sandbox_id)
        by_node.setdefault(place_of(cluster, made[-1]), []).append(made[-1])
        return False

    until(have_two, "each node has two", 60)
    yield by_node
    for one in made:
        Sandbox.kill(one)


def test_sandboxes_are_spread(cluster: Cluster, spread: dict[str, list[str]]) -> None:
    assert set(spread) == nodes_of(cluster)
    counts = {node: len(ids) for node, ids in spread.items()}
    # Their hosts are the same one, so what each has is what counts. How many have come to each at once depends on how late reports come.
    assert {node["id"]: node["sandboxes"] for node in cluster.nodes()} == counts


def test_each_is_reached_where_it_is(cluster: Cluster, spread: dict[str, list[str]]) -> None:
    for ids in spread.values():
        sandbox = Sandbox.connect(ids[0], timeout=600)
        sandbox.commands.run(f"mkdir -p /tmp/served && echo {ids[0]} > /tmp/served/index.html")
        sandbox.commands.run("python3 -m http.server 8000 --directory /tmp/served", background=True)
        headers = {"Host": sandbox.get_host(8000)}

        def served(headers: dict[str, str] = headers, want: str = ids[0]) -> bool:
            answer = httpx.get(f"{cluster.url}/index.html", headers=headers, timeout=10)
            return answer.status_code == 200 and answer.text == f"{want}\n"

        until(served, "its port is served")


def test_a_paused_one_is_resumed_and_forked_where_it_is(cluster: Cluster, spread: dict[str, list[str]]) -> None:
    key = {"X-API-Key": cluster.credentials()["E2B_API_KEY"]}
    for node, ids in spread.items():
        sandbox = Sandbox.connect(ids[1], timeout=600)
        sandbox.pause()
        works(ids[1])
        assert place_of(cluster, ids[1]) == node
        forked = httpx.post(f"{cluster.url}/sandboxes/{ids[1]}/fork", headers=key, json={"timeout": 120}, timeout=60)
        assert forked.status_code == 201, forked.text
        fork = forked.json()[0]["sandbox"]["sandboxID"]
        assert place_of(cluster, fork) == node
        works(fork)
        assert Sandbox.kill(fork)


def test_a_snapshot_is_started_where_its_layers_are(cluster: Cluster, spread: dict[str, list[str]]) -> None:
    for node, ids in spread.items():
        sandbox = Sandbox.connect(ids[-1], timeout=600)
        sandbox.files.write("/tmp/in-snapshot", node)
        template = sandbox.create_snapshot().snapshot_id
        for _ in range(2):
            started = Sandbox.create(template, timeout=120)
            assert started.files.read("/tmp/in-snapshot") == node
            assert place_of(cluster, started.sandbox_id) == node
            started.kill()


def test_a_node_that_is_killed_leaves_the_others_working(cluster: Cluster, spread: dict[str, list[str]]) -> None:
    other: Other = cluster.others[0]
    other.kill()
    until(lambda: {node["id"]: node["state"] for node in cluster.nodes()}[other.id] == "away", "the node is away")
    for node, ids in spread.items():
        for one in ids:
            if node != other.id:
                works(one)
    with ThreadPoolExecutor(4) as pool:
        made = [sandbox.sandbox_id for sandbox in pool.map(lambda _: counting(), range(4))]
    # Where depends on how busy the others are.
    assert {place_of(cluster, one) for one in made} <= nodes_of(cluster) - {other.id}
    for one in made:
        assert Sandbox.kill(one)
    listed = {item.sandbox_id for item in Sandbox.list().next_items()}
    assert {one for ids in spread.values() for one in ids} <= listed
    other.launch()
    until(lambda: {node["id"]: node["state"] for node in cluster.nodes()}[other.id] == "connected", "it is back", 40)
    for ids in spread.values():
        for one in ids:
            works(one)


def test_a_server_that_is_killed_finds_all_nodes_again(cluster: Cluster, spread: dict[str, list[str]]) -> None:
    missing = cluster.others[1]
    hosts = {one: Sandbox.connect(one, timeout=600).get_host(49983) for one in spread[missing.id]}
    cluster.kill()
    missing.kill()
    cluster.launch_server()
    cluster.wait_ready()
    key = {"X-API-Key": cluster.credentials()["E2B_API_KEY"]}
    for node, ids in spread.items():
        for one in ids:
            if node != missing.id:
                works(one)
                continue
            # Listed, and 503 for whoever wants to do something with it.
            assert httpx.get(f"{cluster.url}/sandboxes/{one}", headers=key, timeout=10).status_code == 200
            refused = httpx.delete(f"{cluster.url}/sandboxes/{one}", headers=key, timeout=10)
            assert refused.status_code == 503 and refused.json()["message"], refused.text
            assert httpx.get(f"{cluster.url}/health", headers={"Host": hosts[one]}, timeout=10).status_code == 503
    missing.launch()
    cluster.wait_ready()
    for ids in spread.values():
        for one in ids:
            works(one)


def test_a_forgotten_node_takes_its_own_sandboxes_alone(cluster: Cluster, spread: dict[str, list[str]]) -> None:
    other = cluster.others[1]
    lost = spread.pop(other.id)
    assert cluster.run("node", "forget", other.id).returncode == 0
    listed = lambda: {item.sandbox_id for item in Sandbox.list().next_items()}  # noqa: E731
    until(lambda: not set(lost) & listed(), "what was on it is gone")
    with pytest.raises(NotFoundException):
        Sandbox.connect(lost[0])
    for ids in spread.values():
        for one in ids:
            works(one)
