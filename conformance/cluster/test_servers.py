"""Two servers on one PostgreSQL database, with a node each: a client may use either, and outlives the loss of one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from e2b import NotFoundException, Sandbox
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection
from websockets.sync.client import connect as connect_websocket

from harness.criu import criu_config
from harness.patience import within
from harness.servers import Server, Service, running_service
from harness.traffic import program, until

# Sandboxes of the team that run, and that are paused.
LIMIT, PAUSED = 8, 4
CONFIG = f"[sandbox]\ndisk_mb = 256\n[limits]\nsandboxes = {LIMIT}\npaused_sandboxes = {PAUSED}\n" + criu_config()
COUNT = "i=0; while :; do i=$((i+1)); echo $i > /tmp/count; sleep 0.05; done"
# How long sandboxes may be without a server after one is gone.
TAKEN_OVER_S = 10.0


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running_service(tmp_path_factory.mktemp("s", numbered=True), config=CONFIG) as service:
        yield service


@pytest.fixture(autouse=True)
def shown(service: Service, request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test begins with all servers, and a failed one shows their logs."""
    for server in service.servers:
        if not server.process:
            server.start()
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        print(service.log_tail())


def key_of(server: Server) -> dict[str, str]:
    return {"X-API-Key": server.credentials()["E2B_API_KEY"]}


def created_at(server: Server) -> Sandbox:
    server.use()
    return Sandbox.create(timeout=600)


def through(server: Server, sandbox_id: str) -> Sandbox:
    """The sandbox as a client of this server has it."""
    server.use()
    return Sandbox.connect(sandbox_id, timeout=600)


def one_on(service: Service, server: Server) -> Sandbox:
    """A sandbox on a node that a server serves."""
    nodes = {node.id for node in service.nodes if service.server_of(node) is server}

    def made() -> Sandbox | None:
        sandbox = created_at(server)
        placed = service.postgres.ask(f"SELECT node_id FROM sandboxes WHERE id = '{sandbox.sandbox_id}'")
        if placed in nodes:
            return sandbox
        sandbox.kill()
        return None

    return until(made, "a sandbox is on a node of the server")


def test_a_sandbox_is_created_at_either_and_used_through_the_other(service: Service) -> None:
    for own, other in (service.servers, reversed(service.servers)):
        sandbox = one_on(service, own)
        seen = through(other, sandbox.sandbox_id)
        assert seen.commands.run("echo $((6 * 7))").stdout == "42\n"
        seen.files.write("/tmp/of", "x" * 300_000)
        assert len(seen.files.read("/tmp/of")) == 300_000
        output: list[str] = []
        seen.commands.run("for i in 1 2 3; do echo $i; sleep 0.1; done", on_stdout=output.append)
        assert "".join(output).split() == ["1", "2", "3"]
        with pytest.raises(Exception, match="exit"):
            seen.commands.run("exit 3")
        listed = {info.sandbox_id for info in Sandbox.list().next_items()}
        assert sandbox.sandbox_id in listed
        assert seen.is_running()
        assert seen.kill()
        own.use()
        assert not sandbox.is_running()
        assert not Sandbox.kill(sandbox.sandbox_id)
        with pytest.raises(NotFoundException):
            Sandbox.connect(sandbox.sandbox_id)


def test_its_ports_are_reached_through_the_other(service: Service) -> None:
    own, other = service.servers
    sandbox = one_on(service, own)
    sandbox.commands.run("mkdir -p /tmp/served && head -c 20000000 /dev/urandom > /tmp/served/large")
    sandbox.commands.run("python3 -m http.server 8000 --directory /tmp/served", background=True)
    host = sandbox.get_host(8000)
    answer = until(
        lambda: httpx.get(f"{other.url}/large", headers={"Host": host}, timeout=60) if serves(other, host) else None,
        "its port is served",
    )
    assert len(answer.content) == 20_000_000
    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(lambda _: httpx.get(f"{other.url}/", headers={"Host": host}, timeout=60).status_code, range(64)))
    assert statuses == [200] * 64
    # A port that nothing listens on is told from a sandbox that is gone, as at its own server.
    closed = {"Host": sandbox.get_host(8001)}
    both = [httpx.get(f"{server.url}/", headers=closed, timeout=60) for server in (own, other)]
    assert [answer.status_code for answer in both] == [502, 502]
    assert both[0].json() == both[1].json()
    sandbox.kill()
    both = [httpx.get(f"{server.url}/", headers=closed, timeout=60) for server in (own, other)]
    assert [answer.status_code for answer in both] == [502, 502]
    assert both[0].json() == both[1].json()


