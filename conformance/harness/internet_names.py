"""The name server of the fake internet. What a name resolves to follows from the name alone.

| Label anywhere in the name | Answer |
|---|---|
| `v4-93-184-216-34` | that address; several labels, several addresses |
| `v6-2606-4700--1111` | that address, for AAAA |
| `rebind-X` | a public address at the first query for A, a private one at every later query |
| `alias-X` | a CNAME of the rest of the name |
| `big-X` | more addresses than fit into a UDP packet, so a truncated answer there |
| `missing-X` | NXDOMAIN |
| `broken-X` | SERVFAIL |
| `localhost` at the end | 127.0.0.1, which is where clients on the host of the fake internet find the platform |
| none of these | one public address, different for each name |
"""

from __future__ import annotations

import re
import socket
import struct
import threading
import zlib
from collections import Counter
from collections.abc import Callable

A, CNAME, TXT, AAAA = 1, 5, 16, 28
TYPES = {A: "A", CNAME: "CNAME", TXT: "TXT", AAAA: "AAAA"}
NOERROR, SERVFAIL, NXDOMAIN = 0, 2, 3
RESPONSE, TRUNCATED = 0x8580, 0x0200
PRIVATE = "10.9.0.1"
BIG = 60

asked: Counter[str] = Counter()
lock = threading.Lock()


def home(name: str) -> str:
    """The address of a name that says nothing about its address."""
    number = zlib.crc32(name.lower().rstrip(".").encode()) & 0xFFFF
    return f"151.101.{number >> 8}.{number & 0xFF}"


def addresses(name: str, kind: int) -> list[str]:
    """The addresses of a name."""
    labels = name.split(".")
    if kind == AAAA:
        return [label[3:].replace("-", ":") for label in labels if label.startswith("v6-")]
    if kind != A:
        return []
    if labels[-1:] == ["localhost"]:
        return ["127.0.0.1"]
    if name.startswith("rebind-"):
        with lock:
            asked[name] += 1
            return [home(name) if asked[name] == 1 else PRIVATE]
    if name.startswith("big-"):
        return [f"151.101.250.{number}" for number in range(1, BIG + 1)]
    named = [label[3:].replace("-", ".") for label in labels if re.fullmatch(r"v4(-\d+){4}", label)]
    return named or ([] if any(label.startswith("v6-") for label in labels) else [home(name)])


def encoded(name: str) -> bytes:
    return b"".join(bytes([len(label)]) + label.encode() for label in name.split(".") if label) + b"\0"


def answer(query: bytes, transport: str, server: str, record: Callable[..., None]) -> bytes | None:
    """The answer to a query of one question; None if it is none."""
    if len(query) < 17 or query[2] & 0x80 or query[4:6] != b"\0\1":
        return None
    labels, at = [], 12
    while at < len(query) and query[at]:
        labels.append(query[at + 1 : at + 1 + query[at]])
        at += 1 + query[at]
    question = query[12 : at + 5]
    kind = struct.unpack("!H", query[at + 1 : at + 3])[0]
    sent = b".".join(labels).decode(errors="replace")
    record(kind="dns", name=sent.lower(), type=TYPES.get(kind, str(kind)), transport=transport, server=server)
    name = sent.lower()
    records: list[bytes] = []
    code, flags, owner = NOERROR, RESPONSE, b"\xc0\x0c"
    if name.startswith("missing-"):
        code = NXDOMAIN
    elif name.startswith("broken-"):
        code = SERVFAIL
    else:
        if name.startswith("alias-"):
            name = name.partition(".")[2]
            records.append(_record(owner, CNAME, encoded(name)))
            owner = encoded(name)
        for address in addresses(name, kind):
            family = socket.AF_INET if kind == A else socket.AF_INET6
            records.append(_record(owner, kind, socket.inet_pton(family, address)))
        if kind == TXT:
            records.append(_record(owner, TXT, b"\x04text"))
        if name.startswith("big-") and transport == "udp":
            records, flags = [], RESPONSE | TRUNCATED
    return query[:2] + struct.pack("!5H", flags | code, 1, len(records), 0, 0) + question + b"".join(records)


def _record(owner: bytes, kind: int, data: bytes) -> bytes:
    return owner + struct.pack("!HHIH", kind, 1, 0, len(data)) + data
