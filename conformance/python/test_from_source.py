"""What the README says of an installation from source, as it is written there, in a clean clone.

Nothing is compiled: the compiler's place is taken by a program that checks what it is asked for, and hands out the program under test, which was
compiled of the same tree. The SDK is that of this suite, which the same function has installed. Everything else is real: `/var/lib/ringfence`,
`/var/log`, `/usr/local/bin` and port 3000 are those of namespaces.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import hoststate
from harness.hoststate import HostState, left_over
from harness.patience import within
from harness.platform import binary

pytestmark = pytest.mark.alone("it has a platform at the default place, whose control groups are named by that")

ROOT = Path(__file__).resolve().parents[2]
# Where a platform keeps its data unless it is told otherwise.
DATA = Path("/var/lib/ringfence")
# The data is on a disk; all else that is written is in memory.
OWN = """
ip link set lo up
for directory in /usr/local/bin /var/log "$0"; do mount -t tmpfs -o mode=755 none "$directory"; done
mkdir -m 755 "$0/upper" "$0/upper/ringfence" "$0/work"
mount -t overlay -o "lowerdir=/var/lib,upperdir=$0/upper,workdir=$0/work" overlay /var/lib
mount --bind "$1" /var/lib/ringfence
echo made; read -r _
"""
CARGO = """#!/bin/sh
echo "$RINGFENCE_COMMIT $*" >{asked}
install -D -m 755 {program} {made}
"""


class Clone:
    """A clean clone of what is checked out, and namespaces in which its reader works."""

    def __init__(self, place: Path) -> None:
        self.root = place / "clone"
        subprocess.run(["git", "clone", "--quiet", ROOT, self.root], check=True)
        target = tomllib.loads((self.root / ".cargo" / "config.toml").read_text())["build"]["target"]
        self.made = self.root / "target" / target / "release" / "ringfence"
        self.asked = place / "asked"
        cargo = place / "bin" / "cargo"
        cargo.parent.mkdir()
        words = {"asked": self.asked, "program": binary(), "made": self.made}
        cargo.write_text(CARGO.format(**{name: shlex.quote(str(path)) for name, path in words.items()}))
        cargo.chmod(0o755)
        environment = Path(sys.prefix)
        assert (environment / ".pins").exists(), "the environment of this suite is not one of scripts/common.sh"
        (self.root / "target").mkdir()
        (self.root / "target" / "sdk-2.63.0").symlink_to(environment)
        named = ("RINGFENCE_", "E2B_", "CARGO_TARGET_DIR")
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith(named)}
        self.environment["PATH"] = f"{cargo.parent}:{os.environ['PATH']}"
        memory, data = place / "memory", place / "data"
        memory.mkdir()
        data.mkdir(mode=0o700)
        command = ["unshare", "--mount", "--net", "--propagation", "private", "sh", "-ec", OWN, memory, data]
        self.holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.holder.stdout and self.holder.stdout.readline() == "made\n", "the namespaces were not made"

    def run(self, script: str) -> str:
        """What a script prints in the clone, all of whose commands have to succeed."""
        enter = ["nsenter", f"--target={self.holder.pid}", "--mount", "--net", "--"]
        ran = subprocess.run(
            [*enter, "bash", "-euo", "pipefail", "-c", f'cd "$0"\n{script}', self.root],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=within(120),
        )
        assert ran.returncode == 0, ran.stdout
        return ran.stdout

    def close(self) -> None:
        try:
            if self.made.exists():
                self.run(f"{shlex.quote(str(self.made))} down")
        finally:
            self.holder.kill()
            self.holder.communicate()


@pytest.fixture
def clone(tmp_path: Path) -> Iterator[Clone]:
    assert not DATA.exists(), f"this host has a platform of its own, with the same control groups: {DATA}"
    hoststate.own(DATA, tmp_path / "data")
    before = HostState.take()
    made = Clone(tmp_path)
    try:
        yield made
    finally:
        made.close()
    assert left_over(before) == {}


def test_the_commands_of_the_readme_work_as_written(clone: Clone) -> None:
    section = (clone.root / "README.md").read_text().partition("\n## From source\n")[2]
    commands = section.partition("\n```\n")[2].partition("\n```\n")[0]
    assert commands.splitlines()[0] == "./scripts/run.sh", commands
    said = clone.run(commands)
    commit = subprocess.run(["git", "-C", clone.root, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
    build = f"build --release --locked --manifest-path {clone.root}/Cargo.toml -p cli"
    assert clone.asked.read_text() == f"{commit.stdout.strip()} {build}\n"
    assert re.search(r"^Hello from sandbox i[a-z0-9]+, user on Linux ", said, re.M), said
    # What it says at its end works as well, in its order.
    keys, *stop = [line.strip() for line in said.splitlines() if line.startswith("    ") and not line.lstrip().startswith("install ")]
    looks = 'curl --silent --fail --header "X-API-Key: $E2B_API_KEY" "$E2B_API_URL/v2/sandboxes"'
    assert clone.run(f"{keys}\n{looks}\ncurl --silent --fail --output /dev/null http://127.0.0.1:3000/docs") == "[]"
    assert "already running on 127.0.0.1:3000" in clone.run("./scripts/run.sh")
    clone.run("ringfence doctor")
    assert [line.split()[0] for line in stop] == ["kill", str(clone.made)], said
    for line in stop:
        clone.run(line)
    assert "answered" in clone.run("cat /var/log/ringfence.log")
