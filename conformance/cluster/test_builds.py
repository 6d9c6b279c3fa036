"""Builds on two nodes with a bucket, which gets the layers of a build at its end: until then, each is on the node that has made it. And
builds at a service of which one server has no node.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2b import BuildInfo, Sandbox, Template

from harness.elapse import idle_for
from harness.s3 import Gateway
from harness.servers import Node, Server, Service, running_service
from harness.traffic import until

CONFIG = "[sandbox]\ndisk_mb = 256\n[pool]\nbase = 0\n"
STEPS = 8
# What the log says of a layer that a node gets from elsewhere.
FETCHED = "fetched a layer"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    gateway = Gateway(Path(tmp_path_factory.mktemp("g", numbered=True)))
    gateway.start()
    try:
        work = tmp_path_factory.mktemp("b", numbered=True)
        with running_service(work, servers=1, config=CONFIG + gateway.config(), is_placed=False) as service:
            yield service
    finally:
        gateway.close()


@pytest.fixture
def server(service: Service) -> Server:
    service.servers[0].use()
    return service.servers[0]


def built(name: str) -> str:
    """What a sandbox of a template has that its steps have written."""
    with Sandbox.create(name, timeout=60) as sandbox:
        return sandbox.commands.run("cat ~/steps").stdout


def test_steps_follow_each_other(server: Server) -> None:
    for name in ("one", "two"):
        template = Template().from_template("base").run_cmd(f"echo {name} > ~/steps")
        for step in range(STEPS):
            template = template.run_cmd(f"echo {step} >> ~/steps")
        Template.build(template, alias=name)
    assert FETCHED not in server.log(), "no step has left the node that has its layers"
    for name in ("one", "two"):
        assert built(name) == f"{name}\n" + "".join(f"{step}\n" for step in range(STEPS))


def test_a_step_gets_its_layers_from_a_node_that_drains(service: Service, server: Server) -> None:
    aliases = (f"moved-{number}" for number in itertools.count())
    with contextlib.ExitStack() as stack:

        def drained() -> tuple[str, int] | None:
            """A build whose node drains before its last step begins, and how many layers were fetched before; none if the step was earlier."""
            alias = next(aliases)
            before = {node.id: layers(node) for node in service.nodes}
            template = Template().from_template("base").run_cmd(f"echo {alias} > ~/steps").run_cmd("sleep 3; echo slept >> ~/steps")
            building = Template.build_in_background(template.run_cmd("echo last >> ~/steps"), alias=alias)
            until(lambda: "sleep 3" in said(building), "the second step runs", 60)
            (node,) = (node for node in service.nodes if layers(node) - before[node.id])
            fetched = server.log().count(FETCHED)
            assert server.run("node", "drain", node.id).returncode == 0
            stack.callback(undrain, server, node)
            is_early = "echo last" not in said(building)
            until(lambda: status(building) != "building", "it has ended", 60)
            if is_early:
                return alias, fetched
            stack.close()
            return None

        alias, fetched = until(drained, "a node drains before a last step", 120)
        assert server.log().count(FETCHED) == fetched + 2
        assert built(alias) == f"{alias}\nslept\nlast\n"


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Two servers, the second without a node."""
    with running_service(tmp_path_factory.mktemp("n", numbered=True), servers=2, nodes=1, config=CONFIG) as service:
        assert [len(server.serves()) for server in service.servers] == [1, 0]
        # They tell each other about once a second.
        idle_for(3.0)
        yield service


def test_a_server_without_a_node_leaves_builds_to_another(apart: Service) -> None:
    for server in apart.servers:
        server.use()
        # Which server would build one depends on its id, which is random.
        for number in range(4):
            template = Template().from_template("base").run_cmd(f"echo {server.port} {number} > ~/steps")
            building = Template.build_in_background(template, alias=f"of-{server.port}-{number}")
            until(lambda building=building: status(building) == "ready", "it is built", 30)
    assert built(f"of-{apart.servers[1].port}-3") == f"{apart.servers[1].port} 3\n"


def test_a_server_without_a_node_writes_templates_to_files(apart: Service, tmp_path: Path) -> None:
    first, second = apart.servers
    second.use()
    Template.build(Template().from_template("base").run_cmd("echo pushed > ~/steps"), alias="pushed")
    pushed = second.run("template", "push", "pushed", str(tmp_path / "file.tar"))
    assert pushed.returncode == 0, pushed.stderr
    assert first.run("template", "pull", "pulled", str(tmp_path / "file.tar")).returncode == 0
    assert built("pulled") == "pushed\n"
    for name, why in (("unknown", "unknown"), ("base", "no layers of its own")):
        refused = second.run("template", "push", name, str(tmp_path / "none.tar"))
        assert refused.returncode != 0 and why in refused.stderr, refused.stderr


def test_a_build_whose_server_has_lost_its_node_is_done_by_another(tmp_path_factory: pytest.TempPathFactory) -> None:
    with running_service(tmp_path_factory.mktemp("l", numbered=True), config=CONFIG) as service:
        first, second = service.servers
        first.use()
        idle_for(3.0)

        def at_second() -> tuple[str, BuildInfo] | None:
            """A build of the second server; which one that is depends on the id of the template."""
            alias = f"lost-{next(numbers)}"
            template = Template().from_template("base").run_cmd("echo first > ~/steps").run_cmd("sleep 15; echo slept >> ~/steps")
            building = Template.build_in_background(template.run_cmd(f"echo {alias} >> ~/steps"), alias=alias)
            server = f"SELECT s.address FROM builds b JOIN servers s ON s.id = b.node_id WHERE b.id = '{building.build_id}'"
            return (alias, building) if service.postgres.ask(server) == second.nodes_address else None

        numbers = itertools.count()
        alias, building = until(at_second, "the second server builds", 60)
        until(lambda: "sleep 15" in said(building), "the step runs", 60)
        assert service.nodes[1].terminate() == 0
        until(lambda: status(building) in ("ready", "error"), "it has ended", 120)
        assert status(building) == "ready", said(building)
        assert "begun again" in said(building)
        assert built(alias) == f"first\nslept\n{alias}\n"


def layers(node: Node) -> set[str]:
    return {path.name for path in (node.node_dir / "layers").iterdir()}


def undrain(server: Server, node: Node) -> None:
    assert server.run("node", "undrain", node.id).returncode == 0


def status(building: BuildInfo) -> str:
    return Template.get_build_status(building).status.value


def said(building: BuildInfo) -> str:
    return "".join(entry.message for entry in Template.get_build_status(building).log_entries)