def serves(server: Server, host: str) -> bool:
    return httpx.get(f"{server.url}/", headers={"Host": host}, timeout=10).status_code == 200


def websocket(server: Server, host: str) -> ClientConnection | None:
    """A WebSocket to a port of a sandbox, or none while nothing listens there."""
    raw = socket.create_connection(("127.0.0.1", server.port), timeout=within(10))
    try:
        return connect_websocket(f"ws://{host}/chat", sock=raw, max_size=None, open_timeout=within(10))
    except InvalidStatus:
        return None


def test_a_websocket_goes_through_the_other(service: Service) -> None:
    own, other = service.servers
    sandbox = one_on(service, own)
    sandbox.files.write("/tmp/echo.py", program("websocket_echo.py"))
    sandbox.commands.run("python3 /tmp/echo.py 9000", background=True, timeout=0)
    host = sandbox.get_host(9000)
    with until(lambda: websocket(other, host), "the server listens") as client:
        for sent in ("hello", os.urandom(3 << 20)):
            client.send(sent)
            assert client.recv(timeout=within(20)) == sent
        # A kill breaks the open connection.
        sandbox.kill()
        with pytest.raises(Exception) as broken:
            client.recv(timeout=within(20))
        assert not isinstance(broken.value, TimeoutError)


def test_it_is_paused_and_resumed_through_the_other(service: Service) -> None:
    own, other = service.servers
    sandbox = one_on(service, own)
    sandbox.commands.run(f"setsid sh -c '{COUNT}' >/dev/null 2>&1 & echo $! > /tmp/pid")
    seen = through(other, sandbox.sandbox_id)
    seen.pause()
    infos = httpx.get(f"{other.url}/v2/sandboxes?state=paused", headers=key_of(other), timeout=30).json()
    assert sandbox.sandbox_id in {info["sandboxID"] for info in infos}
    again = through(other, sandbox.sandbox_id)
    assert again.commands.run("kill -0 $(cat /tmp/pid) && echo alive").stdout == "alive\n"
    assert again.kill()


def test_a_key_is_revoked_at_both(service: Service) -> None:
    own, other = service.servers
    made = own.run("key", "create", "--name", "of both")
    assert made.returncode == 0, made.stderr
    key = {"X-API-Key": made.stdout.strip().splitlines()[-1]}

    def status() -> int:
        return httpx.get(f"{other.url}/v2/sandboxes", headers=key, timeout=30).status_code

    assert status() == 200
    listed = json.loads(own.run("key", "list", "--format", "json").stdout)
    found = next(one for one in listed if one["name"] == "of both")
    revoked = own.run("key", "revoke", found["id"])
    assert revoked.returncode == 0, revoked.stderr
    assert status() == 401


def test_the_limit_of_a_team_holds_for_what_is_resumed_and_forked_at_both_at_the_same_time(service: Service) -> None:
    paused = [one_on(service, server) for server in service.servers * 2]
    for sandbox in paused:
        sandbox.pause()
    running = [one_on(service, server) for server in service.servers * 3]
    counted = service.postgres.ask("SELECT COUNT(*) FROM sandboxes WHERE state = 'running'")
    assert int(counted) == len(running) == LIMIT - 2

    def asked(number: int) -> list[int]:
        """A resume or a fork at one of the servers: how many run, and the status of the rest."""
        server = service.servers[number % 2]
        if number < len(paused):
            url = f"{server.url}/sandboxes/{paused[number].sandbox_id}/connect"
            answer = httpx.post(url, headers=key_of(server), json={"timeout": 600}, timeout=60)
            return [answer.status_code]
        url = f"{server.url}/sandboxes/{running[number % 2].sandbox_id}/fork"
        answer = httpx.post(url, headers=key_of(server), json={"timeout": 600, "count": 2}, timeout=60)
        assert answer.status_code == 201, answer.text
        return [one["error"]["code"] if "error" in one else 201 for one in answer.json()]

    with ThreadPoolExecutor(6) as clients:
        statuses = sorted(status for answer in clients.map(asked, range(6)) for status in answer)
    assert statuses == [201] * 2 + [429] * 6, statuses
    assert int(service.postgres.ask("SELECT COUNT(*) FROM sandboxes WHERE state = 'running'")) == LIMIT
    # Those that were refused are as they were.
    for server in service.servers:
        server.use()
        for item in Sandbox.list().next_items():
            if item.sandbox_id not in {one.sandbox_id for one in paused}:
                Sandbox.kill(item.sandbox_id)
    for sandbox in paused:
        assert through(service.servers[0], sandbox.sandbox_id).commands.run("echo $((6 * 7))").stdout == "42\n"
        assert sandbox.kill()


