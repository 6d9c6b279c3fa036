"""Three servers with four nodes, of which a test uses one server, and the next test the next one.

To clients, and to most tests, it is a `Platform`: its data directory, port, log and credentials are those of the server whose turn
it is. Behind a balancer it has one port instead, each connection to which goes to the next server: what one request has made, another
server is asked about. Commands of the operator are those of the first server then.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from harness.cluster import Relay
from harness.platform import Platform, configure
from harness.servers import Server, Service


class Turns(Platform):
    """A service whose servers are used in turn."""

    def __init__(self, work: Path, config: str, is_balanced: bool = False) -> None:
        self.service = Service(work, servers=3, nodes=4, config=config)
        self.number = 0
        self.balancer = Relay(*(server.port for server in self.service.servers)) if is_balanced else None

    @property
    def server(self) -> Server:
        """The server whose turn it is."""
        return self.service.servers[self.number]

    def __getattr__(self, name: str) -> object:
        # What `Platform.__init__` sets.
        return getattr(self.server, name)

    @property
    def port(self) -> int:  # type: ignore[override]
        return self.balancer.port if self.balancer else self.server.port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def credentials(self) -> dict[str, str]:
        """Those of the server, with the port that clients connect to."""
        own = f":{self.server.port}"
        return {name: value.replace(own, f":{self.port}") for name, value in self.server.credentials().items()}

    def environment(self) -> dict[str, str]:
        return self.server.environment()

    def use(self) -> None:
        self.server.use()
        configure(self.credentials())

    def next(self) -> None:
        """The next server has its turn, and the SDK uses it; behind a balancer, each connection has that anyway."""
        if self.balancer:
            return
        self.number = (self.number + 1) % len(self.service.servers)
        self.use()

    def start(self) -> float:
        begun = time.monotonic()
        self.service.start(is_placed=False)
        return time.monotonic() - begun

    def log(self) -> str:
        return "\n".join(part.log() for part in (*self.service.servers, *self.service.nodes))

    def log_tail(self, lines: int = 40) -> str:
        return self.service.log_tail(lines)

    def terminate(self) -> int:
        return self.service.terminate()

    def down(self) -> subprocess.CompletedProcess[str]:
        self.service.down()
        return subprocess.CompletedProcess([], 0, "", "")

    def close(self) -> None:
        if self.balancer:
            self.balancer.close()
        # The first one to be used knows what the SDK was configured with before, so it is closed last.
        self.service.servers.reverse()
        self.service.close()
