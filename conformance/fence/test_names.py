"""Connections that are allowed by name: where they go, whatever the sandbox claims."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from e2b import Sandbox

from harness.inside import outgoing, root
from harness.internet import Internet
from harness.internet_names import PRIVATE, home

ONLY = {"network": {"deny_out": ["0.0.0.0/0"], "allow_out": ["api.example.com", "*.example.org"]}}
CLAIMED = "45.35.0.1"


@pytest.fixture
def box(create: Callable[..., Sandbox], internet: Internet) -> Sandbox:
    box = create(**ONLY)
    box.files.write("/tmp/authority.pem", internet.authority.read_text())
    return box


def test_the_certificate_is_that_of_the_server(box: Sandbox) -> None:
    """TLS is passed through: the program inside verifies the server itself."""
    outcome = outgoing(box, {"do": "tls", "to": CLAIMED, "name": "api.example.com", "verify": True})[0]
    assert outcome["server"] == home("api.example.com") and outcome["name"] == "api.example.com"


def test_fronting_ends_at_the_server_of_the_name(box: Sandbox, internet: Internet) -> None:
    """Inside of TLS the gateway sees nothing: another Host reaches the server of the allowed name, and no other."""
    with internet.capture() as capture:
        tls = outgoing(box, {"do": "tls", "to": home("hidden.example.net"), "name": "front.example.org", "host": "hidden.example.net"})[0]
        assert tls["server"] == home("front.example.org") and tls["host"] == "hidden.example.net"
        assert capture.to(home("hidden.example.net")) == []
    assert internet.events(kind="dns", name="hidden.example.net") == []


def test_a_second_request_stays_at_the_server_of_the_first(box: Sandbox, internet: Internet) -> None:
    """The first Host of a connection decides; what follows reaches that server alone."""
    requests = (
        "import socket;s=socket.create_connection(('45.35.0.2',80));"
        "s.sendall(b'GET /1 HTTP/1.1\\r\\nHost: keep.example.org\\r\\n\\r\\nGET /2 HTTP/1.1\\r\\nHost: www.example.com\\r\\nConnection: close\\r\\n\\r\\n');"
        "print(b''.join(iter(lambda:s.recv(9999),b'')).decode())"
    )
    with internet.capture() as capture:
        root(box, f'python3 -c "{requests}" || true')
        assert capture.to(home("www.example.com"), "45.35.0.2") == []
    seen = [event for event in internet.events(kind="http") if event["host"] in ("keep.example.org", "www.example.com") and event["path"] in ("/1", "/2")]
    assert {event["server"] for event in seen} == {home("keep.example.org")}


@pytest.mark.parametrize("resolve_first", [True, False], ids=["after a lookup", "without a lookup"])
def test_rebinding(box: Sandbox, internet: Internet, resolve_first: bool) -> None:
    """A name that is public once and private ever after: no packet goes to the private address."""
    name = f"rebind-{resolve_first}.example.org".lower()
    if resolve_first:
        assert outgoing(box, {"do": "resolve", "name": name})[0]["addresses"] == [home(name)]
    attempts = [{"do": kind, "to": to, key: name} for kind, key in (("tls", "name"), ("http", "host")) for to in (home(name), CLAIMED, PRIVATE)]
    events = internet.mark()
    outcomes = outgoing(box, *attempts * 3)
    assert {outcome.get("server") for outcome in outcomes} <= {None, home(name)}, outcomes
    assert internet.closed.packets() == []
    assert events(server=PRIVATE) == []


def test_several_addresses(box: Sandbox, internet: Internet) -> None:
    """Private addresses among those of a name are left out."""
    mixed, two = outgoing(
        box,
        {"do": "tls", "to": CLAIMED, "name": "v4-10-9-0-1.v4-93-186-0-1.example.org"},
        {"do": "tls", "to": CLAIMED, "name": "v4-93-186-0-2.v4-93-186-0-3.example.org"},
    )
    assert mixed.get("server") in (None, "93.186.0.1")
    assert two["server"] in ("93.186.0.2", "93.186.0.3")
    assert internet.closed.packets() == []


def test_a_slow_name(box: Sandbox) -> None:
    """A hello in single bytes, over two seconds."""
    slow = {"do": "hello", "to": CLAIMED, "name": "slow.example.org", "cut": 16, "pause": 0.06}
    assert outgoing(box, slow)[0]["result"] == "ok"


def test_a_client_that_never_says_a_name(box: Sandbox) -> None:
    outcome = outgoing(box, {"do": "tcp", "to": CLAIMED, "port": 443, "send": ""})[0]
    # Reset when the gateway has waited long enough; until then the connection is silent.
    assert outcome["result"] in ("ECONNRESET", "silent")


def test_servers_that_speak_first(create: Callable[..., Sandbox]) -> None:
    """Where the address decides, the gateway waits for nothing from the client."""
    everything, some = create(), create(network={"deny_out": ["0.0.0.0/0"], "allow_out": ["93.187.0.0/16"]})
    for box in (everything, some):
        outcome = outgoing(box, {"do": "tcp", "to": "93.187.0.1", "port": 1005, "send": ""})[0]
        assert outcome["result"] == "ok" and outcome["data"], outcome


def test_http_2(box: Sandbox) -> None:
    """With a version of TLS and HTTP that clients negotiate end to end."""
    command = "curl -sS --http2 --cacert /tmp/authority.pem -w '%{http_version}' https://api.example.com/second -d body"
    body, _, version = root(box, command).rpartition("}")
    assert version == "2"
    assert json.loads(body + "}")["server"] == home("api.example.com")


def test_many_connections_by_name(box: Sandbox) -> None:
    names = [f"n{number}.example.org" for number in range(60)]
    outcomes = outgoing(box, *({"do": "tls", "to": CLAIMED, "name": name} for name in names))
    assert [outcome.get("server") for outcome in outcomes] == [home(name) for name in names]
