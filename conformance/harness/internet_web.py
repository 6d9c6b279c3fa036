"""The web servers of the fake internet.

| Path | Answer |
|---|---|
| `/bytes/N` | N bytes |
| `/paced/N` | N lines, and after each nothing more until the client has sent a byte |
| `/redirect?URL` | 302 to the URL |
| `/headers` | the headers of the request |
| `/shows/HOW` | the header `Authorization` of the request, where `HOW` says: see `shown` |
| `/ws` | WebSocket: echo of every message |
| `/files/...` | a file |
| `/git/...` | git's own CGI program |
| `/headers/...` | JSON: the headers of the request, of each value the SHA-256 |
| any at `github.com` | git's own CGI program, for those who have a token; `slow.git` answers after a minute |
| any at the API of a model | see `harness.model_api` |
| any at a registry of packages | see `harness.package_mirror` |
| any other | JSON: which address, server name, Host and path the request arrived at, and number and SHA-256 of its bytes |
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import subprocess
import time
import zlib
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from harness import model_api, package_mirror

WEBSOCKET = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
BLOCK = hashlib.shake_256(b"a block that no relay can guess").digest(1 << 16)


class Web(BaseHTTPRequestHandler):
    """HTTP/1.1 on an accepted connection, until it ends."""

    protocol_version = "HTTP/1.1"

    def __init__(self, connection: Any, record: Callable[..., None], documents: Path) -> None:
        self.arrived, self.record, self.documents = connection, record, documents
        super().__init__(connection.socket, (connection.peer, 0), None)  # type: ignore[arg-type]

    def body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        data = b""
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def serve(self) -> None:
        self.record(
            kind="http",
            id=self.arrived.id,
            server=self.arrived.server,
            port=self.arrived.port,
            host=self.headers.get("Host"),
            path=self.path,
            authorization=self.headers.get("Authorization"),
        )
        url = urlsplit(self.path)
        first, _, rest = url.path.removeprefix("/").partition("/")
        if first == "ws":
            return self.websocket()
        body = self.body()
        if self.arrived.name == "github.com":
            self.code_host(url, body)
        elif self.arrived.name in model_api.KEYS:
            headers = {name.lower(): value for name, value in self.headers.items()}
            self.record(kind="model", host=self.arrived.name, method=self.command, path=url.path, headers=headers, bytes=len(body))
            self.reply(*model_api.answer(self.arrived.name, self.command, url.path, headers, body))
        elif self.arrived.name in (package_mirror.PYTHON, package_mirror.NODE):
            self.reply(*package_mirror.answer(self.arrived.name, unquote(url.path)))
        elif url.path.startswith("/headers/"):
            # Not the values, which the gateway hides in answers if they are secrets.
            headers = {name.lower(): hashlib.sha256(value.encode()).hexdigest() for name, value in self.headers.items()}
            self.reply(200, {"Content-Type": "application/json"}, json.dumps(headers).encode())
        elif first == "bytes":
            count = int(rest)
            self.head(200, {"Content-Length": str(count)})
            for start in range(0, count, len(BLOCK)):
                self.wfile.write(BLOCK[: count - start])
        elif first == "paced":
            # No request follows on this connection: what the client sends meanwhile is none.
            self.head(200, {"Connection": "close"})
            for number in range(int(rest)):
                self.wfile.write(f"line {number}\n".encode())
                if not self.rfile.read(1):
                    break
        elif first == "headers":
            self.reply(200, {"X-Seen": self.headers.get("Authorization", "")}, str(self.headers).encode())
        elif first == "shows":
            self.wfile.write(shown_raw(rest, self.headers))
            self.close_connection = True
        elif first == "redirect":
            self.reply(302, {"Location": unquote(url.query)}, b"")
        elif first == "files":
            self.file(rest)
        elif first == "git":
            self.git(url, body)
        else:
            self.reply(200, {"Content-Type": "application/json"}, about(self.arrived, self.headers.get("Host"), self.path, body))

    do_GET = do_POST = do_PUT = do_HEAD = serve

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def reply(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.head(status, {**headers, "Content-Length": str(len(content))})
        if self.command != "HEAD":
            self.wfile.write(content)

    def file(self, name: str) -> None:
        path = (self.documents / unquote(name)).resolve()
        if not path.is_relative_to(self.documents.resolve()):
            return self.reply(404, {}, b"")
        if path.is_dir():
            links = "".join(f'<a href="{entry.name}">{entry.name}</a>' for entry in sorted(path.iterdir()))
            return self.reply(200, {"Content-Type": "text/html"}, f"<html><body>{links}</body></html>".encode())
        if path.is_file():
            return self.reply(200, {"Content-Type": "application/octet-stream"}, path.read_bytes())
        return self.reply(404, {}, b"")

    def code_host(self, url: Any, body: bytes) -> None:
        root = self.documents / "code_host"
        tokens = (root / "tokens").read_text().split()
        accepted = [base64.b64encode(f"x-access-token:{token}".encode()).decode() for token in tokens]
        if self.headers.get("Authorization") not in [f"Basic {pair}" for pair in accepted]:
            return self.reply(401, {"WWW-Authenticate": 'Basic realm="code host"'}, b"")
        name = "/".join(url.path.split("/")[1:3]).lower()
        # Repositories have both names.
        plain, name = name, f"{name.removesuffix('.git')}.git"
        if name == "octocat/slow.git":
            time.sleep(60)
        if not (root / name).is_dir():
            return self.reply(404, {}, b"Repository not found.")
        self.git(url, body, root, url.path.lower().replace(plain, name, 1))

    def git(self, url: Any, body: bytes, root: Path | None = None, path: str | None = None) -> None:
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        ran = subprocess.run(
            ["git", "http-backend"],
            input=body,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "GIT_CONFIG_COUNT": "1",
                "GIT_CONFIG_KEY_0": "safe.directory",
                "GIT_CONFIG_VALUE_0": "*",
                "GIT_PROJECT_ROOT": str(root or self.documents),
                "GIT_HTTP_EXPORT_ALL": "1",
                "REMOTE_USER": "user",
                "REQUEST_METHOD": self.command,
                "PATH_INFO": path or url.path.removeprefix("/git"),
                "QUERY_STRING": url.query,
                "CONTENT_TYPE": self.headers.get("Content-Type", ""),
                "CONTENT_LENGTH": str(len(body)),
                "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
            },
        ).stdout
        head, _, content = ran.partition(b"\r\n\r\n")
        headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n"))
        self.reply(int(headers.pop("Status", "200").split()[0]), headers, content)

    def websocket(self) -> None:
        key = self.headers["Sec-WebSocket-Key"].encode()
        accept = base64.b64encode(hashlib.sha1(key + WEBSOCKET).digest()).decode()
        self.head(101, {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Accept": accept})
        self.close_connection = True
        while True:
            first, second = self.rfile.read(2)
            size = second & 0x7F
            if size >= 126:
                size = int.from_bytes(self.rfile.read(2 if size == 126 else 8), "big")
            mask = self.rfile.read(4)
            data = bytes(byte ^ mask[at % 4] for at, byte in enumerate(self.rfile.read(size)))
            length = bytes([size]) if size < 126 else b"\x7e" + size.to_bytes(2, "big")
            self.wfile.write(bytes([first]) + length + data)
            if first & 0xF == 8:
                return

    def log_message(self, *_: Any) -> None:
        pass


def about(connection: Any, host: str | None, path: str, body: bytes) -> bytes:
    """What a server can tell of a request."""
    seen = {
        "server": connection.server,
        "port": connection.port,
        "name": connection.name,
        "host": host,
        "path": path,
        "bytes": len(body),
        "sha256": hashlib.sha256(body).hexdigest(),
    }
    return json.dumps(seen).encode()


def shown(how: str, headers: Any) -> tuple[int, dict[str, str], bytes, dict[str, str]]:
    """An answer with the header `Authorization`: status, headers, body and trailers. `headers` has names in any case."""
    secret = headers.get("authorization") or "none"
    token = secret.rpartition(" ")[2]
    page, more, trailers, status = f"<{secret}>".encode(), {}, {}, 200
    if how == "name":
        more = {f"x-{token}": "1"}
    elif how == "cookie":
        more = {"set-cookie": f"a={token}", "location": f"https://{token}/"}
    elif how == "trailer":
        trailers = {"x-last": token, f"x-{token}": "1"}
    elif how == "gzip":
        page, more = gzip.compress(page), {"content-encoding": "gzip"}
    elif how == "deflate":
        page, more = zlib.compress(page), {"content-encoding": "deflate"}
    elif how == "raw":
        page, more = zlib.compress(page, wbits=-15), {"content-encoding": "deflate"}
    elif how == "br":
        # Not in truth, which makes no difference for whoever cannot decode it.
        more = {"content-encoding": "br"}
    elif how == "range" and (wanted := headers.get("range") or headers.get("request-range")):
        begin, end = wanted.removeprefix("bytes=").split("-")
        part = page[int(begin) : int(end) + 1]
        page, more, status = part, {"content-range": f"bytes {begin}-{end}/{len(page)}"}, 206
    return status, more, page, trailers


def shown_raw(how: str, headers: Any) -> bytes:
    """An answer like that of `shown` with HTTP/1.1, and with what only it has: reason phrases, early heads and
    extensions of chunks."""
    status, more, page, trailers = shown(how, headers)
    secret = headers.get("Authorization") or "none"
    reason = secret if how == "reason" else "OK"
    early = f"HTTP/1.1 103 {secret}\r\nLink: <{secret}>\r\n\r\n" if how == "early" else ""
    extension = f";a={secret}" if how == "chunk" else ""
    lines = "".join(f"{name}: {value}\r\n" for name, value in more.items())
    head = f"{early}HTTP/1.1 {status} {reason}\r\n{lines}Trailer: x-last\r\nTransfer-Encoding: chunked\r\n\r\n{len(page):x}{extension}\r\n"
    last = "".join(f"{name}: {value}\r\n" for name, value in trailers.items())
    return head.encode() + page + f"\r\n0\r\n{last}\r\n".encode()


def serve_http2(connection: Any, record: Callable[..., None]) -> None:
    """HTTP/2 on an accepted TLS connection: what `about` tells, for every request, what `shown` shows, and `/bytes/N`."""
    from h2.config import H2Configuration
    from h2.connection import H2Connection
    from h2.events import DataReceived, RequestReceived, StreamEnded

    protocol = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
    protocol.initiate_connection()
    connection.socket.sendall(protocol.data_to_send())
    requests: dict[int, tuple[dict[str, str], bytearray]] = {}
    # Of `/bytes/N`, what is left for each stream.
    left: dict[int, int] = {}

    def fill() -> None:
        # In turns, so that all streams of a client that reads none of them get something.
        is_more = True
        while is_more:
            is_more = False
            for stream, count in list(left.items()):
                if part := min(count, protocol.local_flow_control_window(stream), 1 << 14):
                    left[stream] -= part
                    protocol.send_data(stream, BLOCK[:part], end_stream=part == count)
                    connection.socket.sendall(protocol.data_to_send())
                    is_more = True

    while data := connection.socket.recv(1 << 16):
        for event in protocol.receive_data(data):
            if isinstance(event, RequestReceived):
                requests[event.stream_id] = (dict(event.headers), bytearray())
            elif isinstance(event, DataReceived):
                requests[event.stream_id][1].extend(event.data)
                protocol.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, StreamEnded):
                headers, body = requests.pop(event.stream_id)
                host, path = headers[":authority"], headers[":path"]
                sent = headers.get("authorization")
                record(kind="http", id=connection.id, server=connection.server, port=connection.port, host=host, path=path, authorization=sent)
                if path.startswith("/shows/"):
                    status, more, page, trailers = shown(path.removeprefix("/shows/"), headers)
                    protocol.send_headers(event.stream_id, [(":status", str(status)), *more.items()])
                    protocol.send_data(event.stream_id, page, end_stream=not trailers)
                    if trailers:
                        protocol.send_headers(event.stream_id, list(trailers.items()), end_stream=True)
                    continue
                if path.startswith("/bytes/"):
                    left[event.stream_id] = int(path.removeprefix("/bytes/"))
                    protocol.send_headers(event.stream_id, [(":status", "200")])
                    continue
                protocol.send_headers(event.stream_id, [(":status", "200"), ("content-type", "application/json")])
                protocol.send_data(event.stream_id, about(connection, host, path, bytes(body)), end_stream=True)
        connection.socket.sendall(protocol.data_to_send())
        fill()
