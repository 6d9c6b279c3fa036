"""What is paused is copied to a bucket, and goes on on another node when its own is lost, drains, or was forgotten."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox

from harness.counting import count, goes_on, made, memories, memories_of, runs_once
from harness.criu import criu_config
from harness.patience import within
from harness.ports import free_port
from harness.s3 import Gateway
from harness.servers import Node, Server, Service, running_service
from harness.traffic import until

METRICS = free_port()
# Running sandboxes of each node.
MOST = 4
LIMITS = f"[sandbox]\ndisk_mb = 256\n[pool]\nbase = 0\n[capacity]\nmax_sandboxes = {MOST}\n"
CONFIG = f'metrics_listen = "127.0.0.1:{METRICS}"\n' + LIMITS + criu_config()


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    gateway = Gateway(Path(tmp_path_factory.mktemp("g", numbered=True)))
    gateway.start()
    yield gateway
    gateway.close()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, gateway: Gateway) -> Iterator[Service]:
    """A server on PostgreSQL with two nodes."""
    work = tmp_path_factory.mktemp("c", numbered=True)
    # Whatever nodes have fetched is too much.
    bucket = gateway.config().replace("[blobs]", "[blobs]\ncache_mb = 0")
    with running_service(work, servers=1, config=CONFIG + bucket, is_placed=False) as service:
        yield service


@pytest.fixture(autouse=True)
def shown(service: Service, gateway: Gateway, request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test begins with both nodes, without a sandbox and an empty bucket. A failed one shows the logs."""
    server(service).use()
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        print(service.log_tail(60))
    try:
        launch(service)
        for item in Sandbox.list().next_items():
            Sandbox.kill(item.sandbox_id)
        until(lambda: not copies(gateway), lambda: f"nothing is left in the bucket: {copies(gateway)}")
        for node in service.nodes:
            until(lambda node=node: not kept(node), "nothing is kept on a node")
    except BaseException:
        print(service.log_tail(200))
        raise


def server(service: Service) -> Server:
    return service.servers[0]


def launch(service: Service) -> None:
    for node in service.nodes:
        if node.process is None:
            # Else the connection of the process before may still be listed, and counts below.
            until(lambda node=node: node.id not in server(service).serves(), "the server knows that the node is gone")
            node.launch()
    until(lambda: len(server(service).serves()) == 2, "both nodes are served")


def kill(service: Service, node: Node) -> None:
    assert node.process
    node.process.kill()
    node.process.wait()
    node.process = None
    # A resume that began before would make its copy that of an earlier pause.
    until(lambda: node.id not in server(service).serves(), "the server knows that the node is gone")


def copies(gateway: Gateway) -> list[Path]:
    # Folders may go while they are listed, which this ignores.
    return [Path(folder) / name for folder, _, names in os.walk(gateway.objects / "parcels") for name in names]


def largest_chunk(gateway: Gateway, sandbox: Sandbox) -> Path:
    directory = gateway.objects / "parcels" / sandbox.sandbox_id
    return max((path for path in directory.iterdir() if path.suffix != ".manifest"), key=lambda path: path.stat().st_size)


def kept(node: Node) -> list[str]:
    """The sandboxes that a node keeps on its disk."""
    return [path.name for path in (node.node_dir / "kept").iterdir() if not path.name.startswith("removed.")]


def place_of(service: Service, sandbox_id: str) -> Node:
    """The node of a sandbox, as the database says."""
    found = service.postgres.ask(f"SELECT node_id FROM sandboxes WHERE id = '{sandbox_id}'").strip()
    return next(node for node in service.nodes if node.id == found)


def other(service: Service, node: Node) -> Node:
    return next(found for found in service.nodes if found is not node)


def until_copied(service: Service, sandbox_id: str) -> None:
    sql = f"SELECT COUNT(*) FROM sandboxes WHERE id = '{sandbox_id}' AND state = 'paused' AND parcel_run = execution_id"
    until(lambda: service.postgres.ask(sql).strip() == "1", "a complete copy is in the bucket")


