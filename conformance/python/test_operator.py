"""The platform as its operator meets it: first start, second start, signals, exit codes, `down`."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox

from harness.beside import beside
from harness.patience import within
from harness.platform import Platform
from harness.ports import free_port
from harness.terminal import Terminal
from harness.traffic import until

# Variables that no key of the file stands beside: what they have is in no file.
SECRETS = ("RINGFENCE_MASTER_KEY", "RINGFENCE_BLOBS_SECRET_ACCESS_KEY")


@pytest.fixture
def own(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """A second platform beside the session's, on its own data directory; the session's keys return afterwards."""
    with beside(platform, tmp_path_factory.mktemp("own")) as server:
        yield server


def test_the_first_start_writes_the_credentials(own: Platform) -> None:
    path = own.data_dir / "credentials.env"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(own.data_dir.stat().st_mode) & 0o077 == 0
    values = own.credentials()
    assert set(values) >= {
        "E2B_API_KEY",
        "E2B_API_URL",
        "E2B_SANDBOX_URL",
        "E2B_DOMAIN",
        "RINGFENCE_ACCESS_KEY",
        "RINGFENCE_SECRET_KEY",
    }
    assert values["E2B_API_KEY"].startswith("e2b_") and len(values["E2B_API_KEY"]) == 44
    assert values["E2B_API_URL"].endswith(f":{own.port}")
    assert values["E2B_DOMAIN"] == f"sandbox.localhost:{own.port}"
    assert "earlier start" not in own.log()


def test_a_second_start_keeps_the_keys_and_follows_the_address(own: Platform) -> None:
    before = own.credentials()
    assert own.terminate() == 0
    own.port = free_port()
    own.start()
    after = own.credentials()
    assert {k: v for k, v in before.items() if k.endswith("_KEY")} == {
        k: v for k, v in after.items() if k.endswith("_KEY")
    }
    assert after["E2B_API_URL"].endswith(f":{own.port}")
    own.use()
    with Sandbox.create() as box:
        assert box.commands.run("echo ok").stdout == "ok\n"


@pytest.mark.parametrize("end", ["terminate", "kill"])
def test_sandboxes_outlive_the_platform(own: Platform, end: str) -> None:
    box = Sandbox.create(timeout=300, metadata={"k": "v"})
    box.files.write("kept", "content")
    handle = box.commands.run("exec sleep 600", background=True, timeout=0)
    info = box.get_info()
    getattr(own, end)()
    own.start()
    assert re.search("took over the sandboxes of an earlier start.* sandboxes=1", own.log())
    again = Sandbox.connect(box.sandbox_id, timeout=1)
    assert again.files.read("kept") == "content"
    assert handle.pid in {item.pid for item in again.commands.list()}
    assert again.commands.run("echo new").stdout == "new\n"
    after = again.get_info()
    assert (after.started_at, after.end_at, after.metadata) == (info.started_at, info.end_at, info.metadata)
    with Sandbox.create() as other:
        assert other.commands.run("echo too").stdout == "too\n"
    assert again.kill()


def test_a_deadline_that_passes_while_the_platform_is_down(own: Platform) -> None:
    box = Sandbox.create(timeout=300)
    box.set_timeout(2)
    end = datetime.now(timezone.utc) + timedelta(seconds=2)
    own.kill()
    until(lambda: datetime.now(timezone.utc) > end, "the deadline has passed")
    own.start()
    until(lambda: not box.is_running(), "the sandbox is gone", within_s=10)
    assert Sandbox.list().next_items() == []


def test_down_ends_everything(own: Platform) -> None:
    boxes = [Sandbox.create(timeout=300) for _ in range(3)]
    assert own.terminate() == 0
    assert own.down().returncode == 0
    own.start()
    assert Sandbox.list().next_items() == []
    assert not any(box.is_running() for box in boxes)


def test_two_platforms_do_not_share_a_data_directory(own: Platform) -> None:
    second = own.run("up", "--listen", f"127.0.0.1:{free_port()}", timeout_s=30)
    assert second.returncode == 1
    assert str(own.data_dir) in second.stderr


def test_a_taken_port_is_named(own: Platform, tmp_path: Path) -> None:
    other = Platform(tmp_path / "data")
    failed = other.run("up", "--listen", f"127.0.0.1:{own.port}", timeout_s=30)
    assert failed.returncode == 1
    assert str(own.port) in failed.stderr


def test_wrong_usage_is_2(platform: Platform) -> None:
    assert platform.run("no-such-command").returncode == 2
    assert platform.run("up", "--listen", "not-an-address").returncode == 2


def test_json_logs(platform: Platform, tmp_path: Path) -> None:
    own = Platform(tmp_path / "data", config='log_format = "json"\n')
    try:
        own.start()
        assert own.terminate() == 0
        lines = [line for line in own.log().splitlines() if line.startswith("{")]
        assert lines and all(isinstance(json.loads(line), dict) for line in lines)
    finally:
        own.close()
        platform.use()


# What a person reads at the start, of which only addresses and paths differ.
SCREEN = """
ringfence is ready at {url}

  dashboard      {url}/dashboard
  documentation  {url}/docs
  keys           {keys}
  next           in another terminal: set -a; . '{keys}'; set +a
                 then run a first sandbox: {url}/docs/getting-started
  to stop        Ctrl-C; sandboxes keep running, and the next start adopts them

