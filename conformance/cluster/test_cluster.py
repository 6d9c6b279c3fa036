"""A server and a node as two processes: what a program does, and what becomes of its sandboxes when one of them, or what is
between them, is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from e2b import NotFoundException, Sandbox

from harness.cluster import Cluster, running_cluster
from harness.criu import criu_config
from harness.traffic import until

CONFIG = "[sandbox]\ndisk_mb = 256\n" + criu_config()
# Counts in a file, so that a gap or a restart would show, and never ends.
COUNT = "i=0; while :; do i=$((i+1)); echo $i > /tmp/count; sleep 0.05; done"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("c", numbered=True), CONFIG) as cluster:
        yield cluster


@pytest.fixture
def counting(cluster: Cluster) -> Iterator[Sandbox]:
    """A sandbox with a program that counts."""
    sandbox = Sandbox.create(timeout=600)
    sandbox.commands.run(f"setsid sh -c '{COUNT}' >/dev/null 2>&1 & echo $! > /tmp/pid", background=False)
    until(lambda: sandbox.files.exists("/tmp/count"), "it counts")
    yield sandbox
    sandbox.kill()


def count(sandbox: Sandbox) -> int:
    return int(sandbox.commands.run("cat /tmp/count || (sleep 0.02; cat /tmp/count)").stdout.strip() or 0)


def takeovers(cluster: Cluster) -> int:
    """How often a server has taken the node over so far."""
    return cluster.log().count("ready: the node was taken over")


def goes_on(cluster: Cluster, sandbox: Sandbox, before: int) -> None:
    """The program in the sandbox is still the same, and has counted on."""
    again = Sandbox.connect(sandbox.sandbox_id, timeout=600)
    assert again.commands.run("kill -0 $(cat /tmp/pid) && echo alive").stdout == "alive\n", cluster.log_tail(20)
    until(lambda: count(again) > before, "it goes on counting")


def test_a_program(cluster: Cluster) -> None:
    sandbox = Sandbox.create(timeout=300, metadata={"of": "two processes"})
    assert sandbox.commands.run("echo hello").stdout == "hello\n"
    data = bytes(range(256)) * 8192
    sandbox.files.write("big", data)
    assert sandbox.files.read("big", format="bytes") == data

    sandbox.commands.run("echo served > index.html")
    sandbox.commands.run("python3 -m http.server 8000", background=True)
    host = sandbox.get_host(8000)
    headers = {"Host": host}

    def served() -> bool:
        answer = httpx.get(f"{cluster.url}/index.html", headers=headers, timeout=10)
        return answer.status_code == 200 and answer.text == "served\n"

    until(served, "its port is served")

    kept = sandbox.commands.run("exec sleep 1000", background=True)
    sandbox.pause()
    again = Sandbox.connect(sandbox.sandbox_id, timeout=300)
    assert kept.pid in {process.pid for process in again.commands.list()}
    until(served, "its port is served")
    assert again.files.read("big", format="bytes") == data

    key = {"X-API-Key": cluster.credentials()["E2B_API_KEY"]}
    forked = httpx.post(f"{cluster.url}/sandboxes/{again.sandbox_id}/fork", headers=key, json={"timeout": 120}, timeout=60)
    assert forked.status_code == 201, forked.text
    (fork,) = [Sandbox.connect(fork["sandbox"]["sandboxID"], timeout=120) for fork in forked.json()]
    assert kept.pid in {process.pid for process in fork.commands.list()}
    fork.files.write("big", b"changed")
    assert again.files.read("big", format="bytes") == data
    assert fork.kill()
    assert again.kill()
    with pytest.raises(NotFoundException):
        Sandbox.connect(sandbox.sandbox_id)


def test_a_server_that_is_killed_leaves_sandboxes_running(cluster: Cluster, counting: Sandbox) -> None:
    before = count(counting)
    cluster.kill()
    assert cluster.node and cluster.node.poll() is None
    cluster.launch()
    cluster.wait_ready()
    goes_on(cluster, counting, before)


def test_without_its_node_a_server_says_so_and_goes_on_afterwards(cluster: Cluster, counting: Sandbox) -> None:
    before, taken = count(counting), takeovers(cluster)
    cluster.relay.cut()
    until(lambda: cluster.nodes()[-1]["state"] == "away", "the node is away")
    created = httpx.post(
        f"{cluster.url}/sandboxes",
        headers={"X-API-Key": cluster.credentials()["E2B_API_KEY"]},
        json={"templateID": "base", "timeout": 60},
        timeout=30,
    )
    assert created.status_code == 503 and "node" in created.json()["message"], created.text
    agent = {"Host": counting.get_host(49983)}
    inside = httpx.get(f"{cluster.url}/health", headers=agent, timeout=30)
    assert inside.status_code == 503, inside.text
    # What the database knows is answered.
    assert counting.sandbox_id in {item.sandbox_id for item in Sandbox.list().next_items()}
    cluster.relay.mend()
    until(lambda: cluster.nodes()[-1]["state"] == "connected", "the node is connected")
    goes_on(cluster, counting, before)
    assert httpx.get(f"{cluster.url}/health", headers=agent, timeout=30).status_code == 204
    # The server is the same, and was not restarted in itself: the connection alone was lost.
    assert takeovers(cluster) == taken
    Sandbox.create(timeout=60).kill()


def test_a_node_that_is_killed_adopts_its_sandboxes(cluster: Cluster, counting: Sandbox) -> None:
    before, taken = count(counting), takeovers(cluster)
    cluster.kill_node()
    cluster.launch_node()
    until(lambda: takeovers(cluster) > taken, "the server takes over", 40)
    goes_on(cluster, counting, before)


def test_nodes_join_once_and_are_forgotten(cluster: Cluster, tmp_path: Path) -> None:
    lost, taken = Sandbox.create(timeout=600), takeovers(cluster)
    (node,) = [node for node in cluster.nodes() if node["state"] == "connected"]
    assert node["sandboxes"] >= 1 and node["memory_available_bytes"] > 0
    assert cluster.run("node", "forget", node["id"]).returncode == 0
    until(lambda: "was forgotten" in cluster.node_log(), "the node is told")
    assert [found["state"] for found in cluster.nodes() if found["id"] == node["id"]] == ["forgotten"]
    # What was on it is lost, and says so.
    until(lambda: not Sandbox.list().next_items(), "its sandboxes are gone")
    with pytest.raises(NotFoundException):
        Sandbox.connect(lost.sandbox_id)
    token = cluster.token()
    cluster.terminate_node()
    wrong = f"{token[:-8]}{'A' * 8 if token[-8:] != 'A' * 8 else 'B' * 8}"
    for bad, why in (("rfn_", "no token"), ("something", "no token"), (wrong, "not one of this server")):
        failed = cluster.join(bad, tmp_path / "other")
        assert failed.returncode == 1 and why in failed.stderr, failed.stderr
    # The same host again is another node, which ends what it had.
    assert cluster.join(token).returncode == 0
    used = cluster.join(token, tmp_path / "other")
    assert used.returncode == 1 and "used already" in used.stderr, used.stderr
    cluster.launch_node()
    until(lambda: takeovers(cluster) > taken, "the server takes over", 40)
    until(lambda: cluster.nodes()[-1]["state"] == "connected", "it is connected")
    assert cluster.nodes()[-1]["id"] != node["id"]
    again = Sandbox.create(timeout=60)
    assert again.commands.run("echo hello").stdout == "hello\n"
    again.kill()
    for log in (cluster.log(), cluster.node_log()):
        assert token not in log and "PRIVATE KEY" not in log
        assert all(value not in log for name, value in cluster.credentials().items() if name.endswith("_KEY"))
    assert (cluster.node_dir / "link.json").stat().st_mode & 0o777 == 0o600
    assert not list(cluster.node_dir.glob("*.db")) and not (cluster.node_dir / "secret.key").exists()


def test_directories_are_not_mixed_up(cluster: Cluster) -> None:
    for directory, command, why in (
        (cluster.data_dir, "up", "of a server"),
        (cluster.data_dir, "down", "of a server"),
        (cluster.data_dir, "node", "of a server"),
        (cluster.node_dir, "up", "of a node"),
        (cluster.node_dir, "server", "of a node"),
    ):
        mixed = cluster.on(directory, command)
        assert mixed.returncode == 1 and why in mixed.stderr, (directory, command, mixed.stderr)
    backup = cluster.run("backup", "create", str(cluster.data_dir.parent / "backup"))
    assert backup.returncode == 1 and "cannot be backed up" in backup.stderr
