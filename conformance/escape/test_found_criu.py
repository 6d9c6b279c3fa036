"""CRIU that nobody named: the one that is installed is used, whatever does not fit is passed over, and one that another user could have
put there is not run.

The platforms of these tests have mounts of their own, in which something is installed where the platform looks. Everything in them
is the program that the other suites name, or leaves a mark when it is run.
"""

from __future__ import annotations

import os
import re
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
# The folder of a package of ours, below a directory that systems have.
FOLDER = "/usr/local/lib/ringfence/criu"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "sandboxes" / "pause.md"


class Installed(Platform):
    """A platform on a host on which something is installed. It is the first one in the `PATH` of whoever starts it, too."""

    def __init__(self, data: Path, install: str, criu: str = "auto") -> None:
        super().__init__(data, config=f'[sandbox]\ndisk_mb = 256\n\n[pause]\ncriu = "{criu}"\n')
        self.install = f"{emptied(INSTALLED)} && {install}"

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


def emptied(directory: str) -> str:
    """Has a directory of the host be another, empty one."""
    return f"mount -t tmpfs -o mode=755 none {directory}"


def layered(directory: Path, memory: Path) -> str:
    """Has what is written to a directory of the host be in memory."""
    own = memory / directory.name
    layers = f"lowerdir={directory},upperdir={own}/upper,workdir={own}/work"
    return f"mkdir -p {own}/upper {own}/work && chmod 755 {own}/upper && mount -t overlay -o {layers} overlay {directory}"


def printing(path: Path, line: str) -> Path:
    """A program that prints a line whatever it is asked, linked statically."""
    source = f'#include <stdio.h>\nint main(void) {{ puts("{line}"); }}\n'
    made = subprocess.run(["gcc", "-static", "-xc", "-", "-o", path], input=source, text=True, capture_output=True)
    assert made.returncode == 0, made.stderr
    return path


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


def test_each_documented_place_is_one_and_the_first_counts(tmp_path: Path, mark: Path) -> None:
    """A package of Debian, one of ours, a build from source: wherever CRIU is put, it is found. In one namespace after the other, the
    places before it have none."""
    section = PAGE.read_text().partition("### Where CRIU comes from")[2]
    places = [Path(place) for place in re.findall(r"`(/usr/\S+/criu)`[,.]", section)]
    assert len(places) == 6 and {"/usr/lib/ringfence/criu/criu", f"{FOLDER}/criu", f"{INSTALLED}/criu"} <= set(map(str, places))
    memory = tmp_path / "memory"
    memory.mkdir()
    criu = shlex.quote(os.environ["RINGFENCE_CRIU"])
    # Directories that systems have; some are links to others.
    trees = {Path("/usr/lib"), Path("/usr/local"), *(Path(place).resolve() for place in ("/usr/sbin", "/usr/bin"))}
    server = installed(tmp_path, "true")
    prepare = " && ".join([f"mount -t tmpfs -o mode=755 none {memory}", *(layered(tree, memory) for tree in sorted(trees))])
    for number, place in enumerate(places):
        # All from this one on.
        put = [f"mkdir -p {later.parent} && ln -sf {criu} {later}" for later in places[number:] if later.parent.resolve() == later.parent]
        server.install = " && ".join([prepare, *put])
        said = server.finding()
        assert said.startswith("ok ") and f" at {place}: " in said, said
    assert not mark.exists()


def test_in_a_folder_of_its_own_it_keeps_processes(tmp_path: Path, mark: Path) -> None:
    """With its file there, and not a link to one."""
    put = f"{emptied('/usr/local/lib')} && mkdir -p {FOLDER} && cp {shlex.quote(os.environ['RINGFENCE_CRIU'])} {FOLDER}/criu"
    server = installed(tmp_path, put)
    said = server.finding()
    assert said.startswith("ok ") and f"{FOLDER}/criu" in said and "passed over" not in said, said
    assert paused_on(server) == "disk"
    assert not mark.exists()


def test_what_does_not_fit_is_passed_over_with_its_reason(tmp_path: Path, mark: Path) -> None:
    old = printing(tmp_path / "old", "Version: 3.17.1")
    other = printing(tmp_path / "other", "a program of the same name")
    script = tmp_path / "script"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(os.environ["RINGFENCE_CRIU"])} "$@"\n')
    script.chmod(0o755)
    reasons = {
        old: "CRIU 3.17.1 is too old: version 4.2 or later is required",
        other: "is not CRIU: its --version has no line",
        script: "is a script: name the program itself",
    }
    last = "/usr/local/bin"
    for unfit, reason in reasons.items():
        put = f"{emptied('/usr/local/lib')} && mkdir -p {FOLDER} && cp {unfit} {FOLDER}/criu"
        server = installed(tmp_path, put)
        said = server.finding()
        assert said.startswith("degraded") and f"{FOLDER}/criu: {reason}" in said, said
        server.install += f" && cp {other} {INSTALLED}/criu && {emptied(last)} && ln -s {shlex.quote(os.environ['RINGFENCE_CRIU'])} {last}/criu"
        said = server.finding()
        assert said.startswith("ok ") and f" at {last}/criu: " in said, said
        assert f"passed over {FOLDER}/criu: {reason}" in said and f"passed over {INSTALLED}/criu: is not CRIU" in said, said
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
