"""A platform of two processes: a server, and a node that connects to it through a relay which a test can cut.

To clients, and to most tests, it is a `Platform`: its data directory, port, log and process are those of the server.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

from harness import hoststate
from harness.patience import within
from harness.platform import STOP_S, Platform, PlatformFailed
from harness.ports import free_port

CHUNK = 1 << 16


class Relay:
    """A TCP port that relays to another one, unless it is cut."""

    def __init__(self, to: int) -> None:
        self.to = to
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
                far = socket.create_connection(("127.0.0.1", self.to), timeout=5)
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


class Cluster(Platform):
    """A server and its node."""

    def __init__(self, data_dir: Path, config: str | None = None, ready: bool = False) -> None:
        super().__init__(data_dir, config, ready)
        self.node_dir = data_dir.parent / f"{data_dir.name}-node"
        hoststate.own(self.node_dir)
        self.node_log_path = data_dir.parent / f"{self.node_dir.name}.log"
        self.nodes_port = free_port()
        self.relay = Relay(self.nodes_port)
        self.node: subprocess.Popen[bytes] | None = None

    def _spawn(self, log_path: Path, *arguments: object) -> subprocess.Popen[bytes]:
        command = [str(self.binary), *map(str, arguments)]
        if self.config_path:
            command += ["--config", str(self.config_path)]
        with open(log_path, "ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment(), start_new_session=True
            )

    def launch_server(self) -> None:
        listen = ("--listen", f"127.0.0.1:{self.port}", "--nodes-listen", f"127.0.0.1:{self.nodes_port}")
        self.process = self._spawn(self.log_path, "server", "--data-dir", self.data_dir, *listen)

    def launch_node(self) -> None:
        self.node = self._spawn(self.node_log_path, "node", "--data-dir", self.node_dir)

    def launch(self) -> None:
        self.launch_server()
        if not (self.node_dir / "link.json").exists():
            joined = self.join(self.token())
            if joined.returncode != 0:
                raise PlatformFailed(f"the node did not join: {joined.stderr}")
        if self.node is None:
            self.launch_node()

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
        return f"{super().log_tail(lines)}\n--- the node:\n{node}"

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
        return code or (self.terminate_node() if self.node else 0)

    def down(self) -> subprocess.CompletedProcess[str]:
        """Ends every sandbox, on the node; neither process must be running."""
        return self.on(self.node_dir, "down")

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
        super().close()
        self.relay.close()
