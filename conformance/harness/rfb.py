"""A viewer of a remote screen: the RFB protocol (RFC 6143) over a WebSocket, as far as seeing what is on the screen takes.

The connection is that of an event loop, which one thread runs, and only while the viewer is used. The client of `websockets.sync` reads in
one thread while it sends the request in another, over one object of OpenSSL, which is not made for that: requests were lost.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cryptography.hazmat.decrepit.ciphers.algorithms import TripleDES
from cryptography.hazmat.primitives.ciphers import Cipher, modes
from websockets.asyncio.client import ClientConnection, connect

from harness.patience import within

VERSION = b"RFB 003.008\n"
OPEN, PASSWORD = 1, 2
# 32 bits of a pixel, the first byte red.
FORMAT = struct.pack(">BBBBHHHBBB3x", 32, 24, 0, 1, 255, 255, 255, 0, 8, 16)


class Refused(Exception):
    """The server does not let a viewer in."""


class Stream:
    """A WebSocket, which is served while it is used."""

    def __init__(self, loop: asyncio.Runner, socket: ClientConnection) -> None:
        self.loop = loop
        self.socket = socket

    def send(self, message: bytes) -> None:
        self.loop.run(self.socket.send(message))

    def recv(self) -> bytes:
        message = self.loop.run(asyncio.wait_for(self.socket.recv(), within(30)))
        assert isinstance(message, bytes), message
        return message


class Viewer:
    """A viewer that is let in, or was refused."""

    def __init__(self, stream: Stream, password: str | None) -> None:
        self.stream = stream
        self.rest = b""
        assert self.read(12) == VERSION
        stream.send(VERSION)
        # With no kinds, a reason follows.
        kinds = self.read(self.read(1)[0])
        self.kind = PASSWORD if password is not None else OPEN
        if self.kind not in kinds:
            raise Refused(f"it lets in by {list(kinds)}")
        stream.send(bytes([self.kind]))
        if password is not None:
            stream.send(answer(self.read(16), password))
        (failed,) = struct.unpack(">I", self.read(4))
        if failed:
            (length,) = struct.unpack(">I", self.read(4))
            raise Refused(self.read(length).decode())
        # Others may look, too.
        stream.send(b"\1")
        self.width, self.height = struct.unpack(">HH", self.read(4))
        self.read(16)
        (length,) = struct.unpack(">I", self.read(4))
        self.name = self.read(length).decode()
        stream.send(b"\0\0\0\0" + FORMAT)
        # Pixels as they are, and nothing else.
        stream.send(struct.pack(">BxHi", 2, 1, 0))

    def read(self, size: int) -> bytes:
        while len(self.rest) < size:
            self.rest += self.stream.recv()
        part, self.rest = self.rest[:size], self.rest[size:]
        return part

    def pixel(self, x: int, y: int) -> tuple[int, int, int]:
        """The colour of a point of the screen now."""
        self.stream.send(struct.pack(">BBHHHH", 3, 0, x, y, 1, 1))
        while True:
            kind = self.read(1)[0]
            if kind == 2:  # A bell.
                continue
            if kind == 3:  # What was copied to the clipboard.
                self.read(3)
                self.read(struct.unpack(">I", self.read(4))[0])
                continue
            assert kind == 0, kind
            (count,) = struct.unpack(">xH", self.read(3))
            for _ in range(count):
                left, top, width, height, encoding = struct.unpack(">HHHHi", self.read(12))
                assert encoding == 0, encoding
                data = self.read(width * height * 4)
                if left <= x < left + width and top <= y < top + height:
                    at = ((y - top) * width + x - left) * 4
                    red, green, blue = data[at : at + 3]
                    return red, green, blue


def answer(challenge: bytes, password: str) -> bytes:
    """The challenge, encrypted with the first eight characters of a password. Each of their bytes is taken from its other end."""
    key = bytes(int(f"{byte:08b}"[::-1], 2) for byte in password.encode()[:8].ljust(8, b"\0"))
    # Three times the same key is what DES does once.
    cipher = Cipher(TripleDES(key * 3), modes.ECB()).encryptor()  # noqa: S305
    return cipher.update(challenge) + cipher.finalize()


@contextmanager
def viewer(url: str, password: str | None) -> Iterator[Viewer]:
    """A viewer of the server behind a WebSocket, for as long as the context lasts."""
    trust = ssl.create_default_context(cafile=os.environ["SSL_CERT_FILE"])

    async def opened() -> ClientConnection:
        # Without pings, whose answers nobody reads while the loop does not run.
        protocols: dict[str, Any] = {"subprotocols": ["binary"], "max_size": None, "ping_interval": None}
        return await connect(url, ssl=trust, open_timeout=within(10), **protocols)

    with asyncio.Runner() as loop:
        socket = loop.run(opened())
        try:
            yield Viewer(Stream(loop, socket), password)
        finally:
            loop.run(socket.close())
