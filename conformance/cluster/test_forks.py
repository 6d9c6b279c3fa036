"""Forks of a sandbox are on nodes of other servers, too, where those of its own have no room, or drain."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox

from harness.counting import count, goes_on, made, memories, memories_of, runs_once
from harness.criu import criu_config
from harness.patience import within
from harness.s3 import Gateway
from harness.servers import Node, Server, Service, running_service
from harness.traffic import until

# Running sandboxes of each node.
MOST = 4
CONFIG = f"[sandbox]\ndisk_mb = 256\n[pool]\nbase = 0\n[capacity]\nmax_sandboxes = {MOST}\n" + criu_config()


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    gateway = Gateway(Path(tmp_path_factory.mktemp("g", numbered=True)))
    gateway.start()
    yield gateway
    gateway.close()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, gateway: Gateway) -> Iterator[Service]:
    """Two servers with a node each."""
    with running_service(tmp_path_factory.mktemp("f", numbered=True), config=CONFIG + gateway.config()) as service:
        yield service


@pytest.fixture(autouse=True)
def shown(service: Service, gateway: Gateway, request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test begins with both servers and without a sandbox. A failed one shows the logs."""
    for server in service.servers:
        if not server.process:
            server.start()
    # A server that was stopped or killed may have lost its node to the other.
    service.place()
    service.servers[0].use()
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        print(service.log_tail(60))
    for item in Sandbox.list().next_items():
        Sandbox.kill(item.sandbox_id)


def place_of(service: Service, sandbox_id: str) -> Node:
    """The node of a sandbox, as the database says."""
    found = service.postgres.ask(f"SELECT node_id FROM sandboxes WHERE id = '{sandbox_id}'").strip()
    return next(node for node in service.nodes if node.id == found)


def fork(server: Server, sandbox: Sandbox, number: int) -> tuple[list[Sandbox], list[dict[str, str]]]:
    """Forks a sandbox through a server. Returns its children that run, as its clients have them, and the errors of the others."""
    headers = {"X-API-Key": server.credentials()["E2B_API_KEY"]}
    url = f"{server.url}/sandboxes/{sandbox.sandbox_id}/fork"
    forked = httpx.post(url, headers=headers, json={"timeout": 600, "count": number}, timeout=120)
    assert forked.status_code == 201, forked.text
    server.use()
    children = [Sandbox.connect(child["sandbox"]["sandboxID"], timeout=600) for child in forked.json() if "sandbox" in child]
    return children, [child["error"] for child in forked.json() if "error" in child]


def until_no_memory(service: Service, gateway: Gateway) -> None:
    until(lambda: not memories(gateway), lambda: f"nothing is left in the bucket: {memories(gateway)}", 60)
    for node in service.nodes:
        until(lambda node=node: not memories_of(node), "no node has a memory")
    assert service.postgres.ask("SELECT COUNT(*) FROM fork_memories").strip() == "0"


def until_known(service: Service, server: Server, what: str = '"nodes":1') -> None:
    """Waits until all servers know what one says. Each writes once a second what it has, and reads what the others have."""
    of = "FROM servers WHERE address = "
    until(lambda: what in service.postgres.ask(f"SELECT room_json {of}'{server.nodes_address}'"), f"it has said {what}")
    for _ in range(2):
        # Whoever writes again has read what was there after the time before.
        seen = {one: service.postgres.ask(f"SELECT seen_us {of}'{one.nodes_address}'") for one in service.servers}
        for one, before in seen.items():
            sql = f"SELECT seen_us {of}'{one.nodes_address}'"
            until(lambda sql=sql, before=before: service.postgres.ask(sql) != before, "it writes again")


def test_forks_are_on_nodes_of_another_server_where_there_is_no_room(service: Service, gateway: Gateway) -> None:
    sandbox, hash_before = made()
    before = count(sandbox)
    home = place_of(service, sandbox.sandbox_id)
    (away,) = [server for server in service.servers if server is not service.server_of(home)]
    until_known(service, away)
    # Whichever of the two is asked.
    children, errors = fork(away, sandbox, 2 * MOST)
    places = [place_of(service, child.sandbox_id) is home for child in children]
    assert (places.count(True), places.count(False)) == (MOST - 1, MOST), places
    assert len(errors) == 1 and "capacity" in errors[0]["message"] and errors[0]["code"] == 503, errors
    for child in children:
        for server in service.servers:
            server.use()
            seen = Sandbox.connect(child.sandbox_id, timeout=600)
            assert seen.commands.run("echo $E2B_SANDBOX_ID").stdout.strip() == child.sandbox_id
            goes_on(seen, before, hash_before)
        runs_once(child)
    # Each is its own from then on, and the parent goes on.
    children[-1].files.write("/home/user/random", "another")
    for one in (sandbox, *children[:-1]):
        goes_on(one, before, hash_before)
    until_no_memory(service, gateway)


