"""Two pods of the Deployment, as a chart with several servers renders them: each with a directory of its own, and one service."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from harness.patience import within
from harness.traffic import until
from kubernetes.conftest import CLIENT, KEEPS_NONE_READY, Release, released
from kubernetes.machine import NAME, SERVER, Container, Pod


@pytest.fixture(scope="module")
def several() -> Iterator[Release]:
    with released({"server": {"replicas": 2}}) as release:
        yield release


class Server:
    """A pod of the Deployment."""

    def __init__(self, release: Release, name: str, address: str = "") -> None:
        self.release = release
        self.pod: Pod = release.machine.pod(release.rendered.pod("Deployment"), name, address)
        self.container: Container = self.pod.start("server", **KEEPS_NONE_READY)

    def wait_ready(self) -> None:
        process = self.container.process
        until(lambda: self.pod.probe("server", "startup") == 200 or process.poll() is not None, self.container.said, within_s=60)
        assert process.poll() is None, self.container.said()

    def operator(self, *words: str) -> str:
        ran = self.container.execute("ringfence", *words)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    def states(self) -> list[str]:
        return re.findall(r'"state": *"(\w+)"', self.operator("node", "list", "--format", "json"))

    def client(self, key: str, *words: str) -> str:
        ran = self.try_client(key, *words)
        assert ran.returncode == 0, f"{ran.stderr}\n{self.container.said()[-3000:]}"
        return ran.stdout

    def try_client(self, key: str, *words: str) -> subprocess.CompletedProcess[str]:
        url = f"http://{self.pod.address}:3000"
        return subprocess.run(
            self.release.machine.beside(sys.executable, CLIENT, *words),
            env={"PATH": "/usr/bin:/bin", "E2B_API_KEY": key, "E2B_API_URL": url, "E2B_SANDBOX_URL": url},
            capture_output=True,
            text=True,
            timeout=within(90),
            check=False,
        )


def test_a_sandbox_outlives_the_pod_of_the_server_that_has_it(several: Release) -> None:
    machine, rendered = several.machine, several.rendered
    service = rendered.of("Service", "-nodes")["metadata"]
    # What a service does for a connection: the first pod has its address, and when that is gone, another one.
    machine.services[f"{service['name']}.{service['namespace']}.svc"] = SERVER
    first = Server(several, "first", SERVER)
    first.wait_ready()
    other = Server(several, "other")
    other.wait_ready()
    key = re.findall("e2b_[0-9a-f]{40}", first.operator("team", "create", "research") + first.operator("key", "create", "--team", "research"))[-1]
    machine.secrets[f"{rendered.of('Deployment')['metadata']['name'].removesuffix('-server')}-join"] = {NAME: other.operator("node", "token").strip()}
    node = several.create_pod_of_node()
    assert node.complete("join") == 0, node.running[-1].said()
    several.node = node.start("node", **KEEPS_NONE_READY)
    until(lambda: first.states() == ["connected"], several.node.said, within_s=60)
    until(lambda: other.states() == ["elsewhere"], other.container.said, within_s=30)

    refused: list[str] = []

    def created() -> str:
        """What is said of a sandbox; nothing while the server does not know yet that the node of the first one can be used."""
        ran = other.try_client(key, "create", "echo $((6 * 7))")
        refused.append(ran.stderr)
        return ran.stdout if ran.returncode == 0 else ""

    sandbox, said = until(created, lambda: f"a sandbox is created: {refused[-1]}\n{other.container.said()[-3000:]}", within_s=60).split("\n", 1)
    assert said == "42\n"
    assert first.client(key, sandbox, "echo here") == "here\n"
    assert first.container.terminate(60) == 0
    first.pod.delete()
    # The next pod of the Deployment, behind the service.
    third = Server(several, "third", SERVER)
    third.wait_ready()
    until(lambda: third.states() == ["connected"], several.node.said, within_s=60)
    for server in (other, third):
        assert server.client(key, sandbox, "echo still here") == "still here\n"
    assert other.client(key, "kill", sandbox) == "True\n"
    for server in (other, third):
        assert server.container.terminate(60) == 0
