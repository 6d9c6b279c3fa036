"""A second platform beside the session's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.hoststate import HostState, left_over
from harness.platform import Platform


def settled() -> HostState:
    """The state of the host, once the session's platform has started what it starts after it is ready: launchers."""
    state = HostState.take()
    for _ in range(40):
        time.sleep(0.25)
        earlier, state = state, HostState.take()
        if state == earlier:
            break
    return state


@contextmanager
def beside(session: Platform, directory: Path, config: str | None = None, ready: bool = False) -> Iterator[Platform]:
    """A platform on a data directory of its own, whose credentials are in the environment meanwhile. Nothing of it may be
    left afterwards, whether or not it still runs then.
    """
    before = settled()
    server = Platform(directory / "data", config=config, ready=ready)
    try:
        server.start()
        server.use()
        yield server
        if server.process:
            assert server.terminate() == 0, server.log_tail()
        down = server.down()
        assert down.returncode == 0, down.stderr
        left = left_over(before)
        assert left == {}, left
    finally:
        server.close()
        session.use()