def test_forks_are_on_nodes_of_another_server_while_theirs_drains(service: Service, gateway: Gateway) -> None:
    sandbox, hash_before = made()
    before = count(sandbox)
    home = place_of(service, sandbox.sandbox_id)
    own = service.server_of(home)
    (away,) = [server for server in service.servers if server is not own]
    until_known(service, away)
    assert own.run("node", "drain", home.id).returncode == 0
    try:
        children, errors = fork(own, sandbox, 2)
    finally:
        assert own.run("node", "undrain", home.id).returncode == 0
    assert (len(children), errors) == (2, [])
    for child in children:
        assert place_of(service, child.sandbox_id) is not home
        goes_on(child, before, hash_before)
    goes_on(sandbox, before, hash_before)
    until_no_memory(service, gateway)
    # A child goes on as any other, and can be forked itself.
    again, errors = fork(away, children[0], 1)
    assert (len(again), errors) == (1, [])
    goes_on(again[0], before, hash_before)


def test_a_server_whose_node_cannot_go_on_with_copies_is_not_asked(service: Service, gateway: Gateway) -> None:
    sandbox, hash_before = made()
    before = count(sandbox)
    home = place_of(service, sandbox.sandbox_id)
    own = service.server_of(home)
    (away,) = [server for server in service.servers if server is not own]
    (lacking,) = [node for node in service.nodes if node is not home]
    with_criu, without_criu = lacking.environment, {**lacking.environment(), "RINGFENCE_PAUSE_CRIU": "off"}
    try:
        lacking.environment = lambda: without_criu
        service.restart(lacking, away)
        until_known(service, away, '"takes_forks":false')
        # What would show that something is copied for it.
        gateway.relay.stall(up=10_000)
        children, errors = fork(own, sandbox, MOST + 1)
        assert not gateway.relay.stalled.is_set()
    finally:
        gateway.relay.go_on()
        lacking.environment = with_criu
        service.restart(lacking, away)
    assert (len(children), [error["code"] for error in errors]) == (MOST - 1, [503, 503]), errors
    for one in (sandbox, *children):
        goes_on(one, before, hash_before)
    until_known(service, away, '"takes_forks":true')


def test_a_server_that_is_killed_while_it_starts_forks_leaves_nothing_half(service: Service, gateway: Gateway) -> None:
    sandbox, hash_before = made()
    before = count(sandbox)
    home = place_of(service, sandbox.sandbox_id)
    own = service.server_of(home)
    (away,) = [server for server in service.servers if server is not own]
    until_known(service, away)
    # Not by the one that is killed.
    own.use()
    sandbox = Sandbox.connect(sandbox.sandbox_id, timeout=600)
    with ThreadPoolExecutor(1) as client:
        try:
            # The other node gets the memory from the bucket.
            gateway.relay.stall(down=1_000_000)
            forking = client.submit(fork, own, sandbox, MOST + 1)
            assert gateway.relay.stalled.wait(within(60)), "the memory is on its way to the other node"
            # Those that have started are announced, whatever the others wait for.
            run = "SELECT COUNT(*) FROM sandboxes WHERE state = 'running'"
            until(lambda: service.postgres.ask(run).strip() == str(MOST), "those on the node of their parent run")
            away.kill()
        finally:
            gateway.relay.go_on()
        children, errors = forking.result(within(60))
    assert (len(children), len(errors)) == (MOST - 1, 2), errors
    assert all("not known" in error["message"] for error in errors), errors
    for one in (sandbox, *children):
        goes_on(one, before, hash_before)
    away.start()
    until(service.is_served, "both nodes are served", 40)
    rows = "SELECT COUNT(*) FROM sandboxes"
    until(lambda: service.postgres.ask(rows).strip() == str(MOST), "no other child has a row")
    until_no_memory(service, gateway)
