"""The resolver of the gateway: who answers, what is refused, and that a refused query is never sent on."""

from __future__ import annotations

import base64
import json
import os
import time
from collections import Counter
from collections.abc import Callable

from e2b import Sandbox

from harness.egress_logs import said
from harness.inside import outgoing, root
from harness.internet import RESOLVER, Internet
from harness.internet_names import BIG, home
from harness.patience import within
from harness.platform import Platform
from harness.traffic import until

REFUSED, NXDOMAIN, SERVFAIL = 5, 3, 2
OPEN = ["8.8.8.8", "1.1.1.1", "2606:4700::1111"]
CLOSED = ["10.9.0.1", "192.168.7.7", "169.254.169.254", "fd00:9::9", "10.0.0.3"]
ALL = "0.0.0.0/0"
ONLY = {"network": {"deny_out": ["0.0.0.0/0"], "allow_out": ["api.example.com", "*.example.org"]}}


def answered(box: Sandbox, internet: Internet, prefix: str, servers: list[str]) -> dict[str, list[str]]:
    """The servers that answer from inside, by UDP and by TCP, each with those that were asked for it outside."""
    names = {(server, over): f"{prefix}-{over}-{number}.example.com" for number, server in enumerate(servers) for over in ("udp", "tcp")}
    attempts = [{"do": "dns", "name": name, "server": server, "over": over} for (server, over), name in names.items()]
    outcomes = dict(zip(names, outgoing(box, *attempts)))
    asked: dict[str, list[str]] = {}
    for server in servers:
        both = [(outcomes[server, over], names[server, over]) for over in ("udp", "tcp")]
        is_answered = [outcome["result"] == "ok" and outcome["addresses"] == [home(name)] for outcome, name in both]
        seen = {event["server"] for _, name in both for event in internet.events(kind="dns", name=name)}
        # Both or none; and of what is not answered, nothing is sent.
        assert is_answered in ([True, True], [False, False]) and is_answered[0] == bool(seen), (server, both, seen)
        if seen:
            asked[server] = sorted(seen)
        else:
            # At once, and not after a timeout of the program.
            assert all(outcome["seconds"] < within(4) for outcome, _ in both), (server, both)
    return asked


def test_servers_that_are_open(create: Callable[..., Sandbox], internet: Internet) -> None:
    """Port 53 is like any other port, but for the address of the resolver."""
    every = ["10.0.0.1", *OPEN, *CLOSED]
    itself = {server: [server] for server in OPEN}
    assert answered(create(), internet, "all", every) == {"10.0.0.1": [RESOLVER], **itself}
    box = create(network={"deny_out": ["8.8.8.8"]})
    assert answered(box, internet, "but-one", every) == {"10.0.0.1": [RESOLVER], "1.1.1.1": ["1.1.1.1"], OPEN[2]: [OPEN[2]]}
    # The other names are refused by the resolver, before anything is sent.
    box.update_network({"deny_out": [ALL], "allow_out": ["8.8.8.8", "one.example.org"]})
    assert answered(box, internet, "only-one", every) == {"8.8.8.8": ["8.8.8.8"]}
    box.update_network({"deny_out": [ALL], "allow_out": ["one.example.org"]})
    assert answered(box, internet, "a-name", every) == {}
    box.update_network({"allow_internet_access": False})
    assert answered(box, internet, "none", every) == {}


def test_only_one_server_is_allowed(create: Callable[..., Sandbox], internet: Internet) -> None:
    """With everything else denied: programs can ask it, and the resolver asks it for them where the policy says so."""
    box = create(network={"deny_out": [ALL], "allow_out": ["8.8.8.8"]})
    root(box, "dig +tries=1 +time=5 @8.8.8.8 asked.example.com | grep -q NOERROR")
    assert outgoing(box, {"do": "resolve", "name": "unknown.example.com"})[0]["result"] != "ok"
    box.update_network({"deny_out": [ALL], "allow_out": ["8.8.8.8"], "dns_servers": ["8.8.8.8"]})
    assert outgoing(box, {"do": "resolve", "name": "known.example.net"})[0]["addresses"] == [home("known.example.net")]
    assert {event["server"] for event in internet.events(kind="dns", name="known.example.net")} == {"8.8.8.8"}
    # It is not enough that one of several is open: all of them see the names.
    box.update_network({"deny_out": [ALL], "allow_out": ["8.8.8.8"], "dns_servers": ["8.8.8.8", "1.1.1.1"]})
    assert outgoing(box, {"do": "resolve", "name": "secret.example.net"})[0]["result"] != "ok"
    assert internet.events(kind="dns", name="secret.example.net") == []
    # In place of a server that the sandbox cannot reach, the resolver answers, for allowed names alone.
    box.update_network({"deny_out": [ALL], "allow_out": ["a.example.org"], "dns_servers": ["1.0.0.1"]})
    events = internet.mark()
    attempts = [{"do": "dns", "name": f"{name}.example.org", "server": "1.0.0.1", "over": over} for name in ("a", "b") for over in ("udp", "tcp")]
    assert [outcome["code"] for outcome in outgoing(box, *attempts)] == [0, 0, REFUSED, REFUSED]
    assert {(event["name"], event["server"]) for event in events(kind="dns")} == {("a.example.org", "1.0.0.1")}


