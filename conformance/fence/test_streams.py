"""What is relayed arrives as it was sent: content, ends, resets, back-pressure, packets."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from e2b import Sandbox

from harness.inside import Background, outgoing, root
from harness.internet import BLACK_HOLE, Internet
from harness.internet_web import BLOCK
from harness.patience import within
from harness.platform import Platform
from harness.traffic import until

SIZE = 100_000_000
# Sockets on both sides of the gateway, inside, and at the server, as large as kernels let them grow, and its own buffers.
BUFFERED = 64 << 20


def resident(platform: Platform) -> int:
    """Memory of the platform, bytes."""
    assert platform.process
    lines = Path(f"/proc/{platform.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) * 1024


def written(sandbox: Sandbox, program: str, timeout: float = 120) -> str:
    sandbox.files.write("/tmp/stream.py", "import hashlib,json,socket,struct,sys,time\n" + program)
    return root(sandbox, "python3 /tmp/stream.py", timeout=timeout)


@pytest.mark.parametrize("to", ["93.188.0.1", "2606:4700:88::1"], ids=["v4", "v6"])
def test_100_mb_each_way(create: Callable[..., Sandbox], platform: Platform, to: str) -> None:
    before = resident(platform)
    seen = json.loads(
        written(
            create(),
            f"c=socket.create_connection(('{to}',1001),timeout=60)\n"
            f"c.sendall(b'{SIZE}\\n')\n"
            "down,count=hashlib.sha256(),0\n"
            "while data:=c.recv(1<<20): down.update(data); count+=len(data)\n"
            f"c=socket.create_connection(('{to}',1002),timeout=60)\n"
            "block=bytes(range(256))*4096; up=hashlib.sha256()\n"
            f"left={SIZE}\n"
            "while left: part=block[:left]; c.sendall(part); up.update(part); left-=len(part)\n"
            "c.shutdown(socket.SHUT_WR)\n"
            "said=c.makefile().readline().split()\n"
            "print(json.dumps({'count':count,'down':down.hexdigest(),'up':up.hexdigest(),'said':said}))\n",
        )
    )
    expected = hashlib.sha256((BLOCK * (SIZE // len(BLOCK) + 1))[:SIZE]).hexdigest()
    assert (seen["count"], seen["down"]) == (SIZE, expected)
    # The answer comes after the end of the stream: a half-closed connection goes on in the other direction.
    assert seen["said"] == [str(SIZE), seen["up"]]
    assert resident(platform) - before < 64 << 20


def test_the_end_of_the_server_is_passed_on(create: Callable[..., Sandbox]) -> None:
    """After the server's end, the sandbox can still send."""
    said = written(
        create(),
        "c=socket.create_connection(('93.188.0.2',1001),timeout=10)\nc.sendall(b'10\\n')\n"
        "print(len(c.makefile('rb').read()))\n",
    )
    assert said == "10\n"


def test_resets_are_passed_on(create: Callable[..., Sandbox], internet: Internet) -> None:
    box = create()
    assert outgoing(box, {"do": "tcp", "to": "93.188.0.3", "port": 1003})[0]["result"] == "ECONNRESET"
    events = internet.mark()
    written(
        box,
        # The server has it when its echo is here.
        "c=socket.create_connection(('93.188.0.4',7),timeout=10)\nc.sendall(b'abc')\nc.recv(3,socket.MSG_WAITALL)\n"
        "c.setsockopt(socket.SOL_SOCKET,socket.SO_LINGER,struct.pack('ii',1,0))\nc.close()\n",
    )
    ended = internet.ended(until(lambda: events(kind="tcp", server="93.188.0.4"), "the server has logged it")[0])
    assert (ended["how"], ended["bytes"]) == ("reset", 3)
    written(box, "c=socket.create_connection(('93.188.0.5',1006),timeout=10)\nc.sendall(b'abc')\nc.close()\n")
    ended = internet.ended(until(lambda: events(kind="tcp", server="93.188.0.5"), "the server has logged it")[0])
    assert (ended["how"], ended["bytes"]) == ("eof", 3)


def test_the_end_of_a_sandbox_ends_its_connections(create: Callable[..., Sandbox], internet: Internet) -> None:
    box = create()
    hold = "import socket,time;c=socket.create_connection(('93.188.0.6',1006));c.send(b'x');print('open',flush=True);time.sleep(600)"
    assert Background(box, hold).said == "open\n"
    until(lambda: bool(internet.events(kind="tcp", server="93.188.0.6")), "the connection arrived")
    box.kill()
    internet.ended(internet.events(kind="tcp", server="93.188.0.6")[0])


def test_servers_that_are_not_there(create: Callable[..., Sandbox]) -> None:
    """A port that is closed is reset at once; a host that does not answer, after a while, and others do not wait for it."""
    outcomes = outgoing(
        create(),
        {"do": "tcp", "to": "93.188.0.7", "port": 81},
        {"do": "tcp", "to": BLACK_HOLE, "port": 80},
        {"do": "tcp", "to": "93.188.0.7"},
        {"do": "http", "to": "93.188.0.7"},
    )
    closed, lost, echo, web = outcomes
    assert closed["result"] in ("ECONNRESET", "ECONNREFUSED", "EPIPE") and closed["seconds"] < within(3)
    assert lost["result"] in ("silent", "ECONNRESET")
    assert echo["result"] == web["result"] == "ok" and echo["seconds"] < within(3)


