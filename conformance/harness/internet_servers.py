"""The servers of the fake internet: run in a network namespace in which every address is local.

    python3 -m harness.internet_servers LOG CERTIFICATES DOCUMENTS

A server listens on each port for all addresses at the same time, so that whatever a packet is addressed to, private
networks included, would answer it. Everything that arrives is a line of JSON in the log. Ends with its standard input.

| Port | Server |
|---|---|
| 80, 8080; 443, 8443 | HTTP; HTTPS with HTTP/2: see `harness.internet_web` |
| 53 | DNS: see `harness.internet_names` |
| 7 and 443 UDP, 7 TCP | echo |
| 1080 to 1085 TCP | SOCKS5: see `harness.internet_socks` |
| 1001 TCP | sends as many bytes as the first line says, and closes |
| 1002 TCP | receives until the end of the stream, answers with number and SHA-256 of the bytes |
| 1003 TCP | resets the connection after the first byte |
| 1004 TCP | never receives |
| 1005 TCP | sends for ever |
| 1006 TCP | keeps the connection and says nothing |
| 1007 TCP | the same, also when the other end has sent everything |
| 1001 UDP | answers with as many packets as the packet says |
"""

from __future__ import annotations

import hashlib
import ipaddress
import itertools
import json
import os
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import internet_socks, model_api, package_mirror
from harness.internet_names import answer
from harness.internet_socks import Socks
from harness.internet_web import Web, serve_http2

IPV6_FREEBIND = 78
BLOCK = hashlib.shake_256(b"a block that no relay can guess").digest(1 << 16)
LOG = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(os.devnull)
CERTIFICATES = Path(sys.argv[2]) if len(sys.argv) > 2 else Path()
DOCUMENTS = Path(sys.argv[3]) if len(sys.argv) > 3 else Path()
log_file = open(LOG, "ab", buffering=0)
connections = itertools.count(1)


def record(**event: Any) -> None:
    """One line of the log. A single write, so that lines of threads do not mix."""
    log_file.write(json.dumps({"at": time.time(), **event}).encode() + b"\n")


def plain(address: str) -> str:
    """An address as people write it: an IPv4 address that a socket of both families shows, as IPv4."""
    mapped = ipaddress.IPv6Address(address.partition("%")[0]).ipv4_mapped
    return str(mapped) if mapped else address


class Connection:
    """An accepted TCP connection: what it was addressed to, and how it ended."""

    def __init__(self, client: socket.socket) -> None:
        self.socket = client
        self.id = next(connections)
        address, port = client.getsockname()[:2]
        self.server, self.port = plain(address), port
        self.peer = plain(client.getpeername()[0])
        self.name: str | None = None
        record(kind="tcp", id=self.id, server=self.server, port=port, peer=self.peer)

    def ended(self, how: str, count: int) -> None:
        record(kind="end", id=self.id, server=self.server, port=self.port, how=how, bytes=count)


def receive_all(connection: Connection, each: Callable[[bytes], None]) -> None:
    """Receives until the end of the stream or a reset, and records which of them."""
    count, how = 0, "eof"
    try:
        while data := connection.socket.recv(1 << 16):
            count += len(data)
            each(data)
    except OSError:
        how = "reset"
    connection.ended(how, count)


def echo(connection: Connection) -> None:
    receive_all(connection, connection.socket.sendall)


def source(connection: Connection) -> None:
    left = int(connection.socket.makefile("rb").readline())
    while left:
        sent = connection.socket.send(BLOCK[: min(left, len(BLOCK))])
        # Always whole blocks but for the last, so that the content is the same however it is cut.
        if sent < min(left, len(BLOCK)):
            connection.socket.sendall(BLOCK[sent : min(left, len(BLOCK))])
            sent = min(left, len(BLOCK))
        left -= sent


def sink(connection: Connection) -> None:
    digest, count = hashlib.sha256(), 0

    def take(data: bytes) -> None:
        nonlocal count
        count += len(data)
        digest.update(data)

    receive_all(connection, take)
    connection.socket.sendall(f"{count} {digest.hexdigest()}\n".encode())


def reset(connection: Connection) -> None:
    connection.socket.recv(1)
    connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.socket.close()


def stall(connection: Connection) -> None:
    # A reset or an end shows as a hang-up, without receiving anything.
    while not connection.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in (7, 8):
        time.sleep(0.05)
    connection.ended("closed", 0)


def endless(connection: Connection) -> None:
    count = 0
    try:
        while True:
            count += connection.socket.send(BLOCK)
    except OSError:
        connection.ended("reset", count)


def silent(connection: Connection) -> None:
    receive_all(connection, lambda _: None)


def keep(connection: Connection) -> None:
    # Until it is reset: the kernel closes it then.
    while connection.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != 7:
        time.sleep(0.05)
    connection.ended("reset", 0)


def web(connection: Connection) -> None:
    Web(connection, record, DOCUMENTS)