def test_many_queries_to_a_server(create: Callable[..., Sandbox]) -> None:
    """Each query has a socket of its own, as resolvers send them."""
    box = create(network={"deny_out": [ALL], "allow_out": ["8.8.8.8"]})
    names = [f"each-{number}.example.com" for number in range(200)]
    outcomes = outgoing(box, *({"do": "dns", "name": name, "server": "8.8.8.8"} for name in names))
    assert [outcome.get("addresses") for outcome in outcomes] == [[home(name)] for name in names]


def test_servers_of_a_policy(create: Callable[..., Sandbox], internet: Internet) -> None:
    """Servers of a policy are asked instead of the operator's, in their order, also after a change."""
    box = create(network={"dns_servers": ["8.8.4.4", "8.8.8.8"]})

    def asked(name: str) -> set[str]:
        assert outgoing(box, {"do": "dns", "name": name})[0]["addresses"] == [home(name)]
        return {event["server"] for event in internet.events(kind="dns", name=name)}

    assert asked("first.example.com") == {"8.8.4.4"}
    box.update_network({"dns_servers": ["1.0.0.1"]})
    assert asked("second.example.com") == {"1.0.0.1"}
    box.update_network({})
    assert asked("third.example.com") == {RESOLVER}


def test_what_names_resolve_to(create: Callable[..., Sandbox], internet: Internet) -> None:
    box = create()
    names = {
        "plain.example.com": [home("plain.example.com")],
        "UPPER.Example.COM": [home("upper.example.com")],
        "v4-93-184-216-34.v4-93-184-216-35.example.com": ["93.184.216.34", "93.184.216.35"],
        "alias-1.v4-93-184-216-36.example.com": ["93.184.216.36"],
        "v6-2606-4700--1111.example.com": ["2606:4700::1111"],
    }
    outcomes = outgoing(box, *({"do": "resolve", "name": name} for name in names))
    assert [outcome.get("addresses") for outcome in outcomes] == list(names.values()), outcomes
    assert "10.0.0.1" in root(box, "cat /etc/resolv.conf")
    assert home("getent.example.com") in root(box, "getent hosts getent.example.com")
    missing, broken, aaaa, truncated, big = outgoing(
        box,
        {"do": "dns", "name": "missing-1.example.com"},
        {"do": "dns", "name": "broken-1.example.com"},
        {"do": "dns", "name": "v6-2606-4700--5.example.com", "type": "AAAA"},
        {"do": "dns", "name": "big-1.example.com"},
        {"do": "dns", "name": "big-2.example.com", "over": "tcp"},
    )
    assert missing["code"] == NXDOMAIN and broken["code"] == SERVFAIL
    assert aaaa["addresses"] == ["2606:4700::5"]
    assert truncated["truncated"] or len(truncated["addresses"]) == BIG, truncated
    assert len(big["addresses"]) == BIG, big


