"""Connections through a SOCKS5 proxy, set with the SDK: what the proxy is asked for, that nothing goes around it, and that
its password is nowhere.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from e2b import InvalidArgumentException, Sandbox, SandboxException

from harness.egress_logs import entries, said
from harness.inside import outgoing, root
from harness.internet import HOST_V4, RESOLVER, Internet
from harness.internet_names import home
from harness.internet_socks import AUTHENTICATED, HTTP, OPEN, PASSWORD, REFUSING, SECURE, SILENT, USER
from harness.platform import Platform
from harness.search import files_with
from harness.traffic import until

ALL = "0.0.0.0/0"
PROXY, OTHER_PROXY = "45.90.7.1", "45.90.7.2"
NAMED_PROXY = "proxy.example.net"
LOGIN = {"username": USER, "password": PASSWORD}


def through(port: int = OPEN, host: str = PROXY, **keys: Any) -> dict[str, Any]:
    return {"address": f"{host}:{port}", **keys}


def results(sandbox: Sandbox, *attempts: dict[str, Any]) -> list[str]:
    return [outcome["result"] for outcome in outgoing(sandbox, *attempts)]


def test_every_connection_goes_through_it(create: Callable[..., Sandbox], internet: Internet) -> None:
    """With addresses, except where a name was the reason to allow the connection."""
    box = create(network={"egress_proxy": through()})
    since = internet.mark()
    with internet.capture() as capture:
        attempts = [
            {"do": "tcp", "to": "93.195.0.1"},
            {"do": "tcp", "to": "2606:4700:95::1"},
            {"do": "http", "to": "93.195.0.2", "host": "plain.example.com"},
            {"do": "tls", "to": "93.195.0.3", "name": "secure.example.com"},
        ]
        assert results(box, *attempts) == ["ok"] * 4
        assert "ok" not in results(box, {"do": "udp", "to": "93.195.0.4"}, {"do": "udp", "to": "93.195.0.4", "port": 443})
        sent = {(packet.to, packet.port) for packet in capture.packets()}
    assert sent == {(PROXY, OPEN)}
    asked = {event["to"] for event in since(kind="socks", step="connect", named=False)}
    assert asked == {"93.195.0.1", "2606:4700:95::1", "93.195.0.2", "93.195.0.3"}
    assert since(kind="socks", named=True) == []
    # Its servers see the proxy.
    peers = {event["peer"] for event in since(kind="tcp", server="93.195.0.1", port=7)}
    assert peers and HOST_V4 not in peers
    # Names are still resolved by the gateway, which programs need for addresses.
    assert outgoing(box, {"do": "resolve", "name": "plain.example.com"})[0]["addresses"] == [home("plain.example.com")]


def test_the_policy_decides_before_it(create: Callable[..., Sandbox], internet: Internet) -> None:
    box = create(network={"deny_out": [ALL], "allow_out": ["*.example.org", "93.195.1.1"], "egress_proxy": through()})
    since = internet.mark()
    attempts = [
        {"do": "tls", "to": "45.36.7.1", "name": "api.example.org"},
        {"do": "tcp", "to": "93.195.1.1"},
        {"do": "tls", "to": "45.36.7.2", "name": "www.example.com"},
        {"do": "tcp", "to": "93.195.1.2"},
        {"do": "tcp", "to": "10.9.0.1"},
        {"do": "tcp", "to": PROXY, "port": OPEN},
    ]
    assert [result == "ok" for result in results(box, *attempts)] == [True, True, False, False, False, False]
    asked = {(event["to"], event["named"]) for event in since(kind="socks", step="connect")}
    assert asked == {("api.example.org", True), ("93.195.1.1", False)}
    # The proxy resolves the name.
    assert since(kind="dns", name="api.example.org") == []


def test_users_and_passwords(create: Callable[..., Sandbox], internet: Internet) -> None:
    good = create(network={"egress_proxy": through(AUTHENTICATED, **LOGIN)})
    wrong = create(network={"egress_proxy": through(AUTHENTICATED, username=USER, password="wrong horse")})
    none = create(network={"egress_proxy": through(AUTHENTICATED)})
    attempt = {"do": "tcp", "to": "93.195.2.1"}
    assert results(good, attempt) == ["ok"]
    with internet.capture() as capture:
        assert [*results(wrong, attempt), *results(none, attempt)] == ["ECONNRESET"] * 2
        assert {packet.to for packet in capture.packets()} == {PROXY}


@pytest.mark.parametrize("host", [NAMED_PROXY, PROXY])
def test_tls_to_the_proxy(create: Callable[..., Sandbox], internet: Internet, host: str) -> None:
    ca = internet.authority.read_text()
    name = {} if host == NAMED_PROXY else {"server_name": "www.example.net"}
    box = create(network={"egress_proxy": through(SECURE, host, **LOGIN, tls={"ca_cert": ca, **name})})
    at = home(NAMED_PROXY) if host == NAMED_PROXY else PROXY
    with internet.capture() as capture:
        outcomes = outgoing(box, {"do": "tcp", "to": "93.195.3.1"}, {"do": "tls", "to": "93.195.3.2", "name": "inner.example.com"})
        assert [outcome["result"] for outcome in outcomes] == ["ok", "ok"], outcomes
        sent = {(packet.to, packet.port) for packet in capture.packets()}
        assert sent - {(RESOLVER, 53)} == {(at, SECURE)}
        data = b"".join(packet.data for packet in capture.packets())
    assert PASSWORD.encode() not in data and b"inner.example.com" not in data
    # Large transfers, and the end of one direction, as without a proxy.
    transfer = "import hashlib,socket\ns=socket.create_connection(('93.195.3.3',1002)); d=b'x'*3000000\ns.sendall(d); s.shutdown(1)\nprint(s.makefile().read().strip()==f'{len(d)} {hashlib.sha256(d).hexdigest()}')\n"
    box.files.write("/tmp/transfer.py", transfer)
    assert root(box, "python3 /tmp/transfer.py") == "True\n"


def test_certificates_of_the_proxy_are_verified(create: Callable[..., Sandbox], internet: Internet) -> None:
    ca = internet.authority.read_text()
    since = internet.mark()
    for tls in (True, {"ca_cert": ca, "server_name": "proxy.example.invalid"}, {"ca_cert": ca}):
        box = create(network={"egress_proxy": through(SECURE, **LOGIN, tls=tls)})
        assert results(box, {"do": "tcp", "to": "93.195.3.4"}) == ["ECONNRESET"], tls
    assert since(kind="socks") == []


@pytest.mark.parametrize(
    ("port", "words"),
    [(REFUSING, "do not allow"), (HTTP, "does not speak SOCKS5"), (1999, "Connection refused")],
)
def test_without_the_proxy_there_is_no_connection(
    create: Callable[..., Sandbox], platform: Platform, internet: Internet, port: int, words: str
) -> None:
    box = create(network={"egress_proxy": through(port)})
    with internet.capture() as capture:
        assert results(box, {"do": "tcp", "to": "93.195.4.1"}, {"do": "http", "to": "93.195.4.2"}) == ["ECONNRESET"] * 2
        assert {packet.to for packet in capture.packets()} == {PROXY}
    until(lambda: bool(said(platform, box, "egress_failed", "93.195.4.1", words)), f"{words} in {entries(platform, box)}")


def test_a_proxy_that_says_nothing(create: Callable[..., Sandbox], internet: Internet) -> None:
    """The program waits; when it gives up, so does the gateway."""
    box = create(network={"egress_proxy": through(SILENT, OTHER_PROXY)})
    since = internet.mark()
    program = "import socket,struct,time\ns=socket.create_connection(('93.195.4.3',7)); time.sleep(1)\ns.setsockopt(socket.SOL_SOCKET,socket.SO_LINGER,struct.pack('ii',1,0)); s.close()\n"
    box.files.write("/tmp/leave.py", program)
    root(box, "python3 /tmp/leave.py")
    until(lambda: bool(since(kind="end", server=OTHER_PROXY)), "the connection to the proxy has ended", 5)


def test_names_of_proxies(create: Callable[..., Sandbox], platform: Platform, internet: Internet) -> None:
    """Names of proxies are resolved for each connection, and may not lead to what is closed."""
    named = create(network={"egress_proxy": through(OPEN, NAMED_PROXY), "deny_out": [ALL], "allow_out": ["93.195.5.1"]})
    assert results(named, {"do": "tcp", "to": "93.195.5.1"}) == ["ok"]
    for name in ("v4-10-9-0-1.example.net", f"v4-{HOST_V4.replace('.', '-')}.example.net", "missing-proxy.example.net"):
        box = create(network={"egress_proxy": through(OPEN, name)})
        assert results(box, {"do": "tcp", "to": "93.195.5.2"}) == ["ECONNRESET"], name
        until(lambda: bool(said(platform, box, "egress_failed", name)), f"{name} in {entries(platform, box)}")
    rebinding = create(network={"egress_proxy": through(OPEN, "rebind-proxy.example.net")})
    assert results(rebinding, {"do": "tcp", "to": "93.195.5.3"}) == ["ok"]


def test_changes_while_it_runs(create: Callable[..., Sandbox], platform: Platform, internet: Internet) -> None:
    """Open connections are reset if they do not go the way that the policy says now. The policy outlives its platform."""
    box = create()
    hold = "import socket,sys\ns=socket.create_connection((sys.argv[1],1006)); print('open',flush=True)\ntry: print(s.recv(1) or 'closed',flush=True)\nexcept OSError as error: print(error.errno,flush=True)\n"
    box.files.write("/tmp/hold-one.py", hold)

    def held(name: str, to: str) -> Callable[[], list[str]]:
        box.commands.run(f"exec python3 /tmp/hold-one.py {to} > /tmp/{name}", background=True, timeout=0)
        until(lambda: root(box, f"cat /tmp/{name} || true").split() == ["open"], "it is open")
        return lambda: root(box, f"cat /tmp/{name}").split()

    direct = held("direct", "93.195.6.1")
    box.update_network({"egress_proxy": through(AUTHENTICATED, **LOGIN)})
    until(lambda: direct() == ["open", "104"], "the direct connection is reset")
    proxied = held("proxied", "93.195.6.2")
    box.update_network({"egress_proxy": through(AUTHENTICATED, **LOGIN), "deny_out": ["93.195.6.3"]})
    with internet.capture() as capture:
        assert results(box, {"do": "tcp", "to": "93.195.6.3"}, {"do": "tcp", "to": "93.195.6.4"}) == ["ECONNRESET", "ok"]
        assert {packet.to for packet in capture.packets()} == {PROXY}
    assert proxied() == ["open"]
    platform.kill()
    platform.start()
    with internet.capture() as capture:
        assert results(box, {"do": "tcp", "to": "93.195.6.5"}) == ["ok"]
        assert {packet.to for packet in capture.packets()} == {PROXY}
    # An update without it ends it.
    box.update_network({})
    internet.until_closed(PROXY)
    with internet.capture() as capture:
        assert results(box, {"do": "tcp", "to": "93.195.6.6"}, {"do": "udp", "to": "93.195.6.6"}) == ["ok"] * 2
        assert {packet.to for packet in capture.packets()} == {"93.195.6.6"}


def test_the_password_is_nowhere(create: Callable[..., Sandbox], platform: Platform, internet: Internet) -> None:
    ca = internet.authority.read_text()
    box = create(network={"egress_proxy": through(SECURE, **LOGIN, tls={"ca_cert": ca, "server_name": "www.example.net"})})
    wrong = create(network={"egress_proxy": through(AUTHENTICATED, username=USER, password=f"not {PASSWORD}")})
    assert results(box, {"do": "tcp", "to": "93.195.8.1"}) == ["ok"]
    assert results(wrong, {"do": "tcp", "to": "93.195.8.1"}) == ["ECONNRESET"]
    until(lambda: bool(said(platform, wrong, "refused the user")), "the refusal is logged")
    info = box.get_info()
    assert info.network["egress_proxy"] == {"address": f"{PROXY}:{SECURE}", "username": USER, "tls": {"server_name": "www.example.net"}}
    answer = httpx.get(f"{platform.url}/sandboxes/{box.sandbox_id}", headers={"X-API-Key": os.environ["E2B_API_KEY"]}, timeout=60)
    assert "egressProxy" in answer.text and PASSWORD not in answer.text and "CERTIFICATE" not in answer.text
    assert PASSWORD not in platform.log()
    assert all(PASSWORD not in str(entry) for sandbox in (box, wrong) for entry in entries(platform, sandbox))
    assert files_with(PASSWORD, platform.data_dir) == []
    # It is there, encrypted.
    with sqlite3.connect(f"file:{next(platform.data_dir.glob('*.db'))}?mode=ro", uri=True) as database:
        stored = database.execute("SELECT network_json FROM sandboxes WHERE id = ?", (box.sandbox_id,)).fetchone()
    assert '"passwordSealed":"v2.' in stored[0]


def test_invalid_proxies(create: Callable[..., Sandbox]) -> None:
    box = create()
    for proxy, words in (
        ({"address": "proxy.example.com"}, "egressProxy.address"),
        ({"address": "10.0.0.1:1080"}, "not public (private)"),
        ({"address": "127.0.0.1:1080"}, "loopback"),
        ({"address": f"{HOST_V4}:1080"}, "belongs to the host"),
        ({"address": "a.b:1080", "password": "hunter2"}, "requires a username"),
        ({"address": "a.b:1080", "tls": {"ca_cert": "none"}}, "egressProxy.tls.caCert"),
        ({"address": "a.b:1080", "tls": {"server_name": "a b"}}, "egressProxy.tls.serverName"),
    ):
        for attempt in (lambda: create(network={"egress_proxy": proxy}), lambda: box.update_network({"egress_proxy": proxy})):
            with pytest.raises((InvalidArgumentException, SandboxException)) as raised:
                attempt()
            assert words in str(raised.value) and "hunter2" not in str(raised.value), (proxy, raised.value)
