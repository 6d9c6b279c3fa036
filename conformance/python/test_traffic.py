"""Servers inside a sandbox, reached from outside by host name, by header, over HTTP/1.1, HTTP/2 and WebSocket."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import threading
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox
from websockets.sync.client import connect

from harness.patience import within
from harness.platform import Platform
from harness.traffic import by_name, get, program, until, wait_served


def serve(sandbox: Sandbox, port: int, address: str = "0.0.0.0") -> str:
    """Starts the HTTP server inside and returns its public host name."""
    sandbox.files.write("/tmp/http_server.py", program("http_server.py"))
    sandbox.commands.run(f"python3 /tmp/http_server.py {address} {port}", background=True, timeout=0)
    return sandbox.get_host(port)


def raw(platform: Platform) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", platform.port))
    connection.settimeout(20)
    return connection


def receive(connection: socket.socket, wanted: bytes) -> bytes:
    """Reads until the bytes contain `wanted`."""
    seen = b""
    while wanted not in seen:
        data = connection.recv(65536)
        assert data, f"the connection ended before {wanted!r}: {seen!r}"
        seen += data
    return seen


def test_an_http_server_by_its_host_name(sandbox: Sandbox, platform: Platform) -> None:
    host = serve(sandbox, 8000)
    assert host.startswith(f"8000-{sandbox.sandbox_id}.")
    wait_served(platform.url, host)
    answer = by_name(platform, host, "/some/path?a=b%20c")
    assert answer.status_code == 200
    seen = answer.json()
    assert (seen["method"], seen["path"]) == ("GET", "/some/path?a=b%20c")
    headers = {name.lower(): value for name, value in seen["headers"].items()}
    assert headers["host"] == host
    assert not [name for name in headers if name.startswith(("x-forwarded", "forwarded"))]


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "0.0.0.0", "::"])
def test_every_local_address_is_reachable(sandbox: Sandbox, platform: Platform, address: str) -> None:
    assert wait_served(platform.url, serve(sandbox, 8001, address)).status_code == 200


def test_routing_by_headers_on_any_host(sandbox: Sandbox, platform: Platform) -> None:
    wait_served(platform.url, serve(sandbox, 8002))
    both = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "8002"}
    for host in (f"127.0.0.1:{platform.port}", "localhost", "anything.example"):
        answer = httpx.get(f"{platform.url}/here", headers={"Host": host, **both}, timeout=within(30))
        assert (answer.status_code, answer.json()["path"]) == (200, "/here")
    for name in both:
        alone = httpx.get(f"{platform.url}/here", headers={name: both[name]}, timeout=within(30))
        assert alone.status_code == 400, name


def test_the_old_host_form_with_a_client_id(sandbox: Sandbox, platform: Platform) -> None:
    wait_served(platform.url, serve(sandbox, 8003))
    assert get(platform.url, f"8003-{sandbox.sandbox_id}-6532622b.any.domain").status_code == 200


def test_http_2_from_outside(sandbox: Sandbox, platform: Platform) -> None:
    host = serve(sandbox, 8004)
    wait_served(platform.url, host)
    answer = by_name(platform, host, "/two", http2=True)
    assert (answer.http_version, answer.status_code, answer.json()["path"]) == ("HTTP/2", 200, "/two")


def test_answers_stream_without_buffering(sandbox: Sandbox, platform: Platform) -> None:
    host = serve(sandbox, 8005)
    wait_served(platform.url, host)
    with httpx.stream("GET", f"{platform.url}/stream?/tmp/go", headers={"Host": host}, timeout=20) as answer:
        parts = answer.iter_raw()
        assert next(parts) == b"first"
        # The second half is only sent once this file exists, so the first cannot have waited for it.
        sandbox.files.write("/tmp/go", "")
        assert b"".join(parts) == b"second"


def test_requests_stream_without_buffering(sandbox: Sandbox, platform: Platform) -> None:
    host = serve(sandbox, 8006)
    wait_served(platform.url, host)
    with raw(platform) as connection:
        connection.sendall(f"POST /echo HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        connection.sendall(b"5\r\nfirst\r\n")
        receive(connection, b"first")
        connection.sendall(b"6\r\nsecond\r\n0\r\n\r\n")
        receive(connection, b"second")


def test_a_large_body_both_ways(sandbox: Sandbox, platform: Platform) -> None:
    host = serve(sandbox, 8007)
    wait_served(platform.url, host)
    body = os.urandom(20 * 1024 * 1024)
    # The server answers while it reads and nothing between buffers, so a client that only reads after its last byte
    # would wait for the server for as long as the server waits for it.
    url = httpx.URL(platform.url)
    connection = http.client.HTTPConnection(url.host, url.port, timeout=60)
    connection.putrequest("POST", "/echo", skip_host=True)
    connection.putheader("Host", host)
    connection.putheader("Content-Length", str(len(body)))
    connection.endheaders()
    sender = threading.Thread(target=connection.send, args=(body,))
    sender.start()
    answer = connection.getresponse()
    assert answer.status == 200 and answer.read() == body
    sender.join(60)
    connection.close()


def test_a_websocket_server(sandbox: Sandbox, platform: Platform) -> None:
    sandbox.files.write("/tmp/websocket_echo.py", program("websocket_echo.py"))
    sandbox.commands.run("python3 /tmp/websocket_echo.py 9000", background=True, timeout=0)
    host = sandbox.get_host(9000)

    listening(sandbox, 9000)
    with connect(f"ws://{host}/chat", sock=raw(platform), max_size=None, open_timeout=within(10)) as client:
        client.send("hello")
        assert client.recv(timeout=20) == "hello"
        large = os.urandom(3 * 1024 * 1024)
        client.send(large)
        assert client.recv(timeout=20) == large
        assert client.ping().wait(20)
        # A kill must break the open connection, not leave it waiting.
        sandbox.kill()
        with pytest.raises(Exception) as broken:
            client.recv(timeout=20)
        assert not isinstance(broken.value, TimeoutError)


def test_a_closed_port_is_502_with_the_port(sandbox: Sandbox, platform: Platform) -> None:
    answer = get(platform.url, sandbox.get_host(7999))
    assert answer.status_code == 502
    body = answer.json()
    assert (body["sandboxId"], body["port"], body["code"]) == (sandbox.sandbox_id, 7999, 502)
    assert "port is not open" in body["message"]


def listening(sandbox: Sandbox, port: int) -> None:
    until(lambda: f":{port} " in sandbox.commands.run("ss -ltnH || true").stdout + " ", f"port {port} is open")


TLS_SERVER = """
import ssl, sys
from http.server import HTTPServer, SimpleHTTPRequestHandler
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain("/tmp/own.pem")
server = HTTPServer(("", 7443), SimpleHTTPRequestHandler)
server.socket = context.wrap_socket(server.socket, server_side=True)
server.serve_forever()
"""
BANNER = "import socket;s=socket.create_server(('',7022))\nwhile 1:c=s.accept()[0];c.sendall(b'SSH-2.0-x\\r\\n');c.recv(99);c.close()"
SILENT = "import socket;s=socket.create_server(('',7000))\nwhile 1:c=s.accept()[0];c.recv(9999);c.close()"


def test_what_a_server_without_http_does(sandbox: Sandbox, platform: Platform) -> None:
    """The port is open: the answer says what is wrong instead. What clients read of the agent's port stays."""
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -noenc -subj /CN=own -keyout /tmp/own.key -out /tmp/own.crt"
    sandbox.commands.run(f"{make} && cat /tmp/own.key /tmp/own.crt > /tmp/own.pem")
    for name, text in (("tls", TLS_SERVER), ("ssh", BANNER), ("silent", SILENT)):
        sandbox.files.write(f"/tmp/{name}.py", text)
        sandbox.commands.run(f"exec python3 /tmp/{name}.py", background=True, timeout=0)
    for port, words in ((7443, "speaks TLS"), (7022, "speaks SSH"), (7000, "closed the connection without an answer")):
        listening(sandbox, port)
        answer = get(platform.url, sandbox.get_host(port))
        body = answer.json()
        assert (answer.status_code, body["port"], body["code"]) == (502, port, 502)
        assert body["message"].endswith(words) and body["detail"], body
        headers = {"Host": sandbox.get_host(port), "User-Agent": "Mozilla/5.0", "Accept": "text/html"}
        page = httpx.get(platform.url, headers=headers, timeout=within(30))
        assert words in page.text and page.text.startswith("<html")