def test_only_allowed_names(create: Callable[..., Sandbox], internet: Internet) -> None:
    box = create(**ONLY)
    denied = [
        *("www.example.com", "example.com", "x.api.example.com", "api.example.com.example.net", "example.org", "evilexample.org"),
        *("v4-93-184-216-34.example.com", "localhost.example.com", "_dns.resolver.arpa", "1.0.9.10.in-addr.arpa", "com", "."),
    ]
    allowed = ["api.example.com", "API.Example.Com", "a.example.org", "a.b.example.org", "xn--bcher-kva.example.org"]
    attempts = [
        {"do": "dns", "name": name, "over": over, "type": kind}
        for name in (*denied, *allowed)
        for over in ("udp", "tcp")
        for kind in ("A", "AAAA")
    ]
    with internet.capture() as capture:
        outcomes = outgoing(box, *attempts)
        sent = b"".join(packet.data for packet in capture.packets()).lower()
    for attempt, outcome in zip(attempts, outcomes):
        assert outcome["result"] == "ok", (attempt, outcome)
        if attempt["name"] in denied:
            assert outcome["code"] == REFUSED, (attempt, outcome)
        elif attempt["type"] == "A":
            assert outcome["addresses"] == [home(attempt["name"])], (attempt, outcome)
    seen = {event["name"] for event in internet.events(kind="dns")}
    assert seen.isdisjoint(set(denied) - {"www.example.com"})
    assert b"\x09localhost" not in sent and b"\x01x\x03api" not in sent and b"\x0bevilexample" not in sent


def test_nothing_is_tunnelled(create: Callable[..., Sandbox], internet: Internet) -> None:
    """Data in names, in types and in malformed queries, in every direction that a query could take."""
    box = create(allow_internet_access=False)
    secrets = [base64.b32encode(os.urandom(30)).decode().strip("=").lower() for _ in range(40)]
    attempts = [
        {"do": "dns", "name": f"{secret}.example.com", "server": server, "over": over, "type": kind}
        for secret, (server, over, kind) in zip(
            secrets * 2,
            [(server, over, kind) for server in ("10.0.0.1", "8.8.8.8", "45.90.1.1", "2606:4700::1111") for over in ("udp", "tcp") for kind in ("A", "TXT", "ANY")] * 4,
        )
    ]
    attempts += [{"do": "resolve", "name": f"{secret}.example.com"} for secret in secrets[:4]]
    attempts += [{"do": kind, "to": "45.90.1.1", "port": port, "send": secrets[0]} for kind in ("tcp", "udp") for port in (853, 5353, 443, 123)]
    events = internet.mark()
    with internet.capture() as capture:
        outcomes = outgoing(box, *attempts)
        assert capture.packets() == []
    assert events() == []
    codes = {outcome["code"] for attempt, outcome in zip(attempts, outcomes) if attempt.get("server") == "10.0.0.1"}
    assert codes == {REFUSED}, outcomes
    assert all(outcome["result"] != "ok" for attempt, outcome in zip(attempts, outcomes) if attempt.get("server") != "10.0.0.1")
    # The same query from a sandbox with access, which the name server sees.
    other = create()
    outgoing(other, {"do": "dns", "name": f"{secrets[0]}.example.com"})
    assert events(kind="dns", name=f"{secrets[0]}.example.com")


MALFORMED = """
import os, random, socket, struct
random.seed(5)
head = b"\\x01\\x00"
name = b"\\x03www\\x07example\\x03com\\x00\\x00\\x01\\x00\\x01"
packets = [b"", b"x", os.urandom(11), os.urandom(12), os.urandom(500), bytes(512),
  b"\\0\\1" + head + b"\\0\\0" + bytes(6),                          # no question
  b"\\0\\1" + head + b"\\0\\2" + bytes(6) + name + name,            # two questions
  b"\\0\\1" + head + b"\\xff\\xff" + bytes(6) + name,               # many that are not there
  b"\\0\\1" + b"\\x81\\x80" + b"\\0\\1" + bytes(6) + name,           # a response
  b"\\0\\1" + head + b"\\0\\1" + bytes(6) + b"\\xc0\\x0c" + bytes(4), # a name that refers to itself
  b"\\0\\1" + head + b"\\0\\1" + bytes(6) + b"\\x3f" + b"a" * 20,    # a label that ends early
  b"\\0\\1" + head + b"\\0\\1" + bytes(6) + (b"\\x3f" + b"a" * 63) * 5 + bytes(5), # a name that is too long
  b"\\0\\1" + b"\\x29\\x00" + b"\\0\\1" + bytes(6) + name,           # an update
  b"\\0\\1" + head + b"\\0\\1" + bytes(6) + name[:-2] + b"\\0\\3",   # another class
  b"\\0\\1" + head + b"\\0\\1" + bytes(6) + name[:-4] + b"\\0\\xfc\\0\\1", # a zone transfer
]
packets += [bytes(random.randrange(256) for _ in range(random.randrange(600))) for _ in range(300)]
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.settimeout(0.01)
for packet in packets:
    udp.sendto(packet, ("10.0.0.1", 53))
for size in (0, 1, 11, 65535):
    for data in (b"", bytes(size // 2), bytes(size)):
        with socket.create_connection(("10.0.0.1", 53), timeout=5) as stream:
            try:
                stream.sendall(struct.pack("!H", size) + data)
                stream.shutdown(socket.SHUT_WR)
                stream.recv(100)
            except OSError:
                pass
held = [socket.create_connection(("10.0.0.1", 53), timeout=5) for _ in range(20)]
print("sent")
"""