def tls_contexts() -> ssl.SSLContext:
    """One context per certificate; the server name selects it, and the first is the default."""
    by_domain: dict[str, ssl.SSLContext] = {}
    for certificate in sorted(CERTIFICATES.glob("*.pem")):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        # Git's server and the APIs of models speak HTTP/1.1.
        context.set_alpn_protocols(["http/1.1"] if certificate.stem in ("github.com", *model_api.DOMAINS, *package_mirror.DOMAINS) else ["h2", "http/1.1"])
        by_domain[certificate.stem] = context
    default = next(iter(by_domain.values()))

    def select(session: Any, name: str | None, _: ssl.SSLContext) -> None:
        session.requested_name = name
        domain = ".".join((name or "").rstrip(".").lower().split(".")[-2:])
        session.context = by_domain.get(domain, default)

    default.sni_callback = select
    return default


def secure_web(context: ssl.SSLContext) -> Callable[[Connection], None]:
    def serve(connection: Connection) -> None:
        session = context.wrap_socket(connection.socket, server_side=True, do_handshake_on_connect=False)
        connection.socket = session
        try:
            session.do_handshake()
        finally:
            connection.name = getattr(session, "requested_name", None)
            record(kind="tls", id=connection.id, server=connection.server, port=connection.port, name=connection.name)
        if session.selected_alpn_protocol() == "h2":
            serve_http2(connection, record)
        else:
            Web(connection, record, DOCUMENTS)

    return serve


def secure_socks(context: ssl.SSLContext) -> Callable[[Connection], None]:
    def serve(connection: Connection) -> None:
        connection.socket = context.wrap_socket(connection.socket, server_side=True)
        Socks(connection, record, needs_password=True)

    return serve


def dns_over_tcp(connection: Connection) -> None:
    stream = connection.socket.makefile("rb")
    while size := stream.read(2):
        query = stream.read(struct.unpack("!H", size)[0])
        if reply := answer(query, "tcp", connection.server, record):
            connection.socket.sendall(struct.pack("!H", len(reply)) + reply)


def listen(port: int, handler: Callable[[Connection], None], receive_buffer: int = 0) -> None:
    server = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if receive_buffer:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    server.bind(("::", port))
    server.listen(4096)

    def serve(client: socket.socket) -> None:
        connection = Connection(client)
        try:
            handler(connection)
        except (OSError, ValueError, EOFError):
            pass
        finally:
            try:
                connection.socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            connection.socket.close()

    def accept() -> None:
        while True:
            threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def answer_packets(port: int, reply: Callable[[bytes, str], list[bytes]]) -> None:
    """A UDP server that answers from the address that it was asked at."""
    server = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
    # Addresses that are local by a route alone may be the source.
    server.setsockopt(socket.IPPROTO_IPV6, IPV6_FREEBIND, 1)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    server.bind(("::", port))

    def serve() -> None:
        while True:
            data, control, _, client = server.recvmsg(1 << 16, 256)
            info = next(value for level, kind, value in control if (level, kind) == (socket.IPPROTO_IPV6, socket.IPV6_PKTINFO))
            asked = plain(socket.inet_ntop(socket.AF_INET6, info[:16]))
            record(kind="udp", server=asked, port=port, peer=plain(client[0]), bytes=len(data))
            for packet in reply(data, asked):
                # The address alone: with its interface, which is lo, the answer would stay here.
                source = [(socket.IPPROTO_IPV6, socket.IPV6_PKTINFO, info[:16] + bytes(4))]
                try:
                    server.sendmsg([packet], source, 0, client)
                except OSError as error:
                    record(kind="failed", server=asked, port=port, error=str(error))

    threading.Thread(target=serve, daemon=True).start()


def several(data: bytes, _: str) -> list[bytes]:
    return [b"packet %d" % number for number in range(int(data))]


def dns_over_udp(query: bytes, asked: str) -> list[bytes]:
    reply = answer(query, "udp", asked, record)
    return [reply] if reply else []


def main() -> None:
    contexts = tls_contexts()
    secure = secure_web(contexts)
    for port in (80, 8080):
        listen(port, web)
    for port in (443, 8443):
        listen(port, secure)
    listen(53, dns_over_tcp)
    listen(internet_socks.OPEN, lambda connection: Socks(connection, record))
    listen(internet_socks.AUTHENTICATED, lambda connection: Socks(connection, record, needs_password=True))
    # Clients that speak TLS without HTTP offer no protocols, which these contexts accept.
    listen(internet_socks.SECURE, secure_socks(contexts))
    listen(internet_socks.REFUSING, lambda connection: Socks(connection, record, refuses=True))
    listen(internet_socks.SILENT, silent)
    listen(internet_socks.HTTP, internet_socks.http)
    listen(7, echo)
    listen(1001, source)
    listen(1002, sink)
    listen(1003, reset)
    listen(1004, stall, receive_buffer=1 << 14)
    listen(1005, endless)
    listen(1006, silent)
    listen(1007, keep)
    for port in (7, 443):
        answer_packets(port, lambda data, _: [data])
    answer_packets(1001, several)
    answer_packets(53, dns_over_udp)
    print("ready", flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
