"""The SOCKS5 servers of the fake internet (RFC 1928, RFC 1929), which connect and resolve for themselves.

| Port | Server |
|---|---|
| 1080 | for everybody |
| 1081 | for `USER` with `PASSWORD` |
| 1082 | as 1081, by TLS, with the certificates of the fake internet |
| 1083 | refuses every connection by its rules |
| 1084 | accepts connections and says nothing |
| 1085 | speaks HTTP |
"""

from __future__ import annotations

import ipaddress
import select
import socket
import ssl
import struct
from collections.abc import Callable
from typing import Any

from harness.internet_names import A, addresses

USER, PASSWORD = "fence", "correct horse battery staple"
OPEN, AUTHENTICATED, SECURE, REFUSING, SILENT, HTTP = range(1080, 1086)
NOT_ALLOWED, REFUSED = 2, 5


class Socks:
    """One connection of a client."""

    def __init__(self, connection: Any, record: Callable[..., None], needs_password: bool = False, refuses: bool = False) -> None:
        self.client, self.connection, self.record = connection.socket, connection, record
        version, count = self.read(2)
        methods = self.read(count)
        self.saw(step="methods", version=version, methods=list(methods))
        wanted = 2 if needs_password else 0
        if version != 5 or wanted not in methods:
            self.client.sendall(b"\5\xff")
            return
        self.client.sendall(bytes([5, wanted]))
        if needs_password and not self.is_known():
            return
        _, command, _, kind = self.read(4)
        to = self.destination(kind)
        port = struct.unpack("!H", self.read(2))[0]
        self.saw(step="connect", command=command, to=to, port=port, named=kind == 3)
        if refuses:
            return self.reply(NOT_ALLOWED)
        self.connect(to, port)

    def saw(self, **values: Any) -> None:
        self.record(kind="socks", id=self.connection.id, server=self.connection.server, at_port=self.connection.port, **values)

    def read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self.client.recv(count - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    def is_known(self) -> bool:
        self.read(1)
        user = self.read(self.read(1)[0]).decode()
        password = self.read(self.read(1)[0]).decode()
        known = (user, password) == (USER, PASSWORD)
        self.saw(step="user", user=user, known=known)
        self.client.sendall(bytes([1, 0 if known else 1]))
        return known

    def destination(self, kind: int) -> str:
        if kind == 3:
            return self.read(self.read(1)[0]).decode()
        return str(ipaddress.ip_address(self.read({1: 4, 4: 16}[kind])))

    def reply(self, status: int) -> None:
        self.client.sendall(bytes([5, status, 0, 1]) + bytes(6))

    def connect(self, to: str, port: int) -> None:
        try:
            address = to if self.is_address(to) else addresses(to, A)[0]
            outside = socket.create_connection((address, port), 10)
        except (OSError, IndexError):
            return self.reply(REFUSED)
        outside.settimeout(None)
        self.reply(0)
        with outside:
            self.relay(outside)

    def relay(self, outside: socket.socket) -> None:
        """In one thread, because a TLS connection is not for two."""
        open_ends = {self.client: outside, outside: self.client}
        while open_ends:
            pending = self.client in open_ends and isinstance(self.client, ssl.SSLSocket) and self.client.pending()
            for end in [self.client] if pending else select.select(list(open_ends), [], [])[0]:
                data = end.recv(1 << 16)
                if data:
                    open_ends[end].sendall(data)
                else:
                    self.end(open_ends.pop(end))

    @staticmethod
    def end(stream: socket.socket) -> None:
        if isinstance(stream, ssl.SSLSocket):
            # Without this message the end would be an error for the client.
            stream.unwrap()
        else:
            stream.shutdown(socket.SHUT_WR)

    @staticmethod
    def is_address(text: str) -> bool:
        try:
            ipaddress.ip_address(text)
        except ValueError:
            return False
        return True


def http(connection: Any) -> None:
    connection.socket.recv(1)
    connection.socket.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
