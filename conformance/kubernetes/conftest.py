"""A release on one machine, started once for all tests of a file."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from harness import hoststate
from harness.hoststate import HostState, left_over
from harness.patience import within
from harness.platform import binary
from harness.traffic import until
from kubernetes import chart
from kubernetes.chart import Object, Rendered
from kubernetes.database import Database
from kubernetes.machine import SERVER, Container, Machine, Pod
from kubernetes.page import Page

CLIENT = Path(__file__).with_name("client.py")


class Release:
    """The server and the node of a release, as they run."""

    def __init__(self, machine: Machine, database: Database, rendered: Rendered, node_dir: Path) -> None:
        self.machine = machine
        self.database = database
        self.rendered = rendered
        self.node_dir = node_dir
        self.server_pod: Pod | None = None
        self.server: Container | None = None
        self.node_pod: Pod | None = None
        self.node: Container | None = None
        self.starts = 0
        self.page = Page(machine.place / "page")
        # What the machine joined with.
        self.token = ""
        # The sandbox that the tests go on with.
        self.sandbox = ""

    def launch_server(self) -> None:
        """A pod of the Deployment, with another name each time."""
        self.starts += 1
        self.server_pod = self.machine.pod(self.rendered.pod("Deployment"), f"server-{self.starts}", SERVER)
        service = self.rendered.of("Service", "-nodes")["metadata"]
        self.machine.services[f"{service['name']}.{service['namespace']}.svc"] = SERVER
        self.server = self.server_pod.start("server", **KEEPS_NONE_READY)

    def wait_ready(self) -> None:
        pod, server = self.server_pod, self.server
        assert pod and server
        until(lambda: pod.probe("server", "startup") == 200 or server.process.poll() is not None, server.said, within_s=60)
        assert server.process.poll() is None, server.said()

    def as_with_version_2(self) -> None:
        """Takes sandboxes out of what control groups of version 1 this machine has. A runtime ends what is in the group of a container, and with
        version 2 each process is in one group, which for sandboxes is beside it. With version 1 they inherit that of the node in the
        hierarchies that do not limit them."""
        assert self.node_pod
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                groups = Path(f"/proc/{entry}/cgroup").read_text()
            except OSError:
                continue
            if not re.search(r"^0::/ringfence-", groups, re.MULTILINE):
                continue
            for names, path in re.findall(r"^\d+:([^:]+):(.*)$", groups, re.MULTILINE):
                if self.node_pod.id in path:
                    root = Path("/sys/fs/cgroup") / names.removeprefix("name=")
                    # A process may have ended since it was listed.
                    with suppress(ProcessLookupError):
                        (root / "cgroup.procs").write_text(entry)

    def create_pod_of_node(self) -> Pod:
        self.starts += 1
        self.node_pod = self.machine.pod(self.rendered.pod("DaemonSet"), f"node-{self.starts}")
        return self.node_pod

    def launch_node(self) -> None:
        """The node, and waits until the server has taken it over."""
        assert self.node_pod
        node = self.node = self.node_pod.start("node", **KEEPS_NONE_READY)
        until(lambda: self.states() == ["connected"] or node.process.poll() is not None, node.said, within_s=60)
        assert node.process.poll() is None, node.said()

    def operator(self, *words: str) -> str:
        """`kubectl exec deployment/… -- ringfence …`"""
        assert self.server
        ran = self.server.execute("ringfence", *words)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    def states(self) -> list[str]:
        return re.findall(r'"state": *"(\w+)"', self.operator("node", "list", "--format", "json"))

    def credentials(self) -> dict[str, str]:
        assert self.server
        read = self.server.execute("cat", "/var/lib/ringfence/server/credentials.env")
        assert read.returncode == 0, read.stderr
        return dict(re.findall(r"^(?:export )?(E2B_\w+)=(.*)$", read.stdout, re.MULTILINE))

    def client(self, *words: str) -> str:
        """What a program with the SDK prints, outside of the pods."""
        assert self.server_pod
        url = f"http://{self.server_pod.address}:3000"
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("E2B_", "RINGFENCE_"))}
        ran = subprocess.run(
            self.machine.beside(sys.executable, CLIENT, *words),
            env=plain | {"E2B_API_KEY": self.credentials()["E2B_API_KEY"], "E2B_API_URL": url, "E2B_SANDBOX_URL": url},
            capture_output=True,
            text=True,
            timeout=within(90),
            check=False,
        )
        assert ran.returncode == 0, f"{ran.stderr}\n{self.said()}"
        return ran.stdout

    def said(self) -> str:
        return "\n".join(container.said()[-3000:] for container in (self.server, self.node) if container)


# Nothing is kept ready, because the tests count processes.
KEEPS_NONE_READY = {"RINGFENCE_POOL_BASE": "0"}


@pytest.fixture(scope="module")
def release() -> Iterator[Release]:
    with released({"server": {"tls": {"secretName": "certificate"}}}) as release:
        yield release


@contextmanager
def released(values: Object) -> Iterator[Release]:
    """A release whose node has not joined yet. Nothing of it is on the host afterwards."""
    # Short, because paths of unix sockets are limited to 108 bytes.
    with tempfile.TemporaryDirectory(prefix="rf-") as directory:
        place = Path(directory)
        # The user of the database has to reach its files.
        place.chmod(0o755)
        node_dir = place / "node"
        hoststate.own(node_dir)
        before = HostState.take()
        with ExitStack() as at_the_end:
            machine = Machine(place, binary())
            at_the_end.callback(machine.leave)
            database = Database(machine, place)
            at_the_end.callback(database.stop)
            database.start()
            nodes = {"dataPath": str(node_dir), "kernelModules": Path("/lib/modules").is_dir()}
            rendered = chart.render(values | {"nodes": nodes})
            machine.secrets = {
                "database": {"url": database.url},
                "master-key": {"key": secrets.token_hex(32)},
                "certificate": certificate(place, "sandbox.example.com"),
            }
            machine.config_maps = {each["metadata"]["name"]: each["data"] for each in rendered.objects if each["kind"] == "ConfigMap"}
            # What sandboxes a failed test has left end after the node.
            down = [binary(), "down", "--data-dir", node_dir]
            plain = {"PATH": os.environ["PATH"]}
            at_the_end.callback(subprocess.run, down, check=False, capture_output=True, env=plain)
            at_the_end.callback(machine.close)
            yield Release(machine, database, rendered, node_dir)
        assert left_over(before) == {}
        groups = Path("/sys/fs/cgroup")
        assert [path for pattern in ("", "*/") for path in groups.glob(f"{pattern}{machine.prefix}-*")] == []


def certificate(place: Path, domain: str) -> dict[str, str]:
    """The content of a secret of the type kubernetes.io/tls, for a domain and all names below it."""
    chain, key = place / "tls.crt", place / "tls.key"
    names = f"subjectAltName=DNS:{domain},DNS:*.{domain}"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "90", "-subj", "/CN=test"]
    subprocess.run([*words, "-addext", names, "-keyout", key, "-out", chain], check=True, capture_output=True)
    return {"tls.crt": chain.read_text(), "tls.key": key.read_text()}
