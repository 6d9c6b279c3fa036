"""The command line of `scripts/test.sh`."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

# In the order in which they are listed. `guest` belongs to the long form alone.
STEPS = ("lint", "unit", "build", "sdk", "blobs", "clients", "fuzz", "escape", "fence", "crash", "kubernetes", "guest")
# Parts of the step `clients`, which can be named like steps.
CLIENTS = ("javascript", "cli", "go", "browser", "mcp", "signing", "codeint", "desktop", "gateway", "agents", "dashboard", "docs", "acme", "monitoring")
FLAGS = ("--long", "--changed", "--plan", "--keep-going", "--verbose", "--help")
VALUES = ("--seed", "--hunt", "--lanes", "--binary")
# Seeds are printed to be typed again.
SEEDS = 1_000_000


class UsageError(Exception):
    """A command line that cannot be understood."""


@dataclass(frozen=True)
class Options:
    """What was asked for."""

    steps: tuple[str, ...] = ()
    long: bool = False
    changed: bool = False
    plan: bool = False
    verbose: bool = False
    # Whether a failure leaves everything else as it is.
    keep_going: bool = False
    help: bool = False
    # Times each test is repeated under load, and which tests; 0 without `--hunt`.
    hunt: int = 0
    hunted: str | None = None
    seed: int = 0
    # Suites that run at the same time.
    lanes: int = 3
    # A program to drive instead of one that is built here.
    binary: Path | None = None
    seed_was_given: bool = field(default=False, compare=False)


def parse(words: Sequence[str], cores: int | None = None) -> Options:
    """Reads the words after the name of the script."""
    found = Options(seed=random.SystemRandom().randrange(SEEDS), lanes=default_lanes(cores or os.cpu_count() or 1))
    steps: list[str] = []
    hunted: list[str] = []
    at = 0
    while at < len(words):
        word, equals, value = words[at].partition("=") if words[at].startswith("--") else (words[at], "", "")
        at += 1
        if word in VALUES:
            if not equals:
                if at == len(words):
                    raise UsageError(f"{word} needs a value")
                value = words[at]
                at += 1
            found = with_value(found, word, value)
        elif word in FLAGS and not equals:
            found = with_flag(found, word)
        elif word.startswith("-"):
            raise UsageError(f"unknown option: {word}")
        elif found.hunt and not hunted:
            hunted.append(word)
        elif word in STEPS or word in CLIENTS:
            steps.append(word)
        else:
            raise UsageError(f"unknown step: {word} (one of: {' '.join((*STEPS, *CLIENTS))})")
    found = replace(found, steps=tuple(dict.fromkeys(steps)), hunted=hunted[0] if hunted else None)
    check(found)
    return found


def with_flag(found: Options, word: str) -> Options:
    """One option that has no value."""
    if word == "--long":
        return replace(found, long=True)
    if word == "--changed":
        return replace(found, changed=True)
    if word == "--plan":
        return replace(found, plan=True)
    if word == "--keep-going":
        return replace(found, keep_going=True)
    if word == "--verbose":
        return replace(found, verbose=True)
    return replace(found, help=True)


def with_value(found: Options, word: str, value: str) -> Options:
    """One option that has a value."""
    if word == "--binary":
        return replace(found, binary=Path(value).absolute())
    if not value.isdecimal():
        raise UsageError(f"{word} needs a number, not {value!r}")
    number = int(value)
    if word == "--seed":
        return replace(found, seed=number, seed_was_given=True)
    if number < 1:
        raise UsageError(f"{word} needs a number of at least 1")
    return replace(found, hunt=number) if word == "--hunt" else replace(found, lanes=number)


def check(found: Options) -> None:
    """Refuses options that exclude each other."""
    if found.changed and (found.steps or found.long):
        raise UsageError("--changed chooses by itself what runs: neither steps nor --long go with it")
    if found.hunt and (found.steps or found.changed):
        raise UsageError("--hunt takes one NAME, and neither steps nor --changed")
    if "guest" in found.steps and not found.long:
        raise UsageError("the step guest is part of the long form: scripts/test.sh --long guest")


def default_lanes(cores: int) -> int:
    """How many suites run side by side. Suites mostly wait (0.3 to 0.7 cores each), so there are more than cores."""
    return min(cores + 1, 4)
