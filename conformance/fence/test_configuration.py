"""What the operator opens, closes and limits: a second platform on the same host, with a configuration of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from e2b import Sandbox

from harness.inside import outgoing
from harness.internet import HOST_V4, RESOLVER, Internet
from harness.internet_names import home
from harness.platform import Platform

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
    # The capture of closed addresses sees what is opened here: an empty one elsewhere means something.
    sent = {packet.to for packet in internet.closed.packets()}
    assert sent == {"10.9.0.1", "10.9.0.255", "fd00:9::9"}
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
    assert {packet.to for packet in internet.closed.packets()} == {"10.9.0.5", "10.9.0.7"}
    internet.closed.seen.clear()


def test_names_that_the_operator_defines(make: Callable[..., Sandbox], internet: Internet) -> None:
    """The resolver answers them itself."""
    box = make()
    moved, other = outgoing(box, {"do": "dns", "name": "moved.example.com"}, {"do": "dns", "name": "stays.example.com"})
    assert moved["addresses"] == ["93.191.0.9"] and other["addresses"] == [home("stays.example.com")]
    assert internet.events(kind="dns", name="moved.example.com") == []


def test_networks_that_the_operator_closes(make: Callable[..., Sandbox]) -> None:
    """No policy of a sandbox opens them."""
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
        " u=socket.socket(socket.AF_INET,socket.SOCK_DGRAM); u.settimeout(2); u.connect(('93.191.2.1',7)); held.append(u)\n"
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
