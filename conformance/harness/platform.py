"""The platform under test as an operator sees it: a binary, a data directory, a port, signals and exit codes.

Nothing here looks inside: readiness is `GET /health`, the keys come from `credentials.env`, and the sandboxes end
with `ringfence down`.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
import tomllib
from pathlib import Path

import httpx

from harness import hoststate
from harness.patience import within
from harness.ports import free_port

READY_S = 60.0
STOP_S = 30.0
NAMES_CRIU = re.compile(r"^criu\s*=", re.MULTILINE)


class PlatformFailed(Exception):
    """The platform ended, or did not become ready; carries the end of its log."""


def binary() -> Path:
    """The binary under test, from RINGFENCE_BIN."""
    named = os.environ.get("RINGFENCE_BIN")
    if not named:
        raise PlatformFailed("RINGFENCE_BIN does not name the binary under test")
    path = Path(named).resolve()
    if not os.access(path, os.X_OK):
        raise PlatformFailed(f"{path} is not an executable file")
    return path


def configure(values: dict[str, str]) -> None:
    """Configures the SDK in this process with these values, and with nothing else."""
    for name in [name for name in os.environ if name.startswith("E2B_")]:
        del os.environ[name]
    os.environ.update(values)


def _says_how_many(config: str | None) -> bool:
    """Whether a configuration says how many sandboxes of `base` are kept ready."""
    try:
        return "base" in tomllib.loads(config or "").get("pool", {})
    except tomllib.TOMLDecodeError:
        # One that the platform has to refuse.
        return False


class Platform:
    """One data directory and the process that serves it, if any."""

    def __init__(self, data_dir: Path, config: str | None = None, ready: bool = False, options: tuple[str, ...] = ()) -> None:
        """`options` are further ones of `up`. With `ready`, sandboxes are kept ready as they are by default. Otherwise, and unless `config` says how many, none of
        `base` are: suites count sandboxes, processes, groups and memory of the host.
        """
        self.binary = binary()
        self.data_dir = data_dir
        hoststate.own(data_dir)
        self.port = free_port()
        self.log_path = data_dir.parent / f"{data_dir.name}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.used_before: dict[str, str] | None = None
        self.options = options
        # A program that starts the binary somewhere else, with its arguments: in other namespaces.
        self.starter: tuple[str, ...] = ()
        self.keeps_ready = ready or _says_how_many(config)
        self.config_path: Path | None = None
        if config is not None:
            self.config_path = data_dir.parent / f"{data_dir.name}.toml"
            self.config_path.write_text(config)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environment(self) -> dict[str, str]:
        """Ours without anything that would configure the platform or the SDK from outside. Nothing is kept ready unless a test
        is about that, and a CRIU that the host may have is not used unless the configuration names one: what a pause keeps
        depends on it."""
        own = {k: v for k, v in os.environ.items() if not k.startswith(("RINGFENCE_", "E2B_"))}
        if not self.keeps_ready:
            own["RINGFENCE_POOL_BASE"] = "0"
        config = self.config_path.read_text() if self.config_path and self.config_path.exists() else ""
        if not NAMES_CRIU.search(config):
            own["RINGFENCE_PAUSE_CRIU"] = "off"
        return own

    def start(self) -> float:
        """Starts the platform and returns the seconds until it was ready."""
        begun = time.monotonic()
        self.launch()
        self.wait_ready()
        return time.monotonic() - begun

    def launch(self) -> None:
        """Starts the platform and does not wait for it."""
        command: list[str | Path] = [*self.starter, self.binary, "up", "--data-dir", self.data_dir]
        command += ["--listen", f"127.0.0.1:{self.port}"]
        if self.config_path:
            command += ["--config", self.config_path]
        command += self.options
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment(), start_new_session=True
            )

    def wait_ready(self) -> None:
        assert self.process
        deadline = time.monotonic() + within(READY_S)
        with httpx.Client(timeout=60) as client:
            while True:
                if self.process.poll() is not None:
                    raise PlatformFailed(f"ended with {self.process.returncode}\n{self.log_tail()}")
                try:
                    if client.get(f"{self.url}/health", timeout=2).status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                if time.monotonic() > deadline:
                    raise PlatformFailed(f"not ready after {within(READY_S):.0f} s\n{self.log_tail()}")
                time.sleep(0.005)

    def log(self) -> str:
        return self.log_path.read_bytes().decode(errors="replace") if self.log_path.exists() else ""

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join(self.log().splitlines()[-lines:])

    def credentials(self) -> dict[str, str]:
        """The values of `credentials.env`."""
        values = {}
        for line in (self.data_dir / "credentials.env").read_text().splitlines():
            for word in shlex.split(line, comments=True):
                name, equals, value = word.partition("=")
                if equals:
                    values[name] = value
        return values

    def use(self) -> None:
        """Configures the SDK in this process from `credentials.env`, and from nothing else, until this is closed."""
        if self.used_before is None:
            self.used_before = {name: value for name, value in os.environ.items() if name.startswith("E2B_")}
        configure(self.credentials())

    def run(self, *arguments: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Runs a subcommand on this data directory."""
        return subprocess.run(
            [*self.starter, self.binary, *arguments, "--data-dir", self.data_dir],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=within(timeout_s),
            env=self.environment(),
        )

    def terminate(self) -> int:
        """SIGTERM, and the exit code."""
        assert self.process
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(within(STOP_S))
        self.process = None
        return code

    def kill(self) -> None:
        """SIGKILL, at once."""
        assert self.process
        self.process.kill()
        self.process.wait(within(STOP_S))
        self.process = None

    def down(self) -> subprocess.CompletedProcess[str]:
        """Ends every sandbox; the platform must not be running."""
        return self.run("down")

    def close(self) -> None:
        """Whatever happened before: no process and no sandbox of this platform is left."""
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait(within(STOP_S))
        self.process = None
        if self.data_dir.exists():
            self.down()
        if self.used_before is not None:
            # What another platform was used for goes on with that one.
            configure(self.used_before)
            self.used_before = None
