"""Memory of the host that connections of one sandbox take in the gateway, for which nobody is charged."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

from e2b import Sandbox

from harness.inside import Background, Marked
from harness.platform import Platform
from harness.traffic import program, until

HOST = "www.example.com"
MIB = 1 << 20
# Connections that have ended for both sides, with this much that the program has not read.
ENDED, UNREAD = 300, 4_000_000
ENDS = f"""
import socket, time
address = socket.getaddrinfo("{HOST}", 1001, socket.AF_INET)[0][4]
held = []
for _ in range({ENDED}):
    one = socket.create_connection(address, 60)
    one.sendall(b"{UNREAD}\\n")
    one.shutdown(socket.SHUT_WR)
    held.append(one)
print("held", flush=True)
time.sleep(86400)
"""


def of_sockets(port: str, pid: int | None = None) -> int:
    """Bytes that the kernel counts for TCP sockets, in the network namespace of a process or in this one."""
    enter = ["nsenter", "--net", "--target", str(pid)] if pid else []
    shown = subprocess.run([*enter, "ss", "-tamnH", *port.split()], capture_output=True, text=True, check=True).stdout
    # Received, being sent, and reserved for both.
    counts = (int(count) for count in re.findall(r"[(,][rwf](\d+)", shown))
    # What is reserved can be less than nothing, which `ss` shows as a large number.
    return sum(count - (1 << 32) if count >> 31 else count for count in counts)


class Held:
    """What the gateway holds for connections of a sandbox to a port."""

    def __init__(self, platform: Platform, box: Sandbox, port: int) -> None:
        assert platform.process
        self.pid, self.inside, self.port = platform.process.pid, Marked(box).host_pid, port
        self.before = self.resident()

    def resident(self) -> int:
        found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{self.pid}/status").read_text())
        assert found
        return int(found[1]) << 10

    def now(self) -> int:
        outside, inside = of_sockets(f"dport = :{self.port}"), of_sockets(f"sport = :{self.port}", self.inside)
        grown = self.resident() - self.before
        print(f"sockets outside {outside // MIB} MiB, inside {inside // MIB} MiB, the platform {grown // MIB} MiB")
        return outside + inside + grown


def test_connections_that_are_not_read(create: Callable[..., Sandbox], platform: Platform) -> None:
    """As many as a sandbox may have, full in both directions."""
    box = create()
    held = Held(platform, box, 1005)
    Background(box, program("unread.py"))
    assert held.now() < 256 * MIB


def test_connections_that_have_ended(create: Callable[..., Sandbox], platform: Platform) -> None:
    """What nobody reads does not stay in sockets that count as connections no more."""
    box = create()
    held = Held(platform, box, 1001)
    Background(box, ENDS)
    # The server has sent what it can, and ends those of which nothing is left to send.
    until(lambda: len(re.findall("ESTAB|CLOSE-WAIT", states(held))) >= ENDED, "they are open in the gateway")
    assert held.now() < 64 * MIB
    assert "FIN-WAIT" not in states(held) and "LAST-ACK" not in states(held)


def states(held: Held) -> str:
    shown = ["nsenter", "--net", "--target", str(held.inside), "ss", "-tanH", "sport", "=", f":{held.port}"]
    return subprocess.run(shown, capture_output=True, text=True, check=True).stdout


def test_answers_that_are_not_read(create: Callable[..., Sandbox], platform: Platform) -> None:
    """With HTTP/2, thousands at a time on few connections to the host of a rule."""
    rules = {HOST: [{"transform": {"headers": {"X-Key": "a-value-of-some-length"}}}]}
    box = create(network={"rules": rules})
    held = Held(platform, box, 443)
    Background(box, program("unread_http2.py"))
    seen = [0]

    def is_still() -> bool:
        # Looks take some milliseconds, in which a server sends more than this.
        seen.append(held.now())
        return len(seen) > 50 and seen[-1] - seen[-50] < MIB

    until(is_still, "the gateway takes no more", within_s=60)
    assert max(seen) < 128 * MIB
