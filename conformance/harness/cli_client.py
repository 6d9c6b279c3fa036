"""The published command line client, as a program and in a terminal."""

from __future__ import annotations

import itertools
import json
import os
import pty
import re
import select
import signal
import subprocess
import time
from pathlib import Path

from harness.patience import within
from harness.platform import Platform
from harness.secure import SecurePlatform

# The subcommands and their options that were used, by the way the client reached the platform; those of `sandbox` without it.
used: dict[str, set[str]] = {"http": set(), "https": set()}

RESOLVE = Path(__file__).parent.parent / "javascript" / "resolve.cjs"


class Client:
    """The client with nothing but the platform's credentials, in a home of its own."""

    def __init__(self, platform: Platform, home: Path) -> None:
        self.way = "https" if isinstance(platform, SecurePlatform) else "http"
        modules = Path(os.environ["RINGFENCE_NODE_MODULES"]).resolve()
        self.program = [os.environ["RINGFENCE_NODE"], str(modules / "@e2b" / "cli" / "dist" / "index.js")]
        self.environment = {
            **platform.environment(),
            **platform.credentials(),
            "HOME": str(home),
            "TERM": "xterm",
            "NODE_OPTIONS": f"--require={RESOLVE}",
        }

    def note(self, arguments: tuple[str, ...]) -> None:
        """Writes down the subcommand and its options, up to the sandbox's own command."""
        group, command, *rest = arguments
        if group != "sandbox":
            command = f"{group} {command}"
        if command == "exec":
            rest = list(itertools.takewhile(lambda word: not re.fullmatch("i[a-z0-9]{15,}", word), rest))
        used[self.way] |= {command, *(f"{command} {word}" for word in rest if word.startswith("-"))}

    def run(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        self.note(arguments)
        return subprocess.run(
            [*self.program, *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=within(120),
            **({"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}),
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """A call that goes on; the caller ends it."""
        self.note(arguments)
        return subprocess.Popen(
            [*self.program, *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def ok(self, *arguments: str, stdin: str | None = None) -> str:
        """Standard output of a call that must succeed."""
        ran = self.run(*arguments, stdin=stdin)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    def ids(self, *arguments: str) -> set[str]:
        return {item["sandboxId"] for item in json.loads(self.ok("sandbox", "list", "-f", "json", *arguments))}


class Terminal:
    """The client in a terminal, as a person would use it."""

    def __init__(self, client: Client, *arguments: str) -> None:
        client.note(arguments)
        self.screen = ""
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execve(client.program[0], [*client.program, *arguments], client.environment)

    def shows(self, pattern: str, within_s: float = 30.0) -> re.Match[str]:
        deadline = time.monotonic() + within(within_s)
        while not (found := re.search(pattern, self.screen)):
            assert time.monotonic() < deadline, self.screen
            if select.select([self.fd], [], [], 0.1)[0]:
                self.screen += os.read(self.fd, 65536).decode(errors="replace")
        return found

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def end(self) -> int:
        """The exit code, once the client has ended by itself."""
        deadline = time.monotonic() + within(30)
        while True:
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    self.screen += os.read(self.fd, 65536).decode(errors="replace")
                except OSError:
                    pass
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                os.close(self.fd)
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
            assert time.monotonic() < deadline, self.screen

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            os.close(self.fd)
