"""Measures what several servers on one PostgreSQL cost, by a client on the same machine.

`bench-servers.sh` runs it with the binary and the SDK. Two servers have a node each, and a third one is alone on a database of its own,
with a node as well. Each figure is the time from a request to its answer on a kept connection; the two of a pair are measured in turn.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "conformance"))

from e2b import Sandbox  # noqa: E402
from harness.cluster import Cluster  # noqa: E402
from harness.platform import Platform  # noqa: E402
from harness.servers import Server, Service  # noqa: E402
from harness.traffic import until  # noqa: E402

CONFIG = "[sandbox]\ndisk_mb = 256\n"
# The first ones open connections and warm caches.
WARM = 20


def client(server: Platform) -> httpx.Client:
    return httpx.Client(base_url=server.url, headers={"X-API-Key": server.credentials()["E2B_API_KEY"]}, timeout=60)


Request = Callable[[], httpx.Response]


def in_turn(what: str, number: int, kinds: dict[str, Request], after: Callable[[str, httpx.Response], object] | None = None) -> None:
    """Measures requests in turn. What is done after each does not count."""
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for count in range(number + WARM):
        for kind, ask in kinds.items():
            begun = time.perf_counter()
            answer = ask()
            took = (time.perf_counter() - begun) * 1000
            assert answer.is_success, answer.text
            if after:
                after(kind, answer)
            if count >= WARM:
                times[kind].append(took)
    for kind, found in times.items():
        found.sort()
        print(f"{what}, {kind}: p50 {found[len(found) // 2]:.2f} ms, p99 {found[int(len(found) * 0.99)]:.2f} ms (n {len(found)})", flush=True)


def created(server: Server, service: Service) -> Sandbox:
    """A sandbox on the node of a server."""
    server.use()
    sandbox = Sandbox.create(timeout=3600)
    placed = service.postgres.ask(f"SELECT node_id FROM sandboxes WHERE id = '{sandbox.sandbox_id}'")
    assert placed in server.serves(), "it was placed on another server's node"
    return sandbox


def main() -> None:
    number = int(sys.argv[1])
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    with tempfile.TemporaryDirectory(prefix="rf-bench-", dir=os.environ.get("TMPDIR", "/var/tmp")) as directory:
        work = Path(directory)
        service = Service(work, config=CONFIG)
        # Alone, on a database of its own, over a node on the same machine as well.
        database = service.postgres.url.replace("/postgres?", "/alone?")
        alone = Cluster(work / "alone", config=f'database_url = "{database}"\n{CONFIG}')
        try:
            service.start()
            service.postgres.ask("CREATE DATABASE alone")
            alone.start()
            measure(service, alone, number)
            assert service.terminate() == 0 and alone.terminate() == 0
        finally:
            alone.close()
            alone.down()
            service.close()


def measure(service: Service, alone: Cluster, number: int) -> None:
    own, other = service.servers
    at_own, at_other, at_alone = client(own), client(other), client(alone)
    sandbox = created(own, service)
    path = f"/sandboxes/{sandbox.sandbox_id}"
    in_turn("GET of a sandbox", number, {"own server": lambda: at_own.get(path), "other server": lambda: at_other.get(path)})

    sandbox.commands.run("echo served > index.html")
    sandbox.commands.run("python3 -m http.server 8000 --protocol HTTP/1.1", background=True, timeout=0)
    host = {"Host": sandbox.get_host(8000)}
    until(lambda: at_own.get("/index.html", headers=host).status_code == 200, "its port is served")
    # Without a body, because that server sends one on its own, and its host waits 40 ms with that.
    kinds = {"own server": lambda: at_own.head("/index.html", headers=host), "other server": lambda: at_other.head("/index.html", headers=host)}
    in_turn("request to a port of it", number, kinds)
    sandbox.kill()

    clients = {"one of two servers": at_own, "a server alone on PostgreSQL": at_alone}
    body = {"templateID": "base", "timeout": 600}

    def remove(kind: str, answer: httpx.Response) -> None:
        clients[kind].delete(f"/sandboxes/{answer.json()['sandboxID']}").raise_for_status()

    creates: dict[str, Request] = {kind: partial(at.post, "/sandboxes", json=body) for kind, at in clients.items()}
    in_turn("create", number, creates, remove)


if __name__ == "__main__":
    main()
