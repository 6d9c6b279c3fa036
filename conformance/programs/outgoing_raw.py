"""Tries, as root inside, to send packets past the gateway, and prints what became of each attempt as JSON.

    python3 outgoing_raw.py TARGET_V4 TARGET_V6

A packet that the kernel inside accepts has not left the sandbox yet: what leaves is for the host to see.
"""

import ctypes
import errno
import json
import os
import socket
import struct
import sys
import time

V4, V6 = sys.argv[1], sys.argv[2]
OWN = "10.0.0.2"
FORGED = "45.79.1.1"
PAYLOAD = b"past the gateway"
IP_TRANSPARENT, IP_FREEBIND, IP_OPTIONS, MSG_FASTOPEN = 19, 15, 4, 0x20000000
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
libc = ctypes.CDLL(None, use_errno=True)


def checksum(data):
    data += b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def ip_header(protocol, source, to, size, fragment=0):
    return struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + size, 7, fragment, 64, protocol, 0, socket.inet_aton(source), socket.inet_aton(to))


def udp_header(source_port, port, data):
    return struct.pack("!4H", source_port, port, 8 + len(data), 0) + data


def syn(source, to, port):
    head = struct.pack("!HHIIBBHHH", 40000, port, 1, 0, 0x50, 2, 65535, 0, 0)
    pseudo = socket.inet_aton(source) + socket.inet_aton(to) + struct.pack("!BBH", 0, 6, len(head))
    return head[:16] + struct.pack("!H", checksum(pseudo + head)) + head[18:]


def raw(protocol, data, to, family=socket.AF_INET):
    with socket.socket(family, socket.SOCK_RAW, protocol) as packets:
        packets.sendto(data, (to, 0))


def whole(packet, to):
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as packets:
        packets.setsockopt(socket.IPPROTO_IP, socket.IP_HDRINCL, 1)
        packets.sendto(packet, (to, 0))


def forged_udp(source, port=7, fragment=0):
    data = udp_header(5000, port, PAYLOAD)
    whole(ip_header(17, source, V4, len(data), fragment) + data, V4)


def forged_tcp(source):
    segment = syn(source, V4, 80)
    whole(ip_header(6, source, V4, len(segment)) + segment, V4)


def option(level, name, value, family=socket.AF_INET, kind=socket.SOCK_DGRAM):
    """Sends from a socket with an option that changes how packets are routed."""
    with socket.socket(family, kind) as packets:
        packets.settimeout(2)
        packets.setsockopt(level, name, value)
        to = (V6 if family == socket.AF_INET6 else V4, 7)
        packets.connect(to)
        packets.sendall(PAYLOAD)
        if packets.recv(100) != PAYLOAD:
            raise OSError(errno.ECONNRESET, "closed")


def multicast():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as packets:
        packets.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(OWN))
        packets.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 32)
        packets.sendto(PAYLOAD, ("239.1.2.3", 7))


def broadcast(to):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as packets:
        packets.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        packets.sendto(PAYLOAD, (to, 7))


def from_port(port):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as packets:
        packets.settimeout(2)
        packets.bind(("0.0.0.0", port))
        packets.connect((V4, 7))
        packets.send(PAYLOAD)
        packets.recv(100)


def fast_open():
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as stream:
        # Timeouts of the kernel's own: a socket that does not block reports a connection that is still being made.
        for name in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            stream.setsockopt(socket.SOL_SOCKET, name, struct.pack("ll", 3, 0))
        stream.sendto(PAYLOAD, MSG_FASTOPEN, (V4, 7))
        if stream.recv(100) != PAYLOAD:
            raise OSError(errno.ECONNRESET, "closed")


def echo_request():
    head = struct.pack("!BBHHH", 8, 0, 0, 1, 1)
    data = head[:2] + struct.pack("!H", checksum(head + PAYLOAD)) + head[4:] + PAYLOAD
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as packets:
        packets.settimeout(3)
        packets.connect((V4, 0))
        packets.send(data)
        while packets.recv(1000)[20] != 0:
            pass


def bypass_6(protocol):
    head = struct.pack("!IHBB16s16s", 6 << 28, len(PAYLOAD), protocol, 64, socket.inet_pton(socket.AF_INET6, "2606:4700::bad"), socket.inet_pton(socket.AF_INET6, V6))
    with socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_RAW) as packets:
        packets.setsockopt(socket.IPPROTO_IPV6, 36, 1)
        packets.sendto(head + PAYLOAD, (V6, 0))


