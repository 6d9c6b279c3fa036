"""TCP ports for the servers of a test process, which no other test process of the host is given.

A port that was found free by binding it is free for everyone again until its server listens, and while its server is
restarted. So each process has a block of ports to itself, below those that the kernel gives to sockets without a port.
What keeps others from the block is an abstract unix socket. It ends with the process, leaves no file, and is one of the
network namespace, as the ports are: a suite that moves to a namespace of its own takes a block of that one.
"""

from __future__ import annotations

import os
import socket

FIRST_PORT, BLOCK, BLOCKS = 20_000, 400, 30

# By network namespace: the socket that keeps the block, its first port, and how many of its ports were given out.
_taken: dict[str, tuple[socket.socket, int, int]] = {}


class NoPort(Exception):
    """There are more test processes than blocks, or every port of the block is in use."""


def _take_block() -> tuple[socket.socket, int]:
    for number in range(BLOCKS):
        keeper = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            keeper.bind(f"\0conformance-ports-{number}")
        except OSError:
            keeper.close()
            continue
        return keeper, FIRST_PORT + number * BLOCK
    raise NoPort(f"all {BLOCKS} blocks of ports are taken by other processes")


def free_port() -> int:
    """A TCP port of the loopback that nothing listens on, and that nobody else is given before all others of the block."""
    namespace = f"{os.getpid()} {os.readlink('/proc/thread-self/ns/net')}"
    if namespace not in _taken:
        _taken[namespace] = (*_take_block(), 0)
    for _ in range(BLOCK):
        keeper, first, given = _taken[namespace]
        _taken[namespace] = (keeper, first, given + 1)
        port = first + given % BLOCK
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise NoPort(f"all {BLOCK} ports from {first} on are in use")
