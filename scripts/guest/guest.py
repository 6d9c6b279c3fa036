"""What checks in the guest are made of: the platform, its API, the agent's Connect protocol, sandboxes, and the count of
what passed. Standard library only.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from harness import hoststate
from harness.patience import cpu_seconds

BINARY = "/usr/bin/ringfence" if sys.argv[1:] == ["systemd"] else "/usr/local/bin/ringfence"
PACKAGE = "/opt/guest/ringfence.deb"
NEXT_PACKAGE = "/opt/guest/next.deb"
DATA_DIR = Path("/var/lib/ringfence")
ADDRESS = ("127.0.0.1", 3000)
AGENT_PORT = 49983
CGROUP = Path("/sys/fs/cgroup")
MODPROBE = Path("/proc/sys/kernel/modprobe")
# Small, so that an emulated machine reaches every limit within seconds.
MEMORY_MB, CPUS, PIDS, DISK_MB = 256, 1, 100, 256
LIMITS = {
    "RINGFENCE_SANDBOX_MEMORY_MB": str(MEMORY_MB),
    "RINGFENCE_SANDBOX_CPU_COUNT": str(CPUS),
    "RINGFENCE_SANDBOX_PIDS": str(PIDS),
    "RINGFENCE_SANDBOX_DISK_MB": str(DISK_MB),
    "RINGFENCE_POOL_BASE": "0",
    "RINGFENCE_PAUSE_CRIU": Path("/opt/guest/criu.path").read_text().strip(),
}
# What a fixed piece of work takes in this machine if nobody else uses the host: emulation makes everything 20 to 50 times slower.
EMULATED_CPU_S = 1.0


def slowness() -> float:
    """How many times slower this machine is than that, now. Where others take the host's processors, it gets few turns: its
    clock goes on, and nothing else here does.
    """
    return min(8.0, max(1.0, cpu_seconds() / EMULATED_CPU_S))


# Nothing here is waited for this long unless it hangs.
PATIENCE_S = 120 * slowness()

passed: list[str] = []
failed: list[str] = []


def check(name: str) -> Callable[[Callable[[], object]], None]:
    """Runs the decorated function now and counts how it ended. What it returns is shown."""

    def run(body: Callable[[], object]) -> None:
        begun = time.monotonic()
        try:
            detail = body()
        except Exception as error:  # noqa: BLE001: whatever went wrong is the finding
            failed.append(name)
            text = f"{type(error).__name__}: {error}".replace("\n", "\n       ")
            print(f"FAILED {name}\n       {text}", flush=True)
            return
        passed.append(name)
        took = f"{time.monotonic() - begun:.1f} s"
        print(f"ok     {name} ({took}{f'; {detail}' if detail else ''})", flush=True)

    return run


def expect(condition: object, what: object) -> None:
    if not condition:
        raise AssertionError(what)


def until(condition: Callable[[], object], what: str, within_s: float = PATIENCE_S) -> None:
    begun = time.monotonic()
    while not condition():
        # Measured only when it is late: it is work, too.
        late = time.monotonic() - begun > within_s
        expect(not late or time.monotonic() - begun < within_s * slowness(), f"not within {within_s:.0f} s: {what}")
        time.sleep(0.1)


def run(*command: str, code: int | None = 0, **more: object) -> str:
    """Runs a program of the guest; its output."""
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PATIENCE_S, **more
    )
    expect(code is None or done.returncode == code, f"{command} exited {done.returncode}: {done.stdout}")
    return done.stdout


def healthy() -> bool:
    try:
        return request("GET", "/health")[0] == 200
    except OSError:
        return False


class Plain:
    """The platform as a child of this script."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with open("/var/log/ringfence.log", "ab") as log:
            self.process = subprocess.Popen([BINARY, "up"], env=os.environ | LIMITS, stdout=log, stderr=log)
        until(lambda: healthy() or self.process.poll() is not None, "the platform is ready")
        expect(self.process.poll() is None, self.log())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def log(self) -> str:
        return Path("/var/log/ringfence.log").read_text()


class Systemd:
    """The platform as the unit of its Debian package."""

    def install(self) -> None:
        told = run("dpkg", "--install", PACKAGE)
        expect("systemctl enable --now ringfence" in told, told)
        expect(run("systemctl", "is-active", "ringfence", code=None).strip() == "inactive", "it was started")
        expect(run("systemctl", "is-enabled", "ringfence", code=None).strip() == "disabled", "it was enabled")
        expect(not DATA_DIR.exists(), f"{DATA_DIR} exists before the first start")
        drop_in = Path("/etc/systemd/system/ringfence.service.d/check.conf")
        drop_in.parent.mkdir(parents=True)
        drop_in.write_text("[Service]\n" + "".join(f"Environment={key}={value}\n" for key, value in LIMITS.items()))
        run("systemctl", "daemon-reload")

    def start(self) -> None:
        run("systemctl", "reset-failed", "ringfence", code=None)
        run("systemctl", "start", "ringfence")
        until(
            lambda: healthy() or run("systemctl", "is-active", "ringfence", code=None).strip() != "active",
            "the platform is ready",
        )
        expect(healthy(), self.log())

    def kill(self) -> None:
        pid = self.main_pid()
        run("systemctl", "kill", "--signal=KILL", "--kill-who=main", "ringfence")
        until(lambda: self.main_pid() != pid, "the unit has ended")

    def main_pid(self) -> str:
        return run("systemctl", "show", "--property=MainPID", "--value", "ringfence").strip()

    def log(self) -> str:
        return run("journalctl", "-u", "ringfence", "--no-pager", "-n", "40")


