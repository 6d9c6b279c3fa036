"""Keeps things open whose names are gone, and puts a link to a directory of another user where their directory was.

Arguments: the kind of thing, the directory for all of it, where the links lead, and the names.
"""

import os
import socket
import sys
import time

kind, base, target, *names = sys.argv[1:]
kept = []


def lose(place: str, name: str) -> None:
    path = f"{place}/{name}"
    if kind == "directory":
        os.mkdir(path)
        kept.append(os.open(path, os.O_RDONLY | os.O_DIRECTORY))
        os.rmdir(path)
    elif kind == "file":
        kept.append(os.open(path, os.O_RDWR | os.O_CREAT, 0o6777))
        os.write(kept[-1], b"chosen inside" * 1000)
        os.unlink(path)
    elif kind == "fifo":
        os.mkfifo(path)
        kept.append(os.open(path, os.O_RDWR))
        os.unlink(path)
    elif kind == "link":
        with open(f"{base}/{name}.other", "w") as file:
            file.write("chosen inside")
        os.link(f"{base}/{name}.other", path)
        kept.append(os.open(path, os.O_RDWR))
        os.unlink(path)
    elif kind == "symlink":
        os.symlink("anywhere", path)
        kept.append(os.open(path, os.O_PATH | os.O_NOFOLLOW))
        os.unlink(path)
    elif kind == "socket":
        server = socket.socket(socket.AF_UNIX)
        server.bind(path)
        server.listen()
        kept.append(server)
        os.unlink(path)
    else:
        raise SystemExit(f"unknown kind: {kind}")


for name in names:
    place = f"{base}/{kind}-{name}"
    os.mkdir(place)
    lose(place, name)
    if target != "-":
        os.rmdir(place)
        os.symlink(target, place)
if kind == "directory" and names:
    # Also as a working directory.
    os.fchdir(kept[-1])
print("ready", flush=True)
while True:
    time.sleep(1000)
