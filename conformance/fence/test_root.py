"""Root inside, with raw sockets and everything else that it has: nothing gets past the gateway."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from e2b import Sandbox

from harness.inside import Background, outgoing, root
from harness.internet import HOST_V4, HOST_V6, Internet
from harness.patience import within
from harness.platform import Platform
from harness.traffic import program

PUBLIC, PUBLIC_V6 = "93.185.1.1", "2606:4700:9::1"
NOT_PERMITTED = {"EPERM", "EACCES", "EROFS", "ENOENT", "EAFNOSUPPORT", "EPROTONOSUPPORT", "EOPNOTSUPP", "ESOCKTNOSUPPORT", "ENODEV"}
# What would change how packets are routed, or show those of others.
MUST_FAIL = [
    *("packet socket", "cooked packet socket", "XDP socket", "vsock", "bluetooth", "user and network namespace"),
    *("add an address", "remove an address", "add a route", "take eth0 down", "add a link", "add a rule"),
    *("netfilter", "forwarding", "tunnel device"),
]


def bypass(sandbox: Sandbox, v4: str, v6: str) -> dict[str, str]:
    sandbox.files.write("/tmp/outgoing_raw.py", program("outgoing_raw.py"), user="root")
    return json.loads(root(sandbox, f"python3 /tmp/outgoing_raw.py {v4} {v6}", timeout=120))


def test_nothing_leaves_without_access(create: Callable[..., Sandbox], internet: Internet) -> None:
    denied, allowed = create(allow_internet_access=False), create()
    events = internet.mark()
    with internet.capture() as capture:
        outcome = bypass(denied, PUBLIC, PUBLIC_V6)
        assert capture.packets() == [], outcome
        assert events() == []
        # The same from a sandbox that may send there: the attempts themselves are sound.
        seen = bypass(allowed, PUBLIC, PUBLIC_V6)
        assert seen["fast open"] == seen["from port 443"] == "ok", seen
        assert capture.to(PUBLIC)
    assert [outcome[name] for name in MUST_FAIL if outcome[name] not in NOT_PERMITTED] == [], outcome
    assert outcome["icmp echo"] not in ("ok", "silent")
    assert outcome["fast open"] != "ok"


def test_no_raw_packet_leaves(create: Callable[..., Sandbox], internet: Internet) -> None:
    """What leaves is made by the gateway, from the host's address, and is TCP or UDP."""
    events = internet.mark()
    with internet.capture() as capture:
        bypass(create(), PUBLIC, PUBLIC_V6)
        sent = capture.packets()
    assert {packet.protocol for packet in sent} <= {"tcp", "udp"}
    assert {packet.to for packet in sent} <= {PUBLIC, PUBLIC_V6}
    assert {event["peer"] for event in events() if "peer" in event} <= {HOST_V4, HOST_V6}


def test_nothing_leaves_for_a_private_address(create: Callable[..., Sandbox], internet: Internet) -> None:
    outcome = bypass(create(), "10.9.0.1", "fd00:9::9")
    assert outcome["fast open"] != "ok"
    assert internet.closed.packets() == []


def test_the_gateway_has_no_other_ports(create: Callable[..., Sandbox]) -> None:
    """10.0.0.1 is the resolver, and nothing else."""
    box = create()
    ports = [*range(1, 200), 3000, 5000, 8080, 15001, 15053, 49983, 65535]
    ports.remove(53)
    outcomes = outgoing(box, *({"do": "tcp", "to": "10.0.0.1", "port": port, "send": "GET / HTTP/1.0\r\n\r\n"} for port in ports))
    assert {outcome["result"] for outcome in outcomes} <= {"ECONNRESET", "EPIPE", "ECONNREFUSED"}
    assert outgoing(box, {"do": "dns", "name": "a.example.com", "over": "tcp"})[0]["addresses"]


def test_sockets_of_the_gateway_take_nothing_directly(create: Callable[..., Sandbox], internet: Internet) -> None:
    """A connection to a port on which the gateway listens inside has no destination outside."""
    box = create()
    listening = "import re;print(*{int(l.split()[1].rpartition(':')[2],16) for n in ('tcp','tcp6') for l in open('/proc/net/'+n).readlines()[1:] if l.split()[3]=='0A'})"
    ports = [int(word) for word in root(box, f'python3 -c "{listening}"').split()]
    events = internet.mark()
    attempts = [
        {"do": "http", "to": to, "port": port, "host": "api.example.com", "path": "/direct"}
        for port in ports
        if port != 49983
        for to in ("127.0.0.1", "10.0.0.1", "10.0.0.2", "::1")
    ]
    outcomes = outgoing(box, *attempts)
    assert all(outcome["result"] != "ok" and outcome["seconds"] < within(5) for outcome in outcomes), outcomes
    assert events(kind="tcp") == []


