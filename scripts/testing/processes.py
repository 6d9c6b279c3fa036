"""Processes that this run starts, and their end.

Each task has a process group of its own, which is ended as a whole by its id: first as Ctrl-C would, so that suites put the
host in order, and for good after a while. Platforms put themselves in groups of their own, so that a suite that was killed
leaves them. Everything that a run starts carries a mark in its environment, by which the rest is found; only processes
with that mark are ever ended.

What loses its parent becomes a child of this program, as it would become one of init: the agent of a restored sandbox, for
one, keeps its control group until it is waited for. Where a container runs this program as its first process, or
the first process does not wait for others, nothing else would.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from testing.tasks import Task

MARK = "CONFORMANCE_RUN"
# What a killed process may take to be gone.
SETTLE_S = 2.0
# From <linux/prctl.h>.
PR_SET_CHILD_SUBREAPER = 36
# Children of this program, which has one thread.
CHILDREN = f"/proc/self/task/{os.getpid()}/children"


def new_mark() -> str:
    return uuid.uuid4().hex


def adopt() -> None:
    """Makes this program the parent of whatever below it loses its own. `wait_for_adopted` has to be called then. Without a
    kernel that lists children, init stays what it is.
    """
    if not os.path.exists(CHILDREN):
        return
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def wait_for_adopted(own: set[int]) -> None:
    """Waits for each child that has ended and came from a task. `own` are the tasks, for which others wait. What is in the
    session of this program is left as well: `subprocess` waits for it.
    """
    session = os.getsid(0)
    for child in children():
        with suppress(OSError, IndexError):
            if child not in own and int(stat(child)[3]) != session:
                os.waitpid(child, os.WNOHANG)


def children() -> list[int]:
    """The children of this program."""
    with suppress(OSError):
        return [int(pid) for pid in Path(CHILDREN).read_text().split()]
    return []


def reap(process: subprocess.Popen[bytes]) -> float:
    """Sets the exit code of a child that has ended, and returns the seconds of processors that it and everything it waited for have
    used, which `subprocess` does not tell. A child that runs is left as it is. Nothing else may wait for it meanwhile.
    """
    pid, status, used = os.wait4(process.pid, os.WNOHANG)
    if pid:
        process.returncode = os.waitstatus_to_exitcode(status)
    return used.ru_utime + used.ru_stime


class Process:
    """A task that was begun."""

    def __init__(self, task: Task, log: Path, environment: Mapping[str, str]) -> None:
        self.task = task
        self.log = log
        self.begun = time.monotonic()
        self.ended: float | None = None
        # Seconds of processors that it and everything it waited for have used, once it has ended.
        self.processor_s = 0.0
        # Why it was asked to end, if it was.
        self.stopped_for: str | None = None
        self._stopped_at = 0.0
        log.parent.mkdir(parents=True, exist_ok=True)
        nice = task.nice
        with open(log, "wb") as out:
            output = open(task.output, "wb") if task.output else None  # noqa: SIM115 - closed below
            try:
                self.process = subprocess.Popen(
                    task.command,
                    cwd=task.cwd,
                    env={**environment, **task.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=output or out,
                    stderr=out,
                    # A group and session of its own: what is typed at the terminal reaches this program alone.
                    start_new_session=True,
                    preexec_fn=(lambda: os.nice(nice)) if nice else None,  # noqa: PLW1509 - no threads here
                )
            finally:
                if output:
                    output.close()

    @property
    def seconds(self) -> float:
        return (self.ended or time.monotonic()) - self.begun

    def poll(self) -> int | None:
        """The exit code, once it has ended; what is overdue is asked to end, and what does not end is killed."""
        if self.process.returncode is None:
            self.processor_s = reap(self.process)
        code = self.process.returncode
        if code is not None:
            if self.ended is None:
                self.ended = time.monotonic()
                # A group outlives its first process while others are in it.
                self._signal(signal.SIGKILL)
            return code
        if self.stopped_for is None and self.seconds > self.task.bound:
            self.stop(f"it did not end within {self.task.bound:.0f} s")
        elif self.stopped_for is not None and time.monotonic() - self._stopped_at > self.task.grace:
            self._signal(signal.SIGKILL)
        return None

    def stop(self, why: str) -> None:
        """Asks the task to end, like Ctrl-C."""
        if self.stopped_for is None:
            self.stopped_for, self._stopped_at = why, time.monotonic()
            self._signal(signal.SIGINT)

    def kill(self) -> None:
        """Ends the task immediately."""
        self.stopped_for = self.stopped_for or "killed"
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


def marked(mark: str) -> list[int]:
    """The processes that carry the mark, without this one."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with suppress(OSError):
                if wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    found.append(int(name))
    return found


def end_rest(mark: str, environment: Mapping[str, str]) -> list[str]:
    """Ends whatever is left of a run, and the sandboxes of platforms that are. Returns what was found."""
    found = []
    platforms = {}
    # What was killed with its group may be there for an instant.
    deadline = time.monotonic() + SETTLE_S
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in marked(mark):
        command = arguments(pid)
        if not command:
            continue
        found.append(" ".join(command)[:200])
        if os.path.basename(command[0]) == "ringfence" and "--data-dir" in command[:-1]:
            platforms[command[command.index("--data-dir") + 1]] = command[0]
        end(pid, mark)
    for directory, program in platforms.items():
        with suppress(OSError, subprocess.TimeoutExpired):
            quiet = subprocess.DEVNULL
            command = [program, "down", "--data-dir", directory]
            subprocess.run(command, env=environment, stdin=quiet, stdout=quiet, stderr=quiet, timeout=60, check=False)
    for pid in marked(mark):
        end(pid, mark)
    return found


def arguments(pid: int) -> list[str]:
    try:
        return [word.decode(errors="replace") for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]]
    except OSError:
        return []


def end(pid: int, mark: str, within_s: float = 10.0) -> None:
    """Asks one process to end, and kills it after a while. A descriptor names the process, so that its id cannot become that of
    another one meanwhile.
    """
    with suppress(OSError):
        process = os.pidfd_open(pid)
        try:
            if pid not in marked(mark):
                return
            signal.pidfd_send_signal(process, signal.SIGTERM)
            deadline = time.monotonic() + within_s
            while time.monotonic() < deadline:
                # The descriptor becomes invalid for signals when the process has ended and was waited for.
                signal.pidfd_send_signal(process, 0)
                if state(pid) in "ZX":
                    return
                time.sleep(0.05)
            signal.pidfd_send_signal(process, signal.SIGKILL)
        finally:
            os.close(process)


def state(pid: int) -> str:
    """The state letter of a process; X once it is gone."""
    try:
        return stat(pid)[0]
    except OSError:
        return "X"


def stat(pid: int) -> list[str]:
    """The fields of a process from its state on: state, parent, group, session and others."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