def test_the_limit_of_paused_sandboxes_holds_for_both_at_the_same_time(service: Service) -> None:
    boxes = [one_on(service, server) for server in service.servers * 3]

    def asked(number: int) -> int:
        server = service.servers[number % 2]
        url = f"{server.url}/sandboxes/{boxes[number].sandbox_id}/pause"
        return httpx.post(url, headers=key_of(server), timeout=60).status_code

    with ThreadPoolExecutor(len(boxes)) as clients:
        statuses = list(clients.map(asked, range(len(boxes))))
    assert sorted(statuses) == [204] * PAUSED + [429] * 2, statuses
    # Those that were refused run on, and one of them is paused once another is not.
    refused = [box for box, status in zip(boxes, statuses, strict=True) if status == 429]
    paused = [box for box, status in zip(boxes, statuses, strict=True) if status == 204]
    for box in refused:
        assert through(service.servers[1], box.sandbox_id).commands.run("echo $((6 * 7))").stdout == "42\n"
    assert paused[0].kill()
    until(lambda: asked(boxes.index(refused[0])) == 204, "there is room")
    for box in boxes:
        if box is not paused[0]:
            assert box.kill()


def test_a_node_of_the_other_is_drained(service: Service) -> None:
    own, other = service.servers
    node = next(node for node in service.nodes if service.server_of(node) is other)
    kept = one_on(service, other)
    drained = own.run("node", "drain", node.id)
    assert drained.returncode == 0, drained.stderr
    try:
        places = set()
        for server in (own, other) * 4:
            made = created_at(server)
            places.add(service.postgres.ask(f"SELECT node_id FROM sandboxes WHERE id = '{made.sandbox_id}'"))
            made.kill()
        assert places == {one.id for one in service.nodes if one is not node}
        shown = {server: next(one for one in server.nodes() if one["id"] == node.id) for server in (own, other)}
        assert {server: one["state"] for server, one in shown.items()} == {own: "elsewhere", other: "connected"}
        assert all(one["draining_at"] and one["left"]["running"] == 1 for one in shown.values()), shown
        # Also after a restart of the server that has it, wherever the node goes.
        other.terminate()
        other.start()
        until(lambda: any(node.id in server.serves() for server in service.servers), "the node is served", 40)
        for server in (own, other) * 2:
            made = created_at(server)
            assert service.postgres.ask(f"SELECT node_id FROM sandboxes WHERE id = '{made.sandbox_id}'") != node.id
            made.kill()
        assert through(own, kept.sandbox_id).commands.run("echo $((6 * 7))").stdout == "42\n"
        # What is left is paused by the server that has the node, whichever is asked.
        asked = next(server for server in service.servers if node.id not in server.serves())
        emptied = asked.run("node", "drain", node.id, "--within", "1")
        assert emptied.returncode == 0, emptied.stderr
        assert "paused 1 on disk" in emptied.stdout
        left = next(one for one in asked.nodes() if one["id"] == node.id)["left"]
        assert left == {"running": 0, "paused_in_memory": 0, "paused_on_disk": 1}
        assert through(asked, kept.sandbox_id).commands.run("echo $((6 * 7))").stdout == "42\n"
    finally:
        undrained = own.run("node", "undrain", node.id)
    assert undrained.returncode == 0, undrained.stderr
    assert through(other, kept.sandbox_id).kill()
    until(lambda: service.server_of(node), "a server has it")
    assert one_on(service, service.server_of(node)).kill()