def test_own_servers_do_not_get_in_the_way(create: Callable[..., Sandbox]) -> None:
    """Servers on the ports of destinations, on all addresses inside and on those of the destinations."""
    box = create()
    hog = (
        "import socket,time\nheld=[]\n"
        f"for at in ('0.0.0.0','10.0.0.1','{PUBLIC}'):\n"
        " for port in (1,7,53,80,443,8080):\n"
        "  for kind in (socket.SOCK_STREAM,socket.SOCK_DGRAM):\n"
        "   s=socket.socket(socket.AF_INET,kind); s.setsockopt(socket.SOL_SOCKET,socket.SO_REUSEPORT,1)\n"
        "   try:\n"
        "    s.bind((at,port)); held.append(s)\n"
        "    if kind==socket.SOCK_STREAM: s.listen()\n"
        "   except OSError: pass\n"
        "assert len(held)>8\n"
        "print('bound',flush=True); time.sleep(600)"
    )
    assert Background(box, hog, "root").said == "bound\n"
    outcomes = outgoing(
        box,
        {"do": "tcp", "to": PUBLIC},
        {"do": "udp", "to": PUBLIC},
        {"do": "http", "to": PUBLIC},
        {"do": "dns", "name": "b.example.com"},
        {"do": "dns", "name": "b.example.com", "over": "tcp"},
        {"do": "dns", "name": "b.example.com", "server": "8.8.8.8"},
    )
    assert [outcome["result"] for outcome in outcomes] == ["ok"] * 6, outcomes


def test_the_host_is_not_reachable(create: Callable[..., Sandbox], platform: Platform, internet: Internet) -> None:
    """Root reaches neither the loopback of the host nor its addresses nor the API of the platform; all of them
    answer on the host."""
    ports = (7, 80, 443, 8080, platform.port)
    attempts: list[dict[str, Any]] = []
    for to in ("127.0.0.1", "127.0.0.2", "::1", "::ffff:127.0.0.1", "0.0.0.0", "::", HOST_V4, HOST_V6, f"::ffff:{HOST_V4}", "10.0.0.1", "10.0.0.2"):
        attempts += [{"do": "tcp", "to": to, "port": port, "send": "GET /health HTTP/1.1\r\nHost: x\r\n\r\n"} for port in ports]
        attempts += [{"do": "udp", "to": to}]
    attempts += [{"do": "http", "to": HOST_V4, "host": name} for name in ("localhost", "127.0.0.1", "sandbox.localhost")]
    attempts += [{"do": "tls", "to": "93.185.2.2", "name": "v4-127-0-0-1.example.com", "port": 443}]
    outcomes = outgoing(create(), *attempts)
    reached = [(attempt, outcome) for attempt, outcome in zip(attempts, outcomes) if outcome["result"] == "ok"]
    # With an open policy names do not matter: the last one goes to its address, which is public.
    assert reached == [(attempts[-1], outcomes[-1])], reached
    assert outcomes[-1]["server"] == "93.185.2.2"


def test_sandboxes_do_not_reach_each_other(create: Callable[..., Sandbox], platform: Platform) -> None:
    box, other = create(), create()
    server = (
        "import socket,threading,time\n"
        "def serve(kind,family,at):\n"
        " s=socket.socket(family,kind); s.bind((at,8123))\n"
        " if kind==socket.SOCK_STREAM: s.listen()\n"
        " print('up',flush=True)\n"
        " while True:\n"
        "  got=s.accept()[1] if kind==socket.SOCK_STREAM else s.recvfrom(100)[1]\n"
        "  open('/tmp/arrived','a').write(f'{got}\\n')\n"
        "for kind in (socket.SOCK_STREAM,socket.SOCK_DGRAM): threading.Thread(target=serve,args=(kind,socket.AF_INET,'0.0.0.0')).start()\n"
    )
    assert "up" in Background(other, server).said
    addresses = root(other, "hostname -I").split()
    targets = {*addresses, "10.0.0.1", "10.0.0.2", "10.0.0.3", "127.0.0.1", HOST_V4}
    attempts = [{"do": kind, "to": to, "port": 8123} for to in sorted(targets) for kind in ("tcp", "udp")]
    # By its public name, at the address of the platform.
    name = other.get_host(8123)
    attempts += [{"do": "http", "to": to, "port": platform.port, "host": name} for to in (HOST_V4, "127.0.0.1")]
    outcomes = outgoing(box, *attempts)
    assert [outcome for outcome in outcomes if outcome["result"] == "ok"] == []
    assert root(other, "cat /tmp/arrived 2>/dev/null || true") == ""
    # The server is there: it takes a connection from inside its own sandbox.
    outgoing(other, {"do": "udp", "to": "127.0.0.1", "port": 8123})
    assert root(other, "cat /tmp/arrived") != ""