def credentials() -> dict[str, str]:
    lines = (DATA_DIR / "credentials.env").read_text().splitlines()
    pairs = (line.removeprefix("export ").split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    return {key: value.strip("'\"") for key, value in pairs}


def request(method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*ADDRESS, timeout=PATIENCE_S)
    try:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def api(method: str, path: str, want: int, body: object = None) -> object:
    headers = {"X-API-Key": credentials()["E2B_API_KEY"], "Content-Type": "application/json"}
    status, text = request(method, path, None if body is None else json.dumps(body).encode(), headers)
    expect(status == want, f"{method} {path}: {status} {text.decode(errors='replace')}")
    return json.loads(text) if text else None


class Sandbox:
    """A sandbox, made through the API unless it is there, and used through its agent."""

    def __init__(self, made: dict[str, str] | None = None) -> None:
        made = made or api("POST", "/sandboxes", 201, {"templateID": "base", "timeout": 3600})
        self.id: str = made["sandboxID"]
        self.token: str = made["envdAccessToken"]

    def headers(self, user: str, content: str) -> dict[str, str]:
        return {
            "E2b-Sandbox-Id": self.id,
            "E2b-Sandbox-Port": str(AGENT_PORT),
            "X-Access-Token": self.token,
            "Authorization": "Basic " + base64.b64encode(f"{user}:".encode()).decode(),
            "Content-Type": content,
            "Connect-Protocol-Version": "1",
        }

    def call(self, method: str, message: object) -> dict:
        body = json.dumps(message).encode()
        status, text = request("POST", f"/process.Process/{method}", body, self.headers("root", "application/json"))
        expect(status == 200, f"{method}: {status} {text.decode(errors='replace')}")
        return json.loads(text)

    def events(self, command: str, user: str):
        """The events of a process, as the agent streams them."""
        config = {"cmd": "/bin/bash", "args": ["-l", "-c", command]}
        message = json.dumps({"process": config, "stdin": False}).encode()
        connection = http.client.HTTPConnection(*ADDRESS, timeout=PATIENCE_S)
        try:
            envelope = struct.pack(">BI", 0, len(message)) + message
            connection.request("POST", "/process.Process/Start", envelope, self.headers(user, "application/connect+json"))
            answer = connection.getresponse()
            expect(answer.status == 200, f"Start: {answer.status}")
            while head := answer.read(5):
                flags, length = struct.unpack(">BI", head)
                payload = json.loads(answer.read(length))
                if flags & 2:
                    expect("error" not in payload, payload)
                    return
                yield payload["event"]
        finally:
            connection.close()

    def run(self, command: str, user: str = "user", code: int | None = 0) -> str:
        """Runs a command; what it wrote to both its streams."""
        output, end = b"", None
        for event in self.events(command, user):
            for kind in ("stdout", "stderr"):
                output += base64.b64decode(event.get("data", {}).get(kind, ""))
            end = event.get("end", end)
        text = output.decode(errors="replace")
        expect(end is not None, f"no end event after: {text}")
        expect(code is None or end.get("exitCode", 0) == code, f"{command!r}: {end}, {text}")
        return text

    def start(self, command: str) -> int:
        """Starts a command and leaves it running; its process id inside."""
        for event in self.events(command, "user"):
            return int(event["start"]["pid"])
        raise AssertionError("no start event")

    def group(self, role: str) -> Path:
        found = list(CGROUP.glob(f"ringfence-*/{self.id}.*/{role}"))
        expect(len(found) == 1, f"{role} cgroups: {found}")
        return found[0]

    def value(self, file: str) -> str:
        return (self.group("work") / file).read_text().strip()

    def counter(self, file: str, key: str) -> int:
        return int(dict(line.split() for line in self.value(file).splitlines())[key])

    def delete(self) -> None:
        api("DELETE", f"/sandboxes/{self.id}", 204)


def host_pid(marker: str) -> int:
    """Id on the host of the one process whose command line has `marker`."""
    found = [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and marker.encode() in hoststate._text(f"{entry}/cmdline").encode()
    ]
    expect(len(found) == 1, f"processes with {marker}: {found}")
    return found[0]


def started_at(pid: int) -> str:
    """When a process began, in clock ticks: tells it from a later one with the same id."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
