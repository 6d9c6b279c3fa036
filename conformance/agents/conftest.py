"""Fixtures of the suite: a fake internet with a code host and APIs of models, a platform on its host, and the template."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import coding_agents
from harness.code_host import CodeHost
from harness.criu import criu_config
from harness.hoststate import HostState, left_over
from harness.internet import RESOLVER, Internet
from harness.platform import Platform
from harness.traffic import until

CONFIG = f'[egress]\nresolvers = "{RESOLVER}:53"\n'


@pytest.fixture(scope="session")
def internet(work_dir: Path) -> Iterator[Internet]:
    """The fake internet; the rest of the session runs on its host."""
    directory = work_dir / "internet"
    directory.mkdir()
    with Internet(directory) as internet:
        yield internet
    assert [servers.returncode for servers in internet.servers] == [0, 0]


@pytest.fixture(scope="session")
def host(internet: Internet) -> CodeHost:
    return CodeHost(internet)


@pytest.fixture(scope="session")
def platform(internet: Internet, work_dir: Path) -> Iterator[Platform]:
    """A running platform; afterwards nothing of it may be left."""
    before = HostState.take()
    config = f'{criu_config()}{CONFIG}ca_files = "{internet.authority}"\n'
    # What is built meanwhile is looked at in a test; the code interpreter, which takes a minute, where its packages are there.
    names = ["mcp-gateway", *(["code-interpreter"] if "RINGFENCE_CODE_INTERPRETER_PACKAGES" in os.environ else [])]
    server = Platform(work_dir / "data", config=config, options=tuple(word for name in names for word in ("--with", name)))
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


@pytest.fixture(scope="session")
def template(platform: Platform) -> str:
    """The name of the template, built once, after those of the start: tests look at what reaches the internet."""
    wanted = platform.options.count("--with")
    until(lambda: "the build failed" in platform.log() or platform.log().count("the template is there") == wanted, "all are built", within_s=400)
    assert "the build failed" not in platform.log(), platform.log_tail()
    coding_agents.build(platform)
    return coding_agents.NAME
