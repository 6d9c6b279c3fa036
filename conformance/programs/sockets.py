"""Fills sockets with uncharged memory and keeps it. Run inside a sandbox.

    python3 sockets.py KIND MIB [raise]

Stops by itself once all sockets together hold so many MiB, so that a host that does not bound it lives. With `raise`,
each socket gets the largest buffers that the kernel allows. Prints a line when it is full.
"""

from __future__ import annotations

import errno
import itertools
import os
import resource
import socket
import struct
import sys
import time

SO_MEMINFO, SO_TIMESTAMPING, IP_RECVERR, IP_MTU_DISCOVER = 55, 37, 11, 10
NOTHING_LISTENS = ("127.0.0.1", 9)
raised = "raise" in sys.argv[3:]


def made(family: int, kind: int, protocol: int = 0) -> socket.socket:
    sock = socket.socket(family, kind, protocol)
    sock.setblocking(False)
    if raised:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 29)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 29)
    return sock


def held(sock: socket.socket) -> int:
    words = struct.unpack("9I", sock.getsockopt(socket.SOL_SOCKET, SO_MEMINFO, 36))
    return words[0] + words[2]


def fill(sock: socket.socket, send, most: int = 100_000) -> int:
    """Sends until that adds nothing any more; what the socket holds then."""
    before = -1
    for turn in range(most):
        try:
            send(sock)
        except OSError as error:
            if error.errno not in (errno.ECONNREFUSED, errno.EMSGSIZE):
                break
        if turn % 32 == 31:
            now = held(sock)
            if now <= before:
                break
            before = now
    return held(sock)


def netlink() -> tuple[socket.socket, int]:
    """Replies to requests, refused and granted."""
    sock = made(socket.AF_NETLINK, socket.SOCK_RAW)
    dump = struct.pack("IHHII", 20, 18, 0x301, 1, 0) + bytes(4)
    refused = struct.pack("IHHII", 2016, 90, 0x5, 1, 0) + bytes(2000)
    sock.send(dump)
    return sock, fill(sock, lambda sock: sock.send(refused))


def errors() -> tuple[socket.socket, int]:
    """Reports of packets that were refused."""
    sock = made(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setsockopt(socket.IPPROTO_IP, IP_RECVERR, 1)
    sock.connect(NOTHING_LISTENS)
    return sock, fill(sock, lambda sock: sock.send(bytes(1400)))


def timestamps() -> tuple[socket.socket, int]:
    """Reports of when packets were sent, with the packets."""
    sock = made(socket.AF_INET, socket.SOCK_DGRAM)
    ask = [(socket.SOL_SOCKET, SO_TIMESTAMPING, struct.pack("I", 2))]
    return sock, fill(sock, lambda sock: sock.sendmsg([bytes(16000)], ask, 0, NOTHING_LISTENS))


def corked() -> tuple[socket.socket, int]:
    """Datagrams that are held back to grow."""
    sock = made(socket.AF_INET, socket.SOCK_DGRAM)
    sock.connect(NOTHING_LISTENS)
    sock.send(bytes(65000), socket.MSG_MORE)
    return sock, held(sock)


listeners = []


def unaccepted() -> tuple[None, int]:
    """Data on connections that are not accepted, and whose other end is closed."""
    if not listeners or listeners[-1][1] >= 2000:
        listener = made(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind(("127.0.0.1", 0))
        listener.listen(65535)
        listeners.append([listener, 0])
    listeners[-1][1] += 1
    with socket.create_connection(listeners[-1][0].getsockname()) as client:
        client.setblocking(False)
        try:
            sent = client.send(bytes(60000))
        except BlockingIOError:
            sent = 0
    return None, sent


# Without a meaning for the kernel.
protocols = itertools.cycle(range(145, 254))


def raw() -> tuple[socket.socket, int]:
    """What raw sockets have received. Each packet goes to every socket of its protocol, so the sockets have many."""
    sock = made(socket.AF_INET, socket.SOCK_RAW, next(protocols))
    sock.connect(("127.0.0.1", 0))
    return sock, fill(sock, lambda sock: sock.send(bytes(16000)))


def main() -> None:
    kind, most = globals()[sys.argv[1]], int(sys.argv[2]) << 20
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    keep, total = [], 0
    for _ in itertools.count():
        sock, size = kind()
        keep.append(sock)
        total += size
        if total >= most:
            break
    print(f"{total >> 20} MiB in {len(keep)} sockets", flush=True)
    time.sleep(86400)


if __name__ == "__main__":
    main()
    os._exit(0)
