"""Runs a command for which every name below `localhost` is 127.0.0.1, whatever language it is written in.

Clients in domain mode connect to `https://<port>-<id>.<domain>`, and the identity of a sandbox is in no hosts file.
Resolvers differ in what they know of `localhost`, but all of them (glibc for Python and Node, Go's own, musl) ask the
server in /etc/resolv.conf. So a name server of forty lines answers on an address of the loopback, and the command sees
a resolv.conf of its own, in a mount namespace of its own: the host stays as it is. Needs root, for port 53 and mounts.

    python3 conformance/harness/names.py node --test suite.test.mjs
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading

ZONE = b"localhost"
A, AAAA, CLASS_IN = 1, 28, 1
NOERROR, NXDOMAIN = 0, 3
# `exec` so that signals and the exit code are the command's own.
IN_NAMESPACE = 'mount --bind "$0" /etc/resolv.conf && exec "$@"'


def answer(query: bytes) -> bytes | None:
    """The answer to a query of one question, or None when it is no such query."""
    if len(query) < 12 or query[2] & 0x80 or query[4:6] != b"\0\1":
        return None
    labels, at = [], 12
    while at < len(query) and query[at]:
        labels.append(query[at + 1 : at + 1 + query[at]].lower())
        at += 1 + query[at]
    question = query[12 : at + 5]
    if len(question) < 5:
        return None
    kind, group = struct.unpack("!HH", question[-4:])
    ours = labels[-1:] == [ZONE]
    # No address of the other family is an empty answer; a name that does not exist would end the search.
    records = [socket.inet_aton("127.0.0.1")] if ours and (kind, group) == (A, CLASS_IN) else []
    flags = 0x8580 | (NOERROR if ours else NXDOMAIN)
    header = query[:2] + struct.pack("!5H", flags, 1, len(records), 0, 0)
    body = b"".join(b"\xc0\x0c" + struct.pack("!HHIH", A, CLASS_IN, 0, len(data)) + data for data in records)
    return header + question + body


def serve(server: socket.socket) -> None:
    """Answers until the socket is closed."""
    while True:
        try:
            query, client = server.recvfrom(4096)
        except OSError:
            return
        if reply := answer(query):
            server.sendto(reply, client)


def bound() -> socket.socket:
    """A socket on port 53 of a free loopback address: that of this process, unless another one has the same end."""
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for number in range(1000):
        ends = os.getpid() + number
        try:
            server.bind((f"127.53.{ends >> 8 & 0xFF}.{ends & 0xFF}", 53))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            continue
        return server
    raise OSError(errno.EADDRINUSE, "no loopback address is free")


def run(command: list[str], **options) -> subprocess.CompletedProcess:
    """As `subprocess.run`."""
    with bound() as server:
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        return run_with(server.getsockname()[0], command, **options)


def run_with(server: str, command: list[str], **options) -> subprocess.CompletedProcess:
    """Runs a command like `subprocess.run`, with a name server that is there already."""
    with tempfile.NamedTemporaryFile("w", prefix="resolv-") as conf:
        conf.write(f"nameserver {server}\n")
        conf.flush()
        os.chmod(conf.name, 0o644)
        shell = ["unshare", "--mount", "--propagation", "private", "sh", "-c", IN_NAMESPACE, conf.name]
        return subprocess.run([*shell, *command], **options)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: names.py COMMAND [ARGUMENT...]")
    # Ctrl-C is the command's, which may have to put something in order; a handler, because it would inherit that it is ignored.
    signal.signal(signal.SIGINT, lambda *_: None)
    sys.exit(run(sys.argv[1:]).returncode)