def metric(name: str) -> float:
    """What the server says of its copies."""
    text = httpx.get(f"http://127.0.0.1:{METRICS}/metrics", timeout=10).text
    return float(next(line for line in text.splitlines() if line.startswith(f"ringfence_{name} ")).split()[-1])


def pause(sandbox: Sandbox, service: Service, memory: bool = True) -> None:
    headers = {"X-API-Key": server(service).credentials()["E2B_API_KEY"]}
    url = f"{server(service).url}/sandboxes/{sandbox.sandbox_id}/pause"
    paused = httpx.post(url, headers=headers, json={"memory": memory}, timeout=60)
    assert paused.status_code == 204, paused.text


def test_processes_go_on_on_another_node_when_theirs_is_lost(service: Service, gateway: Gateway) -> None:
    sandbox, hash_before = made()
    before = count(sandbox)
    pause(sandbox, service)
    until_copied(service, sandbox.sandbox_id)
    lost = place_of(service, sandbox.sandbox_id)
    assert len(kept(lost)) == 1
    until(lambda: metric('paused_copies{state="complete"}') == 1, "it counts as copied")
    assert metric('paused_copies{state="waiting"}') == metric('paused_copies{state="failing"}') == 0
    assert metric("copy_uploaded_bytes_total") >= sum(path.stat().st_size for path in copies(gateway) if not path.suffix)
    assert abs(metric("copy_last_upload_timestamp_seconds") - time.time()) < 60
    fetched, downloads = metric("copy_downloaded_bytes_total"), metric('copy_downloads_total{outcome="complete"}')
    for path in copies(gateway):
        assert b"RINGFENCE" not in path.read_bytes() and hash_before[:32].encode() not in path.read_bytes()
    kill(service, lost)
    sandbox = Sandbox.connect(sandbox.sandbox_id, timeout=600)
    assert place_of(service, sandbox.sandbox_id) is other(service, lost)
    assert metric('copy_downloads_total{outcome="complete"}') == downloads + 1
    assert metric("copy_downloaded_bytes_total") > fetched
    goes_on(sandbox, before, hash_before)
    # The node comes back, and has nothing that could run.
    launch(service)
    until(lambda: not kept(lost), "the older copy is gone")
    runs_once(sandbox)
    goes_on(sandbox, count(sandbox), hash_before)
    # Its next copy has what has changed alone.
    pause(sandbox, service)
    until_copied(service, sandbox.sandbox_id)
    sandbox = Sandbox.connect(sandbox.sandbox_id, timeout=600)
    goes_on(sandbox, before, hash_before)
    assert sandbox.kill()
    until(lambda: not copies(gateway), "nothing is left of it in the bucket")


def test_files_alone_go_on_after_the_server_was_restarted(service: Service) -> None:
    sandbox, hash_before = made()
    pause(sandbox, service, memory=False)
    until_copied(service, sandbox.sandbox_id)
    lost = place_of(service, sandbox.sandbox_id)
    kill(service, lost)
    # No session of the node is left.
    assert server(service).terminate() == 0
    server(service).start()
    until(lambda: len(server(service).serves()) == 1, "the other node is served")
    sandbox = Sandbox.connect(sandbox.sandbox_id, timeout=600)
    assert place_of(service, sandbox.sandbox_id) is other(service, lost)
    assert sandbox.commands.run("md5sum ~/random").stdout == hash_before
    sandbox.commands.run("echo written here > ~/note")
    launch(service)
    until(lambda: not kept(lost), "the older copy is gone")
    runs_once(sandbox)
    assert sandbox.files.read("/home/user/note") == "written here\n"


