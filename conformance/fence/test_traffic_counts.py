"""What a sandbox received and sent, as its metrics tell: counted by the host, whatever the sandbox does or says."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from typing import NamedTuple

import httpx
from e2b import Sandbox

from harness.inside import Background, root
from harness.platform import Platform
from harness.traffic import until

DOWN, UP = 3_000_001, 2_000_003
SERVED, TAKEN = 1_000_003, 700_001
# Calls of the agent are counted, too: programs are written, started, and say what they did.
CALLS = 150_000
# Sends its file to whoever asks, and takes what is posted.
SERVER = f"""
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "{SERVED}"); self.end_headers()
        self.wfile.write(bytes({SERVED}))
    def do_POST(self):
        length = int(self.headers["Content-Length"])
        while length: length -= len(self.rfile.read(min(length, 65536)))
        self.send_response(204); self.end_headers()
    def log_message(self, *words): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Handler)
print("ready", flush=True)
server.serve_forever()
"""


class Bytes(NamedTuple):
    received: int
    sent: int
    at: datetime


def counted(platform: Platform, sandbox: Sandbox) -> Bytes:
    """The newest sample."""
    answer = httpx.get(f"{platform.url}/sandboxes/{sandbox.sandbox_id}/metrics", headers={"X-API-Key": os.environ["E2B_API_KEY"]}, timeout=30)
    samples = answer.raise_for_status().json()
    totals = [(sample["networkReceived"], sample["networkSent"]) for sample in samples]
    assert totals == sorted(totals) and [sent for _, sent in totals] == sorted(sent for _, sent in totals), "a total fell"
    return Bytes(*totals[-1], datetime.fromisoformat(samples[-1]["timestamp"])) if samples else Bytes(0, 0, datetime.min.replace(tzinfo=UTC))


def later(platform: Platform, sandbox: Sandbox) -> Bytes:
    """A sample that was measured after this call."""
    begun = datetime.now(UTC)
    return until(lambda: (found := counted(platform, sandbox)).at > begun and found, "it was measured again", within_s=40)


def between(count: int, least: int) -> None:
    assert least <= count <= least + CALLS, f"{count} for {least}"


def test_known_amounts_both_ways_and_over_a_pause_and_a_restart(create: Callable[..., Sandbox], platform: Platform) -> None:
    box, neighbour = create(), create()
    begun = later(platform, box)
    neighbour_before = counted(platform, neighbour)
    said = root(
        box,
        "python3 -c \"import socket\n"
        "c=socket.create_connection(('93.188.7.1',1001),timeout=60); c.sendall(b'%d\\n')\n"
        "n=0\n"
        "while part:=c.recv(1<<20): n+=len(part)\n"
        "c=socket.create_connection(('93.188.7.1',1002),timeout=60); c.sendall(bytes(%d)); c.shutdown(socket.SHUT_WR)\n"
        "print(n, c.makefile().readline().split()[0])\"" % (DOWN, UP),
        timeout=120,
    )
    assert said.split() == [str(DOWN), str(UP)]
    outward = later(platform, box)
    between(outward.received - begun.received, DOWN)
    between(outward.sent - begun.sent, UP)

    # A client of a server inside; a port and the gateway are one sum.
    Background(box, SERVER)
    host = box.get_host(8000)
    assert len(httpx.get(platform.url, headers={"Host": host}, timeout=60).content) == SERVED
    assert httpx.post(platform.url, headers={"Host": host}, content=bytes(TAKEN), timeout=60).status_code == 204
    inward = later(platform, box)
    between(inward.received - outward.received, TAKEN)
    between(inward.sent - outward.sent, SERVED)

    # A pause ends the connections, and not the sum: also of what was moved after the last sample before it.
    assert len(httpx.get(platform.url, headers={"Host": host}, timeout=60).content) == SERVED
    box.pause()
    box.connect(timeout=300)
    resumed = later(platform, box)
    between(resumed.sent - inward.sent, SERVED)
    between(resumed.received - inward.received, 0)

    assert platform.terminate() == 0
    platform.start()
    restarted = later(platform, box)
    between(restarted.sent - resumed.sent, 0)
    between(restarted.received - resumed.received, 0)

    # Nothing of it is the neighbour's.
    other = later(platform, neighbour)
    between(other.received - neighbour_before.received, 0)
    between(other.sent - neighbour_before.sent, 0)


def test_what_stays_inside_or_is_refused_is_not_counted(create: Callable[..., Sandbox], platform: Platform) -> None:
    """Root inside can move and say what it likes; the host counts what crosses."""
    box = create()
    begun = later(platform, box)
    said = root(
        box,
        "python3 -c \"import socket,threading\n"
        # 40 MB over the loopback.
        "server=socket.create_server(('127.0.0.1',9)); got=[]\n"
        "def take():\n"
        " peer,_=server.accept(); n=0\n"
        " while part:=peer.recv(1<<20): n+=len(part)\n"
        " got.append(n)\n"
        "t=threading.Thread(target=take); t.start()\n"
        "c=socket.create_connection(('127.0.0.1',9)); c.sendall(bytes(40_000_000)); c.close(); t.join()\n"
        # 20 MB of packets that go nowhere: to a closed network, and from the interface itself.
        "u=socket.socket(socket.AF_INET,socket.SOCK_DGRAM)\n"
        "def send(s,*a):\n"
        " try: s.sendto(*a)\n"
        " except OSError: pass\n"
        "for n in range(10_000): send(u,bytes(1000),('10.11.12.13',9))\n"
        "try:\n"
        " raw=socket.socket(socket.AF_PACKET,socket.SOCK_RAW); raw.bind(('eth0',0))\n"
        " for n in range(10_000): raw.send(bytes(1000))\n"
        "except OSError: pass\n"
        "print(got[0])\"; mount -t tmpfs none /proc/net 2>/dev/null; true",
        timeout=120,
    )
    assert said.strip() == "40000000"
    after = later(platform, box)
    between(after.received - begun.received, 0)
    between(after.sent - begun.sent, 0)