def test_malformed_queries(create: Callable[..., Sandbox], internet: Internet) -> None:
    box = create(**ONLY)
    box.files.write("/tmp/malformed.py", MALFORMED)
    assert root(box, "python3 /tmp/malformed.py") == "sent\n"
    udp, tcp = outgoing(box, {"do": "dns", "name": "after.example.org"}, {"do": "dns", "name": "then.example.org", "over": "tcp"})
    assert udp["addresses"] == [home("after.example.org")] and tcp["addresses"] == [home("then.example.org")]


ORDINARY = """
import json, socket, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
name, failed = sys.argv[1], []
def look_up(number):
    try: assert socket.getaddrinfo(name, 80, type=socket.SOCK_STREAM)
    except OSError as error: failed.append(str(error))
def connect(number):
    for _ in range(6):
        try: socket.create_connection((name, 80), timeout=20).close()
        except OSError as error: failed.append(str(error))
        time.sleep(0.33)
def all_at_once(count, work):
    begun = time.monotonic()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    return time.monotonic() - begun
look_up(0)
took = {"threads": all_at_once(200, look_up)}
begun = time.monotonic()
for number in range(300): look_up(number)
took["one by one"] = time.monotonic() - begun
took["workers"] = all_at_once(30, connect)
print(json.dumps({"failed": failed, "took": took}))
"""


def test_ordinary_load(create: Callable[..., Sandbox], platform: Platform, internet: Internet) -> None:
    """A name that is known: many threads that look it up, a program that does so again and again, and workers that connect
    three times a second each. Nothing fails or waits.
    """
    box = create()
    box.files.write("/tmp/ordinary.py", ORDINARY)
    events = internet.mark()
    begun = time.monotonic()
    ran = json.loads(root(box, "python3 /tmp/ordinary.py known.example.com", timeout=within(60)))
    seconds = time.monotonic() - begun
    assert ran["failed"] == [], ran
    # It is known for a second, and only then asked for again: what waits for a turn is what nobody knows.
    asked = Counter(event["type"] for event in events(kind="dns", name="known.example.com"))
    assert asked["A"] > 0 and all(count <= seconds + 1 for count in asked.values()), (asked, seconds)
    assert said(platform, box, "egress_dns_limited") == []
    # Programs ask again five seconds after a query that was lost.
    assert all(took < within(30) for took in ran["took"].values()), ran


def test_many_names_at_once(create: Callable[..., Sandbox]) -> None:
    """As a package manager asks. A sandbox that asks ever more waits, and others do not notice."""
    box, other = create(), create()
    names = [f"many-{number}.example.com" for number in range(150)]
    outcomes = outgoing(box, *({"do": "dns", "name": name, "over": "tcp" if number % 7 == 0 else "udp"} for number, name in enumerate(names)))
    assert [outcome.get("addresses") for outcome in outcomes] == [[home(name)] for name in names]
    flood = (
        "import os,socket,time\nu=socket.socket(socket.AF_INET,socket.SOCK_DGRAM)\nend=time.time()+2\n"
        "while time.time()<end: u.sendto(os.urandom(2)+b'\\1\\0\\0\\1'+bytes(6)+b'\\x08'+os.urandom(4).hex().encode()+b'\\7example\\3com\\0\\0\\1\\0\\1',('10.0.0.1',53))\n"
    )
    box.files.write("/tmp/flood.py", flood)
    handle = box.commands.run("python3 /tmp/flood.py", background=True, timeout=60)
    outcomes = outgoing(other, *({"do": "dns", "name": f"calm-{number}.example.com"} for number in range(20)))
    assert [outcome.get("code") for outcome in outcomes] == [0] * 20, outcomes
    handle.wait()
    until(lambda: outgoing(box, {"do": "dns", "name": "later.example.com"})[0].get("code") == 0, "it is answered again")
