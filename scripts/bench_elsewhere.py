"""Measures how long a paused sandbox takes to go on on another node, by a client on the same machine.

`bench-elsewhere.sh` runs it with the binary, the SDK, an S3 server and CRIU. One server on PostgreSQL has two nodes. Each sandbox is
paused, copied to the bucket, and resumed while its node drains, so it goes to the other one. A figure is the time from the request to
resume to its answer, and from that request to the first output of a command in the sandbox.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
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

    def measure(self, size: int) -> tuple[float, float]:
        sandbox = Sandbox.create(timeout=600)
        if size:
            filled = sandbox.commands.run(f'python3 -c "{FILLED.format(bytes=size)}"', background=True, timeout=0)
            next(iter(filled))
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

    def node(self, command: str, node: str) -> None:
        done = self.server.run("node", command, node)
        assert done.returncode == 0, done.stderr


def main() -> None:
    number = int(sys.argv[1])
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    with tempfile.TemporaryDirectory(prefix="rf-bench-", dir=os.environ.get("TMPDIR", "/var/tmp")) as directory:
        gateway = Gateway(Path(directory) / "bucket")
        gateway.start()
        try:
            work = Path(directory) / "service"
            work.mkdir()
            # Past the relay, which is a program of Python.
            direct = gateway.config(endpoint=f'"http://{gateway.host}:{gateway.port}"')
            config = CONFIG + criu_config() + direct
            with running_service(work, servers=1, config=config, is_placed=False) as service:
                service.servers[0].use()
                bench = Bench(service)
                for kind, size in KINDS.items():
                    found = [bench.measure(size) for _ in range(number + WARM)][WARM:]
                    show(f"resume on another node, {kind}, to the answer", [answered for answered, _ in found])
                    show(f"resume on another node, {kind}, to the first output", [used for _, used in found])
        finally:
            gateway.close()


if __name__ == "__main__":
    main()
