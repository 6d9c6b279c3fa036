"""Measures how long a paused sandbox takes to go on on another node, and a fork to run there, by a client on the same machine.

`bench-elsewhere.sh` runs it with the binary, the SDK, an S3 server and CRIU. One server on PostgreSQL has two nodes. Each sandbox is
paused, copied to the bucket, and resumed while its node drains, so it goes to the other one. A figure is the time from the request to
resume to its answer, and from that request to the first output of a command in the sandbox.

Then two servers have a node each. A sandbox is forked while its node drains, so its child is on the node of the other server. The time
of that has the copy of its memory to the bucket and back.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "conformance"))

from e2b import Sandbox  # noqa: E402
from harness.criu import criu_config  # noqa: E402
from harness.s3 import Gateway  # noqa: E402
from harness.servers import Service, running_service  # noqa: E402
from harness.traffic import until  # noqa: E402

CONFIG = "[sandbox]\ndisk_mb = 1024\n[pool]\nbase = 0\n"
# What cannot be compressed, so that all of it is read again.
FILLED = "import os, time; kept = os.urandom({bytes}); print('filled', flush=True); time.sleep(3600)"
KINDS = {"idle": 0, "200 MB": 200_000_000}
# The first of a kind warms caches.
WARM = 1


def show(what: str, times: list[float]) -> None:
    times = sorted(times)
    p50, p90 = times[len(times) // 2], times[int(len(times) * 0.9)]
    print(f"{what}: n {len(times)}, min {times[0]:.0f}, p50 {p50:.0f}, p90 {p90:.0f}, max {times[-1]:.0f} ms", flush=True)


class Bench:
    def __init__(self, service: Service) -> None:
        self.service = service
        self.server = service.servers[0]
        headers = {"X-API-Key": self.server.credentials()["E2B_API_KEY"]}
        self.api = httpx.Client(base_url=self.server.url, headers=headers, timeout=120)

    def asked(self, sandbox: Sandbox, columns: str) -> str:
        return self.service.postgres.ask(f"SELECT {columns} FROM sandboxes WHERE id = '{sandbox.sandbox_id}'").strip()

    def made(self, size: int) -> Sandbox:
        sandbox = Sandbox.create(timeout=600)
        if size:
            filled = sandbox.commands.run(f'python3 -c "{FILLED.format(bytes=size)}"', background=True, timeout=0)
            next(iter(filled))
        return sandbox

    def resume(self, size: int) -> tuple[float, float]:
        sandbox = self.made(size)
        path = f"/sandboxes/{sandbox.sandbox_id}"
        self.api.post(f"{path}/pause", json={"memory": True}).raise_for_status()
        until(lambda: self.asked(sandbox, "state = 'paused' AND parcel_run = execution_id") == "t", "it is copied", 120)
        node = self.asked(sandbox, "node_id")
        self.node("drain", node)
        begun = time.perf_counter()
        self.api.post(f"{path}/connect", json={"timeout": 600}).raise_for_status()
        answered = time.perf_counter() - begun
        assert sandbox.commands.run("echo here").stdout == "here\n"
        used = time.perf_counter() - begun
        assert self.asked(sandbox, "node_id") != node, f"it was resumed where it was\n{self.service.log_tail(40)}"
        if size:
            assert sandbox.commands.run("pgrep -c -f urandom").stdout.strip() != "0", "its program is gone"
        self.node("undrain", node)
        sandbox.kill()
        return answered * 1000, used * 1000

    def fork(self, size: int) -> tuple[float, float]:
        sandbox = self.made(size)
        node = self.asked(sandbox, "node_id")
        self.node("drain", node)
        begun = time.perf_counter()
        (forked,) = self.api.post(f"/sandboxes/{sandbox.sandbox_id}/fork", json={"timeout": 600}).raise_for_status().json()
        answered = time.perf_counter() - begun
        child = Sandbox.connect(forked["sandbox"]["sandboxID"], timeout=600)
        assert child.commands.run("echo here").stdout == "here\n"
        used = time.perf_counter() - begun
        assert self.asked(child, "node_id") != node, f"it is where its parent is\n{self.service.log_tail(40)}"
        if size:
            assert child.commands.run("pgrep -c -f urandom").stdout.strip() != "0", "its program is gone"
        self.node("undrain", node)
        child.kill()
        sandbox.kill()
        return answered * 1000, used * 1000

    def until_known(self) -> None:
        """Waits until the servers know of each other's nodes: whoever writes again has read what was there the time before."""
        for _ in range(3):
            before = self.seen()
            until(lambda before=before: not before & self.seen(), "all servers write again", 60)

    def seen(self) -> set[str]:
        return set(self.service.postgres.ask("SELECT id || ' ' || seen_us FROM servers").split("\n"))

    def show_all(self, what: str, measure: Callable[[int], tuple[float, float]], number: int) -> None:
        for kind, size in KINDS.items():
            found = [measure(size) for _ in range(number + WARM)][WARM:]
            show(f"{what}, {kind}, to the answer", [answered for answered, _ in found])
            show(f"{what}, {kind}, to the first output", [used for _, used in found])

    def node(self, command: str, node: str) -> None:
        done = self.server.run("node", command, node)
        assert done.returncode == 0, done.stderr


@contextmanager
def running_bench(directory: Path, servers: int) -> Iterator[Bench]:
    """Servers with two nodes and a bucket of their own."""
    gateway = Gateway(directory / f"bucket{servers}")
    gateway.start()
    try:
        work = directory / f"service{servers}"
        work.mkdir()
        # Past the relay, which is a program of Python.
        direct = gateway.config(endpoint=f'"http://{gateway.host}:{gateway.port}"')
        config = CONFIG + criu_config() + direct
        with running_service(work, servers=servers, config=config, is_placed=servers > 1) as service:
            service.servers[0].use()
            yield Bench(service)
    finally:
        gateway.close()


def main() -> None:
    number = int(sys.argv[1])
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    with tempfile.TemporaryDirectory(prefix="rf-bench-", dir=os.environ.get("TMPDIR", "/var/tmp")) as text:
        directory = Path(text)
        with running_bench(directory, servers=1) as bench:
            bench.show_all("resume on another node", bench.resume, number)
        with running_bench(directory, servers=2) as bench:
            bench.until_known()
            bench.show_all("fork on a node of another server", bench.fork, number)


if __name__ == "__main__":
    main()