"""


def on_a_terminal(own: Platform, *options: str, last: bytes = b"") -> str:
    """All that `up` shows on a terminal, from the start to Ctrl-C, with a request in between, and not before this has come."""
    words = [str(own.binary), "up", "--data-dir", str(own.data_dir), "--listen", f"127.0.0.1:{own.port}", *options]
    terminal = Terminal(words, own.environment(), rows=50, cols=200)
    try:
        shown = terminal.expect(b"the next start adopts them\r\n\r\n")
        assert httpx.get(f"{own.url}/sandboxes", timeout=within(30)).status_code == 401
        shown += terminal.expect(last)
        terminal.type(b"\x03")
        assert terminal.wait() == 0
        return (shown + terminal.seen).decode().replace("\r\n", "\n")
    finally:
        terminal.close()


def test_a_terminal_shows_a_few_calm_lines(tmp_path: Path) -> None:
    own = Platform(tmp_path / "data")
    try:
        shown = on_a_terminal(own)
        screen = SCREEN.format(url=own.url, keys=own.data_dir / "credentials.env")
        before, found, after = shown.partition(screen)
        assert found, shown
        # The terminal shows the key. The host of a test may give reason to warn.
        around = [line for line in (before + after.replace("^C", "")).splitlines() if line]
        assert all(re.search(r"(WARN|ERROR)\x1b", line) for line in around), shown
        # Who waits for a template that was asked for is told of it.
        shown = on_a_terminal(own, "--with", "mcp-gateway", last=b"building, unless it is there")
        assert "answered" not in shown, shown
        # Whoever asks for the log has all of it, and so has a reader that is no terminal.
        for shown in (on_a_terminal(own, "--log-level", "info"), on_a_terminal(own, "--log-format", "json")):
            assert all(word in shown for word in ("INFO", "answered", "draining")), shown
        own.start()
        assert httpx.get(f"{own.url}/sandboxes", timeout=within(30)).status_code == 401
        assert own.terminate() == 0
        assert all(word in own.log() for word in ("INFO", "answered", "draining")), own.log()
        assert own.down().returncode == 0
    finally:
        own.close()


def test_doctor_reports(platform: Platform) -> None:
    report = platform.run("doctor")
    assert report.returncode == 0, report.stdout + report.stderr
    for word in ("root", "cgroup", "user namespaces", "overlay"):
        assert word in report.stdout.lower()


def test_health_needs_no_key(platform: Platform) -> None:
    assert httpx.get(f"{platform.url}/health", timeout=within(30)).status_code == 200


def test_without_root_one_message_says_what_is_missing(platform: Platform) -> None:
    with tempfile.TemporaryDirectory(prefix="rf-nobody-") as directory:
        place = Path(directory)
        place.chmod(0o755)
        # The build's own directory need not be open to others.
        program = shutil.copy(platform.binary, place / "ringfence")
        (place / "data").mkdir()
        os.chown(place / "data", 65534, 65534)
        failed = subprocess.run(
            [program, "up", "--data-dir", place / "data", "--listen", f"127.0.0.1:{free_port()}"],
            user=65534,
            group=65534,
            extra_groups=[],
            capture_output=True,
            text=True,
            timeout=30,
            env=platform.environment(),
        )
    assert failed.returncode == 1
    assert "root" in failed.stderr
    assert "panicked" not in failed.stderr


# A module for names of users that ends whatever asks it, as one does that does not fit the C library of a static program.
MODULE = """
#include <nss.h>
#include <pwd.h>
#include <signal.h>
enum nss_status _nss_trap_getpwuid_r(uid_t uid, struct passwd *user, char *buffer, size_t length, int *error) {
  raise(SIGSEGV);
  return NSS_STATUS_UNAVAIL;
}
"""


def test_a_user_whom_the_host_does_not_know_can_use_postgresql(platform: Platform) -> None:
    """The client of PostgreSQL wants a name, and a home where a password may be, and the host's modules are not asked for them.
    Nothing answers at the address, which is what has to be said."""
    with tempfile.TemporaryDirectory(prefix="rf-nobody-") as directory:
        place = Path(directory)
        place.chmod(0o755)
        program = shutil.copy(platform.binary, place / "ringfence")
        (place / "module.c").write_text(MODULE)
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", place / "libnss_trap.so.2", place / "module.c"], check=True)
        (place / "nsswitch.conf").write_text("passwd: files trap\n")
        (place / "data").mkdir()
        os.chown(place / "data", 54321, 54321)
        address = f"127.0.0.1:{free_port()}"
        # Programs like setpriv ask for the name themselves.
        become = "import os, sys; os.setgroups([]); os.setgid(54321); os.setuid(54321); os.execv(sys.argv[1], sys.argv[1:])"
        as_user = ["/usr/bin/python3", "-ISc", become]
        command = [*as_user, program, "server", "--data-dir", place / "data", "--listen", f"127.0.0.1:{free_port()}"]
        failed = subprocess.run(
            ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/nsswitch.conf && exec "$@"', place / "nsswitch.conf", *command],
            capture_output=True,
            text=True,
            timeout=within(60),
            env={
                "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
                "LD_LIBRARY_PATH": str(place),
                "RINGFENCE_DATABASE_URL": f"postgres://{address}/somewhere",
            },
        )
    assert failed.returncode == 1, (failed.returncode, failed.stderr)
    assert "database" in failed.stderr and address in failed.stderr, failed.stderr
    assert "panicked" not in failed.stderr


def test_every_setting_is_documented(platform: Platform) -> None:
    shown = platform.run("up", "--help").stdout
    documented = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    settings = set(re.findall(r"\[env: (RINGFENCE_\w+)\]", shown))
    assert len(settings) > 10
    assert {name for name in settings if f"`{name}`" not in documented} == set()
    described = set(re.findall(r"`(RINGFENCE_\w+)`", documented.partition("## Environment variables for clients")[0]))
    # The file with the settings, and the key itself in place of a file that the settings name.
    assert described - settings - {"RINGFENCE_CONFIG", *SECRETS} == set()
