"""A directory of cargo that is kept between runs, outside of the checkout: what CI uses, which starts from a fresh clone.

Dependencies are half of the compile and differ only with `Cargo.lock`, the compiler and its flags, which are the key. The
crates of this repository are never taken from it: cargo knows a source that changed by its time, and the files of a fresh
clone have times that say nothing. So their artifacts are removed before each compile. Whoever works in a checkout has
cargo's own `target` there, and does not need this.

One run at a time has it, to its end, because suites drive the program in it; another run uses its own `target`. A compile
that fails removes it, so that an entry that is broken can spoil one run at most.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from testing.cache import Cache, key, remove
from testing.tasks import CARGO, Task

# Says `kept` in `.ci/run`.
VARIABLE = "RINGFENCE_TEST_TARGET"
FORGET = "forget"
FILES = ("Cargo.lock", "Cargo.toml", ".cargo/config.toml")


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

    def discard(self) -> None:
        """Removes what it has; the lock stays."""
        remove(self.path)


def forget_task(root: Path, triple: str) -> Task:
    """Removes the crates of this repository from it."""
    crates = sorted(manifest.parent.name for manifest in root.glob("crates/*/Cargo.toml"))
    names = [word for crate in crates for word in ("-p", crate)]
    command = ("cargo", "clean", "--locked", "--profile", "ci", "--target", triple, *names)
    return Task(FORGET, "build", command, CARGO, seconds=2000, bound=300, cwd=root)
