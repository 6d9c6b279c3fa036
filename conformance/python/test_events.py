"""Lifecycle events and webhooks as a user has them: a receiver with HTTPS on loopback, which verifies signatures by the
published recipe, answers with errors, hangs, and redirects; and a platform that is killed before an event was received.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2b import Sandbox

from harness.beside import beside
from harness.platform import Platform
from harness.traffic import until

SECRET = "a secret that signs events"
ALL = [f"sandbox.lifecycle.{word}" for word in ("created", "updated", "paused", "resumed", "checkpointed", "killed")]


@dataclass
class Delivery:
    """A request that a receiver got."""

    headers: dict[str, str]
    body: bytes

    @property
    def event(self) -> dict[str, Any]:
        return json.loads(self.body)

    def is_signed(self, secret: str) -> bool:
        digest = base64.b64encode(hashlib.sha256(secret.encode() + self.body).digest()).decode().rstrip("=")
        return self.headers["e2b-signature"] == digest


@dataclass
class Receiver:
    """A receiver on loopback. `answer` gets the number of the request, and returns a status and headers, or waits."""

    url: str
    deliveries: list[Delivery] = field(default_factory=list)
    answer: Callable[[int], tuple[int, dict[str, str]]] = lambda _: (200, {})


def delivered(receiver: Receiver) -> set[str]:
    """The ids of the events that a receiver got, each once or more."""
    return {delivery.event["id"] for delivery in receiver.deliveries}


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


@dataclass(frozen=True)
class Certificates:
    """An authority, and a certificate of it for loopback."""

    authority: Path
    chain: Path
    key: Path


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    work = tmp_path_factory.mktemp("certificates")
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc"]
    found = Certificates(work / "ca.pem", work / "server.pem", work / "server.key")
    _openssl("req", "-x509", *key, "-keyout", work / "ca.key", "-out", found.authority, "-subj", "/CN=Of receivers", "-days", "2")
    _openssl("req", *key, "-keyout", found.key, "-out", work / "server.csr", "-subj", "/CN=Receiver")
    (work / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    signed = ["-CA", found.authority, "-CAkey", work / "ca.key", "-CAcreateserial", "-days", "2", "-extfile", work / "names"]
    _openssl("x509", "-req", "-in", work / "server.csr", *signed, "-out", found.chain)
    return found


@contextmanager
def receiving(certificates: Certificates, host: str = "127.0.0.1") -> Iterator[Receiver]:
    """A receiver until the end of the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            receiver.deliveries.append(Delivery({name.lower(): value for name, value in self.headers.items()}, body))
            status, headers = receiver.answer(len(receiver.deliveries))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            """A client that went away is no error of a receiver."""

    server = Server(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.chain, certificates.key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    receiver = Receiver(f"https://{host}:{server.server_address[1]}/hook")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def config(certificates: Certificates, more: str = "") -> str:
    allowed = 'allow_private = "127.0.0.0/8"\nretry_s = 1\n'
    return f'[sandbox]\ncpu_count = 1\n[webhooks]\nca_file = "{certificates.authority}"\n{allowed}{more}'


@pytest.fixture(scope="module")
def server(platform: Platform, certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """A platform that sends events to loopback."""
    with beside(platform, tmp_path_factory.mktemp("events"), config(certificates)) as server:
        yield server


def call(method: str, path: str, body: Any = None, expected: int = 200) -> Any:
    answer = httpx.request(
        method, os.environ["E2B_API_URL"] + path, headers={"X-API-Key": os.environ["E2B_API_KEY"]}, json=body, timeout=60
    )
    assert answer.status_code == expected, answer.text
    return answer.json() if answer.content else None


@contextmanager
def hooked(receiver: Receiver, events: list[str]) -> Iterator[str]:
    body = {"name": "a hook", "url": receiver.url, "enabled": True, "events": events, "signatureSecret": SECRET}
    created = call("POST", "/events/webhooks", body, 201)
    assert SECRET not in json.dumps(created)
    try:
        yield created["id"]
    finally:
        call("DELETE", f"/events/webhooks/{created['id']}", expected=204)


def attempts(hook: str, count: int) -> list[dict[str, Any]]:
    """The attempts of a webhook, oldest first, once there are so many."""

    def found() -> list[dict[str, Any]] | None:
        log = call("GET", f"/events/webhooks/{hook}/deliveries?limit=100")
        return log[::-1] if len(log) >= count else None

    log = until(found, f"{count} attempts of {hook}", 60)
    assert log is not None
    return log


def test_a_life_is_told_with_signatures(server: Platform, certificates: Certificates) -> None:
    with receiving(certificates) as receiver, hooked(receiver, ALL) as hook:
        box = Sandbox.create(timeout=120, metadata={"user": "ä"})
        box.set_timeout(100)
        box.create_snapshot()
        box.pause()
        box.connect(timeout=100)
        box.kill()
        until(lambda: len(delivered(receiver)) >= 6, lambda: f"{len(receiver.deliveries)} deliveries")
        told = {delivery.event["id"]: delivery for delivery in receiver.deliveries}
        polled = call("GET", f"/events/sandboxes/{box.sandbox_id}?orderAsc=true&limit=100")
        assert [event["type"] for event in polled] == [
            f"sandbox.lifecycle.{word}" for word in ("created", "updated", "checkpointed", "paused", "resumed", "killed")
        ]
        for event in polled:
            delivery = told[event["id"]]
            assert delivery.event == event
            assert event["eventData"]["sandbox_metadata"] == {"user": "ä"}
            assert delivery.headers["e2b-webhook-id"] == hook
            assert delivery.headers["e2b-signature-version"] == "v1"
            assert delivery.is_signed(SECRET)
            assert not delivery.is_signed("another secret")
        assert polled[-1]["eventData"]["execution"]["vcpu_count"] == 1
        metrics = call("GET", f"/teams/{polled[0]['sandboxTeamId']}/metrics")
        assert max(sample["concurrentSandboxes"] for sample in metrics) >= 1
        # The newest sample may be of a minute in which nothing was started.
        assert max(sample["sandboxStartRate"] for sample in metrics) > 0


def test_errors_are_tried_again(server: Platform, certificates: Certificates) -> None:
    with receiving(certificates) as receiver, hooked(receiver, ["sandbox.lifecycle.created"]) as hook:
        receiver.answer = lambda number: (500 if number <= 2 else 200, {})
        Sandbox.create(timeout=60).kill()
        log = attempts(hook, 3)
        assert [(one["attempt"], one["status"], one["error"]) for one in log] == [
            (1, 500, "status"),
            (2, 500, "status"),
            (3, 200, None),
        ]
        assert len({delivery.event["id"] for delivery in receiver.deliveries}) == 1
        assert [delivery.headers["e2b-delivery-id"] for delivery in receiver.deliveries] == [one["id"] for one in log]


def test_a_redirect_to_a_private_address_is_not_followed(server: Platform, certificates: Certificates) -> None:
    with receiving(certificates) as inner, receiving(certificates) as receiver:
        receiver.answer = lambda _: (307, {"location": inner.url})
        with hooked(receiver, ["sandbox.lifecycle.created"]) as hook:
            Sandbox.create(timeout=60).kill()
            (first, *_) = attempts(hook, 2)
        assert (first["status"], first["error"]) == (307, "redirect")
        assert inner.deliveries == []


def test_a_receiver_that_hangs_delays_no_other(server: Platform, certificates: Certificates) -> None:
    hangs = threading.Event()
    with receiving(certificates) as slow, receiving(certificates) as quick:
        slow.answer = lambda _: (200, {}) if hangs.wait() else (200, {})
        try:
            with hooked(slow, ["sandbox.lifecycle.created"]) as hook, hooked(quick, ["sandbox.lifecycle.created"]):
                for _ in range(3):
                    Sandbox.create(timeout=60).kill()
                until(lambda: len(delivered(quick)) == 3, lambda: f"{len(quick.deliveries)} deliveries")
                until(lambda: slow.deliveries, "the slow one was tried")
                # An attempt ends by itself.
                (first, *_) = attempts(hook, 1)
                assert first["error"] == "timeout"
                assert 9_000 < first["durationMs"] < 60_000
        finally:
            hangs.set()


def test_a_certificate_of_another_authority_is_refused(server: Platform, certificates: Certificates, tmp_path: Path) -> None:
    key, chain = tmp_path / "key", tmp_path / "chain"
    _openssl(
        *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc", "-keyout", key, "-out", chain),
        *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"),
    )
    with receiving(Certificates(chain, chain, key)) as receiver, hooked(receiver, ["sandbox.lifecycle.created"]) as hook:
        Sandbox.create(timeout=60).kill()
        (first, *_) = attempts(hook, 1)
        assert (first["status"], first["error"]) == (None, "tls")
        assert receiver.deliveries == []


def test_an_event_survives_a_kill_of_the_platform(server: Platform, certificates: Certificates) -> None:
    with receiving(certificates) as receiver:
        hangs = threading.Event()
        receiver.answer = lambda number: (200, {}) if number > 1 or hangs.wait() else (200, {})
        with hooked(receiver, ["sandbox.lifecycle.killed"]):
            box = Sandbox.create(timeout=300)
            box.kill()
            until(lambda: receiver.deliveries, "the first attempt")
            server.kill()
            try:
                server.start()
                until(lambda: len(receiver.deliveries) >= 2, "another attempt")
            finally:
                hangs.set()
            first, second = receiver.deliveries[:2]
            assert first.body == second.body
            assert second.is_signed(SECRET)
            assert first.headers["e2b-delivery-id"] != second.headers["e2b-delivery-id"]


def test_the_secret_is_neither_logged_nor_stored(server: Platform) -> None:
    assert SECRET not in server.log()
    for path in server.data_dir.glob("ringfence.db*"):
        assert SECRET.encode() not in path.read_bytes(), path


def test_addresses_that_are_not_public_are_refused(platform: Platform) -> None:
    """With the default settings, which the session's platform has."""
    key = platform.credentials()["E2B_API_KEY"]
    for url in (
        "https://127.0.0.1/",
        "https://169.254.169.254/latest/meta-data",
        "https://[::ffff:10.0.0.1]/",
        "https://localhost/",
        "https://2130706433/",
        "http://example.com/",
        "https://user:password@example.com/",
    ):
        body = {"name": "n", "url": url, "events": ALL, "signatureSecret": SECRET}
        answer = httpx.post(f"{platform.url}/events/webhooks", headers={"X-API-Key": key}, json=body, timeout=60)
        assert answer.status_code == 400, answer.text