HEADS = r"""
import socket
s = socket.create_server(("", 7001))
while True:
    c = s.accept()[0]
    head = b""
    while not head.endswith(b"\r\n\r\n"): head += c.recv(9999)
    c.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\nX-reqUEST-Id: 1\r\nContent-Length: %d\r\n\r\n" % len(head) + head)
    c.close()
"""


def test_names_of_headers_keep_their_case(sandbox: Sandbox, platform: Platform) -> None:
    """There are servers and clients that look for one, although it means nothing."""
    sandbox.files.write("/tmp/heads.py", HEADS)
    sandbox.commands.run("exec python3 /tmp/heads.py", background=True, timeout=0)
    listening(sandbox, 7001)
    host = sandbox.get_host(7001)
    with raw(platform) as connection:
        connection.sendall(f"GET / HTTP/1.1\r\nHost: {host}\r\nSOAPAction: a\r\nx-lower: b\r\n\r\n".encode())
        # The head of the answer, and that of the request, which is its body.
        seen = receive(connection, b"\r\n\r\n")
        while seen.count(b"\r\n\r\n") < 2:
            seen += receive(connection, b"\n")
    for line in (f"Host: {host}", "SOAPAction: a", "x-lower: b", "X-reqUEST-Id: 1"):
        assert f"\n{line}\r\n".encode() in seen, (line, seen)
    # Over HTTP/2 names have no case.
    text = by_name(platform, host, "/", http2=True).text
    assert f"\nHost: {host}\r\n" in text and "\nUser-Agent: " in text and "\nAccept-Encoding: " in text


