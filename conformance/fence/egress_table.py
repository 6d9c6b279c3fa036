"""The table of what is denied and what is allowed: each denied attempt beside an allowed one that differs from it in
what the policy is about.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from harness.internet import HOST_V4, HOST_V6
from harness.internet_names import home

ALL = "0.0.0.0/0"
RESET = frozenset({"ECONNRESET", "EPIPE"})
# Also what the kernel inside answers where it knows that an address cannot be a peer.
UNREACHABLE = RESET | {"ECONNREFUSED", "ENETUNREACH", "EHOSTUNREACH", "EINVAL", "EACCES", "EADDRNOTAVAIL", "EPERM"}
# For packets: the ICMP error that the sandbox receives.
PROHIBITED = frozenset({"EHOSTUNREACH", "ECONNREFUSED", "EACCES", "ENETUNREACH", "EPERM", "EINVAL"})

POLICIES: dict[str, dict[str, Any]] = {
    "open": {},
    "no access": {"allow_internet_access": False},
    "some denied": {
        "network": {
            "deny_out": ["104.24.0.0/16", "104.25.128.0/17", "151.102.1.6", "2606:4700:1::/48"],
            "allow_out": ["104.24.7.0/24", "104.24.9.9", "2606:4700:1:7::/64"],
        }
    },
    "some allowed": {
        "network": {
            "deny_out": [ALL],
            "allow_out": ["93.184.216.0/24", "140.82.112.3", "2a04:4e42::/32", "10.9.0.1", "169.254.169.254", "fd00:9::/32"],
        }
    },
    "domains": {
        "network": {
            "deny_out": [ALL],
            "allow_out": ["api.example.com", "*.example.org", "Mixed.Example.NET", "dot.example.net.", "140.82.112.3"],
        }
    },
    "domains without access": {"allow_internet_access": False, "network": {"allow_out": ["api.example.com"]}},
    "all domains": {"network": {"deny_out": [ALL], "allow_out": ["*"]}},
}

Attempt = dict[str, Any]


@dataclass(frozen=True)
class Pair:
    """A denied attempt and its allowed twin."""

    name: str
    policy: str
    denied: Attempt
    allowed: Attempt
    outcomes: frozenset[str]
    # No packet may leave for these.
    never: tuple[str, ...]
    # Where the allowed attempt must arrive; where it was addressed to, if not given.
    lands: str | None = None
    twin_policy: str | None = None


def tcp(to: str, port: int = 7, **more: Any) -> Attempt:
    return {"do": "tcp", "to": to, "port": port, **more}


def udp(to: str, port: int = 7, **more: Any) -> Attempt:
    return {"do": "udp", "to": to, "port": port, **more}


def http(to: str, **more: Any) -> Attempt:
    return {"do": "http", "to": to, **more}


def tls(to: str, name: str | None = None, **more: Any) -> Attempt:
    return {"do": "tls", "to": to, "name": name, **more}


def curl(arguments: str) -> Attempt:
    return {"do": "run", "command": f"curl -sS -m 8 {arguments}"}


def pair(name: str, policy: str, denied: Attempt, allowed: Attempt, **more: Any) -> Pair:
    kind = denied["do"]
    outcomes = more.pop("outcomes", PROHIBITED if kind == "udp" else RESET)
    never = more.pop("never", (denied["to"],) if "to" in denied else ())
    return Pair(name, policy, denied, allowed, outcomes, never, **more)


fresh = (f"104.16.{number // 250}.{1 + number % 250}" for number in itertools.count())
fresh_v6 = (f"2606:4700::{number:x}" for number in itertools.count(0x100))


def public(like: str) -> str:
    """A public address of the same family that no other case uses."""
    return next(fresh_v6 if ":" in like else fresh)


CLOSED_TCP = [
    *("10.9.0.1", "10.255.255.254", "172.16.5.4", "172.31.255.254", "192.168.7.7", "100.64.0.9", "100.127.255.254"),
    *("169.254.169.254", "169.254.1.1", "0.0.0.1", "192.0.0.8", "192.0.2.77", "198.18.0.5", "198.19.255.254"),
    *("198.51.100.7", "203.0.113.9", "240.0.0.1", "255.255.255.254", HOST_V4, HOST_V6, "fd00:9::9", "fc00::1", "fec0::1"),
    *("2001:db8::1", "64:ff9b::a09:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::a09:1", "2002:a09:1::1", "2002:a9fe:a9fe::1"),
    *("::a09:1", "::ffff:0:a09:1", "100::1", "2001:0:a09:1::1", "::ffff:10.9.0.1", "::ffff:169.254.169.254"),
]
# The kernel inside knows that nothing can be connected there.
CLOSED_BY_KERNEL = ["0.0.0.0", "224.0.0.251", "239.255.255.250", "255.255.255.255", "::", "ff02::1", "ff0e::1", "fe80::1"]
CLOSED_UDP = ["10.9.0.1", "192.168.7.7", "169.254.169.254", "100.64.0.9", HOST_V4, HOST_V6, "fd00:9::9", "64:ff9b::a09:1"]
MULTICAST_UDP = ["224.0.0.251", "239.255.255.250", "255.255.255.255", "ff02::1", "ff0e::1"]
# The same address as programs may write it, and a public one.
FORMS = [
    ("0x0a090001", "0x5db8d822"),
    ("168361985", "1572395042"),
    ("012.011.0.01", "0135.0270.0330.042"),
    ("10.9.1", "93.184.55330"),
    ("0xa.0x9.0x0.0x1", "0x5d.0xb8.0xd8.0x22"),
    ("[::ffff:10.9.0.1]", "[::ffff:93.184.216.34]"),
    ("v4-10-9-0-1.example.com", "v4-93-184-216-34.example.com"),
    ("v6-fd00-9--9.example.com", "v6-2606-4700--1.example.com"),
    ("alias-1.v4-192-168-7-7.example.com", "alias-1.v4-93-184-216-34.example.com"),
    ("v4-169-254-169-254.example.com", "v4-93-184-216-35.example.com"),
]
# No address, no connection, no answer, and a reset: while curl receives, or before it has sent.
EXITS = frozenset({"exit 6", "exit 7", "exit 52", "exit 55", "exit 56"})


def closed() -> list[Pair]:
    """Addresses that are closed for every policy, here for the most open one."""
    pairs = [pair(f"tcp {to}", "open", tcp(to), tcp(public(to))) for to in CLOSED_TCP]
    pairs += [pair(f"http {to}", "open", http(to), http(public(to))) for to in ("169.254.169.254", "10.9.0.1", "fd00:9::9")]
    pairs += [
        pair(f"tls {to}", "open", tls(to, "www.example.com"), tls(public(to), "www.example.com")) for to in ("192.168.7.7", "fd00:9::9")
    ]
    pairs += [pair(f"tcp {to}", "open", tcp(to), tcp(public(to)), outcomes=UNREACHABLE) for to in CLOSED_BY_KERNEL]
    pairs += [pair(f"udp {to}", "open", udp(to), udp(public(to))) for to in CLOSED_UDP]
    silent = PROHIBITED | {"EADDRNOTAVAIL", "silent"}
    pairs += [pair(f"udp {to}", "open", udp(to, wait_s=2), udp(public(to)), outcomes=silent) for to in MULTICAST_UDP]
    pairs += [pair(f"curl {denied}", "open", curl(f"http://{denied}/"), curl(f"http://{allowed}/"), outcomes=EXITS) for denied, allowed in FORMS]
    for to in ("10.9.0.1", "169.254.169.254", "[fd00:9::9]", "v4-10-9-0-1.example.com"):
        denied, allowed = (f"-L 'http://93.184.216.36/redirect?http://{target}/latest'" for target in (to, public("")))
        pairs.append(pair(f"redirect to {to}", "open", curl(denied), curl(allowed), outcomes=EXITS))
    return pairs


def networks() -> list[Pair]:
    """Policies of networks and addresses."""
    some, only = "some denied", "some allowed"
    pairs = [
        pair("first address of a denied network", some, tcp("104.24.0.0"), tcp("104.23.255.255")),
        pair("last address of a denied network", some, tcp("104.24.255.255"), tcp("104.25.0.0")),
        pair("half of a network", some, tcp("104.25.128.0"), tcp("104.25.127.255")),
        pair("a denied address", some, tcp("151.102.1.6"), tcp("151.102.1.7")),
        pair("a denied address, mapped", some, tcp("::ffff:151.102.1.6"), tcp("::ffff:151.102.1.8"), never=("151.102.1.6",)),
        pair("allowed inside of denied", some, tcp("104.24.8.0"), tcp("104.24.7.255")),
        pair("an allowed address inside of denied", some, tcp("104.24.9.8"), tcp("104.24.9.9")),
        pair("a denied network, v6", some, tcp("2606:4700:1::5"), tcp("2606:4700:2::5")),
        pair("allowed inside of denied, v6", some, tcp("2606:4700:1:8::1"), tcp("2606:4700:1:7::1")),
        pair("denied, udp", some, udp("104.24.0.2"), udp("104.23.0.2")),
        pair("allowed inside of denied, udp", some, udp("104.24.8.2"), udp("104.24.7.2")),
        pair("denied, udp v6", some, udp("2606:4700:1::6"), udp("2606:4700:2::6")),
        pair("denied, http", some, http("104.24.0.3", host="www.example.com"), http("104.23.0.3", host="www.example.com")),
        pair("denied, tls", some, tls("104.24.0.4", "www.example.com"), tls("104.23.0.4", "www.example.com")),
        pair("denied, QUIC port", some, udp("104.24.0.5", 443), udp("104.23.0.5", 443)),
        pair("denied, any port", some, tcp("104.24.0.6", 1001, send="5\n"), tcp("104.23.0.6", 1001, send="5\n")),
        pair("after an allowed network", only, tcp("93.184.217.0"), tcp("93.184.216.255")),
        pair("before an allowed network", only, tcp("93.184.215.255"), tcp("93.184.216.0")),
        pair("beside an allowed address", only, tcp("140.82.112.4"), tcp("140.82.112.3")),
        pair("beside an allowed network, v6", only, tcp("2a04:4e43::1"), tcp("2a04:4e42::1")),
        pair("beside an allowed network, udp", only, udp("93.184.217.1"), udp("93.184.216.1")),
        pair("beside an allowed network, udp v6", only, udp("2a04:4e43::2"), udp("2a04:4e42::2")),
        pair("beside an allowed network, tls without a name", only, tls("93.184.217.2"), tls("93.184.216.2")),
        pair("beside an allowed network, http without Host", only, http("93.184.217.3"), http("93.184.216.3")),
    ]
    # What a policy allows stays closed if the operator does not open it.
    pairs += [pair(f"allowed but closed {to}", only, tcp(to), tcp("93.184.216.4")) for to in ("10.9.0.1", "169.254.169.254", "fd00:9::9")]
    none = "no access"
    pairs += [
        pair(f"{name}", none, attempt("104.17.0.1"), attempt(public("")), twin_policy="open")
        for name, attempt in (
            ("tcp", tcp),
            ("udp", udp),
            ("http", http),
            ("tls", tls),
            ("tls with a name", lambda to: tls(to, "api.example.com")),
            ("http with a name", lambda to: http(to, host="api.example.com")),
        )
    ]
    pairs.append(pair("tcp v6", none, tcp("2606:4700::9"), tcp(public(":")), twin_policy="open"))
    pairs.append(pair("udp v6", none, udp("2606:4700::9"), udp(public(":")), twin_policy="open"))
    return pairs


def domains() -> list[Pair]:
    """Policies of names. A connection goes to an address of the name, wherever it was addressed to."""
    pairs: list[Pair] = []
    claimed = (f"45.33.{number // 250}.{1 + number % 250}" for number in itertools.count())

    def both(title: str, denied: str | None, allowed: str, policy: str = "domains", by: str = "both") -> None:
        """As server name of TLS and as Host of HTTP."""
        lands = home(allowed.partition(":")[0])
        for kind, make in (("tls", lambda name: tls(next(claimed), name)), ("http", lambda name: http(next(claimed), host=name))):
            if by in ("both", kind):
                pairs.append(pair(f"{title}, {kind}", policy, make(denied), make(allowed), lands=lands))

    both("another name", "www.example.com", "api.example.com")
    both("below an exact name", "x.api.example.com", "api.example.com")
    both("above an exact name", "example.com", "api.example.com")
    both("an exact name as prefix", "api.example.com.evil.example.net", "api.example.com")
    both("an exact name as suffix", "xapi.example.com", "api.example.com")
    both("the apex of a wildcard", "example.org", "a.example.org")
    both("a wildcard without its dot", "evilexample.org", "b.example.org")
    both("a wildcard, two levels", "a.b.example.com", "a.b.example.org")
    both("case of the request", "WWW.Example.COM", "API.Example.COM")
    both("case of the policy", "other.example.net", "mixed.example.net")
    both("dot at the end of the policy", "nodot.example.net", "dot.example.net")
    both("dot at the end of the request", "www.example.com.", "api.example.com.", by="http")
    both("Host with a port", "www.example.com:80", "api.example.com:80", by="http")
    both("no name", None, "c.example.org")
    both("an address as name", "140.82.112.3", "d.example.org", by="http")
    both("an empty name", "", "e.example.org", by="http")
    both("a name with a user", "api.example.com@www.example.com", "f.example.org", by="http")
    both("a name with a NUL", "www.example.com\0.example.org", "g.example.org", by="http")
    both("without access", "www.example.com", "api.example.com", policy="domains without access")
    both("no name, all domains", None, "www.example.com", policy="all domains")
    both("an address, all domains", "10.9.0.1", "www.example.net", policy="all domains", by="http")
    name = "domains"
    pairs += [
        pair("bytes that are no name", name, tcp("45.34.0.1", send="hello, world\r\n\r\n"), tcp("140.82.112.3")),
        pair("udp", name, udp("45.34.0.2"), udp("140.82.112.3")),
        pair("QUIC", name, udp(home("q.example.org"), 443), udp("140.82.112.3", 443)),
        pair("text on the port of TLS", name, tcp("45.34.0.3", 443, send="hello\r\n\r\n"), tls("45.34.0.4", "h.example.org"), lands=home("h.example.org")),
        pair("text on the port of HTTP", name, tcp("45.34.0.5", 80, send="hello\r\n\r\n"), http("45.34.0.6", host="i.example.org"), lands=home("i.example.org")),
        pair("TLS on the port of HTTP", name, tls("45.34.0.7", "www.example.com", port=80), http("45.34.0.8", host="j.example.org"), lands=home("j.example.org")),
        pair("a name of a private address", name, tls("45.34.0.9", "v4-10-9-0-1.example.org"), tls("45.34.0.10", "v4-93-184-216-40.example.org"), lands="93.184.216.40"),
        pair("a Host of a private address", name, http("45.34.0.11", host="v4-10-9-0-1.example.org"), http("45.34.0.12", host="v4-93-184-216-41.example.org"), lands="93.184.216.41"),
        pair("a name of a mapped private address", name, tls("45.34.0.13", "v6---ffff-a09-1.example.org"), tls("45.34.0.14", "v6-2606-4700--41.example.org"), lands="2606:4700::41"),
        pair("a name of the host", name, tls("45.34.0.15", "v4-185-199-0-2.example.org"), tls("45.34.0.16", "v4-185-199-0-1.example.org"), lands="185.199.0.1"),
        pair("a name that does not exist", name, tls("45.34.0.17", "missing-1.example.org"), tls("45.34.0.18", "k.example.org"), lands=home("k.example.org")),
        pair("an alias of a private address", name, tls("45.34.0.19", "alias-1.v4-10-9-0-1.example.org"), tls("45.34.0.20", "alias-1.v4-93-184-216-42.example.org"), lands="93.184.216.42"),
        pair("TLS cut in pieces", name, {"do": "hello", "to": "45.34.0.21", "name": "www.example.com", "cut": 40}, {"do": "hello", "to": "45.34.0.22", "name": "l.example.org", "cut": 40}, lands=home("l.example.org")),
        pair("TLS with an encrypted name", name, {"do": "hello", "to": "45.34.0.23", "name": "www.example.com", "extension": 0xFE0D}, {"do": "hello", "to": "45.34.0.24", "name": "m.example.org", "extension": 0xFE0D}, lands=home("m.example.org")),
        pair("the name of another address", name, tls(home("n.example.org"), "www.example.com"), tls("45.34.0.25", "n.example.org"), lands=home("n.example.org"), never=("45.34.0.25",)),
    ]
    return pairs


TABLE = [*closed(), *networks(), *domains()]
