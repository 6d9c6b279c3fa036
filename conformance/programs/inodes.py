"""Uses what belongs to an inode, and not to its content, on every path that can be opened: locks, watches and times.

    inodes.py hold [PATHS]   locks and watches every path and touches it, and answers each line of its input by a line of JSON:
                             how many it has locked, how many it watches, and which of them were used since the line before;
                             and a line with `whole`
    inodes.py try [PATHS]    opens and tries to lock every path; prints those that another program has locked
    inodes.py rights         prints who may do what with every path
    inodes.py times          prints the times of every path on a file system in memory

PATHS is a JSON list; without it, they are what is in /dev, /proc, /sys and a few other directories, and all mount points.
"""

import ctypes
import errno
import fcntl
import json
import os
import resource
import stat
import struct
import sys

TOPS = ("/dev", "/proc", "/sys", "/run", "/etc", "/usr/bin")
# struct flock of x86_64 and aarch64: type, whence, start, length, pid.
FLOCK = "hhqqi4x"
OFD_GETLK, OFD_SETLK = 36, 37
# All that a program can do with a file.
ALL_EVENTS = 0xFFF


def mounts():
    with open("/proc/self/mountinfo") as lines:
        for line in lines:
            words = line.split()
            yield words[4], words[words.index("-") + 1]


def everything():
    found = {point: None for point, _ in mounts()}
    for top in TOPS:
        for directory, names, files in os.walk(top):
            if directory == "/proc":
                # Processes are the sandbox's own, and come and go.
                names[:] = [name for name in names if not name.isdigit() and not os.path.islink(f"/proc/{name}")]
            if directory == "/dev":
                names[:] = [name for name in names if name != "pts"]
            found[directory] = None
            for name in files:
                path = os.path.join(directory, name)
                if not os.path.islink(path):
                    found[path] = None
    found.update({f"/proc/self/ns/{name}": None for name in os.listdir("/proc/self/ns")})
    return [path for path in found if not path.startswith("/dev/pts/")]


def opened(path):
    """A descriptor that may be used for locks, or none."""
    try:
        is_device = stat.S_ISCHR(os.stat(path).st_mode)
        flags = os.O_RDWR if is_device else os.O_RDONLY
        return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None


def lock(fd):
    """Why a file cannot be locked by either kind of lock, if another program has locked it."""
    why = []
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno == errno.EWOULDBLOCK:
            why.append("flock")
    asked = struct.pack(FLOCK, fcntl.F_WRLCK, 0, 0, 0, 0)
    try:
        if struct.unpack(FLOCK, fcntl.fcntl(fd, OFD_GETLK, asked))[0] != fcntl.F_UNLCK:
            why.append("fcntl")
    except OSError:
        pass
    for kind in (fcntl.F_WRLCK, fcntl.F_RDLCK):
        try:
            fcntl.fcntl(fd, OFD_SETLK, struct.pack(FLOCK, kind, 0, 0, 0, 0))
            break
        except OSError:
            continue
    return why


def touch(path, fd):
    for what in (lambda: os.utime(path), lambda: os.read(fd, 1), lambda: fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)):
        try:
            what()
        except OSError:
            pass


def hold(paths):
    libc = ctypes.CDLL(None, use_errno=True)
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    held, memory = [], in_memory(paths)
    for path in paths:
        fd = opened(path)
        if fd is not None:
            lock(fd)
            if path in memory:
                touch(path, fd)
            held.append(fd)
    watches = {}
    inotify = libc.inotify_init1(os.O_NONBLOCK)
    for path in paths:
        number = libc.inotify_add_watch(inotify, os.fsencode(path), ALL_EVENTS)
        if number >= 0:
            watches.setdefault(number, path)
    for _ in sys.stdin:
        print(json.dumps([len(held), len(watches), seen(inotify, watches)]), flush=True)
        print("whole", flush=True)


def seen(inotify, watches):
    found = set()
    while True:
        try:
            data = os.read(inotify, 1 << 20)
        except BlockingIOError:
            return sorted(found)
        while data:
            number, _, _, length = struct.unpack_from("iIII", data)
            found.add(watches.get(number, "more than it could remember"))
            data = data[16 + length :]


def tried(paths):
    locked = {}
    for path in paths:
        fd = opened(path)
        if fd is not None:
            why = lock(fd)
            if why:
                locked[path] = why
            os.close(fd)
    return locked


def rights(paths):
    found = {}
    for path in paths:
        try:
            seen = os.stat(path)
        except OSError as error:
            found[path] = errno.errorcode[error.errno]
            continue
        found[path] = [seen.st_mode, seen.st_uid, seen.st_gid, seen.st_rdev]
        for flag, may in ((os.R_OK, "read"), (os.W_OK, "write"), (os.X_OK, "execute")):
            if os.access(path, flag):
                found[path].append(may)
    return found


def in_memory(paths):
    """Paths that are on a file system in memory."""
    points = dict(mounts())

    def kind(path):
        while path not in points:
            path = os.path.dirname(path)
        return points[path]

    return {path for path in paths if kind(path) == "tmpfs"}


def times(paths):
    found = {}
    for path in in_memory(paths):
        seen = os.stat(path)
        # Reading a directory, as this program does, changes the first.
        found[path] = [None if stat.S_ISDIR(seen.st_mode) else seen.st_atime_ns, seen.st_mtime_ns, seen.st_ctime_ns]
    return found


def main():
    paths = json.loads(sys.argv[2]) if len(sys.argv) > 2 else everything()
    if sys.argv[1] == "hold":
        hold(paths)
    else:
        print(json.dumps({"try": tried, "rights": rights, "times": times}[sys.argv[1]](paths)))


main()