def test_what_is_paused_leaves_a_node_that_drains(service: Service) -> None:
    sandbox, hash_before = made()
    before = count(sandbox)
    pause(sandbox, service)
    until_copied(service, sandbox.sandbox_id)
    drained = place_of(service, sandbox.sandbox_id)
    assert server(service).run("node", "drain", drained.id).returncode == 0
    try:
        sandbox = Sandbox.connect(sandbox.sandbox_id, timeout=600)
        assert place_of(service, sandbox.sandbox_id) is other(service, drained)
        goes_on(sandbox, before, hash_before)
        # In the same session.
        until(lambda: not kept(drained), "the older copy is gone")
        runs_once(sandbox)
    finally:
        assert server(service).run("node", "undrain", drained.id).returncode == 0


def test_what_a_node_has_lost_goes_on_from_its_copy(service: Service) -> None:
    sandbox, hash_before = made()
    before = count(sandbox)
    pause(sandbox, service)
    until_copied(service, sandbox.sandbox_id)
    lost = place_of(service, sandbox.sandbox_id)
    kill(service, lost)
    for path in [*(lost.node_dir / "kept").iterdir(), *(lost.node_dir / "disks").glob("*.img")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    launch(service)
    assert [item.sandbox_id for item in Sandbox.list().next_items()] == [sandbox.sandbox_id]
    # Its node is connected, which is not what keeps it from going on.
    for node in service.nodes:
        assert server(service).run("node", "drain", node.id).returncode == 0
    try:
        headers = {"X-API-Key": server(service).credentials()["E2B_API_KEY"]}
        url = f"{server(service).url}/sandboxes/{sandbox.sandbox_id}"
        refused = httpx.post(f"{url}/connect", headers=headers, json={"timeout": 60}, timeout=60)
        answer = refused.json()
        assert (refused.status_code, answer["error_code"]) == (503, "node_lost_sandbox"), refused.text
        assert "is connected and has lost the sandbox, and every node that can use the copy drains" in answer["message"]
        assert refused.headers["Retry-After"] == "10"
        # To traffic, which anyone may send, less is said.
        visited = httpx.get(server(service).url, headers={"Host": sandbox.get_host(3000)}, timeout=60)
        assert (visited.status_code, visited.json()["message"]) == (503, "The sandbox is paused, and cannot be resumed at present")
        assert "bucket" not in visited.text and lost.id not in visited.text
        assert httpx.get(url, headers=headers, timeout=60).json()["state"] == "paused"
    finally:
        for node in service.nodes:
            assert server(service).run("node", "undrain", node.id).returncode == 0
    sandbox = Sandbox.connect(sandbox.sandbox_id, timeout=600)
    goes_on(sandbox, before, hash_before)
    runs_once(sandbox)


def test_the_operator_kills_what_a_lost_node_has_paused(service: Service) -> None:
    sandbox, _ = made()
    pause(sandbox, service)
    until_copied(service, sandbox.sandbox_id)
    lost = place_of(service, sandbox.sandbox_id)
    kill(service, lost)
    shown = lambda: json.loads(server(service).run("sandbox", "show", sandbox.sandbox_id, "--format", "json").stdout)  # noqa: E731
    until(lambda: shown()["is_node_away"], "the node is away")
    # No session of the node is left.
    assert server(service).terminate() == 0
    server(service).start()
    ended = server(service).run("sandbox", "kill", sandbox.sandbox_id)
    assert ended.returncode == 0 and sandbox.sandbox_id in ended.stdout, ended.stderr
    assert Sandbox.list().next_items() == []
    log = server(service).run("sandbox", "logs", sandbox.sandbox_id, "--format", "json").stdout
    assert '"operator"' in log, log
    assert len(kept(lost)) == 1
    launch(service)
    until(lambda: not kept(lost), "the node throws away what it has")


def test_copies_of_what_has_ended_are_removed_and_no_others(service: Service, gateway: Gateway) -> None:
    sandbox, hash_before = made()
    before = count(sandbox)
    pause(sandbox, service)
    until_copied(service, sandbox.sandbox_id)
    own = set(copies(gateway))
    ended = gateway.objects / "parcels" / "iended0000000000000000"
    left = [ended / ("ab" * 32), ended / ("cd" * 32), ended / f"{'0f' * 16}.manifest"]
    foreign = [ended / "note.txt", gateway.objects / "parcels" / "NOT A SANDBOX" / ("ab" * 32)]
    try:
        for path in [*left, *foreign]:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"left")
        done = server(service).run("gc")
        assert done.returncode == 0, done.stderr
        assert [path for path in left if path.exists()] == []
        assert all(path.exists() for path in foreign)
        assert own <= set(copies(gateway))
    finally:
        for path in foreign:
            shutil.rmtree(path.parent, ignore_errors=True)
    kill(service, place_of(service, sandbox.sandbox_id))
    goes_on(Sandbox.connect(sandbox.sandbox_id, timeout=600), before, hash_before)


