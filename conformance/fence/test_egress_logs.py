"""What the log of a sandbox says about its connections."""

from __future__ import annotations

from collections.abc import Callable

from e2b import Sandbox

from harness.egress_logs import entries, said
from harness.inside import outgoing
from harness.platform import Platform
from harness.traffic import until


def test_denied_connections(create: Callable[..., Sandbox], platform: Platform) -> None:
    box = create(network={"deny_out": ["0.0.0.0/0"], "allow_out": ["api.example.com"]})
    outgoing(
        box,
        {"do": "tls", "to": "45.38.0.1", "name": "www.example.com"},
        {"do": "http", "to": "45.38.0.2", "host": "www.example.net"},
        {"do": "tcp", "to": "45.38.0.3", "send": "no name\r\n\r\n"},
        {"do": "udp", "to": "45.38.0.4"},
        {"do": "tcp", "to": "169.254.169.254", "port": 80},
    )
    for words in (("45.38.0.1", "443", "www.example.com"), ("45.38.0.2", "80", "www.example.net"), ("45.38.0.3", "7"), ("45.38.0.4", "7"), ("169.254.169.254",)):
        until(lambda: bool(said(platform, box, *words)), f"{words} in {entries(platform, box)}")
    # The reasons differ: a closed address is not one that the policy denies.
    reasons = {entry["fields"].get("reason") for entry in entries(platform, box)}
    assert len(reasons - {None}) >= 2, entries(platform, box)


def test_allowed_connections(create: Callable[..., Sandbox], platform: Platform) -> None:
    box = create()
    outgoing(box, {"do": "tcp", "to": "93.192.0.1", "send": "twelve bytes"}, {"do": "http", "to": "93.192.0.2", "host": "logged.example.com"})
    until(lambda: bool(said(platform, box, "93.192.0.1", "12")), f"bytes of the connection in {entries(platform, box)}")
    until(lambda: bool(said(platform, box, "93.192.0.2")), "the second connection")


def test_logs_carry_no_content(create: Callable[..., Sandbox], platform: Platform) -> None:
    box = create()
    outgoing(box, {"do": "http", "to": "93.192.0.3", "host": "x.example.com", "path": "/secret-path?token=secret-token"})
    until(lambda: bool(said(platform, box, "93.192.0.3")), "the connection")
    assert said(platform, box, "secret") == []
    assert "secret-t" not in platform.log()


def test_names_in_logs_are_harmless(create: Callable[..., Sandbox], platform: Platform) -> None:
    """A Host is the sandbox's to choose: no line breaks or escapes of it reach a log."""
    box = create(network={"deny_out": ["0.0.0.0/0"], "allow_out": ["api.example.com"]})
    outgoing(box, {"do": "http", "to": "45.38.1.1", "host": "a\x1b[31m.example.com"}, {"do": "http", "to": "45.38.1.2", "host": "x" * 5000})
    until(lambda: bool(said(platform, box, "45.38.1.1") and said(platform, box, "45.38.1.2")), "both are logged")
    assert all("\x1b" not in entry["message"] and len(str(entry)) < 2000 for entry in entries(platform, box))
    assert "\x1b" not in platform.log()


def test_a_flood_of_denials_is_bounded(create: Callable[..., Sandbox], platform: Platform) -> None:
    box = create(allow_internet_access=False)
    before = len(platform.log())
    outgoing(box, {"do": "many", "to": "45.38.2.1", "count": 1500}, timeout=120)
    assert len(entries(platform, box)) <= 1000
    assert len(platform.log()) - before < 1 << 20
