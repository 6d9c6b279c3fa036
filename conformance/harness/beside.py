"""A second platform beside the session's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.hoststate import HostState, left_over, only
from harness.platform import Platform


@contextmanager
def beside(session: Platform, directory: Path, config: str | None = None, ready: bool = False) -> Iterator[Platform]:
    """A platform on a data directory of its own, whose credentials are in the environment meanwhile. Nothing of it may be
    left afterwards, whether or not it still runs then.
    """
    server = Platform(directory / "data", config=config, ready=ready)
    with only(server.data_dir):
        before = HostState.take()
    try:
        server.start()
        server.use()
        yield server
        if server.process:
            assert server.terminate() == 0, server.log_tail()
        down = server.down()
        assert down.returncode == 0, down.stderr
        with only(server.data_dir):
            left = left_over(before)
        assert left == {}, left
    finally:
        server.close()
        session.use()
