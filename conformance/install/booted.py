"""A fresh system that its service manager runs: systemd is process 1, in namespaces and control groups of its own.

It is `systemd-nspawn` that boots it, which such a container needs no other systemd for. What a machine has and a container has
not is made by a unit of the test before anything else starts: device nodes, and control groups that can be written.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

from harness.patience import within
from harness.traffic import until
from install.fresh import Fresh

NAME = "ringfence-install"
AS_A_MACHINE = """#!/bin/sh
set -eu
mknod -m 600 /dev/loop-control c 10 237
mknod -m 666 /dev/fuse c 10 229
number=0
while [ $number -lt 256 ]; do
    mknod -m 660 /dev/loop$number b 7 $number
    number=$((number + 1))
done
awk '$3 == "cgroup" { print $2 }' /proc/self/mounts | while read -r place; do
    mount -o remount,rw,bind "$place"
done
"""
UNIT = """[Unit]
DefaultDependencies=no
Before=sysinit.target

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/opt/as-a-machine
"""


class Booted(Fresh):
    """One system, which is there until it is closed, and can be booted again."""

    def __init__(self, root: Path) -> None:
        self.root = root
        machine = root / "opt" / "as-a-machine"
        machine.write_text(AS_A_MACHINE)
        machine.chmod(0o755)
        units = root / "etc" / "systemd" / "system"
        (units / "as-a-machine.service").write_text(UNIT)
        wanted = units / "sysinit.target.wants"
        wanted.mkdir(exist_ok=True)
        (wanted / "as-a-machine.service").symlink_to("../as-a-machine.service")
        self.process: subprocess.Popen[bytes] | None = None
        try:
            self.boot()
        except BaseException:
            self.close()
            raise

    def boot(self) -> None:
        """Starts process 1, and waits until it has started everything else."""
        groups = [place / NAME for place in hierarchies()]
        for group in groups:
            group.mkdir(exist_ok=True)
            for file in ("cpuset.cpus", "cpuset.mems"):
                # With version 1, a group without processors takes no process.
                if (group / file).exists() and not (group / file).read_text().strip():
                    (group / file).write_text((group.parent / file).read_text())
            if (group / "cgroup.clone_children").exists():
                (group / "cgroup.clone_children").write_text("1")

        def enter() -> None:
            for group in groups:
                (group / "cgroup.procs").write_text(str(os.getpid()))

        container = ["--register=no", "--keep-unit", f"--machine={NAME}", "--private-network", "--capability=all"]
        words = ["systemd-nspawn", "--quiet", *container, "--resolv-conf=off", "--timezone=off", "--console=pipe", "--boot", "-D", self.root]
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Sandboxes have filters of their own, and would have this one besides.
            env=os.environ | {"SYSTEMD_SECCOMP": "0"},
            preexec_fn=enter,
        )
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        until(lambda: children.read_text().split(), "process 1 is there")
        self.pid = int(children.read_text().split()[0])
        until(self.is_up, "the system has started", within_s=60)

    def is_up(self) -> bool:
        assert self.process and self.process.poll() is None, "the system did not start"
        ran = subprocess.run(self.inside("systemctl", "is-system-running"), stdin=subprocess.DEVNULL, capture_output=True, text=True)
        return ran.stdout.strip() in {"running", "degraded"}

    def inside(self, *command: str | Path) -> list[str | Path]:
        enter = ["nsenter", "--target", str(self.pid), "--mount", "--pid", "--net", "--uts", "--ipc", "--cgroup"]
        plain = ["env", "-i", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]
        return [*enter, *plain, *command]

    def halt(self) -> None:
        """Ends all processes, as a machine does that is switched off in an orderly way."""
        assert self.process
        self.process.send_signal(signal.SIGTERM)
        try:
            # Agents of sandboxes end at no signal but the last one, for which systemd waits 90 s.
            self.process.wait(within(120))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(30)
            raise
        finally:
            for place in hierarchies():
                remove_group(place / NAME)

    def close(self) -> None:
        if self.process and self.process.poll() is None:
            self.halt()
        shutil.rmtree(self.root)


def hierarchies() -> list[Path]:
    """Where control groups are mounted on this host."""
    lines = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    return [Path(words[1]) for words in lines if words[2] in {"cgroup", "cgroup2"}]


def remove_group(group: Path) -> None:
    """Removes a group with all below it, once no process is in them."""

    def gone() -> bool:
        for directory, _names, _files in os.walk(group, topdown=False):
            try:
                os.rmdir(directory)
            except OSError:
                return False
        return True

    until(gone, f"{group} has no processes")
