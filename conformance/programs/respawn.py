"""Attacks from inside, as root, on the process that brings a sandbox its next spawner.

Usage: respawn.py look COUNT MARK...   kills the spawner COUNT times and looks at every process that appears meanwhile;
                                       prints as JSON how many it saw, how many of them before they were a program of the
                                       sandbox, and what of the host it found (a MARK, or anything that is closed to
                                       others of such an early process)
       respawn.py stop                 kills the spawner and stops every process, over and over
"""

import json
import os
import signal
import sys
import time

# World-readable: only the namespaces of the process determine what they show.
OPEN = ("net/tcp", "net/tcp6", "net/unix", "net/route", "net/dev", "mountinfo", "cmdline", "cgroup", "uid_map")
# Readable for processes that may trace the process.
CLOSED = ("environ", "maps", "mem", "auxv", "io", "stack")
LINKS = ("exe", "cwd", "root", "ns/net", "ns/mnt", "ns/user", "ns/pid", "ns/ipc", "ns/uts", "ns/cgroup")
# How far ahead of the last known pid to look: a replacement is made of two processes.
AHEAD = 6
# Looks at one process, and how many of them before it may go on.
LOOKS = 200
LOOKS_WHILE_STOPPED = 3


def text(path):
    try:
        with open(path, "rb") as file:
            return file.read(1 << 20).decode(errors="replace")
    except OSError:
        return ""


def spawners():
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and text(f"/proc/{name}/cmdline").split("\0")[1:2] == ["spawner"]:
            found.append(int(name))
    return found


def kill_spawners():
    for pid in spawners():
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def program_of(pid):
    return text(f"/proc/{pid}/cmdline").split("\0")[1:2]


def closed_parts(pid):
    """What of the closed parts can be read."""
    got = []
    for name in CLOSED:
        try:
            with open(f"/proc/{pid}/{name}", "rb") as file:
                if name == "mem" or file.read(16):
                    got.append(name)
        except OSError:
            pass
    for name in LINKS:
        try:
            got.append(f"{name} -> {os.readlink(f'/proc/{pid}/{name}')}")
        except OSError:
            pass
    try:
        got += [f"fd {fd} -> {os.readlink(f'/proc/{pid}/fd/{fd}')}" for fd in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        pass
    return got


def look_at(pid, marks, found):
    """Everything that can be read of a process; again and again until it is the spawner or gone. Whether it was seen
    before it was the spawner."""
    early = False
    try:
        kept = os.open(f"/proc/{pid}/net", os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        kept = None
    for number in range(LOOKS):
        if number == LOOKS_WHILE_STOPPED:
            send(pid, signal.SIGCONT)
        shown = {name: text(f"/proc/{pid}/{name}") for name in OPEN}
        if not any(shown.values()):
            break
        before = program_of(pid)
        early = early or before == ["launcher"]
        closed = closed_parts(pid)
        for name, content in shown.items():
            found.update(f"{mark} in {name}" for mark in marks if mark in content)
        for part in closed:
            found.update(f"{mark} in {part}" for mark in marks if mark in part)
        # Between the two looks at its program it was what it is.
        if before and before != ["spawner"] and before == program_of(pid):
            found.update(f"{part} of {' '.join(before)}" for part in closed)
        if before == ["spawner"]:
            break
    send(pid, signal.SIGCONT)
    if kept is not None:
        # A descriptor that was taken in time would show the network for as long as it is kept.
        for name in ("tcp", "tcp6", "unix", "route"):
            try:
                fd = os.open(name, os.O_RDONLY, dir_fd=kept)
                content = os.read(fd, 1 << 20).decode(errors="replace")
                os.close(fd)
                found.update(f"{mark} in a kept net/{name}" for mark in marks if mark in content)
            except OSError:
                pass
        os.close(kept)
    return early


def newest():
    return max(int(name) for name in os.listdir("/proc") if name.isdigit())


def send(pid, number):
    """Whether there is such a process; it may be one that may not be signalled."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def appears(after, until):
    """The next process with a pid above `after`, stopped the moment it is there."""
    while time.monotonic() < until:
        for pid in range(after + 1, after + AHEAD):
            if send(pid, signal.SIGSTOP):
                return pid
    return None


def look(count, marks):
    found, seen, early, respawns = set(), 0, 0, 0
    while respawns < count:
        last = newest()
        if not spawners():
            time.sleep(0.01)
            continue
        kill_spawners()
        respawns += 1
        until = time.monotonic() + 20
        while (pid := appears(last, until)) is not None:
            seen += 1
            early += look_at(pid, marks, found)
            last = pid
            if spawners():
                break
    print(json.dumps({"respawns": respawns, "seen": seen, "early": early, "found": sorted(found)}), flush=True)


def stop():
    print("stopping", flush=True)
    while True:
        kill_spawners()
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            try:
                # Everybody but this process and the first.
                os.kill(-1, signal.SIGSTOP)
            except ProcessLookupError:
                pass


if sys.argv[1] == "look":
    look(int(sys.argv[2]), sys.argv[3:])
else:
    stop()
