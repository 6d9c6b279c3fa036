"""A mount namespace in which /usr is an overlay, as it is in a container of Docker or podman: its mounts cannot have mapped ids.

The host stays as it is. What is written to /usr there is in memory, and vanishes with the namespace.
"""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Waits for its parent in between: what lies above the host's /usr is made in memory that only this namespace has.
MOUNTS = """
mount -t tmpfs -o mode=0755 memory "$0"
mkdir "$0/upper" "$0/work"
echo memory; read -r _
mount -t overlay -o "lowerdir=/usr,upperdir=$0/upper,workdir=$0/work" overlay /usr
echo overlay; read -r _
"""
# What is larger, in bytes, and not needed, is hidden: tests are not about how long a copy of everything on this host takes.
LARGE = 8 << 20
NEEDED = ("python3*", "*-linux-gnu")
USR = Path("/usr")
PAST_NS = 1_000_000_000_123_456_789
# The right to bind low ports, as the kernel stores it: version 2, effective.
CAPABILITY = b"".join(word.to_bytes(4, "little") for word in (0x0200_0001, 1 << 10, 0, 0, 0))


class Overlaid:
    """The namespace, as the host sees it."""

    def __init__(self, holder: subprocess.Popen[str]) -> None:
        self.root = Path(f"/proc/{holder.pid}/root")
        # `nsenter` executes the program in its own place: its process is the one that was started.
        self.starter = ("nsenter", f"--mount=/proc/{holder.pid}/ns/mnt", "--")

    def path(self, path: str) -> Path:
        """A path that leads to a file as the namespace has it."""
        return self.root / path.lstrip("/")

    def run(self, command: str) -> str:
        """Standard output of a command of the shell in the namespace."""
        done = subprocess.run([*self.starter, "sh", "-c", command], capture_output=True, text=True, check=True)
        return done.stdout


@contextmanager
def overlaid(directory: Path) -> Iterator[Overlaid]:
    """The namespace for as long as the context lasts. `directory` is made, and has nothing on the host's side."""
    directory.mkdir()
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", MOUNTS, directory]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdin and holder.stdout
    try:
        assert holder.stdout.readline() == "memory\n"
        place = Overlaid(holder)
        upper = place.path(str(directory)) / "upper"
        upper.chmod(0o755)
        _hide(upper)
        _add(upper)
        print(file=holder.stdin, flush=True)
        assert holder.stdout.readline() == "overlay\n"
        yield place
    finally:
        holder.stdin.close()
        holder.wait(60)
        holder.stdout.close()
        directory.rmdir()


def _size(path: Path) -> int:
    """Bytes of a file, or of all files below a directory."""
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size
    return sum(_size(entry) for entry in path.iterdir())


def _below(upper: Path, directory: Path) -> Path:
    """A directory of the upper layer, with the mode of the host's: overlayfs shows that of the upper one."""
    if directory == USR:
        return upper
    place = _below(upper, directory.parent) / directory.name
    place.mkdir(exist_ok=True)
    place.chmod(stat.S_IMODE(directory.stat().st_mode))
    return place


def _hide(upper: Path) -> None:
    """Hides large files and directories of the host, and all of its data."""
    for name in ("include", "share"):
        if (USR / name).is_dir():
            os.setxattr(_below(upper, USR / name), "trusted.overlay.opaque", b"y")
    libraries = [path for path in (USR / "lib").glob("*-linux-gnu") if not path.is_symlink()]
    for directory in (USR / "bin", USR / "lib", USR / "libexec", *libraries):
        for path in sorted(directory.iterdir()) if directory.is_dir() else ():
            if not any(path.match(name) for name in NEEDED) and _size(path) > LARGE:
                os.mknod(_below(upper, directory) / path.name, stat.S_IFCHR, os.makedev(0, 0))


def _add(upper: Path) -> None:
    """Adds one file of each kind that a copy has to know: `/usr/lib/overlaid`."""
    place = _below(upper, USR / "lib") / "overlaid"
    place.mkdir()
    for name in ("plain", "setuid", "hard"):
        (place / name).write_text(name)
    (place / "hard2").hardlink_to(place / "hard")
    (place / "soft").symlink_to("plain")
    os.mkfifo(place / "pipe")
    os.chown(place / "setuid", 12, 34)
    os.lchown(place / "soft", 56, 78)
    (place / "setuid").chmod(0o6751)
    os.setxattr(place / "plain", "security.capability", CAPABILITY)
    for name in ("plain", "setuid", "hard", "soft"):
        os.utime(place / name, ns=(PAST_NS, PAST_NS), follow_symlinks=False)
    os.chown(place, 0, 42)
    place.chmod(0o2775)
    os.utime(place, ns=(PAST_NS, PAST_NS))
