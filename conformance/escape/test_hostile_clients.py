"""Clients without credentials: limits, error responses, and what a sandbox learns from their requests."""

from __future__ import annotations

import json
import os
import socket
import threading
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox

from harness.platform import Platform
from harness.traffic import program, until, wait_served

# More than the platform's default for all clients together.
CONNECTIONS = 12_000
UPLOAD_MB = 50


def descriptors(platform: Platform) -> int:
    assert platform.process
    return len(os.listdir(f"/proc/{platform.process.pid}/fd"))


def resident_mb(platform: Platform) -> int:
    assert platform.process
    status = Path(f"/proc/{platform.process.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) // 1024


def test_idle_connections_do_not_block_new_ones(platform: Platform) -> None:
    before_mb = resident_mb(platform)
    held: list[socket.socket] = []
    # As much of a head as fits, so that the platform has something to hold for each.
    head = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Filler: " + b"a" * 1000
    try:
        with httpx.Client(timeout=30) as client:
            for number in range(CONNECTIONS):
                connection = socket.create_connection(("127.0.0.1", platform.port))
                held.append(connection)
                try:
                    connection.sendall(head)
                except OSError:
                    pass
                if number % 500 == 0:
                    assert client.get(f"{platform.url}/health").status_code == 200
        with Sandbox.create(timeout=60) as box:
            assert box.commands.run("echo fine").stdout == "fine\n"
            assert descriptors(platform) < 8192 + 1000
            assert resident_mb(platform) - before_mb < 1024
    finally:
        for connection in held:
            connection.close()
    until(lambda: descriptors(platform) < 1000, "the connections are gone")


@pytest.mark.parametrize("http2", [False, True], ids=["http1", "http2"])
def test_the_refusal_of_an_upload_is_seen(platform: Platform, sandbox: Sandbox, http2: bool) -> None:
    # Part by part, as programs send files; httpx copies what is left of a single part for every frame of it.
    def upload() -> object:
        for _ in range(UPLOAD_MB):
            yield bytes(1_000_000)

    agent = {"e2b-sandbox-id": sandbox.sandbox_id, "e2b-sandbox-port": "49983"}
    closed = {"e2b-sandbox-id": sandbox.sandbox_id, "e2b-sandbox-port": "8999"}
    gone = {"e2b-sandbox-id": "inobody", "e2b-sandbox-port": "49983"}
    with httpx.Client(http1=not http2, http2=http2, timeout=60) as client:
        for path, headers, status in (
            ("/v2/sandboxes", {}, 401),
            ("/nothing", {}, 404),
            ("/files?path=/tmp/x", agent, 401),
            ("/", closed, 502),
            ("/", gone, 502),
        ):
            answer = client.post(f"{platform.url}{path}", headers=headers, content=upload())
            assert answer.status_code == status, (path, answer.text)
            assert answer.http_version == ("HTTP/2" if http2 else "HTTP/1.1")
            assert client.get(f"{platform.url}/health").status_code == 200


def test_a_program_inside_gets_no_key_of_the_platform(platform: Platform, sandbox: Sandbox) -> None:
    sandbox.files.write("/tmp/http_server.py", program("http_server.py"))
    sandbox.commands.run("python3 /tmp/http_server.py 0.0.0.0 8000", background=True, timeout=0)
    host = sandbox.get_host(8000)
    wait_served(platform.url, host)
    key = os.environ["E2B_API_KEY"]
    for name, value, kept in (
        ("X-API-Key", key, False),
        ("Authorization", f"Bearer {key}", False),
        ("X-API-Key", "e2b_" + "f" * 40, True),
        ("X-API-Key", "an application's own", True),
        ("Authorization", "Bearer an application's own", True),
    ):
        answer = httpx.get(f"{platform.url}/", headers={"Host": host, name: value}, timeout=30)
        seen = json.dumps(answer.json()["headers"])
        assert (value in seen) == kept, (name, seen)


def test_a_signed_link_is_bounded_and_guessing_does_not_keep_others_from_theirs(
    platform: Platform, sandbox: Sandbox
) -> None:
    sandbox.files.write("/home/user/a.txt", "mine")
    link = httpx.URL(sandbox.download_url("/home/user/a.txt"))
    query = {**link.params, "path": "/" + "a" * 5000}
    assert httpx.get(f"{platform.url}/files", params=query, timeout=30).status_code == 400
    stop = threading.Event()

    def guess() -> None:
        with httpx.Client(timeout=30) as client:
            while not stop.is_set():
                wrong = {**link.params, "signature": "v1_" + "A" * 43}
                assert client.get(f"{platform.url}/files", params=wrong).status_code in (401, 429)

    guessers = [threading.Thread(target=guess) for _ in range(8)]
    for guesser in guessers:
        guesser.start()
    try:
        for _ in range(20):
            answer = httpx.get(f"{platform.url}/files", params=link.params, timeout=30)
            assert (answer.status_code, answer.text) == (200, "mine")
    finally:
        stop.set()
        for guesser in guessers:
            guesser.join()
