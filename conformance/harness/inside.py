"""Looking at a sandbox from both sides: programs run inside as its root, and its processes found from the host."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from e2b import CommandExitException, CommandHandle, Sandbox, TimeoutException

from harness.traffic import program, until

PROBE = "/tmp/probe.py"


def probe(sandbox: Sandbox, name: str, *arguments: str, user: str = "root", timeout: float = 120) -> Any:
    """Runs one of the attempts of `programs/probe.py` inside and returns its outcome."""
    sandbox.files.write(PROBE, program("probe.py"), user="root")
    words = " ".join(f"'{argument}'" for argument in (name, *arguments))
    return json.loads(sandbox.commands.run(f"python3 {PROBE} {words}", user=user, timeout=timeout).stdout)


def root(sandbox: Sandbox, command: str, timeout: float = 60) -> str:
    """Standard output of a command run as root inside."""
    return sandbox.commands.run(command, user="root", timeout=timeout).stdout


def status(sandbox: Sandbox, command: str, user: str = "root", timeout: float = 60) -> int:
    """Exit code of a command; -1 when a signal ended it."""
    try:
        return sandbox.commands.run(command, user=user, timeout=timeout).exit_code
    except CommandExitException as failed:
        return failed.exit_code


@contextmanager
def ending_spawner() -> Iterator[None]:
    """Around the start of what ends the process that starts all others. That may be gone before it has said that it started this:
    then the answer is that it is gone."""
    try:
        yield
    except TimeoutException as gone:
        assert "its spawner is gone" in str(gone)


def end_spawner(sandbox: Sandbox) -> None:
    """Has root inside kill the process that starts all others."""
    with ending_spawner():
        root(sandbox, "pkill -KILL -f '^ringfence spawner' || true")


def starts(sandbox: Sandbox) -> bool:
    """Whether a command can be started at this moment."""
    try:
        return root(sandbox, "echo started") == "started\n"
    except TimeoutException:
        return False


def attack_spawner(sandbox: Sandbox, command: str) -> CommandHandle:
    """Starts a program of root inside that ends or changes the process that starts all others. It begins once its start was answered."""
    begin = f"/tmp/begin-{uuid.uuid4().hex[:8]}"
    wait = f"until [ -e {begin} ]; do sleep 0.01; done; exec {command}"
    handle = sandbox.commands.run(wait, user="root", background=True, timeout=0)
    sandbox.files.write(begin, "", user="root")
    return handle


def boot_id(sandbox: Sandbox) -> str:
    """What tells a run of the sandbox from all others."""
    text = sandbox.commands.run("cat /proc/sys/kernel/random/boot_id").stdout
    assert text == f"{uuid.UUID(text.strip())}\n"
    return text.strip()


class Background:
    """A Python program that runs inside until it is killed, and has printed a line: what it had to do first is done."""

    def __init__(self, sandbox: Sandbox, code: str, user: str = "user") -> None:
        place = f"/tmp/background-{uuid.uuid4().hex[:8]}.py"
        sandbox.files.write(place, code, user=user)
        # As many descriptors as the user may have: most of these programs take what they can get.
        command = f"ulimit -n $(ulimit -Hn); exec python3 -u {place}"
        self.handle = sandbox.commands.run(command, background=True, user=user, timeout=0)
        self.said = ""
        output = iter(self.handle)
        # A line may arrive in parts.
        while not self.said.endswith("\n"):
            out, error, _ = next(output)
            assert error is None, error
            self.said += out or ""


class Marked:
    """A process inside a sandbox that the host can find, because its command line carries a mark of its own."""

    def __init__(self, sandbox: Sandbox, user: str = "root") -> None:
        # The mark is the name of the process, so that it cannot be mistaken for one of the host.
        self.mark = f"rf-{uuid.uuid4().hex[:10]}"
        self.handle = sandbox.commands.run(f"exec -a {self.mark} sleep 86400", background=True, user=user, timeout=0)
        self.inner_pid = self.handle.pid

    @property
    def host_pid(self) -> int:
        # The shell becomes the marked process a moment after its start was answered.
        until(lambda: bool(host_pids(self.mark)), f"{self.mark} runs")
        return host_pids(self.mark)[0]


def host_pids(mark: str) -> list[int]:
    """Processes of the host whose first argument is the mark."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                first = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")[0]
            except OSError:
                continue
            if first == mark.encode():
                found.append(int(name))
    return found


def outgoing(sandbox: Sandbox, *attempts: dict[str, Any], user: str = "root", timeout: float = 120) -> list[dict[str, Any]]:
    """Makes connections from inside, all at the same time, by `programs/outgoing.py`; what became of each, in order."""
    place = f"/tmp/outgoing-{uuid.uuid4().hex[:8]}"
    sandbox.files.write(f"{place}.py", program("outgoing.py"), user=user)
    sandbox.files.write(f"{place}.json", json.dumps(attempts), user=user)
    return json.loads(sandbox.commands.run(f"python3 {place}.py < {place}.json", user=user, timeout=timeout).stdout)


class Timers:
    """`programs/timers.py` in a sandbox: what its clocks show, and what its timers have left, before and after a pause."""

    CLOCKS = ("monotonic", "boottime", "uptime")

    def __init__(self, sandbox: Sandbox) -> None:
        self.program = Background(sandbox, program("timers.py"))
        self.before = self.ask(sandbox, 0)

    def ask(self, sandbox: Sandbox, number: int) -> dict[str, Any]:
        sandbox.files.write(f"/tmp/ask-{number}", "")
        until(lambda: sandbox.files.exists(f"/tmp/told-{number}"), "the clocks are read")
        return json.loads(sandbox.files.read(f"/tmp/told-{number}"))

    def passed(self, sandbox: Sandbox) -> tuple[float, dict[str, float], dict[str, float], dict[str, Any]]:
        """What has passed since: by the wall clock at most, by the other clocks, and of the timers; and what was told now."""
        after = self.ask(sandbox, 1)
        clocks = {name: after[name] - self.before[name] for name in self.CLOCKS}
        timers = {name: left - after["left"][name] for name, left in self.before["left"].items()}
        # The wall clock is read first and last, so no delay in between makes anything else pass it.
        return after["wall_after"] - self.before["wall"], clocks, timers, after
