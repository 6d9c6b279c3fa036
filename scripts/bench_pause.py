"""Measures pauses to disk, resumes, snapshots and forks for SPECIFICATION.md, by a client on the same machine.

`bench-pause.sh` runs it with the release binary, the SDK and CRIU. Each figure is the time from a request to its answer, on a kept
connection, nothing left out. Arguments name the cases, all of them by default.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "conformance"))

from e2b import Sandbox  # noqa: E402
from harness.criu import criu_config  # noqa: E402
from harness.platform import Platform  # noqa: E402

MB = 1 << 20
HOLDER = """
import os, time
memory = bytearray(os.urandom(1 << 20)) * {megabytes}
print("ready", flush=True)
while True: time.sleep(60)
"""


class Bench:
    def __init__(self, server: Platform) -> None:
        self.server = server
        headers = {"X-API-Key": server.credentials()["E2B_API_KEY"]}
        self.api = httpx.Client(base_url=server.url, headers=headers, timeout=600)

    def post(self, path: str, body: dict[str, object] | None = None) -> tuple[float, httpx.Response]:
        begun = time.perf_counter()
        answer = self.api.post(path, json=body or {})
        took = (time.perf_counter() - begun) * 1000
        assert answer.is_success, answer.text
        return took, answer

    def sandbox(self, megabytes: int = 0) -> Sandbox:
        """A sandbox with a program that holds memory."""
        box = Sandbox.create(timeout=3600)
        if megabytes:
            box.files.write("/tmp/holder.py", HOLDER.format(megabytes=megabytes))
            handle = box.commands.run("exec python3 /tmp/holder.py", background=True, timeout=0)
            assert next(iter(handle))[0] == "ready\n"
            handle.disconnect()
        return box

    def cycles(self, megabytes: int, number: int) -> None:
        without = in_use()
        box = self.sandbox(megabytes)
        path = f"/sandboxes/{box.sandbox_id}"
        pauses, resumes, freed = [], [], []
        for _ in range(number):
            running = in_use()
            pauses.append(self.post(f"{path}/pause")[0])
            assert self.api.get(path).json()["pauseStorage"] == "disk"
            freed.append(100 * (running - in_use()) / (running - without))
            time.sleep(0.2)
            resumes.append(self.post(f"{path}/connect", {"timeout": 3600})[0])
            time.sleep(0.2)
        show(f"pause, {megabytes} MB", pauses)
        show(f"connect, {megabytes} MB", resumes)
        if megabytes:
            show(f"part of the memory of the sandbox that is freed, {megabytes} MB", freed, "%")
        box.kill()

    def forks(self, megabytes: int, count: int, number: int) -> None:
        box = self.sandbox(megabytes)
        times = []
        for _ in range(number):
            took, answer = self.post(f"/sandboxes/{box.sandbox_id}/fork", {"count": count, "timeout": 3600})
            times.append(took)
            children = [entry["sandbox"]["sandboxID"] for entry in answer.json()]
            assert len(children) == count
            for child in children:
                self.api.delete(f"/sandboxes/{child}").raise_for_status()
            time.sleep(1)
        show(f"fork into {count}, {megabytes} MB each", times)
        box.kill()

    def snapshots(self, megabytes: int, number: int) -> None:
        box = self.sandbox(megabytes)
        times, creates = [], []
        for _ in range(number):
            took, answer = self.post(f"/sandboxes/{box.sandbox_id}/snapshots")
            times.append(took)
            template = answer.json()["snapshotID"].split(":")[0]
            begun = time.perf_counter()
            child = Sandbox.create(template, timeout=600)
            creates.append((time.perf_counter() - begun) * 1000)
            child.kill()
            self.api.delete(f"/templates/{template}").raise_for_status()
            time.sleep(0.3)
        show(f"snapshot with memory, {megabytes} MB", times)
        show(f"create from it, {megabytes} MB", creates)
        box.kill()

    def files(self, megabytes: int) -> None:
        """What a snapshot, and each child of a fork, of a sandbox with many bytes of files takes, and what is written to the disk for it."""
        box = self.sandbox()
        box.commands.run(f"head -c {megabytes}M /dev/urandom > /home/user/data && sync", timeout=600)
        for what, path, body in (
            ("snapshot of the files", "snapshots", {"memory": False}),
            ("snapshot with memory", "snapshots", {"memory": True}),
            ("fork into 1", "fork", {"count": 1, "timeout": 3600}),
            ("fork into 4", "fork", {"count": 4, "timeout": 3600}),
        ):
            os.sync()
            before, space = written(), taken(self.server.data_dir)
            took, answer = self.post(f"/sandboxes/{box.sandbox_id}/{path}", body)
            os.sync()
            wrote, grew = (written() - before) / MB, (taken(self.server.data_dir) - space) / MB
            print(f"{what}, {megabytes} MB of files: {took / 1000:.2f} s, {wrote:.0f} MiB written, {grew:.0f} MiB more in use", flush=True)
            if path == "fork":
                for entry in answer.json():
                    self.api.delete(f"/sandboxes/{entry['sandbox']['sandboxID']}").raise_for_status()
            else:
                self.api.delete(f"/templates/{answer.json()['snapshotID'].split(':')[0]}").raise_for_status()
            time.sleep(5)
        box.kill()


def in_use() -> int:
    """Memory of the host that holds no file of a disk and cannot be taken back, in bytes. Freed pages may be in lists of the
    processors for a while, where they count as neither free nor available."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return sum(int(line[1]) * 1024 for line in lines if line[0] in ("AnonPages:", "Shmem:", "SUnreclaim:", "PageTables:", "KernelStack:"))


def written() -> int:
    """Bytes written to disks of the host, without loop devices."""
    lines = (line.split() for line in Path("/proc/diskstats").read_text().splitlines())
    return sum(int(line[9]) * 512 for line in lines if Path("/sys/block", line[2], "device").exists())


def taken(directory: Path) -> int:
    """Bytes that the files below a directory take."""
    entries = {(found.st_dev, found.st_ino): found.st_blocks * 512 for found in map(os.lstat, directory.rglob("*"))}
    return sum(entries.values())


def show(what: str, times: list[float], unit: str = "ms") -> None:
    times = sorted(times)
    p50, p90, p99 = (times[math.ceil(len(times) * share) - 1] for share in (0.5, 0.9, 0.99))
    print(f"{what}: n {len(times)}, p50 {p50:.1f}, p90 {p90:.1f}, p99 {p99:.1f}, max {times[-1]:.1f} {unit}", flush=True)


CASES: dict[str, Callable[[Bench], None]] = {
    "idle": lambda bench: bench.cycles(0, 100),
    "memory": lambda bench: bench.cycles(200, 50),
    "fork": lambda bench: bench.forks(100, 20, 10),
    "snapshot": lambda bench: bench.snapshots(0, 30),
    "files": lambda bench: bench.files(2048),
}


def main() -> None:
    cases = sys.argv[1:] or list(CASES)
    with tempfile.TemporaryDirectory(prefix="rf-bench-", dir=os.environ.get("TMPDIR", "/var/tmp")) as directory:
        server = Platform(Path(directory) / "data", config=criu_config())
        try:
            server.start()
            server.use()
            for case in cases:
                CASES[case](Bench(server))
        finally:
            server.terminate()
            server.down()
            server.close()


main()
