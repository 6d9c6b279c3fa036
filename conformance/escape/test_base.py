"""The built-in template `base`: what it takes from the host, what it never takes, and what it only shows."""

from __future__ import annotations

import fcntl
import os
import struct
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2b import Sandbox

from harness.inside import Background, root, status
from harness.platform import Platform
from harness.traffic import until


def test_fuse_is_shown_and_cannot_be_opened(sandbox: Sandbox) -> None:
    """With or without FUSE on the host: the device node exists for programs that check it, and cannot be opened."""
    assert root(sandbox, "stat -c '%F %a %t:%T' /dev/fuse") == "character special file 666 a:e5\n"
    for user in ("root", "user"):
        attempt = "import os\ntry: os.open('/dev/fuse', os.O_RDWR)\nexcept OSError as e: print(e.strerror)"
        assert sandbox.commands.run(f'python3 -c "{attempt}"', user=user).stdout == "Permission denied\n"
    for change in ("rm /dev/fuse", "mv /dev/fuse /dev/other", "chmod 600 /dev/fuse", "mknod /tmp/fuse c 10 229"):
        assert status(sandbox, change) != 0, change


def test_the_generator_of_random_numbers_says_that_there_is_none(sandbox: Sandbox) -> None:
    place = "/sys/class/misc/hw_random"
    assert sandbox.commands.run(f"cat {place}/rng_current {place}/rng_available").stdout == "none\n\n"
    assert status(sandbox, f"echo virtio_rng.0 > {place}/rng_current") != 0


@pytest.fixture
def planted() -> Iterator[str]:
    """A mark in files of the host that say how its packages come: credentials, a proxy, a key; without effect there."""
    mark = f"rf-{uuid.uuid4().hex}"
    files = {
        f"/etc/apt/auth.conf.d/{mark}.conf": f"machine nowhere.invalid login x password {mark}\n",
        f"/etc/apt/sources.list.d/{mark}.sources": (
            f"Enabled: no\nTypes: deb\nURIs: https://x:{mark}@nowhere.invalid/debian\nSuites: x\nComponents: main\n"
        ),
        f"/etc/apt/preferences.d/{mark}.pref": f"# {mark}\nPackage: rf-nothing\nPin: origin nowhere.invalid\nPin-Priority: 1\n",
        f"/etc/ssl/certs/{mark}.pem": f"-----BEGIN PRIVATE KEY-----\n{mark}\n-----END PRIVATE KEY-----\n",
        f"/etc/default/{mark}": f"PASSWORD={mark}\n",
    }
    made = [Path(path) for path in files if Path(path).parent.is_dir()]
    try:
        for path in made:
            path.write_text(files[str(path)])
        yield mark
    finally:
        for path in made:
            path.unlink()


@pytest.mark.alone("it changes /etc of the host, of which every platform then makes a new base")
def test_a_change_of_the_host_reaches_new_sandboxes_alone(platform: Platform, planted: str) -> None:
    """Existing sandboxes keep their version, new ones get the current one, and private files are never copied."""
    versions = platform.data_dir / "base"

    def current() -> str:
        return os.readlink(versions / "current")

    changed = Path("/etc/ssl/certs") / f"{planted}.change"
    with Sandbox.create() as box:
        before = current()
        try:
            changed.write_text("change\n")
            until(lambda: current() != before and (versions / before / "users").exists(), "a new version of base", 90)
        finally:
            changed.unlink()
        # Files that were not opened through this sandbox yet.
        assert root(box, "echo written >> /etc/protocols && tail -n 1 /etc/protocols") == "written\n"
        assert int(root(box, "ls /var/lib /etc/ssl/certs | wc -l")) > 100
        assert (versions / before).is_dir()
        with Sandbox.create() as late:
            assert root(late, "tail -n 1 /etc/protocols") != "written\n"
            found = root(late, f"grep -rls {planted} /etc /var /usr/etc /home /root; find /etc /var -name '{planted}.*'")
            assert found.split() in ([], [str(changed)])
    until(lambda: sorted(os.listdir(versions)) == sorted([current(), "current"]), "old versions are removed", 90)


def test_the_copy_of_the_package_database_is_no_file_of_the_host(sandbox: Sandbox, platform: Platform) -> None:
    """Locks are taken in the copy: what a sandbox does with its packages never waits for the host, nor the host for it."""
    if not Path("/var/lib/dpkg/status").exists():
        assert status(sandbox, "test -e /var/lib/dpkg") != 0
        return
    copies = platform.data_dir / "base" / "current" / "root" / "var/lib/dpkg"
    for file in ("status", "lock", "info/dpkg.list"):
        ours, theirs = os.stat(copies / file), os.stat(f"/var/lib/dpkg/{file}")
        assert ours.st_ino != theirs.st_ino and ours.st_nlink == 1
    code = (
        "import fcntl,time\nfiles=[open('/var/lib/dpkg/'+name,'w') for name in ('lock','lock-frontend')]\n"
        "[fcntl.lockf(file,fcntl.LOCK_EX|fcntl.LOCK_NB) for file in files]\nprint('held',flush=True)\ntime.sleep(600)"
    )
    program = Background(sandbox, code, "root")
    assert program.said == "held\n"
    assert status(sandbox, "sudo dpkg --configure -a") != 0
    for lock in ("lock", "lock-frontend"):
        with open(f"/var/lib/dpkg/{lock}") as file:
            holder = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))
        kind, _, _, _, pid = struct.unpack("hhqqi4x", holder)
        # Other programs of the host may be running, but no process of a sandbox.
        assert kind == fcntl.F_UNLCK or os.readlink(f"/proc/{pid}/ns/pid") == os.readlink("/proc/self/ns/pid")
    program.handle.kill()