def test_a_gone_sandbox_is_502(sandbox: Sandbox, platform: Platform) -> None:
    sandbox.kill()
    for port in (49983, 8000):
        answer = get(platform.url, sandbox.get_host(port), "/health")
        assert answer.status_code == 502
        assert "was not found" in answer.json()["message"]


def test_a_killed_sandbox_cuts_open_answers(sandbox: Sandbox, platform: Platform) -> None:
    host = serve(sandbox, 8008)
    wait_served(platform.url, host)
    with httpx.stream("GET", f"{platform.url}/forever", headers={"Host": host}, timeout=20) as answer:
        parts = answer.iter_raw()
        assert next(parts) == b"open"
        sandbox.kill()
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
            next(parts)
            pytest.fail("the answer ended as if it were complete")


def first_process(sandbox: Sandbox) -> int:
    """The host's number of the process that is 1 inside."""
    namespace = sandbox.commands.run("readlink /proc/self/ns/pid").stdout.strip()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            numbers = next(line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:"))
            if numbers[-1] == "1" and os.readlink(f"/proc/{pid}/ns/pid") == namespace:
                return int(pid)
        except (OSError, StopIteration):
            continue  # it ended meanwhile
    raise AssertionError(f"no first process in {namespace}")


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_sandbox_that_dies_by_itself_cuts_open_answers(sandbox: Sandbox, platform: Platform, version: str) -> None:
    host = serve(sandbox, 8009)
    wait_served(platform.url, host)
    agent = first_process(sandbox)
    with raw(platform) as connection:
        connection.sendall(f"GET /until-close HTTP/{version}\r\nHost: {host}\r\n\r\n".encode())
        receive(connection, b"open")
        os.kill(agent, signal.SIGKILL)
        with pytest.raises(ConnectionResetError):
            rest = receive(connection, b"0\r\n\r\n")
            pytest.fail(f"the answer ended as if it were complete: {rest!r}")


@pytest.mark.parametrize("path", ["/init", "/freeze", "/unfreeze", "/upgrade", "/x/../init", "/%69nit", "//init"])
def test_control_routes_are_not_reachable_from_outside(sandbox: Sandbox, platform: Platform, path: str) -> None:
    with raw(platform) as connection:
        connection.sendall(
            f"POST {path} HTTP/1.1\r\nHost: {sandbox.get_host(49983)}\r\nContent-Type: application/json\r\n"
            "Content-Length: 2\r\nConnection: close\r\n\r\n{}".encode()
        )
        assert b" 404 " in receive(connection, b"\r\n").splitlines()[0]
    assert sandbox.commands.run("echo still mine").stdout == "still mine\n"


def test_the_agent_wants_its_token(sandbox: Sandbox, platform: Platform) -> None:
    host = sandbox.get_host(49983)
    assert get(platform.url, host, "/health").status_code == 204
    call = {"Content-Type": "application/json", "Connect-Protocol-Version": "1", "Host": host}
    url = f"{platform.url}/process.Process/List"
    assert httpx.post(url, headers=call, content="{}", timeout=within(30)).status_code == 401
    assert httpx.post(url, headers={**call, "X-Access-Token": "0" * 64}, content="{}", timeout=within(30)).status_code == 401
