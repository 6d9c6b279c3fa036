"""`dig`, which shows every bit of a response, against the resolver of a sandbox."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from e2b import Sandbox

from harness.internet import Internet
from harness.internet_names import BIG, home

SITE = "www.example.com"
SIXTH = "2606:4700::1111"


@dataclass
class Answer:
    """What `dig` printed of one response."""

    text: str

    def __post_init__(self) -> None:
        head = re.search(r"status: (\w+), id: \d+\n;; flags: ([a-z ]*);", self.text)
        assert head, self.text
        self.code, self.flags = head.group(1), set(head.group(2).split())
        self.records = re.findall(r"^([^;\s]\S*)\s+\d+\s+IN\s+(\S+)\s+(\S+)$", self.text, re.M)
        self.server = re.search(r"^;; SERVER: ([^#]+)#53\(\S+\) \((UDP|TCP)\)$", self.text, re.M)
        assert self.server, self.text
        self.transport = self.server.group(2)


@pytest.fixture
def dig(create: Callable[..., Sandbox]) -> Callable[[str], Answer]:
    box = create()
    return lambda question: Answer(box.commands.run(f"dig +tries=1 +time=5 {question}").stdout)


@pytest.mark.parametrize(("options", "transport"), [("", "UDP"), ("+tcp", "TCP"), ("+noedns", "UDP"), ("+dnssec +nocookie", "UDP")])
def test_addresses(dig: Callable[[str], Answer], options: str, transport: str) -> None:
    answer = dig(f"{options} {SITE} A")
    assert (answer.code, answer.transport) == ("NOERROR", transport)
    assert answer.records == [(f"{SITE}.", "A", home(SITE))]
    assert {"qr", "rd", "ra"} <= answer.flags and "tc" not in answer.flags
    sixth = dig(f"{options} v6-2606-4700--1111.example.com AAAA")
    assert (sixth.code, sixth.records) == ("NOERROR", [("v6-2606-4700--1111.example.com.", "AAAA", SIXTH)])
    # A name without an address of that kind exists nevertheless.
    none = dig(f"{options} {SITE} AAAA")
    assert (none.code, none.records) == ("NOERROR", [])
    assert dig(f"{options} missing-x.example.com A").code == "NXDOMAIN"
    assert dig(f"{options} broken-x.example.com A").code == "SERVFAIL"


def test_other_types(dig: Callable[[str], Answer]) -> None:
    assert dig("other.example.com TXT").records == [("other.example.com.", "TXT", '"text"')]
    answer = dig("alias-x.www.example.com A")
    assert answer.records == [("alias-x.www.example.com.", "CNAME", f"{SITE}."), (f"{SITE}.", "A", home(SITE))]


def test_answers_that_do_not_fit(dig: Callable[[str], Answer]) -> None:
    """A large answer is cut off and marked where the client has said that it takes no more, and is complete over TCP."""
    small = dig("+noedns +ignore big-one.example.com A")
    assert (small.code, small.transport) == ("NOERROR", "UDP")
    assert "tc" in small.flags and len(small.records) < BIG
    # As `dig` does it by itself.
    for options in ("+noedns", "+bufsize=512", "+tcp"):
        whole = dig(f"{options} big-one.example.com A")
        assert (whole.transport, len(whole.records)) == ("TCP", BIG), options
        assert "tc" not in whole.flags


def test_what_the_policy_does_not_open(create: Callable[..., Sandbox], internet: Internet) -> None:
    """Names that nothing may be reached by are refused, and not asked for; those that may be are resolved."""
    box = create(network={"deny_out": ["0.0.0.0/0"], "allow_out": ["open.example.org"]})
    events = internet.mark()
    for options in ("", "+tcp"):
        shut = Answer(box.commands.run(f"dig {options} secret-text.example.org A").stdout)
        assert (shut.code, shut.records) == ("REFUSED", [])
        assert Answer(box.commands.run(f"dig {options} open.example.org A").stdout).records[0][2] == home("open.example.org")
    assert {event["name"] for event in events(kind="dns")} == {"open.example.org"}
