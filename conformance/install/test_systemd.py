"""The service of the package under systemd, from its installation to the purge: systemd is process 1 of a fresh Debian."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.traffic import until
from install.booted import Booted
from install.systems import HAVE, PORT, client, first_output, keys_of, made, mirror, own_answers, serving, unpacked

pytestmark = pytest.mark.alone("systems of their own use the control groups of the host")


@pytest.fixture
def booted(tmp_path: Path) -> Iterator[Booted]:
    # The systemd of later versions runs with control groups of version 2 alone, and a host of tests may have both.
    archive = made(tmp_path, "bookworm", f"{HAVE},systemd,systemd-sysv,dbus,procps,sudo", mirror())
    own = Booted(unpacked([archive], tmp_path / "root"))
    try:
        yield own
    finally:
        own.close()


def state(own: Booted, what: str) -> str:
    words = own.inside("systemctl", what, "ringfence")
    return subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True).stdout.strip()


def main_pid(own: Booted) -> str:
    return own.run("systemctl", "show", "--property=MainPID", "--value", "ringfence").strip()


def is_ready(own: Booted) -> None:
    until(lambda: own_answers(own, 3000, "/health"), "the platform answers", within_s=60)


def user(own: Booted, *words: str) -> str:
    """What the program of a user says."""
    return client(own, Path(__file__).with_name("longer.py"), *words).strip()


def next_version(package: Path, place: Path) -> Path:
    """The package with a higher version."""
    tree, made_ = place / "next", place / "next.deb"
    subprocess.run(["dpkg-deb", "--raw-extract", package, tree], check=True)
    control = tree / "DEBIAN" / "control"
    lines = [f"{line}+next" if line.startswith("Version: ") else line for line in control.read_text().splitlines()]
    control.write_text("\n".join(lines) + "\n")
    subprocess.run(["dpkg-deb", "--root-owner-group", "-Zxz", "-z0", "--build", tree, made_], check=True, capture_output=True)
    return made_


def test_the_service_from_its_installation_to_the_purge(booted: Booted, release: Path, tmp_path: Path) -> None:
    own, url = booted, f"http://127.0.0.1:{PORT}"
    there = own.files()
    with serving(own, release):
        own.run("curl", "--silent", "--fail", "--output", "/opt/install.sh", f"{url}/install.sh")
        assert "not started, as you wished" in own.run("sh", "/opt/install.sh", "--url", url, "--no-start")
        assert (state(own, "is-active"), state(own, "is-enabled")) == ("inactive", "disabled")
        assert not (own.root / "var/lib/ringfence").exists()
        said = own.run("sh", "/opt/install.sh", "--url", url)
        assert "the service runs, now and after each boot" in said, said
        assert (state(own, "is-active"), state(own, "is-enabled")) == ("active", "enabled")
        is_ready(own)
        assert first_output(own) == "42\n"
        # Again, while it runs.
        own.run("sh", "/opt/install.sh", "--url", url)
        is_ready(own)
        assert first_output(own) == "42\n"
    
    box = user(own, "create")
    kept = "['kept', '1']"
    assert user(own, "look", box) == kept
    for action in ("restart", "stop"):
        before = main_pid(own)
        own.run("systemctl", action, "ringfence")
        if action == "stop":
            assert not own_answers(own, 3000, "/health")
            own.run("systemctl", "start", "ringfence")
        is_ready(own)
        assert main_pid(own) != before
        assert user(own, "look", box) == kept, action

    # It comes back after it was killed, and not after it was asked to end.
    before = main_pid(own)
    own.run("systemctl", "kill", "--signal=KILL", "--kill-who=main", "ringfence")
    until(lambda: main_pid(own) not in {before, "0"}, "systemd starts it again")
    is_ready(own)
    assert user(own, "look", box) == kept

    # The groups of sandboxes are not those of the unit, also where that is delegated.
    drop_in = own.root / "etc/systemd/system/ringfence.service.d/delegate.conf"
    drop_in.parent.mkdir()
    drop_in.write_text("[Service]\nDelegate=yes\n")
    own.run("systemctl", "daemon-reload")
    own.run("systemctl", "restart", "ringfence")
    is_ready(own)
    assert own.run("systemctl", "show", "--property=Delegate", "--value", "ringfence") == "yes\n"
    assert first_output(own) == "42\n"
    assert user(own, "look", box) == kept
    drop_in.unlink()
    drop_in.parent.rmdir()
    own.run("systemctl", "daemon-reload")

    # An upgrade restarts it under the sandbox, and leaves it enabled.
    [package] = release.glob("*.deb")
    (own.root / "opt" / "next.deb").write_bytes(next_version(package, tmp_path).read_bytes())
    before = main_pid(own)
    own.run("dpkg", "--install", "/opt/next.deb")
    assert own.run("dpkg-query", "-W", "-f", "${Version}", "ringfence").endswith("+next")
    is_ready(own)
    assert main_pid(own) not in {before, "0"}
    assert state(own, "is-enabled") == "enabled"
    assert user(own, "look", box) == kept

    # The service starts with the machine; sandboxes are gone as after any restart of it.
    own.halt()
    own.boot()
    is_ready(own)
    assert first_output(own) == "42\n"

    # A removal stops it and leaves sandboxes; a purge leaves nothing.
    box = user(own, "create")
    own.run("sh", "/opt/install.sh", "--uninstall")
    assert state(own, "is-active") != "active" and not own_answers(own, 3000, "/health")
    assert "long-marker" in own.run("ps", "-eo", "args")
    assert keys_of(own), "data stays"
    own.run("sh", "/opt/install.sh", "--uninstall", "--purge")
    assert "long-marker" not in own.run("ps", "-eo", "args")
    assert "not installed" in own.run("sh", "/opt/install.sh", "--uninstall")
    ours = {"opt/install.sh", "opt/next.deb"}
    # Services of the system have directories of their own while they run.
    left = {name for name in own.files() - there - ours if not name.startswith("var/tmp/systemd-private-")}
    assert left == set()
    assert "ringfence" not in own.run("systemctl", "list-unit-files")