def test_a_server_that_does_not_receive(create: Callable[..., Sandbox], platform: Platform) -> None:
    before = resident(platform)
    sent = int(
        written(
            create(),
            "held,total=[],0\n"
            "for n in range(4):\n"
            " c=socket.create_connection(('93.188.1.%d'%n,1004),timeout=10); c.setblocking(False); held.append(c)\n"
            "until=time.time()+3\n"
            "while time.time()<until:\n"
            " for c in held:\n"
            "  try: total+=c.send(bytes(1<<20))\n"
            "  except BlockingIOError: time.sleep(0.01)\n"
            "print(total)\n",
        )
    )
    assert 0 < sent < 4 * BUFFERED
    assert resident(platform) - before < 32 << 20


def test_a_sandbox_that_does_not_receive(create: Callable[..., Sandbox], platform: Platform, internet: Internet) -> None:
    before = resident(platform)
    written(
        create(),
        "held=[socket.create_connection(('93.188.2.%d'%n,1005),timeout=10) for n in range(4)]\n"
        "for c in held: c.recv(1)\n"
        "time.sleep(3)\n",
    )
    assert resident(platform) - before < 32 << 20
    for number in range(4):
        accepted = internet.events(kind="tcp", server=f"93.188.2.{number}")[0]
        assert 0 < internet.ended(accepted)["bytes"] < BUFFERED


def test_a_slow_receiver_loses_nothing(create: Callable[..., Sandbox]) -> None:
    said = written(
        create(),
        "c=socket.socket(); c.setsockopt(socket.SOL_SOCKET,socket.SO_RCVBUF,8192); c.settimeout(30); c.connect(('93.188.0.8',1001))\n"
        "c.sendall(b'3000000\\n'); digest=hashlib.sha256()\n"
        "while data:=c.recv(20000): digest.update(data); time.sleep(0.002)\n"
        "print(digest.hexdigest())\n",
    )
    assert said.strip() == hashlib.sha256((BLOCK * 46)[:3_000_000]).hexdigest()


def test_answers_as_they_come(create: Callable[..., Sandbox]) -> None:
    """Nothing is held back until there is more of it: here there is more only once the client has what was sent before."""
    seen = json.loads(
        written(
            create(),
            "c=socket.create_connection(('93.188.0.9',80),timeout=10); lines=c.makefile('rb')\n"
            "c.sendall(b'GET /paced/20 HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n'); seen=[]; took=[]\n"
            "while lines.readline().strip(): pass\n"
            "begun=time.monotonic()\n"
            "while line:=lines.readline():\n"
            " seen.append(line.decode()); took.append(time.monotonic()-begun)\n"
            " begun=time.monotonic(); c.sendall(b'x')\n"
            "print(json.dumps({'lines':seen,'took':took}))\n",
        )
    )
    assert seen["lines"] == [f"line {number}\n" for number in range(20)]
    # The machine may delay some of them, and a gateway that waited a moment for more would delay all.
    assert min(seen["took"][1:]) < within(0.03), seen


def test_packets(create: Callable[..., Sandbox], internet: Internet) -> None:
    box = create()
    seen = json.loads(
        written(
            box,
            "u=socket.socket(socket.AF_INET,socket.SOCK_DGRAM); u.settimeout(5); u.bind(('0.0.0.0',0))\n"
            "out={}\n"
            # One socket, several peers: each answer comes from the one that was asked.
            "for n in range(20): u.sendto(b'%d'%n,('93.189.0.%d'%n,7))\n"
            "got={}\n"
            "for _ in range(20): data,peer=u.recvfrom(999); got[peer[0]]=int(data)\n"
            "out['peers']=all(got['93.189.0.%d'%n]==n for n in range(20))\n"
            "sizes=[]\n"
            "for size in (1,512,1472,4000,9000,32000):\n"
            " u.sendto(bytes(size),('93.189.1.1',7))\n"
            " try: sizes.append(len(u.recvfrom(70000)[0]))\n"
            " except TimeoutError: sizes.append(None)\n"
            "out['sizes']=sizes\n"
            "u.sendto(b'30',('93.189.1.2',1001)); out['several']=sorted(u.recvfrom(99)[0].decode() for _ in range(30))\n"
            "u.sendto(b'',('93.189.1.3',7)); out['empty']=u.recvfrom(99)[0].decode()\n"
            "six=socket.socket(socket.AF_INET6,socket.SOCK_DGRAM); six.settimeout(5)\n"
            "six.sendto(b'six',('2606:4700:89::1',7)); out['six']=six.recvfrom(99)[0].decode()\n"
            "print(json.dumps(out))\n",
        )
    )
    assert seen["peers"]
    assert seen["sizes"][:3] == [1, 512, 1472], seen
    assert seen["several"] == sorted(f"packet {number}" for number in range(30))
    assert seen["empty"] == "" and seen["six"] == "six"


def test_nobody_else_answers(create: Callable[..., Sandbox], internet: Internet) -> None:
    """A packet for a flow that comes from another address does not enter the sandbox."""
    box = create()
    listener = (
        "import socket;u=socket.socket(socket.AF_INET,socket.SOCK_DGRAM);u.bind(('0.0.0.0',5555));u.settimeout(3);"
        "u.sendto(b'first',('93.189.2.1',7));print(u.recvfrom(99),flush=True)\n"
        "try: print(u.recvfrom(99))\n"
        "except TimeoutError: print('nothing else')\n"
    )
    program = Background(box, listener)
    assert "first" in program.said
    # From the host itself, to every port that a flow could have.
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        for port in range(32768, 61000):
            other.sendto(b"forged", ("185.199.0.2", port))
    assert "nothing else" in program.handle.wait().stdout


def test_200_connections_at_once(create: Callable[..., Sandbox]) -> None:
    begun = time.monotonic()
    outcome = outgoing(create(), {"do": "many", "to": "93.188.0.10", "count": 200, "hold_s": 1})[0]
    assert outcome["outcomes"] == {"ok": 200}
    assert time.monotonic() - begun < within(30)
