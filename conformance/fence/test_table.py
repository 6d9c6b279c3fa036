"""The table: each denied attempt ends visibly and sends nothing, and its twin arrives where it should."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from e2b import Sandbox
from egress_table import POLICIES, TABLE, Pair

from harness.capture import Packet
from harness.inside import outgoing
from harness.internet import Internet
from harness.patience import within
from harness.platform import Platform

# A denial that takes longer looks like a hang to programs.
VISIBLE_S = 4


@dataclass
class Run:
    """What became of the whole table, attempted at once, and what left the host meanwhile."""

    # Every attempt of each, of which there are several if they were slow.
    denied: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    allowed: dict[str, dict[str, Any]] = field(default_factory=dict)
    sent: list[Packet] = field(default_factory=list)
    arrived: list[dict[str, Any]] = field(default_factory=list)


def key(pair: Pair) -> str:
    return f"{pair.policy}: {pair.name}"


@pytest.fixture(scope="module")
def run(platform: Platform, internet: Internet) -> Iterator[Run]:
    seen = Run()
    events = internet.mark()
    with internet.capture() as capture:
        for policy, options in POLICIES.items():
            denied = [pair for pair in TABLE if pair.policy == policy]
            allowed = [pair for pair in TABLE if (pair.twin_policy or pair.policy) == policy]
            with Sandbox.create(timeout=300, **options) as box:
                outcomes = outgoing(box, *(pair.denied for pair in denied), *(pair.allowed for pair in allowed))
                seen.denied |= {key(pair): [outcome] for pair, outcome in zip(denied, outcomes)}
                # The machine may delay some of them, and what hangs does so each time.
                for _ in range(2):
                    if slow := [pair for pair in denied if seen.denied[key(pair)][-1]["seconds"] >= VISIBLE_S]:
                        for pair, outcome in zip(slow, outgoing(box, *(pair.denied for pair in slow))):
                            seen.denied[key(pair)].append(outcome)
            seen.allowed |= {key(pair): outcome for pair, outcome in zip(allowed, outcomes[len(denied) :])}
        seen.sent = capture.packets()
        seen.arrived = events()
    yield seen


def test_names_of_the_table_are_different() -> None:
    assert len({key(pair) for pair in TABLE}) == len(TABLE) > 60


@pytest.mark.parametrize("pair", TABLE, ids=key)
def test_pair(run: Run, pair: Pair) -> None:
    allowed, attempts = run.allowed[key(pair)], run.denied[key(pair)]
    denied = attempts[-1]
    assert allowed["result"] == "ok", allowed
    lands = pair.lands or pair.allowed.get("to", "").removeprefix("::ffff:")
    if "server" in allowed:
        assert allowed["server"] == lands or not lands, allowed
    if lands:
        assert [event for event in run.arrived if event.get("server") == lands], "the servers saw nothing of it"
    if pair.lands and pair.allowed["to"] != pair.lands:
        assert [packet for packet in run.sent if packet.to == pair.allowed["to"]] == []
    assert denied["result"] in pair.outcomes and "ok" not in [attempt["result"] for attempt in attempts], attempts
    assert denied["seconds"] < within(VISIBLE_S), attempts
    assert [packet for packet in run.sent if packet.to in pair.never] == []
    assert [event for event in run.arrived if event.get("server") in pair.never] == []
