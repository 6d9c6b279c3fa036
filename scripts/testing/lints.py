"""Says what clippy has found: `python3 -m testing.lints`.

Clippy is a compiler that also looks for mistakes. A run that compiles the program and the tests does so by it ([`environment`]),
instead of checking everything once more. What it has found is a warning of the compile, with which nothing fails before it is
tested. Here cargo repeats the warnings of what is compiled, which takes seconds, and each of them is a failure.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

# What is compiled besides by this call are benchmarks.
COMMAND = ("cargo", "test", "--locked", "--workspace", "--all-targets", "--profile", "ci", "--no-run", "--message-format=json")


def environment(root: Path) -> dict[str, str]:
    """What has cargo compile the crates of the repository by clippy. Dependencies are compiled as always."""
    sysroot = subprocess.run(["rustc", "--print", "sysroot"], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    return {"RUSTC_WORKSPACE_WRAPPER": f"{sysroot}/bin/clippy-driver"}


def found(messages: Iterable[str]) -> list[str]:
    """What the compiler has said, each thing once: a library is compiled with its tests and without."""
    said = {}
    for line in messages:
        if line.startswith("{"):
            message = json.loads(line)
            if message.get("reason") == "compiler-message" and message["message"]["level"] in ("warning", "error"):
                said[message["message"]["rendered"]] = None
    return list(said)


def main() -> int:
    with subprocess.Popen(COMMAND, stdout=subprocess.PIPE, text=True) as cargo:
        assert cargo.stdout is not None
        said = found(cargo.stdout)
    for text in said:
        print(text, file=sys.stderr)
    if said:
        print(f"clippy: {len(said)} findings", file=sys.stderr)
    return 1 if said or cargo.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
