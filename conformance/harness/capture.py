"""What leaves the host: packets as an interface sends them, from a packet socket."""

from __future__ import annotations

import ipaddress
import socket
import struct
from dataclasses import dataclass

ETH_P_ALL = 3
SO_ATTACH_FILTER, SO_RCVBUFFORCE = 26, 33
IPV4, IPV6 = 0x0800, 0x86DD
NAMES = {1: "icmp", 6: "tcp", 17: "udp", 58: "icmp6"}
BUFFER = 32 << 20
# Where the kernel of the host reports its multicast groups, with a header before that of ICMPv6.
LISTENER_REPORTS = "ff02::16"

# Classic packet filter instructions.
LOAD_HALF, LOAD_WORD, LOAD_BYTE, AND, JUMP_EQUAL, RETURN = 0x28, 0x20, 0x30, 0x54, 0x15, 0x06


@dataclass(frozen=True)
class Packet:
    """A packet that left."""

    protocol: str
    to: str
    port: int
    data: bytes

    @classmethod
    def parse(cls, frame: bytes) -> Packet | None:
        """Parses a frame; none unless it is IP."""
        kind = struct.unpack("!H", frame[12:14])[0]
        if kind == IPV4:
            protocol, to, start = frame[23], socket.inet_ntop(socket.AF_INET, frame[30:34]), 14 + (frame[14] & 15) * 4
        elif kind == IPV6:
            protocol, to, start = frame[20], socket.inet_ntop(socket.AF_INET6, frame[38:54]), 54
        else:
            return None
        port = struct.unpack("!H", frame[start + 2 : start + 4])[0] if protocol in (6, 17) else 0
        return cls(NAMES.get(protocol, str(protocol)), to, port, frame[start:])


class Capture:
    """Records what an interface sends, from its construction on."""

    def __init__(self, link: str, program: list[tuple[int, int, int, int]] | None = None) -> None:
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        self.socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER)
        if program:
            code = b"".join(struct.pack("HBBI", *step) for step in program)
            self.program = code  # The kernel reads it by its address.
            import ctypes

            memory = ctypes.create_string_buffer(code)
            header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(memory))
            self.socket.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, header)
        self.socket.bind((link, ETH_P_ALL))
        self.socket.setblocking(False)
        self.seen: list[Packet] = []

    def __enter__(self) -> Capture:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def packets(self) -> list[Packet]:
        """What was sent until now, without neighbour discovery. Fails if the kernel had to leave out packets."""
        while True:
            try:
                frame, (_, _, direction, *_) = self.socket.recvfrom(1 << 16)
            except BlockingIOError:
                break
            packet = Packet.parse(frame) if direction == socket.PACKET_OUTGOING else None
            if packet and packet.protocol != "icmp6" and packet.to != LISTENER_REPORTS:
                self.seen.append(packet)
        _, dropped = struct.unpack("II", self.socket.getsockopt(263, 6, 8))
        assert dropped == 0, f"{dropped} packets are missing in the capture"
        return self.seen

    def to(self, *addresses: str) -> list[Packet]:
        """Packets to one of the addresses."""
        return [packet for packet in self.packets() if packet.to in addresses]


def destined_to(networks: list[str]) -> list[tuple[int, int, int, int]]:
    """A filter for packets to one of the networks, without neighbour discovery."""
    steps: list[tuple[int, int, int, int]] = []
    for text in networks:
        network = ipaddress.ip_network(text)
        kind, first = (IPV4, 30) if network.version == 4 else (IPV6, 38)
        words = range(0, network.max_prefixlen, 32)
        part = [(LOAD_HALF, 0, 0, 12), (JUMP_EQUAL, 0, 0, kind)]
        if network.version == 6:
            # An ICMPv6 packet is told by a jump to the next network when the values are equal.
            part += [(LOAD_BYTE, 0, 0, 20), (JUMP_EQUAL, 1, 0, 58)]
        for start in words:
            mask = int(network.netmask) >> (network.max_prefixlen - 32 - start) & 0xFFFFFFFF
            value = int(network.network_address) >> (network.max_prefixlen - 32 - start) & 0xFFFFFFFF
            if mask:
                part += [(LOAD_WORD, 0, 0, first + start // 8), (AND, 0, 0, mask), (JUMP_EQUAL, 0, 0, value)]
        part.append((RETURN, 0, 0, 0x40000))
        for at, (code, marked, _, constant) in enumerate(part):
            if code == JUMP_EQUAL:
                away = len(part) - at - 1
                part[at] = (code, away, 0, constant) if marked else (code, 0, away, constant)
        steps += part
    return [*steps, (RETURN, 0, 0, 0)]
