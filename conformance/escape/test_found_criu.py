"""CRIU that nobody named: the one that is installed is used, and one that another user could have put there is not run.

The platforms of these tests have mounts of their own, in which something is installed where the platform looks. Everything in them
is the program that the other suites name, or leaves a mark when it is run.
"""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox

from harness import hoststate
from harness.hoststate import HostState, left_over
from harness.inside import status
from harness.platform import Platform

INSTALLED = "/usr/local/sbin"


class Installed(Platform):
    """A platform on a host on which something is installed. It is the first one in the `PATH` of whoever starts it, too."""

    def __init__(self, data: Path, install: str, criu: str = "auto") -> None:
        super().__init__(data, config=f'[sandbox]\ndisk_mb = 256\n\n[pause]\ncriu = "{criu}"\n')
        self.install = f"mount -t tmpfs -o mode=755 none {INSTALLED} && {install}"

    def inside(self, *command: str | Path) -> list[str | Path]:
        return ["unshare", "--mount", "--propagation", "private", "sh", "-c", f'{self.install} && exec "$@"', "sh", *command]

    def environment(self) -> dict[str, str]:
        own = super().environment()
        return own | {"PATH": f"{self.data_dir.parent / 'path'}:{own['PATH']}"}

    def launch(self) -> None:
        command = [self.binary, "up", "--data-dir", self.data_dir, "--listen", f"127.0.0.1:{self.port}", "--config", self.config_path]
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                self.inside(*command), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment(), start_new_session=True
            )

    def finding(self) -> str:
        """What `doctor` says of CRIU, which runs no program that it refuses either."""
        command = [self.binary, "doctor", "--data-dir", self.data_dir, "--listen", "127.0.0.1:0", "--config", self.config_path]
        said = subprocess.run(self.inside(*command), capture_output=True, text=True, env=self.environment()).stdout
        return next(line for line in said.splitlines() if " criu " in line)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """A file that a program makes which must never be run, and that program, which is first in the `PATH`."""
    mark = tmp_path / "mark"
    planted = tmp_path / "path" / "criu"
    planted.parent.mkdir()
    planted.write_text(f"#!/bin/sh\necho run >>{shlex.quote(str(mark))}\n")
    planted.chmod(0o755)
    return mark


def paused_on(server: Installed) -> str:
    """Where a sandbox with a program is kept while it is paused; the program goes on afterwards."""
    before = HostState.take()
    try:
        server.start()
        server.use()
        with Sandbox.create(timeout=120) as box:
            pid = box.commands.run("exec sleep 1000", background=True, timeout=0).pid
            assert box.pause() is True
            answer = httpx.get(
                f"{os.environ['E2B_API_URL']}/sandboxes/{box.sandbox_id}", headers={"X-API-Key": os.environ["E2B_API_KEY"]}, timeout=60
            )
            box = box.connect(timeout=120)
            assert status(box, f"kill -0 {pid}") == 0
        assert server.terminate() == 0, server.log_tail()
        assert server.down().returncode == 0
    finally:
        server.close()
    assert left_over(before) == {}
    return answer.json()["pauseStorage"]


def installed(tmp_path: Path, install: str, **settings: str) -> Installed:
    data = tmp_path / "data"
    hoststate.own(data)
    return Installed(data, install, **settings)


def test_an_installed_criu_is_used(tmp_path: Path, mark: Path) -> None:
    server = installed(tmp_path, f"ln -s {shlex.quote(os.environ['RINGFENCE_CRIU'])} {INSTALLED}/criu")
    said = server.finding()
    assert said.startswith("ok ") and f"{INSTALLED}/criu" in said, said
    assert paused_on(server) == "disk"
    assert not mark.exists()


def test_it_can_be_turned_off(tmp_path: Path, mark: Path) -> None:
    server = installed(tmp_path, f"ln -s {shlex.quote(os.environ['RINGFENCE_CRIU'])} {INSTALLED}/criu", criu="off")
    assert server.finding().startswith("ok "), server.finding()
    assert paused_on(server) == "memory"
    assert not mark.exists()


@pytest.mark.parametrize("change", ["chmod 757 .", "chmod 775 .", "chmod 757 criu", "chown 4321 .", "chown 4321 criu"])
def test_what_another_user_could_have_put_there_is_not_run(tmp_path: Path, mark: Path, change: str) -> None:
    """The program is one that leaves a mark, linked statically: as a program of the shell it would be refused for being a script."""
    trap = tmp_path / "trap"
    source = f'#include <fcntl.h>\nint main(void) {{ open("{mark}", O_WRONLY | O_CREAT, 0600); }}\n'
    made = subprocess.run(["gcc", "-static", "-xc", "-", "-o", trap], input=source, text=True, capture_output=True)
    assert made.returncode == 0, made.stderr
    put = f"cp {shlex.quote(str(trap))} {INSTALLED}/criu && cd {INSTALLED}"
    server = installed(tmp_path, f"{put} && {change} && cd /")
    said = server.finding()
    assert said.startswith("degraded") and INSTALLED in said, said
    assert not mark.exists(), "it was run"
    # As root's, it would have been.
    server.install = f"mount -t tmpfs -o mode=755 none {INSTALLED} && {put} && cd /"
    assert "version" in server.finding()
    assert stat.S_ISREG(mark.stat().st_mode)


def test_a_host_without_criu_keeps_memory(tmp_path: Path, mark: Path) -> None:
    if any(Path(place, "criu").exists() for place in ("/usr/sbin", "/usr/bin", "/usr/local/bin", "/usr/lib/ringfence/criu")):
        hide = "for place in /usr/sbin /usr/bin /usr/local/bin; do [ ! -e $place/criu ] || mount --bind /dev/null $place/criu; done"
    else:
        hide = "true"
    server = installed(tmp_path, hide)
    said = server.finding()
    assert said.startswith("degraded"), said
    assert paused_on(server) == "memory"
    assert not mark.exists()
