"""Fixtures of the suite: a fake internet, and a platform on its host."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from e2b import Sandbox

from harness.criu import criu_config
from harness.hoststate import HostState, left_over
from harness.internet import RESOLVER, Internet
from harness.platform import Platform

CONFIG = f"""
[sandbox]
disk_mb = 768
[builds]
insecure_registries = "registry.example.org:5000,registry.example.org:5001,registry.example.org:5003,registry.example.org:5004"
registry_mirrors = "mirrored.example.com=registry.example.org:5000"
[egress]
resolvers = "{RESOLVER}:53"
"""


@pytest.fixture(scope="session")
def internet(work_dir: Path) -> Iterator[Internet]:
    """The fake internet; the rest of the session runs on its host."""
    directory = work_dir / "internet"
    directory.mkdir()
    with Internet(directory) as internet:
        yield internet
    assert [servers.returncode for servers in internet.servers] == [0, 0]


@pytest.fixture(scope="session")
def platform(internet: Internet, work_dir: Path) -> Iterator[Platform]:
    """A running platform; afterwards nothing of it may be left."""
    before = HostState.take()
    # Servers that the gateway connects to for a sandbox have certificates of this authority.
    registries = f'[builds]\nregistry_ca_files = "registry.example.org:5002={internet.authority}"'
    config = CONFIG.replace("[builds]", registries)
    server = Platform(work_dir / "data", config=f'{criu_config()}{config}ca_file = "{internet.authority}"\n')
    try:
        server.start()
        server.use()
        yield server
        assert server.terminate() == 0, server.log_tail(12)
        down = server.down()
        assert down.returncode == 0, down.stderr
        assert left_over(before) == {}
    finally:
        server.close()


@pytest.fixture(autouse=True)
def nothing_leaves_for_closed_addresses(internet: Internet) -> Iterator[None]:
    """Whatever a test is about: no packet may leave for a private network, or any other that is always closed, and
    nothing may arrive at the servers of the host.
    """
    at_host = len(internet.host_events())
    yield
    sent = [*internet.closed.packets()]
    internet.closed.seen.clear()
    assert sent == []
    assert internet.host_events()[at_host:] == []


@pytest.fixture
def create(platform: Platform) -> Iterator[Callable[..., Sandbox]]:
    """Makes sandboxes with the SDK's options, which end with the test."""
    with ExitStack() as stack:

        def make(**options: Any) -> Sandbox:
            box = Sandbox.create(timeout=300, **options)
            stack.callback(box.kill)
            return box

        yield make


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """A failure shows what arrived at the servers last."""
    report = yield
    internet = getattr(item, "funcargs", {}).get("internet")
    if report.failed and internet:
        lines = [json.dumps(event) for event in internet.events()[-12:]]
        report.sections.append(("the last events of the fake internet", "\n".join(lines)))
    return report
