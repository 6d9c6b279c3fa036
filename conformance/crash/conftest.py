"""The platform that these tests kill."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.hoststate import HostState, left_over
from harness.platform import Platform


@pytest.fixture
def crashing(work_dir: Path, request: pytest.FixtureRequest) -> Iterator[Platform]:
    """A platform of the test's own, of which nothing may be left afterwards. A parameter makes its configuration."""
    before = HostState.take()
    config = getattr(request, "param", None)
    server = Platform(work_dir / request.node.path.stem.removeprefix("test_"), config=config and config())
    try:
        server.start()
        server.use()
        yield server
        if server.process:
            assert server.terminate() == 0
        assert server.down().returncode == 0
        assert left_over(before) == {}
    finally:
        server.close()
