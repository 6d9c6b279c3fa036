"""A server of tokens for Debian's registry, as a class and as a program: `PORT KEY CERTIFICATE`."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx

from harness.registry import PASSWORD, USER


def certificate(directory: Path) -> tuple[Path, Path]:
    """A key and its own certificate, for localhost and for tokens."""
    key, pem = directory / "key.pem", directory / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost", "-addext", "basicConstraints=critical,CA:FALSE", "-keyout", key, "-out", pem],
        check=True, capture_output=True,
    )  # fmt: skip
    return key, pem


class Tokens(ThreadingHTTPServer):
    """Gives tokens to one user, signed as the registry expects them."""

    def __init__(self, key: Path, pem: Path, address: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__((address, port), TokenHandler)
        self.key, self.pem = key, pem
        self.asked: list[str] = []

    def token(self, scope: str) -> str:
        kind, name, actions = scope.split(":")
        now = int(time.time())
        claims = {
            "iss": "tokens", "sub": USER, "aud": "templates", "exp": now + 300, "nbf": now - 60, "iat": now,
            "jti": uuid.uuid4().hex, "access": [{"type": kind, "name": name, "actions": actions.split(",")}],
        }  # fmt: skip
        der = "".join(line for line in self.pem.read_text().splitlines() if not line.startswith("-"))

        def part(data: bytes) -> str:
            return base64.urlsafe_b64encode(data).decode().rstrip("=")

        header = {"typ": "JWT", "alg": "RS256", "x5c": [der]}
        text = f"{part(json.dumps(header).encode())}.{part(json.dumps(claims).encode())}"
        sign = ["openssl", "dgst", "-sha256", "-sign", self.key]
        return f"{text}.{part(subprocess.run(sign, input=text.encode(), check=True, capture_output=True).stdout)}"


class TokenHandler(BaseHTTPRequestHandler):
    server: Tokens

    def do_GET(self) -> None:  # noqa: N802
        query = httpx.URL(self.path).params
        expected = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        if self.headers.get("authorization") != f"Basic {expected}" or query.get("service") != "templates":
            self.send_response(401)
            self.send_header("content-length", "0")
            self.end_headers()
            return
        self.server.asked.append(query["scope"])
        body = json.dumps({"token": self.server.token(query["scope"])}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    with Tokens(Path(sys.argv[2]), Path(sys.argv[3]), "0.0.0.0", int(sys.argv[1])) as tokens:  # noqa: S104
        tokens.serve_forever()
