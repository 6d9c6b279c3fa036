"""What clients of HTTP may do on the way to a server inside: versions, expectations, trailers, large headers, slowness."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

import httpx
import pytest
from e2b import Sandbox

from harness.elapse import slowly
from harness.platform import Platform
from harness.secure import SecurePlatform
from harness.traffic import program, until

PORT = 8000
# The limit of a head, see docs/configuration.md.
HEAD_BYTES = 64 * 1024


class Server(NamedTuple):
    platform: Platform
    host: str

    @property
    def is_secure(self) -> bool:
        return isinstance(self.platform, SecurePlatform)

    def curl(self, *arguments: str, data: bytes | None = None) -> tuple[str, str, bytes]:
        """Version and status of the response, and its body."""
        name, _, port = self.host.partition(":")
        path, *options = arguments
        ran = subprocess.run(
            [
                *("curl", "-sS", "-m", "30", "-w", "%{stderr}%{http_version} %{http_code}", *options),
                *("--connect-to", f"{name}:{port or self.platform.port}:127.0.0.1:{self.platform.port}"),
                f"http{'s' if self.is_secure else ''}://{name}:{port or self.platform.port}{path}",
            ],
            input=data,
            capture_output=True,
            timeout=60,
            env={"PATH": os.environ["PATH"], "CURL_CA_BUNDLE": os.environ.get("SSL_CERT_FILE", "")},
        )
        assert ran.returncode == 0, ran.stderr
        version, status = ran.stderr.decode().split()
        return version, status, ran.stdout

    def connect(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.platform.port))
        connection.settimeout(30)
        if self.is_secure:
            context = ssl.create_default_context(cafile=os.environ["SSL_CERT_FILE"])
            return context.wrap_socket(connection, server_hostname=self.host.partition(":")[0])
        return connection


@pytest.fixture(scope="module")
def server(platform: Platform) -> Iterator[Server]:
    with Sandbox.create(timeout=300) as box:
        box.files.write("/tmp/protocols.py", program("protocols.py"))
        box.commands.run(f"exec python3 /tmp/protocols.py {PORT}", background=True, timeout=0)
        server = Server(platform, box.get_host(PORT))
        until(lambda: server.curl("/bytes/1")[1] == "200", "the server listens")
        yield server


def receive(connection: socket.socket, wanted: bytes) -> bytes:
    """Reads until the bytes contain `wanted`, or to the end."""
    seen = b""
    while wanted not in seen and (data := connection.recv(65536)):
        seen += data
    return seen


@pytest.mark.parametrize("version", ["1.0", "1.1", "2", "2-prior-knowledge"])
def test_versions(server: Server, version: str) -> None:
    """A client that proposes HTTP/2 gets it where TLS negotiates it. Over HTTP it has to use it without asking."""
    is_second = version == "2-prior-knowledge" or (version == "2" and server.is_secure)
    data = os.urandom(3_000_000)
    for path, options in (("/bytes/3000000", ()), ("/", ("-X", "PUT", "--data-binary", "@-", "-H", "Expect:"))):
        used, status, body = server.curl(path, f"--http{version}", *options, data=data)
        assert (used == "2") == is_second
        assert (status, len(body) if path != "/" else body) == ("200", 3_000_000 if path != "/" else b"3000000")


def test_a_client_that_waits_for_the_word_of_the_server(server: Server) -> None:
    head = f"PUT /%s HTTP/1.1\r\nHost: {server.host}\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n"
    with server.connect() as connection:
        connection.sendall((head % "any").encode())
        assert receive(connection, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"12345")
        assert receive(connection, b"\r\n\r\n5").startswith(b"HTTP/1.1 200 ")
    with server.connect() as connection:
        connection.sendall((head % "refuse").encode())
        assert receive(connection, b"\r\n\r\n").startswith(b"HTTP/1.1 417 ")


def test_trailers_cross_both_ways(server: Server) -> None:
    with server.connect() as connection:
        connection.sendall(
            f"PUT /trailers HTTP/1.1\r\nHost: {server.host}\r\nTE: trailers\r\nConnection: TE, close\r\n"
            "Transfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n3\r\nabc\r\n0\r\nX-Sum: 294\r\n\r\n".encode()
        )
        answer = receive(connection, b"294\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 ") and b"3\r\nabc\r\n0\r\nx-sum: 294\r\n\r\n" in answer.lower(), answer


@pytest.mark.parametrize("is_second", [False, True])
def test_large_headers(server: Server, is_second: bool) -> None:
    """Up to the limit both ways; above it a client is told."""
    base = f"https://{server.host}" if server.is_secure else server.platform.url
    with httpx.Client(base_url=base, http1=not is_second, http2=is_second, timeout=30) as client:
        large = {"Host": server.host, "X-Large": "x" * 50_000}
        answer = client.get("/headers/50000", headers=large)
        assert (answer.status_code, answer.text, len(answer.headers["X-Large"])) == (200, "50000", 50_000)
        assert answer.http_version == ("HTTP/2" if is_second else "HTTP/1.1")
        assert client.get("/headers/1", headers={**large, "X-Large": "x" * HEAD_BYTES}).status_code == 431


def test_a_client_that_reads_slowly_gets_everything(server: Server) -> None:
    size = 8 << 20
    with server.connect() as connection:
        connection.sendall(f"GET /bytes/{size} HTTP/1.1\r\nHost: {server.host}\r\nConnection: close\r\n\r\n".encode())
        got = receive(connection, b"\r\n\r\n")
        received = len(got) - got.index(b"\r\n\r\n") - 4
        for _ in range(20):
            slowly(0.05)
            received += len(connection.recv(4096))
        while data := connection.recv(1 << 20):
            received += len(data)
    assert received == size


def test_a_client_that_sends_slowly_is_served(server: Server) -> None:
    with server.connect() as connection:
        for part in (f"PUT / HTTP/1.1\r\nHost: {server.host}\r\n", "Content-Length: 10\r\n\r\n", *"0123456789"):
            connection.sendall(part.encode())
            slowly(0.05)
        assert receive(connection, b"\r\n\r\n10").startswith(b"HTTP/1.1 200 ")
