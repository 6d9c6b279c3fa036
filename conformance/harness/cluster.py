"""A platform of several processes: a server, and nodes that connect to it, the first through a relay which a test can cut.

To clients, and to most tests, it is a `Platform`: its data directory, port, log and process are those of the server.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from harness import hoststate
from harness.hoststate import HostState, left_over
from harness.patience import within
from harness.platform import STOP_S, Platform, PlatformFailed
from harness.ports import free_port

CHUNK = 1 << 16


class Relay:
    """A TCP port that relays to another one, or to several in turn, unless it is cut."""

    def __init__(self, *to: int) -> None:
        self.to = itertools.cycle(to)
        self.is_cut = False
        self.lock = threading.Lock()
        self.pairs: list[tuple[socket.socket, socket.socket]] = []
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", next(self.to)), timeout=5)
            except OSError:
                near.close()
                continue
            with self.lock:
                if self.is_cut:
                    near.close()
                    far.close()
                    continue
                self.pairs.append((near, far))
            for source, sink in ((near, far), (far, near)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        source.settimeout(None)
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK):
                sink.sendall(data)
        for side in (source, sink):
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """Cuts every connection, and accepts no other."""
        with self.lock:
            self.is_cut = True
            pairs, self.pairs = self.pairs, []
        for pair in pairs:
            for side in pair:
                with contextlib.suppress(OSError):
                    side.shutdown(socket.SHUT_RDWR)
                side.close()

    def mend(self) -> None:
        with self.lock:
            self.is_cut = False

    def close(self) -> None:
        self.cut()
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


class Other:
    """A further node of a cluster, with a data directory of its own on the same host."""

    def __init__(self, cluster: Cluster, node_dir: Path) -> None:
        self.cluster = cluster
        self.node_dir = node_dir
        hoststate.own(node_dir)
        self.log_path = node_dir.parent / f"{node_dir.name}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.id = ""

    def launch(self) -> None:
        if not (self.node_dir / "link.json").exists():
            joined = self.cluster.join(self.cluster.token(), self.node_dir)
            if joined.returncode != 0:
                raise PlatformFailed(f"a node did not join: {joined.stderr}")
            # The last one to join.
            self.id = self.cluster.nodes()[-1]["id"]
        self.process = self.cluster.spawn(self.log_path, "node", "--data-dir", self.node_dir)

    def kill(self) -> None:
        """SIGKILL, at once."""
        assert self.process
        self.process.kill()
        self.process.wait(within(STOP_S))
        self.process = None

    def terminate(self) -> int:
        assert self.process
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(within(STOP_S))
        self.process = None
        return code


class Cluster(Platform):
    """A server and its node; further ones with `more`."""

    def __init__(self, data_dir: Path, config: str | None = None, ready: bool = False, more: int = 0) -> None:
        super().__init__(data_dir, config, ready)
        self.others = [Other(self, data_dir.parent / f"{data_dir.name}-node{number}") for number in range(2, 2 + more)]
        self.node_dir = data_dir.parent / f"{data_dir.name}-node"
        hoststate.own(self.node_dir)
        self.node_log_path = data_dir.parent / f"{self.node_dir.name}.log"
        self.nodes_port = free_port()
        self.relay = Relay(self.nodes_port)
        self.node: subprocess.Popen[bytes] | None = None

    def spawn(self, log_path: Path, *arguments: object) -> subprocess.Popen[bytes]:
        command = [str(self.binary), *map(str, arguments)]
        if self.config_path:
            command += ["--config", str(self.config_path)]
        with open(log_path, "ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment(), start_new_session=True
            )

    def launch_server(self) -> None:
        listen = ("--listen", f"127.0.0.1:{self.port}", "--nodes-listen", f"127.0.0.1:{self.nodes_port}")
        self.process = self.spawn(self.log_path, "server", "--data-dir", self.data_dir, *listen)

    def launch_node(self) -> None:
        self.node = self.spawn(self.node_log_path, "node", "--data-dir", self.node_dir)

    def launch(self) -> None:
        self.launch_server()
        if not (self.node_dir / "link.json").exists():
            joined = self.join(self.token())
            if joined.returncode != 0:
                raise PlatformFailed(f"the node did not join: {joined.stderr}")
        if self.node is None:
            self.launch_node()
        for other in self.others:
            if other.process is None:
                other.launch()

    def wait_ready(self) -> None:
        """Waits until the server answers, and has taken over every node that runs."""
        super().wait_ready()
        count = sum(process is not None for process in (self.node, *(other.process for other in self.others)))
        deadline = time.monotonic() + within(30)
        while sum(node["state"] == "connected" for node in self.nodes()) < count:
            if time.monotonic() > deadline or (self.process and self.process.poll() is not None):
                raise PlatformFailed(f"the nodes were not taken over: {self.nodes()}\n{self.log_tail()}")
            time.sleep(0.02)

    def token(self) -> str:
        """A token to join, once the server answers its operator."""
        deadline = time.monotonic() + within(30)
        while True:
            made = self.run("node", "token")
            if made.returncode == 0:
                return made.stdout.strip()
            if time.monotonic() > deadline or (self.process and self.process.poll() is not None):
                raise PlatformFailed(f"no token: {made.stderr}\n{self.log_tail()}")
            time.sleep(0.02)

    def join(self, token: str, node_dir: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Has a node join. The token goes through standard input."""
        return subprocess.run(
            [self.binary, "node", "join", f"https://127.0.0.1:{self.relay.port}", "--data-dir", node_dir or self.node_dir],
            input=f"{token}\n",
            capture_output=True,
            text=True,
            timeout=within(60),
            env=self.environment(),
        )

    def nodes(self) -> list[dict[str, str]]:
        """The nodes, as the server lists them."""
        listed = self.run("node", "list", "--format", "json")
        assert listed.returncode == 0, listed.stderr
        return json.loads(listed.stdout)

    def node_log(self) -> str:
        return self.node_log_path.read_bytes().decode(errors="replace") if self.node_log_path.exists() else ""

    def log_tail(self, lines: int = 40) -> str:
        node = "\n".join(self.node_log().splitlines()[-lines:])
        tail = f"{super().log_tail(lines)}\n--- the node:\n{node}"
        for other in self.others:
            log = other.log_path.read_bytes().decode(errors="replace") if other.log_path.exists() else ""
            tail += f"\n--- {other.node_dir.name}:\n" + "\n".join(log.splitlines()[-lines:])
        return tail

    def kill_node(self) -> None:
        """SIGKILL, at once."""
        assert self.node
        self.node.kill()
        self.node.wait(within(STOP_S))
        self.node = None

    def terminate_node(self) -> int:
        assert self.node
        self.node.send_signal(signal.SIGTERM)
        code = self.node.wait(within(STOP_S))
        self.node = None
        return code

    def terminate(self) -> int:
        code = super().terminate()
        code = code or (self.terminate_node() if self.node else 0)
        for other in self.others:
            code = code or (other.terminate() if other.process else 0)
        return code

    def down(self) -> subprocess.CompletedProcess[str]:
        """Ends every sandbox, on all nodes; no process must be running."""
        downs = [self.on(directory, "down") for directory in (self.node_dir, *(other.node_dir for other in self.others))]
        return next((down for down in downs if down.returncode != 0), downs[0])

    def on(self, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs a subcommand on a data directory."""
        return subprocess.run(
            [self.binary, *arguments, "--data-dir", directory],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=within(120),
            env=self.environment(),
        )

    def close(self) -> None:
        if self.node and self.node.poll() is None:
            self.kill_node()
        self.node = None
        for other in self.others:
            if other.process and other.process.poll() is None:
                other.kill()
        super().close()
        self.relay.close()


@contextlib.contextmanager
def running_cluster(work: Path, config: str | None = None, more: int = 0) -> Iterator[Cluster]:
    """A cluster that runs, for clients of this process. Nothing of it is on the host afterwards."""
    before = HostState.take()
    cluster = Cluster(work / "data", config=config, more=more)
    try:
        cluster.start()
        cluster.use()
        yield cluster
        assert cluster.terminate() == 0, cluster.log_tail(20)
        down = cluster.down()
        assert down.returncode == 0, down.stderr
        assert left_over(before) == {}
    finally:
        cluster.close()
