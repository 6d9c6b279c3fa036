"""Three servers with four nodes, of which a test uses one server, and the next test the next one.

To clients, and to most tests, it is a `Platform`: its data directory, port, log and credentials are those of the server whose turn
it is.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from harness.platform import Platform
from harness.servers import Server, Service


class Turns(Platform):
    """A service whose servers are used in turn."""

    def __init__(self, work: Path, config: str) -> None:
        self.service = Service(work, servers=3, nodes=4, config=config)
        self.number = 0

    @property
    def server(self) -> Server:
        """The server whose turn it is."""
        return self.service.servers[self.number]

    def __getattr__(self, name: str) -> object:
        # What `Platform.__init__` sets.
        return getattr(self.server, name)

    @property
    def url(self) -> str:
        return self.server.url

    def environment(self) -> dict[str, str]:
        return self.server.environment()

    def use(self) -> None:
        self.server.use()

    def next(self) -> None:
        """The next server has its turn, and the SDK uses it."""
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
        # The first one to be used knows what the SDK was configured with before, so it is closed last.
        self.service.servers.reverse()
        self.service.close()
