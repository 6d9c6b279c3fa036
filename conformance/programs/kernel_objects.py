"""Makes objects of the kernel inside a sandbox and keeps them, to compare what the host loses with what is charged.

    python3 kernel_objects.py KIND MIB SECONDS

Makes objects of the kind until the sandbox is charged so many MiB more for memory of the kernel, the kernel refuses
another one, or the time is over. Prints what became of that as a line of JSON, and waits. Begins once the file
`/tmp/begin` exists.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable

libc = ctypes.CDLL(None, use_errno=True)
number = itertools.count(1)
PROCESSES = 16
LEVELS = (0, 1, 6, 17, 41, 58, 255, 270)
SOCKETS = (
    (socket.AF_INET, socket.SOCK_STREAM, 0),
    (socket.AF_INET6, socket.SOCK_STREAM, 0),
    (socket.AF_INET, socket.SOCK_DGRAM, 0),
    (socket.AF_INET6, socket.SOCK_DGRAM, 0),
    (socket.AF_UNIX, socket.SOCK_STREAM, 0),
    (socket.AF_NETLINK, socket.SOCK_RAW, 0),
    (socket.AF_INET, socket.SOCK_RAW, 200),
    (socket.AF_INET6, socket.SOCK_RAW, 200),
)


def call(name: str, *arguments: object) -> int:
    result = getattr(libc, name)(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), name)
    return result


def raw(number: int, *arguments: object) -> int:
    result = libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), str(number))
    return result


def sock(family: int, kind: int, protocol: int = 0) -> int:
    return socket.socket(family, kind, protocol).detach()


def bound() -> int:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    n = next(number)
    made.bind((f"127.{n >> 16 & 255}.{n >> 8 & 255}.{n & 255}", 999))
    return made.detach()


def listening() -> int:
    made = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    made.listen(65535)
    return made.detach()


def unix_bound() -> int:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    made.bind(b"\0" + str(next(number)).encode().rjust(100))
    return made.detach()


def in_flight() -> socket.socket:
    """Open files that are on their way."""
    left, right = socket.socketpair()
    for _ in range(4):
        file = os.open("/dev/null", os.O_RDONLY)
        socket.send_fds(left, [b"x"], [file] * 60)
        os.close(file)
    left.close()
    return right


def member() -> int:
    """A socket in as many groups as it can be."""
    made = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    n = next(number)
    for index in range(20):
        group = bytes([232 + (n >> 16 & 3), n >> 8 & 255, n & 255, index])
        made.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, struct.pack("=4s4si", group, bytes(4), 1))
    return made.detach()


def netlink_member() -> int:
    made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    for group in range(1, 34):
        try:
            made.setsockopt(270, 1, group)
        except PermissionError:
            # Some are for administrators.
            pass
    return made.detach()


def values() -> list[bytes]:
    """What options take, in the formats of the kernel, each time for other addresses."""
    n = next(number)
    group, source = bytes([233, n >> 8 & 255, n & 255, 1]), bytes([10, n >> 16 & 255, n >> 8 & 255, n & 255])
    group6 = b"\xff\x05" + n.to_bytes(14, "big")
    storage = lambda address: struct.pack("=HH4s", socket.AF_INET, 0, address).ljust(128, b"\0")
    storage6 = lambda address: struct.pack("=HHI16s", socket.AF_INET6, 0, 0, address).ljust(128, b"\0")
    return [
        struct.pack("i", 1),
        struct.pack("q", 1),
        struct.pack("=ii", 1, 1),
        group + bytes(4) + struct.pack("i", 1),
        group + bytes(4) + source,
        group6 + struct.pack("i", 1),
        struct.pack("=Ixxxx", 1) + storage(group),
        struct.pack("=Ixxxx", 1) + storage6(group6),
        struct.pack("=Ixxxx", 1) + storage(group) + storage(source),
        struct.pack("=Ixxxx", 1) + storage6(group6) + storage6(group6[:1] + b"\x0e" + group6[2:]),
        # A key of 80 bytes, with the address that it is for.
        storage(source) + struct.pack("=BBHi", 0, 0, 80, 0) + bytes(80),
        storage6(group6) + struct.pack("=BBHi", 0, 0, 80, 0) + bytes(80),
        # A flow label.
        group6 + struct.pack("=IBBHHHI", socket.htonl(n & 0xFFFFF), 0, 1, 1, 60, 60, 0),
        # An extension header of 2,040 bytes: only padding.
        bytes([0, 254, 1, 255]) + bytes(255) + (bytes([1, 255]) + bytes(255)) * 6 + bytes(238),
        bytes([7, 7, 4] + [0] * 4 + [1] + [0] * 32),
        b"lo\0",
        b"cubic\0",
        b"tls\0",
    ]


ACCEPTED: dict[int, list[tuple[int, int, int]]] = {}
# How often an option is set on one socket, with other addresses each time.
TIMES = 32


def find_options(index: int) -> None:
    """Options that a socket accepts, and the last format that is accepted for each."""
    made = socket.socket(*SOCKETS[index])
    found: dict[tuple[int, int], int] = {}
    formats = values()
    for level, option, form in itertools.product(LEVELS, range(130), range(len(formats))):
        try:
            made.setsockopt(level, option, formats[form])
            found[level, option] = form
        except OSError:
            pass
    ACCEPTED[index] = [(level, option, form) for (level, option), form in found.items()]


def optioned(index: int) -> int:
    """A socket with every option that it accepts, again and again."""
    made = socket.socket(*SOCKETS[index])
    for _ in range(TIMES):
        formats = values()
        for level, option, form in ACCEPTED[index]:
            try:
                made.setsockopt(level, option, formats[form])
            except OSError:
                pass
    return made.detach()


def requested() -> tuple[int, ...]:
    """A socket, an eventfd and a pipe with every request that they accept."""
    files = (sock(socket.AF_INET, socket.SOCK_DGRAM), os.eventfd(0), *os.pipe())
    known = ACCEPTED.setdefault(-1, [])
    argument = bytearray(4096)
    if not known:
        for index, request in itertools.product(range(3), [*range(0x5400, 0x5480), *range(0x8900, 0x8A00)]):
            # Those that close the file at exec do not matter.
            try:
                fcntl.ioctl(files[index], request, argument)
                known.append((index, request, 0))
            except OSError:
                pass
    for index, request, _ in known:
        try:
            fcntl.ioctl(files[index], request, argument)
        except OSError:
            pass
    return files


def owned() -> int:
    file = os.open("/dev/null", os.O_RDONLY)
    fcntl.fcntl(file, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(file, 10, signal.SIGUSR1)  # F_SETSIG
    return file


def noticing() -> int:
    file = os.open("/tmp", os.O_RDONLY | os.O_DIRECTORY)
    fcntl.fcntl(file, fcntl.F_NOTIFY, 0x8000003F)
    return file


def locking() -> None:
    n = next(number)
    if not hasattr(locking, "file"):
        locking.file = os.open("/tmp/locked", os.O_RDWR | os.O_CREAT)
    fcntl.lockf(locking.file, fcntl.LOCK_EX, 1, n * 2)


def watching() -> object:
    """An epoll instance that watches 50 eventfds."""
    made = select.epoll()
    if not hasattr(watching, "files"):
        watching.files = [os.eventfd(0) for _ in range(50)]
    for file in watching.files:
        made.register(file)
    return made


def watching_files() -> None:
    n = next(number)
    if not hasattr(watching_files, "file"):
        watching_files.file = call("inotify_init1", 0)
    path = f"/dev/shm/watched{n}"
    os.close(os.open(path, os.O_CREAT))
    call("inotify_add_watch", watching_files.file, path.encode(), 0xFFF)


def timer() -> None:
    made = ctypes.c_int()
    raw(222, 1, None, ctypes.byref(made))


def queued() -> None:
    """A message queue, with what it holds."""
    name = f"/q{next(number)}".encode()
    made = raw(240, name[1:], os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o600, struct.pack("8q", 0, 10, 1024, 0, 0, 0, 0, 0))
    for _ in range(10):
        raw(242, made, bytes(1024), 1024, 0, None)


def attributed() -> None:
    path = f"/dev/shm/with-attributes{next(number)}"
    os.close(os.open(path, os.O_CREAT))
    for index in range(8):
        os.setxattr(path, f"user.{index}", bytes(1000))


def ruleset() -> int:
    return raw(444, struct.pack("Q", 1), 8, 0)


def terminal() -> tuple[int, int]:
    return os.openpty()


KINDS: dict[str, Callable[[], object]] = {
    "netlink": lambda: sock(socket.AF_NETLINK, socket.SOCK_RAW, 0),
    "netlink-diag": lambda: sock(socket.AF_NETLINK, socket.SOCK_RAW, 4),
    "netlink-groups": netlink_member,
    "tcp": lambda: sock(socket.AF_INET6, socket.SOCK_STREAM),
    "udp": lambda: sock(socket.AF_INET6, socket.SOCK_DGRAM),
    "ping": lambda: sock(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP),
    "raw": lambda: sock(socket.AF_INET, socket.SOCK_RAW, 200),
    "raw6": lambda: sock(socket.AF_INET6, socket.SOCK_RAW, 200),
    "bound": bound,
    "listening": listening,
    "unix": lambda: socket.socketpair(),
    "unix-bound": unix_bound,
    "in-flight": in_flight,
    "memberships": member,
    **{f"options-{index}": (lambda index=index: optioned(index)) for index in range(len(SOCKETS))},
    "requests": requested,
    "eventfd": lambda: os.eventfd(0),
    "timerfd": lambda: call("timerfd_create", 1, 0),
    "signalfd": lambda: call("signalfd", -1, (ctypes.c_ulong * 16)(1), 0),
    "epoll": lambda: select.epoll(),
    "epoll-watches": watching,
    "inotify": lambda: call("inotify_init1", 0),
    "inotify-watches": watching_files,
    "memfd": lambda: os.memfd_create("x"),
    "pipe": lambda: os.pipe(),
    "pidfd": lambda: os.pidfd_open(os.getpid()),
    "files": lambda: os.open("/etc/passwd", os.O_RDONLY),
    "owners": owned,
    "directory-notices": noticing,
    "locks": locking,
    "timers": timer,
    "queues": queued,
    "semaphores": lambda: call("semget", 0, 250, 0o600),
    "message-queues": lambda: call("msgget", 0, 0o600),
    "segments": lambda: call("shmget", 0, 4096, 0o600),
    "attributes": attributed,
    "landlock": ruleset,
    "terminals": terminal,
}


def charged() -> int:
    """Kernel memory that the sandbox is charged for, in bytes."""
    old = "/sys/fs/cgroup/memory/memory.kmem"
    try:
        return sum(int(open(f"{old}{kind}.usage_in_bytes").read()) for kind in ("", ".tcp"))
    except FileNotFoundError:
        lines = dict(line.split() for line in open("/sys/fs/cgroup/memory.stat"))
        return int(lines["kernel"]) + int(lines["sock"])


def main() -> None:
    global number
    make, most, within = KINDS[sys.argv[1]], int(sys.argv[2]) << 20, float(sys.argv[3])
    if sys.argv[1].startswith("options-"):
        find_options(int(sys.argv[1].removeprefix("options-")))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print("begun", flush=True)
    # The test measures the host first.
    while not os.path.exists("/tmp/begin"):
        time.sleep(0.01)
    before, deadline = charged(), time.monotonic() + within
    reader, writer = os.pipe()
    # The limit of open files is one of each process.
    for index in range(PROCESSES):
        if os.fork() == 0:
            # So that no two make an object of the same name.
            number = itertools.count(1 + (index << 18))
            made, refused = work(make, before + most, deadline)
            os.write(writer, (json.dumps([len(made), refused, sum(map(len, ACCEPTED.values()))]) + "\n").encode())
            time.sleep(86400)
    os.close(writer)
    lines = [json.loads(line) for _, line in zip(range(PROCESSES), os.fdopen(reader))]
    line = {
        "made": sum(line[0] for line in lines),
        "charged": charged() - before,
        "refused": max(line[1] for line in lines),
        "options": lines[0][2],
    }
    print(json.dumps(line), flush=True)
    time.sleep(86400)


def work(make: Callable[[], object], most: int, deadline: float) -> tuple[list[object], str]:
    """Makes objects; those that it made, and why it could not make another one."""
    keep: list[object] = []
    try:
        while time.monotonic() < deadline and (len(keep) % 200 or charged() < most):
            for _ in range(20):
                keep.append(make())
    except OSError as error:
        return keep, errno.errorcode.get(error.errno or 0, str(error))
    return keep, ""


if __name__ == "__main__":
    main()
    os._exit(0)
