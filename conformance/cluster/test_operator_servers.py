"""The operator of two servers on one database: either lists and kills the sandboxes of both, also while one of them is stopped."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
from e2b import Sandbox

from harness.criu import criu_config
from harness.patience import within
from harness.servers import Node, Server, Service, running_service
from harness.traffic import until

CONFIG = "[sandbox]\ndisk_mb = 256\n" + criu_config()
# How long a command may take about a server that does not answer.
NO_HANG_S = 20.0
OTHER_TEAM = "of-another-team"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running_service(tmp_path_factory.mktemp("p", numbered=True), config=CONFIG) as service:
        assert service.servers[0].run("team", "create", OTHER_TEAM).returncode == 0
        yield service


@pytest.fixture(autouse=True)
def shown(service: Service, request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test begins with a node at each server, and a failed one shows the logs."""
    for server in service.servers:
        if not server.process:
            server.start()
    if {service_of(service, node) for node in service.nodes} != set(service.servers):
        for node in service.nodes:
            if node.process:
                node.terminate()
        service.place()
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        print(service.log_tail())


def service_of(service: Service, node: Node) -> Server | None:
    found = [server for server in service.servers if node.id in server.serves()]
    return found[0] if found else None


def node_of(service: Service, server: Server) -> Node:
    return next(node for node in service.nodes if node.id in server.serves())


def one_on(service: Service, server: Server, team: str = "default") -> str:
    """A sandbox of a team on a node that a server serves."""
    server.use()
    node = node_of(service, server)
    made = server.run("key", "create", "--team", team)
    assert made.returncode == 0, made.stderr
    key = made.stdout.strip().splitlines()[-1]

    def found() -> str | None:
        sandbox = Sandbox.create(timeout=600, api_key=key)
        if service.postgres.ask(f"SELECT node_id FROM sandboxes WHERE id = '{sandbox.sandbox_id}'") == node.id:
            return sandbox.sandbox_id
        sandbox.kill(api_key=key)
        return None

    return until(found, "a sandbox is on a node of the server")


def on_both(service: Service) -> tuple[str, str]:
    """A sandbox on the node of each server, of a team each."""
    own, other = service.servers
    return one_on(service, own), one_on(service, other, OTHER_TEAM)


def listed(server: Server) -> dict[str, dict[str, Any]]:
    done = server.run("sandbox", "list", "--format", "json")
    assert done.returncode == 0, done.stderr
    entries = json.loads(done.stdout)
    by_id = {entry["id"]: entry for entry in entries}
    assert len(by_id) == len(entries), "each is listed once"
    return by_id


def kill(server: Server, *ids: str) -> subprocess.CompletedProcess[str]:
    begun = time.monotonic()
    done = server.run("sandbox", "kill", *ids)
    assert time.monotonic() - begun < within(NO_HANG_S)
    return done


def end_reason(server: Server, sandbox_id: str) -> str:
    def read() -> str | None:
        logged = server.run("sandbox", "logs", sandbox_id, "--format", "json")
        if logged.returncode:
            # Another server knows of it once the one that has ended it has written that, a moment later.
            return None
        fields = [entry["fields"] for entry in json.loads(logged.stdout)]
        reasons = [one["reason"] for one in fields if one.get("event_type") == "sandbox_ending"]
        return reasons[0] if reasons else None

    return until(read, "its log says why it has ended")


def test_either_lists_and_kills_those_of_both(service: Service) -> None:
    for own, other in (service.servers, reversed(service.servers)):
        mine, theirs = on_both(service) if own is service.servers[0] else reversed(on_both(service))
        entries = listed(own)
        nodes = {mine: node_of(service, own), theirs: node_of(service, other)}
        for sandbox_id, node in nodes.items():
            entry = entries[sandbox_id]
            assert (entry["node"], entry["state"], "is_node_away" in entry) == (node.id, "running", False)
            assert ("server" in entry) == (sandbox_id == theirs)
        assert {entries[mine]["team"], entries[theirs]["team"]} == {"default", OTHER_TEAM}
        text = own.run("sandbox", "list").stdout
        assert text.splitlines()[0].split()[-2:] == ["NODE", "SERVER"], text
        assert mine in text and theirs in text
        assert theirs in own.run("top", "--once").stdout
        show = own.run("sandbox", "show", theirs)
        assert show.returncode == 0 and node_of(service, other).id in show.stdout and "\nserver " in show.stdout, show
        killed = kill(own, mine, theirs)
        assert killed.returncode == 0, killed.stderr
        assert killed.stdout.splitlines() == [f"killed {mine}", f"killed {theirs}"]
        for server in (own, other):
            assert not {mine, theirs} & set(listed(server))
        assert [end_reason(own, sandbox_id) for sandbox_id in (mine, theirs)] == ["operator", "operator"]
        again = kill(own, theirs)
        assert again.returncode == 1 and f"there is no sandbox {theirs}" in again.stderr


