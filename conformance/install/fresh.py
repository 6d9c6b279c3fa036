"""A fresh system in namespaces of its own: a root file system as a distribution makes it, a network with a loopback device alone, and
processes that end with it. The control groups and the claims of id ranges are the host's, as in a privileged container.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

# Mounts what a system has, enters the root, and stays.
ENTER = """
set -eu
mount --make-rprivate /
mount --bind "$1" "$1"
mount --rbind /dev "$1/dev"
mount --rbind /sys "$1/sys"
mount -t proc proc "$1/proc"
mount -t tmpfs -o mode=755 none "$1/run"
mkdir "$1/run/ringfence"
mount --bind /run/ringfence "$1/run/ringfence"
mount -t tmpfs -o mode=1777 none "$1/tmp"
ip link set lo up
cd "$1"
mkdir -p mnt
pivot_root . mnt
exec chroot . sh -c 'umount -l /mnt; echo entered; exec sleep infinity'
"""


class Fresh:
    """One system, which is there until it is closed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        Path("/run/ringfence").mkdir(mode=0o700, exist_ok=True)
        self.process = subprocess.Popen(
            ["unshare", "--mount", "--pid", "--net", "--uts", "--ipc", "--fork", "--kill-child", "sh", "-c", ENTER, "sh", root],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout and self.process.stdout.readline() == "entered\n", "the namespaces were not made"
        # The first process of the namespaces is the child of what made them.
        self.pid = int(Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()[0])

    def inside(self, *command: str | Path) -> list[str | Path]:
        """A command of this system, for a program of the host to start."""
        enter = ["nsenter", "--target", str(self.pid), "--mount", "--pid", "--net", "--uts", "--ipc"]
        plain = ["env", "-i", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "RINGFENCE_PAUSE_CRIU=off"]
        return [*enter, *plain, *command]

    def beside(self, *command: str | Path) -> list[str | Path]:
        """A command of the host in the network of this system: a server of files, or a client."""
        return ["nsenter", "--target", str(self.pid), "--net", *command]

    def run(self, *command: str | Path, code: int = 0) -> str:
        """Runs a command of this system, and returns what it said."""
        ran = subprocess.run(
            self.inside(*command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300
        )
        assert ran.returncode == code, f"{command}: {ran.returncode}\n{ran.stdout}"
        return ran.stdout

    def files(self) -> set[str]:
        """Every file that is there, but for what package managers write down and what is not of the disk."""
        found = set()
        for directory, names, files in os.walk(self.root):
            below = Path(directory).relative_to(self.root)
            if str(below) in {"proc", "sys", "dev", "run", "tmp", "mnt", "var/lib/dpkg", "var/lib/apt", "var/cache", "var/log", "var/lib/systemd", "var/lib/rpm", "var/lib/dnf"}:
                names.clear()
                continue
            # A question to `rpm` makes its database.
            names[:] = [name for name in names if name != ".rpmdb"]
            found |= {str(below / name) for name in [*names, *files]}
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait(30)
        shutil.rmtree(self.root)
