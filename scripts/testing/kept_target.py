"""A directory of cargo that is kept between runs, outside of the checkout: what CI uses, which starts from a fresh clone.

Dependencies are half of the compile and differ only with `Cargo.lock`, the compiler and its flags, which are the key. The
crates of this repository are never taken from it: cargo knows a source that changed by its time, and the files of a fresh
clone have times that say nothing. So their artifacts are removed before each compile. What stays is what the compiler itself
keeps of them, which it finds again by the content of the sources: only what differs is compiled again. It counts the directory
of the sources as a part of them, so there is one of it for each. Whoever works in a checkout has cargo's own `target` there, and
does not need this.

One run at a time has it, to its end, because suites drive the program in it; another run uses its own `target`. A compile
that fails removes it, unless it was interrupted, so that an entry that is broken can spoil one run at most.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from testing.cache import Cache, key, remove
from testing.plan import COMPILE, PROGRAM
from testing.report import FAILED, Outcome

# Says `kept` in `.ci/run`.
VARIABLE = "RINGFENCE_TEST_TARGET"
PROFILE = "ci"
FILES = ("Cargo.lock", "Cargo.toml", ".cargo/config.toml")
# Where the compiler keeps what it knows of crates, in each directory that cargo fills.
INCREMENTAL = "incremental"
# How long that stays without being used: sources are somewhere else, or a dependency gives a crate another name.
INCREMENTAL_DAYS = 3


class KeptTarget:
    """The directory, held until the process ends."""

    def __init__(self, root: Path, cache: Cache) -> None:
        compiler = subprocess.run(["rustc", "-vV"], cwd=root, capture_output=True, text=True, check=True).stdout
        flags = os.environ.get("RUSTFLAGS", "")
        self.cache = cache
        self.path = cache.path("target", key(compiler, flags, *((root / file).read_bytes() for file in FILES)))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Raises BlockingIOError while another run has it.
        self._lock = cache.lock(self.path, exclusive=True, wait=False)
        self.path.mkdir(exist_ok=True)
        # Its age is that of its last use.
        os.utime(self.path)
        self._spare_space()
        keep_for(self.path, root)

    def _spare_space(self) -> None:
        """Removes what the compiler keeps in directories with another key, which is most of them, unless a run has them."""
        for other in self.cache.root.glob("target-*"):
            if other == self.path:
                continue
            try:
                descriptor = self.cache.lock(other, exclusive=True, wait=False)
            except BlockingIOError:
                continue
            try:
                for incremental in incrementals(other):
                    remove(incremental)
            finally:
                os.close(descriptor)

    def discard(self) -> None:
        """Removes the kept directory; the lock stays."""
        remove(self.path)


def is_suspect(outcomes: Iterable[Outcome], was_interrupted: bool) -> bool:
    """Whether the directory may be why something did not compile. An interrupt says nothing: cargo goes on from what it has left."""
    return not was_interrupted and any(outcome.task.name in (PROGRAM, COMPILE) and outcome.status == FAILED for outcome in outcomes)


def own_names(root: Path) -> tuple[set[str], set[str]]:
    """The packages of the repository, and what they make: libraries, programs, tests."""
    command = ["cargo", "metadata", "--no-deps", "--offline", "--format-version", "1"]
    packages = json.loads(subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout)["packages"]
    return {package["name"] for package in packages}, {target["name"] for package in packages for target in package["targets"]}


def directories(target: Path) -> list[Path]:
    """What cargo fills: below the triple what is compiled for it, and beside that what runs while cargo compiles."""
    return [*target.glob(f"*/{PROFILE}"), target / PROFILE]


def incrementals(target: Path) -> list[Path]:
    """What the compiler keeps, for all directories of sources."""
    return [found for directory in directories(target) for found in directory.glob(f"{INCREMENTAL}*")]


def keep_for(target: Path, sources: Path, now: float | None = None) -> None:
    """Has the compiler find what it keeps of crates in this directory, and removes what it kept of others that are long gone."""
    limit = (now or time.time()) - INCREMENTAL_DAYS * 86400
    for directory in directories(target):
        link, own = directory / INCREMENTAL, directory / f"{INCREMENTAL}-{key(str(sources))}"
        if link.is_dir() and not link.is_symlink() and not own.exists():
            # Made by the first run, which had no link yet.
            link.rename(own)
        own.mkdir(parents=True, exist_ok=True)
        os.utime(own)
        remove(link)
        link.symlink_to(own.name)
        for other in directory.glob(f"{INCREMENTAL}-*"):
            if other.stat().st_mtime < limit:
                remove(other)


def forget(target: Path, packages: Collection[str], targets: Collection[str], now: float | None = None) -> int:
    """Removes the artifacts of some packages, whatever directory they were compiled in, and what the compiler keeps of crates that
    it was not given for days. Returns how many artifacts were removed.

    `cargo clean -p` does the same for one directory of sources; clones are in others, and what nothing removes adds up.
    """
    of_packages = re.compile(rf"({'|'.join(map(re.escape, packages))})-[0-9a-f]{{16}}")
    names = "|".join(re.escape(name.replace("-", "_")) for name in targets)
    of_targets = re.compile(rf"(lib)?({names})-[0-9a-f]{{16}}(\..*)?")
    removed = 0
    for directory in directories(target):
        for part, pattern in ((".fingerprint", of_packages), ("build", of_packages), ("deps", of_targets)):
            for path in (directory / part).glob("*"):
                if pattern.fullmatch(path.name):
                    remove(path)
                    removed += 1
    limit = (now or time.time()) - INCREMENTAL_DAYS * 86400
    for directory in directories(target):
        for crate in (directory / INCREMENTAL).glob("*"):
            # Each compile of the crate makes and removes something in it.
            if crate.stat().st_mtime < limit:
                remove(crate)
    return removed
