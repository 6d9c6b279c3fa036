"""A policy that changes while connections are open, and one that outlives its platform."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from e2b import Sandbox

from harness.elapse import idle_for, nothing_for
from harness.inside import outgoing, root
from harness.internet import Internet
from harness.internet_names import home
from harness.patience import within
from harness.platform import Platform
from harness.traffic import program, until

ALL = "0.0.0.0/0"
FIRST, SECOND, SIXTH = "93.190.0.1", "93.190.0.2", "2606:4700:90::1"
# No sandbox connects to this one.
LAST = "93.190.0.3"
AT_ONCE_S = 2


class Held:
    """`programs/hold.py` running inside, which writes to a file so that it needs nothing from the platform."""

    def __init__(self, sandbox: Sandbox, *arguments: str) -> None:
        self.sandbox, self.path = sandbox, f"/tmp/held-{time.monotonic_ns()}"
        sandbox.files.write("/tmp/hold.py", program("hold.py"))
        sandbox.commands.run(f"exec python3 /tmp/hold.py {' '.join(arguments)} > {self.path}", background=True, timeout=0)

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in root(self.sandbox, f"cat {self.path} || true").splitlines()]

    def last(self) -> dict[str, str]:
        """What was last said of each address."""
        return {event["to"]: event["event"] for event in self.events()}

    def becomes(self, expected: dict[str, str], within_s: float = 10) -> None:
        until(lambda: self.last() == expected, f"{expected}, and not {self.last()}", within_s)


def results(sandbox: Sandbox, *attempts: dict[str, Any]) -> list[str]:
    return [outcome["result"] for outcome in outgoing(sandbox, *attempts)]


def test_new_and_open_connections(create: Callable[..., Sandbox], internet: Internet) -> None:
    box = create()
    held = Held(box, FIRST, SECOND, SIXTH)
    held.becomes({FIRST: "open", SECOND: "open", SIXTH: "open"})
    box.update_network({"deny_out": [FIRST, "2606:4700::/32"]})
    changed = time.time()
    tcp = [{"do": "tcp", "to": to} for to in (FIRST, SECOND, SIXTH)]
    udp = [{**attempt, "do": "udp"} for attempt in tcp]
    after = results(box, *tcp, *udp)
    assert [result == "ok" for result in after] == [False, True, False] * 2, after
    held.becomes({FIRST: "ECONNRESET", SECOND: "open", SIXTH: "ECONNRESET"})
    assert max(event["at"] for event in held.events()) - changed < within(AT_ONCE_S)
    # The servers see the end as well, without an orderly close.
    assert internet.ended(internet.events(kind="tcp", server=FIRST)[0])["how"] == "reset"
    # An update replaces all of it.
    box.update_network({"deny_out": [SECOND]})
    after = results(box, *tcp, *udp)
    assert [result == "ok" for result in after] == [True, False, True] * 2, after
    box.update_network({"allow_internet_access": False})
    assert "ok" not in results(box, *tcp, *udp)
    box.update_network({})
    assert results(box, *tcp, *udp) == ["ok"] * 6


def test_connections_by_name(create: Callable[..., Sandbox]) -> None:
    """A connection that a name has opened ends with the name; one of another name goes on."""
    box = create(network={"deny_out": [ALL], "allow_out": ["one.example.org", "two.example.org"]})
    names = {"one.example.org", "two.example.org"}
    hold = (
        "import errno,socket,sys,time\n"
        "s=socket.create_connection(('45.36.0.1',80)); name=sys.argv[1]; last=''\n"
        "def say(event):\n global last\n if event!=last: print(event,flush=True)\n last=event\n"
        "try:\n while True:\n"
        "  s.sendall(f'GET / HTTP/1.1\\r\\nHost: {name}\\r\\n\\r\\n'.encode()); say('open' if s.recv(9999) else 'closed'); time.sleep(0.05)\n"
        "except OSError as error: say(errno.errorcode[error.errno])\n"
    )
    box.files.write("/tmp/requests.py", hold)
    for name in names:
        box.commands.run(f"exec python3 /tmp/requests.py {name} > /tmp/{name}", background=True, timeout=0)

    def last(name: str) -> str:
        return (root(box, f"cat /tmp/{name} || true").split() or [""])[-1]

    until(lambda: {last(name) for name in names} == {"open"}, "both are open")
    box.update_network({"deny_out": [ALL], "allow_out": ["two.example.org"]})
    until(lambda: last("one.example.org") in ("ECONNRESET", "EPIPE"), "the first is reset")
    assert last("two.example.org") == "open"
    one, two = outgoing(box, *({"do": "http", "to": "45.36.0.1", "host": name} for name in sorted(names)))
    assert one["result"] == "ECONNRESET" and two["server"] == home("two.example.org")
    codes = [outcome["code"] for outcome in outgoing(box, *({"do": "dns", "name": name} for name in sorted(names)))]
    assert codes == [5, 0]


def test_udp_flows_end_with_their_policy(create: Callable[..., Sandbox], internet: Internet) -> None:
    """Flows of a socket that has sent before end as well."""
    box = create()
    flow = (
        "import socket,time\nu=socket.socket(socket.AF_INET,socket.SOCK_DGRAM); u.settimeout(1); u.connect(('93.190.1.1',7)); last=''\n"
        "while True:\n"
        " try: u.send(b'x'); u.recv(9); now='ok'\n"
        " except OSError: now='denied'\n"
        " if now!=last: print(now,flush=True)\n"
        " last=now; time.sleep(0.05)\n"
    )
    box.files.write("/tmp/flow.py", flow)
    box.commands.run("exec python3 /tmp/flow.py > /tmp/flow", background=True, timeout=0)
    until(lambda: root(box, "cat /tmp/flow || true").split()[-1:] == ["ok"], "packets are answered")
    box.update_network({"deny_out": ["93.190.1.0/24"]})
    until(lambda: root(box, "cat /tmp/flow || true").split()[-1:] == ["denied"], "packets are refused")
    with internet.capture() as capture:
        nothing_for(0.3)
        assert capture.to("93.190.1.1") == []
    box.update_network({})
    until(lambda: root(box, "cat /tmp/flow || true").split()[-1:] == ["ok"], "packets are answered again")


def test_invalid_policies_change_nothing(create: Callable[..., Sandbox]) -> None:
    from e2b import SandboxException

    box = create(network={"deny_out": [FIRST]})
    for update in ({"deny_out": ["example.com"]}, {"allow_out": ["example.com"]}, {"allow_out": ["10.0.0.0/33"]}, {"deny_out": ["x y"]}):
        with pytest.raises(SandboxException):
            box.update_network(update)
        with pytest.raises(SandboxException):
            create(network=update)
    after = results(box, {"do": "tcp", "to": FIRST}, {"do": "tcp", "to": SECOND})
    assert after[0] != "ok" and after[1] == "ok"


def test_a_policy_outlives_its_platform(create: Callable[..., Sandbox], platform: Platform, internet: Internet) -> None:
    """Without a platform there is no network. After kill -9 and a start, each sandbox has what it had."""
    first = create(network={"deny_out": [SECOND]})
    second = create(allow_internet_access=False)
    third = create(network={"deny_out": [ALL], "allow_out": ["*.example.org"]})
    changed = create()
    changed.update_network({"deny_out": [FIRST]})
    held, renewed, denied = Held(first, FIRST), Held(first, "--new", FIRST), Held(second, "--new", FIRST)
    held.becomes({FIRST: "open"})
    renewed.becomes({FIRST: "ok"})
    accepted = internet.mark()
    with internet.capture() as capture:
        platform.kill()
        # The kernel resets its connections, and no new ones are made. The server accepts them in their order, so those from
        # before the kill are logged once one that is made now has come and gone.
        with socket.create_connection((LAST, 7), timeout=within(10)):
            last = until(lambda: accepted(kind="tcp", server=LAST), "the server has accepted all that came before")[0]
        internet.ended(last)
        idle_for(0.3)
        later = internet.mark()
        capture.packets().clear()
        nothing_for(0.7)
        assert [packet for packet in capture.packets() if packet.data[13] & 2 or packet.protocol == "udp"] == []
        assert later(kind="tcp", server=FIRST) == []
    platform.start()
    ready = time.time()
    renewed.becomes({FIRST: "ok"})
    # The kernel inside answers no attempt while there is no gateway: one may be refused, or wait and succeed afterwards.
    until(lambda: any(event["at"] > ready for event in internet.events(kind="tcp", server=FIRST)), "a new connection arrives")
    assert results(first, {"do": "tcp", "to": FIRST}) == ["ok"]
    assert time.time() - ready < within(20)
    # A clean end would mean that all data had arrived.
    assert held.last()[FIRST] in ("ECONNRESET", "EPIPE")
    assert "ok" not in {event["event"] for event in denied.events()}
    tcp = [{"do": "tcp", "to": to} for to in (FIRST, SECOND)]
    named = [{"do": "tls", "to": "45.36.0.2", "name": name} for name in ("www.example.com", "a.example.org")]
    assert [result == "ok" for box in (first, second, third, changed) for result in results(box, *tcp, *named)] == [
        *(True, False, True, True),
        *(False, False, False, False),
        *(False, False, False, True),
        *(False, True, True, True),
    ]


GREEDY = """
import socket, time
held = []
while True:
    for at in ("0.0.0.0", "10.0.0.1", "::"):
        for port in (1, 53):
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                taken = socket.socket(socket.AF_INET6 if ":" in at else socket.AF_INET, kind)
                try:
                    taken.bind((at, port))
                    held.append(taken)
                except OSError:
                    taken.close()
    time.sleep(0.02)
"""


def test_ports_taken_while_there_is_no_platform(create: Callable[..., Sandbox], platform: Platform) -> None:
    """Whatever a sandbox occupies meanwhile harms at most itself."""
    greedy, other = create(allow_internet_access=False), create()
    greedy.files.write("/tmp/greedy.py", GREEDY)
    greedy.commands.run("exec python3 /tmp/greedy.py", background=True, user="root", timeout=0)
    assert results(other, {"do": "tcp", "to": FIRST}) == ["ok"]
    platform.kill()
    idle_for(0.5)
    platform.start()
    assert root(greedy, "echo unharmed") == "unharmed\n"
    assert "ok" not in results(greedy, {"do": "tcp", "to": FIRST}, {"do": "udp", "to": FIRST}, {"do": "tcp", "to": "10.9.0.1"})
    assert results(other, {"do": "tcp", "to": FIRST}, {"do": "udp", "to": FIRST}, {"do": "http", "to": FIRST}) == ["ok"] * 3
