"""Several servers on one PostgreSQL database, and nodes that know all of them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from harness import hoststate
from harness.hoststate import HostState, left_over
from harness.machines import Machine, Machines
from harness.patience import within
from harness.platform import STOP_S, Platform, PlatformFailed, binary
from harness.ports import free_port
from harness.postgres import Postgres
from harness.s3 import Gateway


class Server(Platform):
    """One server: its port, credentials, log and process."""

    def __init__(
        self, data_dir: Path, database: str, domain: str | None = None, config: str | None = None, machine: Machine | None = None
    ) -> None:
        super().__init__(data_dir, config)
        self.database = database
        self.machine = machine
        self.host = machine.address if machine else "127.0.0.1"
        self.starter = machine.starter if machine else ()
        self.domain = domain or f"sandbox.localhost:{self.port}"
        self.nodes_port = free_port()

    @property
    def nodes_address(self) -> str:
        return f"https://{self.host}:{self.nodes_port}"

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def environment(self) -> dict[str, str]:
        return super().environment() | {"RINGFENCE_DATABASE_URL": self.database}

    def launch(self) -> None:
        command: list[str | Path] = [*self.starter, self.binary, "server", "--data-dir", self.data_dir, "--listen", f"{self.host}:{self.port}"]
        command += ["--nodes-listen", f"{self.host}:{self.nodes_port}", "--nodes-address", self.nodes_address]
        command += ["--domain", self.domain]
        if self.config_path:
            command += ["--config", self.config_path]
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment(), start_new_session=True
            )

    def signal(self, number: signal.Signals) -> None:
        assert self.process
        self.process.send_signal(number)

    def nodes(self) -> list[dict[str, str]]:
        """The nodes, as this server lists them."""
        listed = self.run("node", "list", "--format", "json")
        assert listed.returncode == 0, listed.stderr
        return json.loads(listed.stdout)

    def serves(self) -> set[str]:
        """The ids of the nodes that are connected to this server."""
        return {node["id"] for node in self.nodes() if node["state"] == "connected"}

    def down(self) -> subprocess.CompletedProcess[str]:
        """A server has no sandboxes of its own."""
        return subprocess.CompletedProcess([], 0, "", "")


class Node:
    """A node of several servers."""

    def __init__(self, node_dir: Path, servers: list[Server], machine: Machine | None = None) -> None:
        self.binary = binary()
        self.node_dir = node_dir
        self.machine = machine
        self.starter = machine.starter if machine else ()
        hoststate.own(node_dir)
        self.servers = servers
        self.log_path = node_dir.parent / f"{node_dir.name}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.id = ""

    def environment(self) -> dict[str, str]:
        own = self.servers[0].environment()
        del own["RINGFENCE_DATABASE_URL"]
        return own

    def join(self, through: Server) -> None:
        made = through.run("node", "token")
        if made.returncode != 0:
            raise PlatformFailed(f"no token: {made.stderr}\n{through.log_tail()}")
        addresses = [server.nodes_address for server in self.servers]
        joined = subprocess.run(
            [*self.starter, self.binary, "node", "join", *addresses, "--data-dir", self.node_dir],
            input=made.stdout,
            capture_output=True,
            text=True,
            timeout=within(60),
            env=self.environment(),
        )
        if joined.returncode != 0:
            raise PlatformFailed(f"a node did not join: {joined.stderr}")
        # The last one to join.
        self.id = through.nodes()[-1]["id"]

    def launch(self) -> None:
        command: list[object] = [*self.starter, self.binary, "node", "--data-dir", self.node_dir]
        if self.servers[0].config_path:
            command += ["--config", self.servers[0].config_path]
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment(),
                start_new_session=True,
            )

    def terminate(self) -> int:
        assert self.process
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(within(STOP_S))
        self.process = None
        return code

    def down(self) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.starter, self.binary, "down", "--data-dir", self.node_dir],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=within(120),
            env=self.environment(),
        )

    def log(self) -> str:
        return self.log_path.read_bytes().decode(errors="replace") if self.log_path.exists() else ""


class Service:
    """Servers on one database, with nodes; each on a machine of its own where there are machines."""

    def __init__(
        self, work: Path, servers: int = 2, nodes: int = 2, config: str | None = None, machines: Machines | None = None
    ) -> None:
        self.work = work
        self.machines = machines or Machines()
        self.gateway: Gateway | None = None
        self.postgres = Postgres(work / "pg")
        self.servers: list[Server] = []
        for number in range(1, servers + 1):
            domain = self.servers[0].domain if self.servers else None
            machine = machines.add() if machines else None
            self.servers.append(Server(work / f"server{number}", self.postgres.url, domain, config, machine))
        self.nodes = [
            Node(work / f"node{number}", self.servers, machines.add() if machines else None) for number in range(1, nodes + 1)
        ]

    def start(self, is_placed: bool = True) -> None:
        """Starts all; if they are placed, each node at a server of its own as far as there are as many."""
        self.postgres.start()
        first, *others = self.servers
        first.start()
        for server in others:
            # They have one master key.
            server.data_dir.mkdir(mode=0o700)
            shutil.copy(first.data_dir / "secret.key", server.data_dir / "secret.key")
            os.chmod(server.data_dir / "secret.key", 0o600)
            server.start()
        for number, node in enumerate(self.nodes):
            node.join(self.servers[number % len(self.servers)])
        if is_placed:
            self.place()
            return
        for node in self.nodes:
            node.launch()
        deadline = time.monotonic() + within(30.0)
        while not self.is_served():
            if time.monotonic() > deadline:
                raise PlatformFailed(f"the nodes are not served: {self.log_tail()}")
            time.sleep(0.05)

    def is_served(self) -> bool:
        """Whether each node is connected to one server, where all servers run."""
        served = [node for server in self.servers for node in server.serves()]
        return sorted(served) == sorted(node.id for node in self.nodes)

    def place(self) -> None:
        """Has each node connect to the server of its number, and waits until each is at that alone."""
        deadline = time.monotonic() + within(120.0)
        while found := self._misplaced():
            self._place(*found, deadline)

    def restart(self, node: Node, server: Server) -> None:
        """Ends a node and starts it again, at this server."""
        self._place(node, server, time.monotonic() + within(120.0))

    def _misplaced(self) -> tuple[Node, Server] | None:
        """A node that is not at the server of its number. One that was stopped here for more than ten seconds may have lost its own."""
        for number, node in enumerate(self.nodes):
            home = self.servers[number % len(self.servers)]
            at = [server for server in self.servers if server.process and node.id in server.serves()]
            if node.process is None or at != [home]:
                return node, home
        return None

    def _place(self, node: Node, server: Server, deadline: float) -> None:
        if node.process:
            node.terminate()
        # The connection of the process before may still be listed, and would be taken for that of the next one.
        while any(node.id in each.serves() for each in self.servers if each.process):
            if time.monotonic() > deadline:
                raise PlatformFailed(f"a node that has ended is served: {self.log_tail()}")
            time.sleep(0.05)
        # A node prefers none, so the others are away while it looks for one: their ports answer nothing.
        away = [other for other in self.servers if other is not server and other.process]
        for other in away:
            other.signal(signal.SIGSTOP)
        try:
            node.launch()
            self.until_served(node, server)
        finally:
            for other in away:
                other.signal(signal.SIGCONT)

    def until_served(self, node: Node, server: Server, within_s: float = 30.0) -> None:
        deadline = time.monotonic() + within(within_s)
        while node.id not in server.serves():
            if time.monotonic() > deadline:
                raise PlatformFailed(f"the node is not served: {server.nodes()}\n{server.log_tail()}\n--- the node:\n{node.log()[-4000:]}")
            time.sleep(0.05)

    def server_of(self, node: Node) -> Server:
        """The server that a node is connected to."""
        found = [server for server in self.servers if server.process and node.id in server.serves()]
        assert len(found) == 1, [server.nodes() for server in self.servers if server.process]
        return found[0]

    def log_tail(self, lines: int = 30) -> str:
        tails = [f"--- {server.data_dir.name}:\n{server.log_tail(lines)}" for server in self.servers]
        tails += [f"--- {node.node_dir.name}:\n" + "\n".join(node.log().splitlines()[-lines:]) for node in self.nodes]
        tails.append(f"--- PostgreSQL:\n{self.postgres.log_tail(lines)}")
        return "\n".join(tails)

    def terminate(self) -> int:
        running = [(part, part.process) for part in (*self.servers, *self.nodes) if part.process]
        for _, process in running:
            # A test that was interrupted may have left it stopped.
            process.send_signal(signal.SIGCONT)
        return max((part.terminate() for part, _ in running), default=0)

    def down(self) -> None:
        for node in self.nodes:
            down = node.down()
            assert down.returncode == 0, down.stderr

    def close(self) -> None:
        for part in (*self.servers, *self.nodes):
            if part.process and part.process.poll() is None:
                part.process.kill()
                part.process.wait(within(STOP_S))
            part.process = None
        for node in self.nodes:
            if node.node_dir.exists():
                node.down()
        for server in self.servers:
            server.close()
        self.postgres.stop()


@contextlib.contextmanager
def running_service(
    work: Path,
    servers: int = 2,
    nodes: int = 2,
    config: str | None = None,
    is_placed: bool = True,
    machines: Machines | None = None,
    program: Path | None = None,
) -> Iterator[Service]:
    """Servers and nodes that run, of this program if one is given. Nothing of them is on the host afterwards."""
    service = Service(work, servers, nodes, config, machines)
    for part in (*service.servers, *service.nodes):
        part.binary = program or part.binary
    before = HostState.take()
    try:
        service.start(is_placed)
        yield service
        assert service.terminate() == 0, service.log_tail()
        service.down()
        assert left_over(before) == {}
    finally:
        service.close()
