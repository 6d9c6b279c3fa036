"""Attacks from inside, as root, on a spawner that has not started a process yet.

Usage: waiting_spawner.py look   kills the spawner, and tries on the next one, and on a process of its own to compare, to get at its
                                 memory and its descriptors; prints as JSON what worked on which, and what is left of
                                 the spawner after signals
       waiting_spawner.py starve kills the spawner, and leaves the next one no memory for its first request
"""

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import time

PTRACE_ATTACH, PTRACE_DETACH, PTRACE_SEIZE = 16, 17, 0x4206
PIDFD_GETFD = 438
IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGPIPE, signal.SIGUSR1, signal.SIGUSR2)
SECONDS = 60

libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.restype = ctypes.c_long
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def text(path):
    try:
        with open(path, "rb") as file:
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def spawners():
    names = [name for name in os.listdir("/proc") if name.isdigit()]
    return [int(name) for name in names if text(f"/proc/{name}/cmdline").split("\0")[1:2] == ["spawner"]]


def ignores(pid):
    """Whether a process ignores what a spawner does, which is one of the first things that one does."""
    masks = [line.split()[1] for line in text(f"/proc/{pid}/status").splitlines() if line.startswith("SigIgn:")]
    return bool(masks) and all(int(masks[0], 16) >> (number - 1) & 1 for number in IGNORED)


def replaced():
    """Kills the spawner, and returns the next one, once it has taken its first steps."""
    before = spawners()
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        now = [pid for pid in spawners() if pid not in before and ignores(pid)]
        if now:
            return now[0]
        time.sleep(0.001)
    sys.exit("there is no new spawner")


def address(pid):
    """Where the stack of a process is, which the kernel shows to those who may trace it."""
    for line in text(f"/proc/{pid}/maps").splitlines():
        if line.endswith("[stack]"):
            return int(line.split("-")[0], 16)
    return 0


def memory(pid):
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as file:
        file.seek(address(pid))
        return len(file.read(8)) == 8


def copied(pid):
    data = ctypes.create_string_buffer(8)
    ours = (ctypes.c_size_t * 2)(ctypes.addressof(data), 8)
    theirs = (ctypes.c_size_t * 2)(address(pid) or 0x400000, 8)
    return libc.process_vm_readv(pid, ours, 1, theirs, 1, 0) == 8


def attached(pid):
    if libc.ptrace(PTRACE_ATTACH, pid, None, None) != 0:
        return False
    os.waitpid(pid, 0x40000000)
    libc.ptrace(PTRACE_DETACH, pid, None, None)
    return True


def seized(pid):
    if libc.ptrace(PTRACE_SEIZE, pid, None, None) != 0:
        return False
    libc.ptrace(PTRACE_DETACH, pid, None, None)
    return True


def descriptors(pid):
    pidfd = os.pidfd_open(pid)
    try:
        return any(libc.syscall(PIDFD_GETFD, pidfd, number, 0) >= 0 for number in range(8))
    finally:
        os.close(pidfd)


def opened(pid):
    return any(os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd"))


def environment(pid):
    return bool(text(f"/proc/{pid}/auxv"))


def program(pid):
    with open(f"/proc/{pid}/exe", "rb") as file:
        return bool(file.read(4))


ATTEMPTS = (memory, copied, attached, seized, descriptors, opened, environment, program)


def worked(pid):
    got = []
    for attempt in ATTEMPTS:
        try:
            if attempt(pid):
                got.append(attempt.__name__)
        except OSError:
            pass
    return got


def look():
    pid = replaced()
    # Not its program, which may be mapped by huge pages.
    (own_kb,) = [int(line.split()[1]) for line in text(f"/proc/{pid}/status").splitlines() if line.startswith("RssAnon:")]
    of_spawner = worked(pid)
    for number in IGNORED:
        os.kill(pid, number)
    os.kill(-1, signal.SIGCONT)
    own = subprocess.Popen(["sleep", "600"])
    until = time.monotonic() + SECONDS
    while not text(f"/proc/{own.pid}/cmdline").startswith("sleep") and time.monotonic() < until:
        time.sleep(0.001)
    of_own = worked(own.pid)
    own.kill()
    outcome = {"spawner": pid, "own_kb": own_kb, "worked": of_spawner, "worked_on_own": of_own}
    print(json.dumps(outcome | {"left": spawners() == [pid]}), flush=True)


def starve():
    pid = replaced()
    for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_STACK):
        resource.prlimit(pid, limit, (4096, 4096))
    print(json.dumps({"spawner": pid}), flush=True)


look() if sys.argv[1] == "look" else starve()
