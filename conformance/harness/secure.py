"""A platform that speaks HTTPS besides HTTP, with a certificate authority of its own, for clients in domain mode.

Names below its domain end in `localhost`, which plain resolvers do not resolve; each client's suite says how they are
led to the platform's address.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.hoststate import HostState, left_over
from harness.platform import Platform


class SecurePlatform(Platform):
    """One that hands out the credentials of `credentials-tls.env`."""

    def credentials(self) -> dict[str, str]:
        values = {}
        for line in (self.data_dir / "credentials-tls.env").read_text().splitlines():
            for word in shlex.split(line, comments=True):
                name, equals, value = word.partition("=")
                if equals:
                    values[name] = value
        return values


@contextmanager
def secure_platform(data_dir: Path, config: str = "") -> Iterator[SecurePlatform]:
    """A running platform, with further sections of its configuration; afterwards nothing of it may be left."""
    before = HostState.take()
    server = SecurePlatform(data_dir, config=f"tls = true\n\n[sandbox]\ndisk_mb = 768\n{config}")
    try:
        server.start()
        yield server
        assert server.terminate() == 0, server.log_tail(12)
        down = server.down()
        assert down.returncode == 0, down.stderr
        left = left_over(before)
        assert left == {}, left
    finally:
        server.close()