def test_a_paused_one_of_the_other_is_killed(service: Service) -> None:
    own, other = service.servers
    sandbox_id = one_on(service, other)
    other.use()
    assert Sandbox.pause(sandbox_id)
    assert listed(own)[sandbox_id]["state"] == "paused"
    assert kill(own, sandbox_id).returncode == 0
    assert service.postgres.ask(f"SELECT count(*) FROM sandboxes WHERE id = '{sandbox_id}'") == "0"
    assert end_reason(own, sandbox_id) == "operator"


def test_a_shell_is_at_the_server_of_the_node(service: Service) -> None:
    own, other = service.servers
    sandbox_id = one_on(service, other)
    for command in (("exec", sandbox_id, "--", "true"), ("cp", f"{sandbox_id}:/etc/hostname", "-"), ("forward", sandbox_id, "0:80")):
        # The flag of the data directory is before what the sandbox runs.
        name, *rest = command
        refused = subprocess.run(
            [own.binary, "sandbox", name, "--data-dir", own.data_dir, *rest],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=within(60),
            env=own.environment(),
        )
        assert refused.returncode == 1, refused
        assert f"({other.nodes_address}): run the command on the host of that server" in refused.stderr, refused.stderr
    assert kill(other, sandbox_id).returncode == 0


def test_what_a_suspended_server_has_is_killed_once_another_has_it(service: Service) -> None:
    own, other = service.servers
    mine, theirs = on_both(service)
    is_ahead = "lease_until_us > EXTRACT(EPOCH FROM clock_timestamp()) * 1000000"
    sql = f"SELECT lease_owner FROM nodes WHERE id = '{node_of(service, own).id}' AND {is_ahead}"
    owner = service.postgres.ask(sql)
    assert owner, "the node has a server"
    refused: list[str] = []

    def killed() -> bool:
        done = kill(other, mine)
        if done.returncode == 0:
            return True
        # A server that does not answer is told by its lease, which it does not renew: one that is ahead now was so when it was read.
        is_known = service.postgres.ask(sql) == owner
        refused.append(message := done.stderr)
        assert "ringfence node list" in message and mine in message, message
        if is_known:
            assert f"({own.nodes_address}), which does not answer" in message, message
        else:
            assert "does not answer" in message or "not connected" in message, message
        return False

    own.signal(signal.SIGSTOP)
    try:
        # The first command, while the lease is new.
        is_killed = killed()
        assert {theirs} | (set() if is_killed else {mine}) <= set(listed(other)), "all are listed meanwhile"
        assert kill(other, theirs).returncode == 0
        until(lambda: is_killed or killed(), lambda: f"the sandbox is killed: {refused}", 60)
    finally:
        own.signal(signal.SIGCONT)
    until(lambda: not {mine, theirs} & set(listed(own)), "both say that they are gone", 30)
    assert end_reason(other, mine) == "operator"


def test_those_of_a_stopped_server_are_killed_at_the_other(service: Service) -> None:
    own, other = service.servers
    mine, theirs = on_both(service)
    node = node_of(service, own)
    assert own.terminate() == 0
    assert {mine, theirs} <= set(listed(other))
    until(lambda: node.id in other.serves(), "the other server has the node", 40)
    killed = kill(other, mine, theirs)
    assert killed.returncode == 0, killed.stderr
    assert not {mine, theirs} & set(listed(other))


def test_those_of_a_node_that_is_away_are_told_apart(service: Service) -> None:
    own, other = service.servers
    mine, theirs = on_both(service)
    node = node_of(service, own)
    assert node.terminate() == 0
    for server in (own, other):
        until(lambda server=server: listed(server)[mine].get("is_node_away"), "the node is away", 40)
        entries = listed(server)
        assert "server" not in entries[mine] and "is_node_away" not in entries[theirs]
        rows = server.run("sandbox", "list").stdout.splitlines()
        assert ["(node away)" in row for row in rows if mine in row] == [True], rows
    # Whichever server has the node next; the one that it has left may still have begun to kill it.
    refused = kill(other, mine)
    assert refused.returncode == 1 and "ringfence node list" in refused.stderr, refused
    node.launch()
    until(lambda: service_of(service, node), "a server has the node", 40)
    until(lambda: mine not in listed(other) or kill(other, mine).returncode == 0, "the sandbox is killed", 40)
    assert end_reason(other, mine) == "operator"
    assert kill(other, theirs).returncode == 0
