"""What the operator opens, closes and limits: a second platform on the same host, with a configuration of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from e2b import Sandbox

from harness.egress_logs import said
from harness.inside import outgoing
from harness.internet import HOST_V4, RESOLVER, Internet
from harness.internet_names import home
from harness.patience import within
from harness.platform import Platform
from harness.traffic import until, wait_served

ALL = "0.0.0.0/0"
CONNECTIONS, FLOWS = 20, 12
RESTRICTED = f"""
[sandbox]
disk_mb = 256
[egress]
resolvers = "{RESOLVER}:53"
allow_private = "10.9.0.0/24, fd00:9::9"
deny = "93.191.7.0/24, 2606:4700:91::/48"
connections = {CONNECTIONS}
udp_flows = {FLOWS}
[egress.hosts]
"registry.example.com" = "10.9.0.7"
"moved.example.com" = "93.191.0.9"
"""
CLOSED_BY_DEFAULT = f"""
[sandbox]
disk_mb = 256
[egress]
default = "deny"
resolvers = "{RESOLVER}:53"
"""
OPEN_FOR_ONE_TEAM = f'{CLOSED_BY_DEFAULT}[team.default.egress]\ndefault = "allow"\n'
CLOSED_FOR_ONE_TEAM = '[sandbox]\ndisk_mb = 256\n[team.default.egress]\ndefault = "deny"\n'
DISABLED = f'[sandbox]\ndisk_mb = 256\n[egress]\nenabled = false\nresolvers = "{RESOLVER}:53"\n'
PER_SECOND, BURST = 5, 20
BANDWIDTH_MBIT = 40
LIMITED = f"""
[sandbox]
disk_mb = 256
[egress]
resolvers = "{RESOLVER}:53"
connections_per_s = {PER_SECOND}
dns_queries_per_s = {PER_SECOND}
bandwidth_mbit = {BANDWIDTH_MBIT}
"""


@contextmanager
def running(directory: Path, config: str) -> Iterator[Platform]:
    server = Platform(directory, config=config)
    try:
        server.start()
        server.use()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def restricted(platform: Platform, work_dir: Path) -> Iterator[Platform]:
    with running(work_dir / "restricted", RESTRICTED) as server:
        yield server


@pytest.fixture
def make(restricted: Platform, create: Callable[..., Sandbox]) -> Callable[..., Sandbox]:
    restricted.use()
    return create


def results(sandbox: Sandbox, *attempts: dict[str, Any]) -> list[str]:
    return [outcome["result"] for outcome in outgoing(sandbox, *attempts)]


def test_private_addresses_that_are_open(make: Callable[..., Sandbox], internet: Internet) -> None:
    box = make()
    opened = [{"do": kind, "to": to} for to in ("10.9.0.1", "10.9.0.255", "fd00:9::9") for kind in ("tcp", "udp")]
    opened.append({"do": "http", "to": "45.37.0.1", "host": "x"})
    closed = [{"do": kind, "to": to} for to in ("10.9.1.0", "192.168.7.7", "169.254.169.254", "fd00:9::8", HOST_V4) for kind in ("tcp", "udp")]
    assert results(box, *opened) == ["ok"] * 7
    assert "ok" not in results(box, *closed)
    internet.until_closed("10.9.0.1", "10.9.0.255", "fd00:9::9")
    # The capture of closed addresses sees what is opened here: an empty one elsewhere means something.
    sent = {packet.to for packet in internet.closed.packets()}
    assert sent == {"10.9.0.1", "10.9.0.255", "fd00:9::9"}
    internet.closed.seen.clear()


def test_private_dns_servers(make: Callable[..., Sandbox], internet: Internet) -> None:
    """A policy can name those that the operator opened, and no others."""
    servers = {"10.9.0.3": True, "10.9.1.3": False, "93.191.7.3": False, "8.8.4.4": True}
    for server, is_open in servers.items():
        box = make(network={"dns_servers": [server]})
        name = f"by-{server.replace('.', '-')}.example.com"
        outcome = outgoing(box, {"do": "dns", "name": name})[0]
        assert (outcome["code"] == 0) == is_open, (server, outcome)
        assert {event["server"] for event in internet.events(kind="dns", name=name)} == ({server} if is_open else set())
    assert {packet.to for packet in internet.closed.packets()} == {"10.9.0.3"}
    internet.closed.seen.clear()


def test_private_addresses_of_names(make: Callable[..., Sandbox], internet: Internet) -> None:
    box = make(network={"deny_out": [ALL], "allow_out": ["*.example.org", "registry.example.com"]})
    opened, closed, host = outgoing(
        box,
        {"do": "tls", "to": "45.37.0.2", "name": "v4-10-9-0-5.example.org"},
        {"do": "tls", "to": "45.37.0.3", "name": "v4-10-9-1-5.example.org"},
        {"do": "http", "to": "45.37.0.4", "host": "registry.example.com"},
    )
    assert opened["server"] == "10.9.0.5" and closed["result"] == "ECONNRESET" and host["server"] == "10.9.0.7"
    internet.until_closed("10.9.0.5", "10.9.0.7")
    assert {packet.to for packet in internet.closed.packets()} == {"10.9.0.5", "10.9.0.7"}
    internet.closed.seen.clear()


def test_names_that_the_operator_defines(make: Callable[..., Sandbox], internet: Internet) -> None:
    """The resolver answers names that the operator defines itself."""
    box = make()
    moved, other = outgoing(box, {"do": "dns", "name": "moved.example.com"}, {"do": "dns", "name": "stays.example.com"})
    assert moved["addresses"] == ["93.191.0.9"] and other["addresses"] == [home("stays.example.com")]
    assert internet.events(kind="dns", name="moved.example.com") == []


def test_networks_that_the_operator_closes(make: Callable[..., Sandbox]) -> None:
    """No policy of a sandbox opens networks that the operator closes."""
    for box in (make(), make(network={"allow_out": ["93.191.7.0/24", "2606:4700:91::1"]})):
        seen = results(box, *({"do": kind, "to": to} for to in ("93.191.7.1", "2606:4700:91::1", "93.191.6.1") for kind in ("tcp", "udp")))
        assert [result == "ok" for result in seen] == [False] * 4 + [True] * 2, seen
    box = make(network={"deny_out": [ALL], "allow_out": ["*.example.org"]})
    closed, opened = results(
        box, *({"do": "tls", "to": "45.37.0.5", "name": name} for name in ("v4-93-191-7-2.example.org", "v4-93-191-6-2.example.org"))
    )
    assert (closed, opened) == ("ECONNRESET", "ok")


@pytest.mark.parametrize("count", [CONNECTIONS, CONNECTIONS + 10])
def test_connections_of_a_sandbox(make: Callable[..., Sandbox], count: int) -> None:
    box, other = make(), make()
    several = {"do": "many", "to": "93.191.1.1", "count": count, "hold_s": 1}
    outcomes = outgoing(box, several)[0]["outcomes"]
    assert outcomes["ok"] == min(count, CONNECTIONS), outcomes
    assert outcomes.get("silent", 0) == 0, outcomes
    # They are those of one sandbox, and free again at once.
    assert results(other, {"do": "tcp", "to": "93.191.1.2"}) == ["ok"]
    assert outgoing(box, {**several, "count": CONNECTIONS // 2})[0]["outcomes"] == {"ok": CONNECTIONS // 2}


@pytest.mark.parametrize("count", [FLOWS, FLOWS + 8])
def test_udp_flows_of_a_sandbox(make: Callable[..., Sandbox], count: int) -> None:
    """Beyond the limit, flows are refused or replace older ones; those of others are not affected."""
    box, other = make(), make()
    program = (
        "import json,socket,sys\nheld,out=[],{}\n"
        f"for n in range({count}):\n"
        " u=socket.socket(socket.AF_INET,socket.SOCK_DGRAM); u.settimeout(8); u.connect(('93.191.2.1',7)); held.append(u)\n"
        " try: u.send(b'%d'%n); got=u.recv(99).decode()==str(n)\n"
        " except OSError: got=False\n"
        " out[str(got)]=out.get(str(got),0)+1\n"
        "print(json.dumps(out))\n"
    )
    box.files.write("/tmp/flows.py", program)
    seen = outgoing(box, {"do": "run", "command": "python3 /tmp/flows.py"})[0]
    assert FLOWS <= seen["True"] <= count, seen
    assert results(other, {"do": "udp", "to": "93.191.2.2"}) == ["ok"]


def test_a_platform_that_denies_by_default(platform: Platform, work_dir: Path) -> None:
    with running(work_dir / "closed", CLOSED_BY_DEFAULT):
        plain = Sandbox.create()
        some = Sandbox.create(network={"allow_out": ["93.191.3.1"]})
        names = Sandbox.create(network={"deny_out": [ALL], "allow_out": ["api.example.com"]})
        attempts = [{"do": "tcp", "to": "93.191.3.1"}, {"do": "tcp", "to": "93.191.3.2"}, {"do": "tls", "to": "45.37.0.6", "name": "api.example.com"}]
        seen = [result == "ok" for box in (plain, some, names) for result in results(box, *attempts)]
        assert seen == [False, False, False, True, False, False, False, False, True]


@pytest.mark.parametrize(("config", "is_open"), [(OPEN_FOR_ONE_TEAM, True), (CLOSED_FOR_ONE_TEAM, False)])
def test_a_default_for_one_team(platform: Platform, work_dir: Path, config: str, is_open: bool) -> None:
    """The default of a team replaces the operator's for all of its sandboxes, in both directions, and policies are
    above it."""
    with running(work_dir / f"team-{is_open}", config):
        plain, denied, allowed = Sandbox.create(), Sandbox.create(network={"deny_out": ["93.191.3.4"]}), Sandbox.create(network={"allow_out": ["93.191.3.4"]})
        seen = [results(box, {"do": "tcp", "to": "93.191.3.4"}) == ["ok"] for box in (plain, denied, allowed)]
        assert seen == [is_open, False, True]


def test_a_platform_without_network(platform: Platform, work_dir: Path, internet: Internet) -> None:
    """Servers inside can still be reached."""
    with running(work_dir / "disabled", DISABLED) as server:
        box = Sandbox.create(network={"allow_out": [ALL]})
        with internet.capture() as capture:
            attempts = [{"do": kind, "to": "93.191.3.5"} for kind in ("tcp", "udp", "http")]
            attempts += [{"do": "dns", "name": "off.example.com", "over": over} for over in ("udp", "tcp")]
            assert "ok" not in results(box, *attempts)
            assert capture.packets() == []
        until(lambda: said(server, box, "93.191.3.5", "no network here"), "its log says why")
        box.commands.run("exec python3 -m http.server 8000", background=True, timeout=0)
        assert wait_served(server.url, box.get_host(8000)).status_code == 200


@pytest.fixture(scope="module")
def limited(platform: Platform, work_dir: Path) -> Iterator[Platform]:
    with running(work_dir / "limited", LIMITED) as server:
        yield server


def test_names_per_second(limited: Platform, create: Callable[..., Sandbox]) -> None:
    """Beyond a burst, names that no cache has wait for their turn. None is refused, others wait for nothing, and the logs
    say it once.
    """
    limited.use()
    box, other = create(), create()
    asked = [{"do": "dns", "name": f"many-{number}.example.com"} for number in range(BURST + 2 * PER_SECOND)]
    asked[-1]["over"] = "tcp"
    assert [outcome.get("code") for outcome in outgoing(box, *asked)] == [0] * len(asked)
    quick = outgoing(other, {"do": "dns", "name": "calm.example.com"}, *asked[:8])
    assert {outcome.get("code") for outcome in quick} == {0}
    until(lambda: bool(said(limited, box, "egress_dns_limited", "waited")), "an entry")
    assert len(said(limited, box, "egress_dns_limited")) == 1
    assert said(limited, other, "egress_dns_limited") == []
    assert [line for line in limited.log().splitlines() if "egress.dns_queries_per_s" in line and box.sandbox_id in line]


@pytest.mark.parametrize("beyond", [0, 3 * PER_SECOND])
def test_connections_per_second(limited: Platform, create: Callable[..., Sandbox], internet: Internet, beyond: int) -> None:
    """A burst is accepted at once; further ones wait for their turn, and none is refused."""
    limited.use()
    box, other = create(), create()
    to = f"93.191.4.{1 + beyond}"
    # The whole of it, because the first connections may be delayed on their way to the server.
    begun = time.time()
    assert outgoing(box, {"do": "many", "to": to, "count": BURST + beyond})[0]["outcomes"] == {"ok": BURST + beyond}
    took = max(event["at"] for event in internet.events(kind="tcp", server=to)) - begun
    due = beyond / PER_SECOND
    assert due - 0.7 <= took <= due + within(10), took
    assert results(other, {"do": "tcp", "to": "93.191.4.250"}) == ["ok"]


TRANSFER = """
import json, socket, time
size, to = 6_000_000, "93.191.5.1"
begun = time.monotonic()
stream = socket.create_connection((to, 1001)); stream.sendall(b"%d\\n" % size)
received = 0
while data := stream.recv(1 << 16): received += len(data)
down = time.monotonic()
stream = socket.create_connection((to, 1002)); stream.sendall(bytes(size)); stream.shutdown(1)
sent = int(stream.makefile().read().split()[0])
print(json.dumps({"down": down - begun, "up": time.monotonic() - down, "received": received, "sent": sent}))
"""


def test_bandwidth(limited: Platform, platform: Platform, create: Callable[..., Sandbox]) -> None:
    """6 MB take 1.2 s in each direction at 40 Mbit/s; without the limit, next to nothing."""
    for server, is_limited in ((limited, True), (platform, False)):
        server.use()
        box = create()
        box.files.write("/tmp/transfer.py", TRANSFER)
        # Without the limit, a busy machine may be slow many times.
        for _ in range(1 if is_limited else 30):
            took = outgoing(box, {"do": "run", "command": "python3 /tmp/transfer.py"})[0]
            assert took["received"] == took["sent"] == 6_000_000, took
            if is_limited or max(took["down"], took["up"]) < 0.9:
                break
        for direction in ("down", "up"):
            assert (1.0 if is_limited else 0) < took[direction] < (within(15) if is_limited else 0.9), took


@pytest.mark.parametrize("line", ['default = "maybe"', 'resolvers = "nowhere"', 'deny = "10.0.0.0/33"', "connections = -1", 'allow_private = "example.com"'])
def test_invalid_values(internet: Internet, work_dir: Path, line: str) -> None:
    """Named, before anything starts."""
    server = Platform(work_dir / "invalid", config=f"[egress]\n{line}\n")
    try:
        ran = server.run("up", "--config", str(server.config_path), "--listen", f"127.0.0.1:{server.port}", timeout_s=20)
        assert ran.returncode != 0
        assert f"egress.{line.partition(' ')[0]}" in ran.stderr, ran.stderr
    finally:
        server.close()