def test_a_bucket_that_is_away_holds_up_no_pause(service: Service, gateway: Gateway) -> None:
    sandbox, _ = made()
    gateway.stop()
    pause(sandbox, service)
    # It goes on where it is.
    sandbox = Sandbox.connect(sandbox.sandbox_id, timeout=600)
    assert sandbox.commands.run("kill -0 $(cat /tmp/pid) && echo alive").stdout == "alive\n"
    pause(sandbox, service)
    until(lambda: metric('paused_copies{state="failing"}') == 1, "it counts as failing")
    gateway.start()
    until_copied(service, sandbox.sandbox_id)
    until(lambda: metric('paused_copies{state="complete"}') == 1, "it counts as copied")
    assert metric('paused_copies{state="failing"}') == 0


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_a_damaged_copy_is_made_again_by_the_node_that_has_the_sandbox(service: Service, gateway: Gateway, damage: str) -> None:
    sandbox, hash_before = made()
    before = count(sandbox)
    pause(sandbox, service)
    until_copied(service, sandbox.sandbox_id)
    sql = f"SELECT parcel_id FROM sandboxes WHERE id = '{sandbox.sandbox_id}'"
    first = service.postgres.ask(sql).strip()
    chunk = largest_chunk(gateway, sandbox)
    content = chunk.read_bytes()
    if damage == "changed":
        chunk.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        chunk.unlink()
    away = place_of(service, sandbox.sandbox_id)
    kill(service, away)
    headers = {"X-API-Key": server(service).credentials()["E2B_API_KEY"]}
    url = f"{server(service).url}/sandboxes/{sandbox.sandbox_id}/connect"
    refused = httpx.post(url, headers=headers, json={"timeout": 60}, timeout=60)
    assert refused.status_code == 503 and "blob store is damaged" in refused.text, refused.text
    assert service.postgres.ask(sql).strip() == f"{first}!"
    # It is paused all the time, and nobody asks for it.
    launch(service)
    until(lambda: service.postgres.ask(sql).strip().rstrip("!") != first, "another copy is complete")
    assert chunk.read_bytes() == content
    kill(service, away)
    sandbox = Sandbox.connect(sandbox.sandbox_id, timeout=600)
    assert place_of(service, sandbox.sandbox_id) is other(service, away)
    goes_on(sandbox, before, hash_before)