def test_a_stopped_server_is_no_hang_and_changes_nothing_afterwards(service: Service) -> None:
    own, other = service.servers
    sandbox = one_on(service, own)
    # The server may have both nodes.
    placed = service.postgres.ask(f"SELECT node_id FROM sandboxes WHERE id = '{sandbox.sandbox_id}'").strip()
    node = next(node for node in service.nodes if node.id == placed)
    sandbox.commands.run(f"setsid sh -c '{COUNT}' >/dev/null 2>&1 & echo $! > /tmp/pid")
    other.use()
    path = f"{other.url}/sandboxes/{sandbox.sandbox_id}"
    assert httpx.get(path, headers=key_of(other), timeout=30).status_code == 200
    own.signal(signal.SIGSTOP)
    try:
        begun = time.monotonic()
        answer = httpx.get(path, headers=key_of(other), timeout=120)
        assert time.monotonic() - begun < within(20)
        assert answer.status_code in (200, 503), answer.text
        if answer.status_code == 503:
            assert answer.json()["error_code"] == "node_away"
        # The row of the sandbox can be read meanwhile, so only this shows that the node has let go.
        until(lambda: node.id in other.serves(), "the other server has the node", 60)
        until(lambda: httpx.get(path, headers=key_of(other), timeout=120).status_code == 200, "the other server has it", 60)
    finally:
        own.signal(signal.SIGCONT)
    # The one that was stopped finds out, and forwards what it had.
    until(lambda: node.id not in own.serves(), "it has let go of the node", 30)
    assert httpx.get(f"{own.url}/sandboxes/{sandbox.sandbox_id}", headers=key_of(own), timeout=30).status_code == 200
    seen = through(own, sandbox.sandbox_id)
    assert seen.commands.run("kill -0 $(cat /tmp/pid) && echo alive").stdout == "alive\n"
    assert seen.kill()


def test_sandboxes_outlive_a_server(service: Service) -> None:
    own, other = service.servers
    for node in service.nodes:
        node.terminate()
    service.place()
    mine, others = one_on(service, own), one_on(service, other)
    for sandbox in (mine, others):
        sandbox.commands.run(f"setsid sh -c '{COUNT}' >/dev/null 2>&1 & echo $! > /tmp/pid")
    other.use()
    own.kill()
    begun = time.monotonic()
    # What it had is served by the other one, soon, and says meanwhile that it is not.
    path = f"{other.url}/sandboxes/{mine.sandbox_id}/connect"
    statuses: list[int] = []

    def served() -> bool:
        answer = httpx.post(path, headers=key_of(other), json={"timeout": 600}, timeout=30)
        statuses.append(answer.status_code)
        return answer.status_code == 200

    until(served, lambda: f"the sandbox is served: {statuses}", 60)
    assert time.monotonic() - begun < within(TAKEN_OVER_S)
    assert set(statuses) <= {200, 503}, statuses
    for sandbox in (mine, others):
        seen = through(other, sandbox.sandbox_id)
        assert seen.commands.run("kill -0 $(cat /tmp/pid) && echo alive").stdout == "alive\n"
    # New ones, too.
    created_at(other).kill()
    # The one that was gone takes part again, and forwards.
    own.start()
    seen = through(own, mine.sandbox_id)
    assert seen.commands.run("kill -0 $(cat /tmp/pid) && echo alive").stdout == "alive\n"
    created_at(own).kill()
    for sandbox in (mine, others):
        assert Sandbox.kill(sandbox.sandbox_id)


def test_a_second_server_needs_an_address_and_postgres(service: Service, tmp_path: Path) -> None:
    own, _ = service.servers
    data = tmp_path / "third"
    data.mkdir(mode=0o700)
    (data / "secret.key").write_bytes((own.data_dir / "secret.key").read_bytes())
    (data / "secret.key").chmod(0o600)

    def refused(database: str, *more: str) -> str:
        command = [own.binary, "server", "--data-dir", data, "--listen", "127.0.0.1:0", "--nodes-listen", "127.0.0.1:0", *more]
        environment = {**own.environment(), "RINGFENCE_DATABASE_URL": database}
        ended = subprocess.run(command, capture_output=True, text=True, timeout=within(60), env=environment)
        assert ended.returncode == 1, ended.stderr
        return ended.stderr

    assert "set nodes.address" in refused(own.database)
    assert "need PostgreSQL" in refused(f"sqlite:{tmp_path}/x.db", "--nodes-address", "https://127.0.0.1:3999")
    assert os.path.exists(data / "nodes")