def namespaces():
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def netlink(kind, body, flags):
    """A request that changes links, addresses or routes."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as requests:
        requests.send(struct.pack("IHHII", 16 + len(body), kind, flags, 1, 0) + body)
        code = struct.unpack_from("i", requests.recv(4096), 16)[0]
        if code:
            raise OSError(-code, os.strerror(-code))


def attribute(kind, data):
    return struct.pack("HH", 4 + len(data), kind) + data + b"\0" * (-len(data) % 4)


REQUEST_ACK_CREATE = 1 | 4 | 0x400
ETH0 = socket.if_nametoindex("eth0")
ATTEMPTS = {
    "udp with another source": lambda: forged_udp(FORGED),
    "udp with the own source": lambda: forged_udp(OWN),
    "udp from loopback": lambda: forged_udp("127.0.0.1"),
    "udp from the gateway": lambda: forged_udp("10.0.0.1"),
    "dns with another source": lambda: forged_udp(FORGED, 53),
    "a first fragment": lambda: forged_udp(OWN, fragment=0x2000),
    "a later fragment": lambda: forged_udp(OWN, fragment=10),
    "a SYN with another source": lambda: forged_tcp(FORGED),
    "a SYN": lambda: raw(socket.IPPROTO_TCP, syn(OWN, V4, 80), V4),
    "raw udp": lambda: raw(socket.IPPROTO_UDP, udp_header(5001, 7, PAYLOAD), V4),
    **{f"protocol {number}": (lambda number=number: raw(number, PAYLOAD, V4)) for number in (2, 4, 41, 47, 50, 51, 88, 89, 103, 132, 136)},
    **{f"protocol {number}, v6": (lambda number=number: raw(number, PAYLOAD, V6, socket.AF_INET6)) for number in (4, 17, 41, 47, 50, 132)},
    "icmp echo": echo_request,
    "v6 with another source": lambda: bypass_6(17),
    "v6 with a routing header": lambda: bypass_6(43),
    "v6 with a fragment header": lambda: bypass_6(44),
    "packet socket": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)).close(),
    "cooked packet socket": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(3)).close(),
    "XDP socket": lambda: socket.socket(44, socket.SOCK_RAW, 0).close(),
    "vsock": lambda: socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM).close(),
    "bluetooth": lambda: socket.socket(31, socket.SOCK_RAW, 1).close(),
    "bound to lo": lambda: option(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0"),
    "bound to eth0": lambda: option(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"eth0\0"),
    "stream bound to eth0": lambda: option(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"eth0\0", kind=socket.SOCK_STREAM),
    "stream bound to lo": lambda: option(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0", kind=socket.SOCK_STREAM),
    "marked": lambda: option(socket.SOL_SOCKET, socket.SO_MARK, 1),
    "without routing": lambda: option(socket.SOL_SOCKET, socket.SO_DONTROUTE, 1),
    "transparent": lambda: option(socket.IPPROTO_IP, IP_TRANSPARENT, 1),
    "free binding": lambda: option(socket.IPPROTO_IP, IP_FREEBIND, 1),
    "source route": lambda: option(socket.IPPROTO_IP, IP_OPTIONS, bytes([131, 7, 4]) + socket.inet_aton(FORGED) + b"\0"),
    "multicast": multicast,
    "broadcast": lambda: broadcast("255.255.255.255"),
    "directed broadcast": lambda: broadcast("10.0.0.255"),
    **{f"from port {port}": (lambda port=port: from_port(port)) for port in (1, 53, 443)},
    "fast open": fast_open,
    "user and network namespace": namespaces,
    "add an address": lambda: netlink(20, struct.pack("BBBBi", 2, 24, 0, 0, ETH0) + attribute(2, socket.inet_aton("185.199.0.3")), REQUEST_ACK_CREATE),
    "remove an address": lambda: netlink(21, struct.pack("BBBBi", 2, 24, 0, 0, ETH0) + attribute(2, socket.inet_aton(OWN)), 5),
    "add a route": lambda: netlink(24, struct.pack("BBBBBBBBI", 2, 32, 0, 0, 254, 4, 0, 1, 0) + attribute(1, socket.inet_aton(V4)) + attribute(4, struct.pack("i", ETH0)), REQUEST_ACK_CREATE),
    "take eth0 down": lambda: netlink(16, struct.pack("BxHiII", 0, 0, ETH0, 0, 1), 5),
    "add a link": lambda: netlink(16, struct.pack("BxHiII", 0, 0, 0, 0, 0) + attribute(3, b"veth9\0") + attribute(18, attribute(1, b"veth")), REQUEST_ACK_CREATE),
    "add a rule": lambda: netlink(32, struct.pack("BBBBBBBBI", 2, 0, 0, 0, 254, 0, 0, 1, 0), REQUEST_ACK_CREATE),
    "netfilter": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12).close(),
    "forwarding": lambda: open("/proc/sys/net/ipv4/ip_forward", "w").write("1"),
    "tunnel device": lambda: os.close(os.open("/dev/net/tun", os.O_RDWR)),
}


def outcome(attempt):
    child, parent = socket.socketpair()
    if os.fork() == 0:
        result = "ok"
        try:
            attempt()
        except TimeoutError:
            result = "silent"
        except OSError as error:
            result = errno.errorcode.get(error.errno, str(error))
        except BaseException as error:
            result = f"{type(error).__name__}: {error}"
        child.sendall(result.encode())
        os._exit(0)
    child.close()
    result = parent.recv(1000).decode()
    os.wait()
    return result


print(json.dumps({name: outcome(attempt) for name, attempt in ATTEMPTS.items()}))
# What was queued inside may take a moment.
time.sleep(0.2)