def test_a_copy_that_was_changed_is_refused_and_outlives_a_node_that_is_forgotten(service: Service, gateway: Gateway) -> None:
    lost, left = service.nodes
    assert server(service).run("node", "drain", left.id).returncode == 0
    try:
        sandbox, hash_before = made()
        killed = Sandbox.create(timeout=600)
    finally:
        assert server(service).run("node", "undrain", left.id).returncode == 0
    before = count(sandbox)
    for one in (sandbox, killed):
        pause(one, service)
    for one in (sandbox, killed):
        until_copied(service, one.sandbox_id)
    chunk = largest_chunk(gateway, sandbox)
    content = chunk.read_bytes()
    changed = bytearray(content)
    changed[len(changed) // 2] ^= 1
    chunk.write_bytes(changed)
    kill(service, lost)
    forgotten = server(service).run("node", "forget", lost.id)
    assert forgotten.returncode == 0, forgotten.stderr
    headers = {"X-API-Key": server(service).credentials()["E2B_API_KEY"]}
    url = f"{server(service).url}/sandboxes/{sandbox.sandbox_id}"
    refused = httpx.post(f"{url}/connect", headers=headers, json={"timeout": 60}, timeout=60)
    assert refused.status_code == 503 and "blob store is damaged" in refused.text, refused.text
    assert kept(left) == [], "nothing half is left"
    assert httpx.get(url, headers=headers, timeout=60).json()["state"] == "paused"
    # One that nobody resumes again ends without its node.
    assert Sandbox.kill(killed.sandbox_id)
    until(lambda: not (gateway.objects / "parcels" / killed.sandbox_id).exists(), "nothing is left of it in the bucket")
    listed = json.loads(server(service).run("sandbox", "list", "--format", "json").stdout)
    assert [one["id"] for one in listed] == [sandbox.sandbox_id]
    chunk.write_bytes(content)
    sandbox = Sandbox.connect(sandbox.sandbox_id, timeout=600)
    assert place_of(service, sandbox.sandbox_id) is left
    goes_on(sandbox, before, hash_before)
    # The host joins again, as another node, without what it had.
    lost.down()
    for name in ("link.json", "node.json"):
        (lost.node_dir / name).unlink(missing_ok=True)
    lost.join(server(service))


def restored(service: Service, snapshot: str) -> Sandbox:
    """A sandbox with the memory of a snapshot. One that a busy machine started from files alone had that too late; it arrives all the
    same."""
    headers = {"X-API-Key": server(service).credentials()["E2B_API_KEY"]}

    def started() -> Sandbox | None:
        child = Sandbox.create(snapshot, timeout=600)
        url = f"{server(service).url}/v2/sandboxes/{child.sandbox_id}/logs"

        def events() -> set[str]:
            return {entry["fields"].get("event_type", "") for entry in httpx.get(url, headers=headers, timeout=60).json()["logs"]}

        until(lambda: "sandbox_start" in events(), "its log says that it was started")
        if "memory_not_restored" not in events():
            return child
        child.kill()
        return None

    return until(started, "a sandbox goes on with the memory", 120)


def test_a_snapshot_goes_on_with_its_processes_on_another_node(service: Service, gateway: Gateway) -> None:
    """Its memory is fetched once by the node that lacks it, goes from there when it is not used and takes too much space, comes back,
    and is nowhere once the snapshot is deleted."""
    sandbox, hash_before = made()
    before = count(sandbox)
    snapshot = sandbox.create_snapshot()
    until(lambda: any(path.suffix == ".manifest" for path in memories(gateway)), "its memory is in the bucket", 60)
    for path in memories(gateway):
        assert b"RINGFENCE" not in path.read_bytes() and hash_before[:32].encode() not in path.read_bytes()
    owner = place_of(service, sandbox.sandbox_id)
    sandbox.kill()
    assert len(memories_of(owner)) == 1 and not memories_of(other(service, owner))
    kill(service, owner)
    until(lambda: len(server(service).serves()) == 1, "the node is lost")
    fetched = metric('copy_downloads_total{outcome="complete"}')
    first, second = (restored(service, snapshot.snapshot_id) for _ in range(2))
    for child in (first, second):
        assert place_of(service, child.sandbox_id) is other(service, owner)
        goes_on(child, before, hash_before)
    assert metric('copy_downloads_total{outcome="complete"}') == fetched + 1
    assert len(memories_of(other(service, owner))) == 1
    first.kill(), second.kill()
    launch(service)
    assert server(service).run("gc").returncode == 0
    assert [len(memories_of(node)) for node in service.nodes] == [1, 1], "it was used just now"
    # In a new session it was not used yet.
    kill(service, other(service, owner))
    launch(service)
    assert server(service).run("gc").returncode == 0
    assert len(memories_of(owner)) == 1 and not memories_of(other(service, owner))
    kill(service, owner)
    third = restored(service, snapshot.snapshot_id)
    goes_on(third, before, hash_before)
    assert metric('copy_downloads_total{outcome="complete"}') == fetched + 2
    third.kill()
    launch(service)
    assert Sandbox.delete_snapshot(snapshot.snapshot_id)
    until(lambda: not memories(gateway), lambda: f"nothing is left in the bucket: {memories(gateway)}", 60)
    for node in service.nodes:
        until(lambda node=node: not memories_of(node), "no node has its memory")


def test_a_snapshot_whose_copy_is_damaged_starts_from_files_and_is_copied_again(service: Service, gateway: Gateway) -> None:
    sandbox, hash_before = made()
    snapshot = sandbox.create_snapshot()
    until(lambda: any(path.suffix == ".manifest" for path in memories(gateway)), "its memory is in the bucket", 60)
    owner = place_of(service, sandbox.sandbox_id)
    sandbox.kill()
    largest = max(memories(gateway), key=lambda path: path.stat().st_size)
    content = largest.read_bytes()
    largest.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    kill(service, owner)
    until(lambda: len(server(service).serves()) == 1, "the node is lost")
    child = Sandbox.create(snapshot.snapshot_id, timeout=600)
    assert child.commands.run("md5sum ~/random").stdout == hash_before
    headers = {"X-API-Key": server(service).credentials()["E2B_API_KEY"]}
    url = f"{server(service).url}/sandboxes/{child.sandbox_id}/logs"
    until(lambda: "memory_not_restored" in httpx.get(url, headers=headers, timeout=30).text, "its log says so")
    assert not memories_of(other(service, owner))
    child.kill()
    # The node that has the memory is back, and makes another copy.
    launch(service)
    until(lambda: any(path.suffix == ".manifest" for path in memories(gateway)), "it is copied again", 60)
    assert Sandbox.delete_snapshot(snapshot.snapshot_id)
    until(lambda: not memories(gateway), "nothing is left in the bucket", 60)


def fork(service: Service, sandbox: Sandbox, count: int) -> tuple[list[Sandbox], list[str]]:
    """Forks a sandbox. Returns its children that run, and why the others do not."""
    headers = {"X-API-Key": server(service).credentials()["E2B_API_KEY"]}
    url = f"{server(service).url}/sandboxes/{sandbox.sandbox_id}/fork"
    forked = httpx.post(url, headers=headers, json={"timeout": 600, "count": count}, timeout=120)
    assert forked.status_code == 201, forked.text
    children = [Sandbox.connect(child["sandbox"]["sandboxID"], timeout=600) for child in forked.json() if "sandbox" in child]
    return children, [child["error"]["message"] for child in forked.json() if "error" in child]


def until_no_memory(service: Service, gateway: Gateway) -> None:
    until(lambda: not memories(gateway), lambda: f"nothing is left in the bucket: {memories(gateway)}", 60)
    for node in service.nodes:
        until(lambda node=node: not memories_of(node), "no node has a memory")
    assert service.postgres.ask("SELECT COUNT(*) FROM fork_memories").strip() == "0"


def test_forks_are_on_another_node_while_theirs_drains(service: Service, gateway: Gateway) -> None:
    sandbox, hash_before = made()
    before = count(sandbox)
    drained = place_of(service, sandbox.sandbox_id)
    assert server(service).run("node", "drain", drained.id).returncode == 0
    try:
        children, errors = fork(service, sandbox, 2)
    finally:
        assert server(service).run("node", "undrain", drained.id).returncode == 0
    assert (len(children), errors) == (2, [])
    for child in children:
        assert place_of(service, child.sandbox_id) is other(service, drained)
        goes_on(child, before, hash_before)
        assert child.commands.run("echo $E2B_SANDBOX_ID").stdout.strip() == child.sandbox_id
        runs_once(child)
    # Each is its own from then on, and the parent goes on.
    children[0].files.write("/home/user/random", "another")
    goes_on(children[1], before, hash_before)
    goes_on(sandbox, before, hash_before)
    until_no_memory(service, gateway)
    # A child is paused and goes on as any other, without what it was started from.
    before = count(children[1])
    pause(children[1], service)
    until_copied(service, children[1].sandbox_id)
    goes_on(Sandbox.connect(children[1].sandbox_id, timeout=600), before, hash_before)


def test_forks_are_spread_where_their_node_has_no_room(service: Service, gateway: Gateway) -> None:
    sandbox, hash_before = made()
    before = count(sandbox)
    home = place_of(service, sandbox.sandbox_id)
    children, errors = fork(service, sandbox, 2 * MOST)
    places = [place_of(service, child.sandbox_id) for child in children]
    assert (places.count(home), places.count(other(service, home))) == (MOST - 1, MOST), places
    assert len(errors) == 1 and "capacity" in errors[0], errors
    for child in children:
        goes_on(child, before, hash_before)
    goes_on(sandbox, before, hash_before)
    until_no_memory(service, gateway)
    # Those that fit are started by their node alone.
    for child in children[2:]:
        assert child.kill()
    uploads = metric('copy_uploads_total{outcome="complete"}')
    assert len(fork(service, sandbox, 1)[0]) == 1
    assert metric('copy_uploads_total{outcome="complete"}') == uploads


def test_a_bucket_that_is_away_fails_only_the_forks_on_other_nodes(service: Service, gateway: Gateway) -> None:
    sandbox, hash_before = made()
    before = count(sandbox)
    home = place_of(service, sandbox.sandbox_id)
    gateway.stop()
    try:
        children, errors = fork(service, sandbox, MOST + 1)
    finally:
        gateway.start()
    assert [place_of(service, child.sandbox_id) for child in children] == [home] * (MOST - 1)
    assert len(errors) == 2, errors
    for one in (*children, sandbox):
        goes_on(one, before, hash_before)
    assert len(list(Sandbox.list().next_items())) == MOST, "nothing is left of those that failed"
    until_no_memory(service, gateway)


def test_a_fork_whose_server_is_killed_leaves_nothing_half(service: Service, gateway: Gateway) -> None:
    sandbox, hash_before = made()
    before = count(sandbox)
    drained = place_of(service, sandbox.sandbox_id)
    assert server(service).run("node", "drain", drained.id).returncode == 0
    try:
        with ThreadPoolExecutor(1) as client:
            gateway.relay.stall(up=1_000_000)
            forking = client.submit(fork, service, sandbox, 2)
            assert gateway.relay.stalled.wait(within(30)), "its memory is on its way to the bucket"
            server(service).kill()
            assert isinstance(forking.exception(), httpx.TransportError)
    finally:
        gateway.relay.go_on()
        server(service).start()
        assert server(service).run("node", "undrain", drained.id).returncode == 0
    until(lambda: len(server(service).serves()) == 2, "both nodes are served")
    goes_on(sandbox, before, hash_before)
    assert [one.sandbox_id for one in Sandbox.list().next_items()] == [sandbox.sandbox_id]
    until(lambda: service.postgres.ask("SELECT COUNT(*) FROM sandboxes").strip() == "1", "no child has a row")
    for node in service.nodes:
        until(lambda node=node: not memories_of(node), "no node has its memory")
    # The row of its memory goes later, and with that what is in the bucket.
    service.postgres.ask("UPDATE fork_memories SET created_us = 1")
    assert server(service).run("gc").returncode == 0
    until_no_memory(service, gateway)
    assert len(fork(service, sandbox, 1)[0]) == 1
