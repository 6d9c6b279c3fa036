"""Servers inside that speak TLS themselves, reached through the ingress."""

from __future__ import annotations

import os
from collections.abc import Callable

import httpx
from e2b import Sandbox

from harness.elapse import idle_for
from harness.internet import Internet
from harness.platform import Platform
from harness.traffic import get, until

# Answers with the number of its connection, over TLS or not.
SERVER = """
import http.server, itertools, socketserver, ssl, sys
numbers = itertools.count(1)
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def setup(self):
        self.number = next(numbers)
        super().setup()
    def do_GET(self):
        body = b"connection %d" % self.number
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
if len(sys.argv) > 2:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(sys.argv[2])
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
server.serve_forever()
"""


def serve(sandbox: Sandbox, platform: Platform, port: int, *certificate: str, answer: str = "connection") -> str:
    """Starts a server and returns its host once it answers."""
    sandbox.files.write("/tmp/server.py", SERVER)
    sandbox.commands.run(f"exec python3 /tmp/server.py {port} {' '.join(certificate)}", background=True, timeout=0)
    host = sandbox.get_host(port)
    until(lambda: answer in get(platform.url, host).text, f"the server on port {port} answers with {answer!r}")
    return host


def test_servers_with_tls(create: Callable[..., Sandbox], platform: Platform, internet: Internet) -> None:
    """On the ports that the client listed; their certificates are for any name, and connections are kept."""
    box = create(network={"https_ports": [8443, 9443]})
    assert box.get_info().network["https_ports"] == [8443, 9443]
    box.files.write("/tmp/certificate.pem", (internet.certificates / "example.com.pem").read_text())
    secure = serve(box, platform, 8443, "/tmp/certificate.pem")
    answers = {get(platform.url, secure).text for _ in range(20)}
    assert len(answers) < 10, answers
    plain = serve(box, platform, 3000)
    assert get(platform.url, plain).text.startswith("connection")
    # An update is about what it may reach, and a start of the platform changes nothing.
    box.update_network({"deny_out": ["0.0.0.0/0"]})
    platform.kill()
    platform.start()
    assert get(platform.url, secure).status_code == 200
    assert box.get_info().network["https_ports"] == [8443, 9443]


def test_an_update_changes_the_ports(create: Callable[..., Sandbox], platform: Platform, internet: Internet) -> None:
    """SDKs do not send such an update, but the API takes it."""
    box = create()
    box.files.write("/tmp/certificate.pem", (internet.certificates / "example.com.pem").read_text())
    box.files.write("/tmp/server.py", SERVER)
    box.commands.run("exec python3 /tmp/server.py 8443 /tmp/certificate.pem", background=True, timeout=0)
    host, url = box.get_host(8443), f"{platform.url}/sandboxes/{box.sandbox_id}/network"
    for ports, served in (([8443], True), ([], False), ([9000, 8443], True)):
        reply = httpx.put(url, json={"httpsPorts": ports}, headers={"X-API-Key": os.environ["E2B_API_KEY"]}, timeout=60)
        assert reply.status_code == 204, reply.text
        if served:
            until(lambda: "connection" in get(platform.url, host).text, f"it is served with {ports}")
        else:
            # A connection that is kept stays as it is, for about a second after its last request.
            idle_for(3)
            assert "connection" not in get(platform.url, host).text, ports


def test_servers_without_tls_on_such_a_port(create: Callable[..., Sandbox], platform: Platform) -> None:
    box = create(network={"https_ports": [8443]})
    host = serve(box, platform, 8443, answer="does not speak TLS")
    answer = get(platform.url, host)
    assert (answer.status_code, answer.json()["port"]) == (502, 8443), answer.text
