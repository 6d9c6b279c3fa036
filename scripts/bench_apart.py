"""Measures what a node costs that is a process of its own, by clients on the same machine.

`bench-apart.sh` runs it with the binary and the SDK. `ringfence up` is beside a server with one node; both are on SQLite. Creates are
measured in turn. nginx in a sandbox of each serves a small file to 32 kept connections of wrk, and a large one to curl.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "conformance"))

from bench_servers import Request, client, in_turn  # noqa: E402
from e2b import Sandbox  # noqa: E402
from harness.cluster import Cluster  # noqa: E402
from harness.platform import Platform  # noqa: E402
from harness.traffic import until  # noqa: E402

# The large file has to fit.
CONFIG = "[sandbox]\ndisk_mb = 1024\n"
ROUNDS = 3
LARGE = 300_000_000
NGINX = """
worker_processes 1; daemon off; error_log stderr; pid /tmp/nginx.pid; events {}
http {
    access_log off; keepalive_requests 1000000000;
    client_body_temp_path /tmp/body; proxy_temp_path /tmp/proxy; fastcgi_temp_path /tmp/fastcgi;
    uwsgi_temp_path /tmp/uwsgi; scgi_temp_path /tmp/scgi;
    server { listen 8000; root /tmp/www; }
}
"""


class Apart(Cluster):
    """A server and its node, which connects to it directly."""

    def __init__(self, data_dir: Path, config: str) -> None:
        super().__init__(data_dir, config)
        self.relay.close()
        self.relay.port = self.nodes_port


def serves(platform: Platform) -> tuple[str, str]:
    """A sandbox whose nginx serves a small and a large file: its URL at the platform, and its host."""
    platform.use()
    sandbox = Sandbox.create(timeout=3600)
    sandbox.files.write("/tmp/nginx.conf", NGINX)
    sandbox.commands.run(f"mkdir /tmp/www; echo small > /tmp/www/small; head -c {LARGE} /dev/urandom > /tmp/www/large")
    sandbox.commands.run("exec /usr/sbin/nginx -c /tmp/nginx.conf", background=True, timeout=0)
    host = sandbox.get_host(8000)
    until(lambda: httpx.get(f"{platform.url}/small", headers={"Host": host}).status_code == 200, "nginx serves")
    return platform.url, host


def traffic(what: str, url: str, host: str) -> None:
    command = ["wrk", "-t1", "-c32", "-d6", "--latency", "-H", f"Host: {host}", f"{url}/small"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rate, p99 = re.search(r"Requests/sec:\s+(\S+)", said), re.search(r"99%\s+(\S+)", said)
    assert rate and p99 and "Non-2xx" not in said, said
    begun = time.perf_counter()
    command = ["curl", "-sf", "-o", "/dev/null", "-w", "%{size_download}", "-H", f"Host: {host}", f"{url}/large"]
    assert int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) == LARGE
    took = time.perf_counter() - begun
    print(f"{what}: {float(rate[1]):.0f} requests/s, p99 {p99[1]}; download {LARGE / took / 1e6:.0f} MB/s", flush=True)


def main() -> None:
    number = int(sys.argv[1])
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    with tempfile.TemporaryDirectory(prefix="rf-bench-", dir=os.environ.get("TMPDIR", "/var/tmp")) as directory:
        platforms = {"one process": Platform(Path(directory) / "one", CONFIG), "a server and a node": Apart(Path(directory) / "apart", CONFIG)}
        try:
            for platform in platforms.values():
                platform.start()
            clients = {kind: client(platform) for kind, platform in platforms.items()}
            body = {"templateID": "base", "timeout": 600}

            def remove(kind: str, answer: httpx.Response) -> None:
                clients[kind].delete(f"/sandboxes/{answer.json()['sandboxID']}").raise_for_status()

            creates: dict[str, Request] = {kind: partial(at.post, "/sandboxes", json=body) for kind, at in clients.items()}
            in_turn("create", number, creates, remove)
            sites = {kind: serves(platform) for kind, platform in platforms.items()}
            for _ in range(ROUNDS):
                for kind, (url, host) in sites.items():
                    traffic(kind, url, host)
            assert all(platform.terminate() == 0 for platform in platforms.values())
        finally:
            for platform in platforms.values():
                platform.close()
                platform.down()


if __name__ == "__main__":
    main()
