"""A real S3 server on the loopback, whose objects are files of a directory, and a relay before it that can stall.

The server is a program of its own, named by RINGFENCE_VERSITYGW.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path

from harness.patience import within
from harness.ports import free_port

BUCKET = "objects"
KEY_ID = "conformance"
KEY = "a-secret-key-of-conformance"
PREFIX = "some/where"


def until(what: str, condition, seconds: float = 60.0) -> None:
    """Waits for what comes if nothing is wrong."""
    waits_s = within(seconds)
    deadline = time.monotonic() + waits_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited for {waits_s:.1f} s: {what}")
        time.sleep(0.02)


class Relay:
    """Connections to a port, relayed until it stalls."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.to = port
        # How many more bytes pass in each direction, all connections together; no limit if none.
        self.left: dict[str, int | None] = {"up": None, "down": None}
        self.lock = threading.Lock()
        self.stalled = threading.Event()
        self.listener = socket.create_server((host, 0))
        self.port = self.listener.getsockname()[1]
        self.open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self.to), timeout=5)
                server.settimeout(None)
            except OSError:
                client.close()
                continue
            self.open += [client, server]
            for source, target, way in ((client, server, "up"), (server, client, "down")):
                threading.Thread(target=self._relay, args=(source, target, way), daemon=True).start()

    def _passes(self, way: str, size: int) -> bool:
        with self.lock:
            left = self.left[way]
            if left is not None and left < size:
                self.stalled.set()
                return False
            if left is not None:
                self.left[way] = left - size
            return True

    def _relay(self, source: socket.socket, target: socket.socket, way: str) -> None:
        try:
            while piece := source.recv(1 << 16):
                while not self._passes(way, len(piece)):
                    time.sleep(0.02)
                target.sendall(piece)
        except OSError:
            pass
        finally:
            for end in (source, target):
                try:
                    end.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    def stall(self, up: int | None = None, down: int | None = None) -> None:
        """Lets this many bytes pass from now on, and then none."""
        with self.lock:
            self.left = {"up": up, "down": down}
            self.stalled.clear()

    def go_on(self) -> None:
        self.stall()

    def close(self) -> None:
        self.go_on()
        self.listener.close()
        for end in self.open:
            end.close()


class Gateway:
    """The server. Its objects stay while it is stopped."""

    def __init__(self, work: Path, *options: str | Path, host: str = "127.0.0.1") -> None:
        """`host` is the address that the relay before it listens at."""
        self.host = host
        self.program = Path(os.environ["RINGFENCE_VERSITYGW"])
        self.options = options
        self.root = work / "s3"
        (self.root / BUCKET).mkdir(parents=True)
        self.key_file = work / "s3.key"
        self.key_file.write_text(KEY + "\n")
        self.key_file.chmod(0o600)
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.relay = Relay(self.port, host)

    def start(self) -> None:
        environment = {"ROOT_ACCESS_KEY_ID": KEY_ID, "ROOT_SECRET_ACCESS_KEY": KEY}
        command = [self.program, "--port", f"127.0.0.1:{self.port}", "--quiet", *self.options, "posix", self.root]
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, env=environment)
        until("the S3 server listens", self._listens)

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            return True
        except OSError:
            return False

    def stop(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None

    def close(self) -> None:
        self.stop()
        self.relay.close()
        shutil.rmtree(self.root, ignore_errors=True)

    def config(self, **other: str) -> str:
        """The table of the configuration file. `other` are values as they are written in it."""
        values = {
            "store": '"s3"',
            "bucket": f'"{BUCKET}"',
            "endpoint": f'"http://{self.host}:{self.relay.port}"',
            "prefix": f'"{PREFIX}"',
            "access_key_id": f'"{KEY_ID}"',
            "secret_access_key_file": f'"{self.key_file}"',
            "allow_http": "true",
        } | other
        return "\n[blobs]\n" + "".join(f"{name} = {value}\n" for name, value in values.items())

    @property
    def objects(self) -> Path:
        """The directory of the platform's objects."""
        return self.root / BUCKET / PREFIX

    def layer(self, layer: str) -> Path:
        return self.objects / "layers" / f"{layer}.tar.zst"

    def layers(self) -> set[str]:
        directory = self.objects / "layers"
        return {path.name.removesuffix(".tar.zst") for path in directory.iterdir()} if directory.exists() else set()

    def unfinished(self) -> int:
        """How many uploads in parts have not ended."""
        return sum(1 for path in (self.root / BUCKET / ".sgwtmp/multipart").glob("*/*") if path.is_dir())
