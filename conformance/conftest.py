"""Fixtures of every suite: one platform per session, a sandbox per test, and no skipped test.

A skipped test proves nothing, so it fails the run like a failed one.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import httpx
import pytest

from harness import hoststate, patience
from harness.cluster import Cluster
from harness.criu import criu_config
from harness.hoststate import HostState, left_over
from harness.platform import Platform
from harness.s3 import Gateway
from harness.secure import SecurePlatform
from harness.turns import Turns

# Writes what became of each test, and how long it took.
pytest_plugins = ("harness.durations",)

# Small enough to be filled in a test, large enough for a 100 MB file twice.
CONFIG = "[sandbox]\ndisk_mb = 768\n"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tls",
        action="store_true",
        help="reach the platform over HTTPS, each sandbox by a name of its own; run it by harness/names.py",
    )
    parser.addoption(
        "--s3",
        action="store_true",
        help="keep layers and uploaded files in the bucket of an S3 server, named by RINGFENCE_VERSITYGW",
    )
    parser.addoption(
        "--criu",
        action="store_true",
        help="write the processes of paused sandboxes to disk, by the CRIU of RINGFENCE_CRIU",
    )
    parser.addoption(
        "--restored",
        action="store_true",
        help="pause and resume every sandbox before its test, with its processes on disk, by the CRIU of RINGFENCE_CRIU",
    )
    parser.addoption(
        "--cluster",
        action="store_true",
        help="with a server and a node as two processes",
    )
    parser.addoption(
        "--several",
        action="store_true",
        help="with three servers, four nodes and the bucket of an S3 server: each test uses the next server, and sandboxes through another one than made them",
    )
    parser.addoption(
        "--balanced",
        action="store_true",
        help="as with --several, behind one port, of which each connection goes to the next server",
    )
    parser.addoption(
        "--forked",
        action="store_true",
        help="run every test in a fork of a sandbox, by the CRIU of RINGFENCE_CRIU",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("alone"):
            if len(mark.args) != 1 or not isinstance(mark.args[0], str) or mark.kwargs:
                raise pytest.UsageError(f"{item.nodeid} is marked `alone` without one reason")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter and reporter.stats.get("skipped") and session.exitstatus == pytest.ExitCode.OK:
        reporter.write_line("skipped tests count as failed", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure shows what the platform said meanwhile."""
    report = yield
    if report.failed:
        for server in getattr(item, "funcargs", {}).values():
            if isinstance(server, Platform):
                report.sections.append((f"log of the platform on {server.data_dir}", server.log_tail(12)))
    return report


@pytest.fixture(scope="session")
def work_dir() -> Iterator[Path]:
    # Short, because paths of unix sockets are limited to 108 bytes.
    with tempfile.TemporaryDirectory(prefix="rf-") as directory:
        # Before the first look at the host, so that the first and the last count the same.
        hoststate.own(Path(directory) / "data")
        yield Path(directory)


@pytest.fixture(scope="session")
def platform(work_dir: Path, request: pytest.FixtureRequest) -> Iterator[Platform]:
    """A running platform whose credentials are in the environment; afterwards nothing of it may be left."""
    before = HostState.take()
    gateway = None
    is_balanced = request.config.getoption("--balanced")
    is_several = is_balanced or request.config.getoption("--several")
    if request.config.getoption("--s3") or is_several:
        gateway = Gateway(work_dir)
        gateway.start()
        config = CONFIG + gateway.config()
        server: Platform = Turns(work_dir, config, is_balanced) if is_several else Platform(work_dir / "data", config=config)
    elif request.config.getoption("--cluster"):
        server = Cluster(work_dir / "data", config=CONFIG)
    elif request.config.getoption("--tls"):
        more = criu_config() if request.config.getoption("--criu") else ""
        server = SecurePlatform(work_dir / "data", config=f"tls = true\n\n{CONFIG}{more}")
    elif any(request.config.getoption(option) for option in ("--restored", "--forked", "--criu")):
        server = Platform(work_dir / "data", config=CONFIG + criu_config())
    else:
        server = Platform(work_dir / "data", config=CONFIG)
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
        if gateway:
            gateway.close()


@pytest.fixture(autouse=True)
def turn(request: pytest.FixtureRequest) -> None:
    """With `--several`, the next server is used."""
    if request.config.getoption("--several"):
        request.getfixturevalue("platform").next()


@pytest.fixture(scope="session")
def secrets(platform: Platform) -> list[str]:
    """Values that must never appear in a log."""
    return [v for k, v in platform.credentials().items() if k.endswith("_KEY")]


def forks(parent) -> list[str]:
    """Forks a sandbox, and returns the id of the fork."""
    path = f"{os.environ['E2B_API_URL']}/sandboxes/{parent.sandbox_id}/fork"
    answer = httpx.post(path, headers={"X-API-Key": os.environ["E2B_API_KEY"]}, json={"timeout": 120}, timeout=60)
    assert answer.status_code == 201, answer.text
    return [fork["sandbox"]["sandboxID"] for fork in answer.json()]


def fresh(config: pytest.Config, platform: Platform | None = None):
    """A sandbox with the SDK's defaults. With `--restored` it was written to disk and restored, with `--forked` it is a fork, and
    with `--several` another server is used than the one that made it.
    """
    from e2b import Sandbox

    box = Sandbox.create(timeout=120)
    if isinstance(platform, Turns):
        platform.next()
        box = Sandbox.connect(box.sandbox_id, timeout=120)
    if config.getoption("--forked"):
        parent = box
        try:
            (child,) = forks(parent)
            box = Sandbox.connect(child, timeout=120)
        finally:
            parent.kill()
    if config.getoption("--restored"):
        box.pause()
        path = f"{os.environ['E2B_API_URL']}/sandboxes/{box.sandbox_id}"
        detail = httpx.get(path, headers={"X-API-Key": os.environ["E2B_API_KEY"]}, timeout=30).json()
        assert detail["pauseStorage"] == "disk", detail
        box = Sandbox.connect(box.sandbox_id, timeout=120)
    return box


@pytest.fixture
def sandbox(platform: Platform, request: pytest.FixtureRequest):
    """A fresh sandbox with the SDK's defaults."""
    box = fresh(request.config, platform)
    try:
        yield box
    finally:
        box.kill()


@pytest.fixture
def neighbour(platform: Platform, request: pytest.FixtureRequest):
    """A second sandbox beside the one under test."""
    box = fresh(request.config, platform)
    try:
        yield box
    finally:
        box.kill()


def pytest_report_header(config: pytest.Config) -> list[str]:
    from importlib.metadata import version

    way = "HTTPS and names" if config.getoption("--tls") else "HTTP and headers"
    return [
        f"e2b {version('e2b')} over {way}, platform {os.environ.get('RINGFENCE_BIN')}",
        f"deadlines are multiplied by {patience.factor():.1f} or more: measured {patience.measured():.2f}, waiting {patience.waiting():.2f}",
    ]
