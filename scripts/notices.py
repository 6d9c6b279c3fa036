#!/usr/bin/env python3
"""Prints the licences of everything that is built into the binary: each text once, with the packages that it is for.

Usage: notices.py REPOSITORY [TARGET]. Licences ask to be given along with binaries; `xtask tidy` checks that they ask for no more.
"""

import json
import subprocess
import sys
from pathlib import Path

TARGET = "x86_64-unknown-linux-gnu"


def cargo(root: Path, *arguments: str) -> str:
    command = ["cargo", *arguments, "--locked", "--manifest-path", str(root / "Cargo.toml")]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def built_in(root: Path, target: str = TARGET) -> set[tuple[str, str]]:
    """Name and version of the packages whose code is in the binary."""
    lines = cargo(root, "tree", "-p", "cli", "--edges=normal", f"--target={target}", "--prefix=none", "--format={p}")
    words = (line.split() for line in lines.splitlines() if line)
    return {(name, version.removeprefix("v")) for name, version, *_ in words}


def texts(directory: Path) -> list[str]:
    """The licence texts of a package, without differences that only white space makes."""
    found = []
    for path in sorted(directory.iterdir()):
        if path.is_file() and path.name.upper().startswith(("LICENSE", "LICENCE", "COPYING", "NOTICE", "UNLICENSE", "COPYRIGHT")):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            found.append("\n".join(line.rstrip() for line in lines).strip())
    return found


def main() -> None:
    root = Path(sys.argv[1])
    target = sys.argv[2] if len(sys.argv) > 2 else TARGET
    wanted = built_in(root, target)
    metadata = json.loads(cargo(root, "metadata", "--format-version=1", f"--filter-platform={target}"))
    by_text: dict[str, list[str]] = {}
    without: list[str] = []
    packages = sorted(metadata["packages"], key=lambda package: (package["name"], package["version"]))
    for package in packages:
        if package["source"] is None or (package["name"], package["version"]) not in wanted:
            continue
        title = f"{package['name']} {package['version']} ({package['license']})"
        found = texts(Path(package["manifest_path"]).parent)
        if not found:
            without.append(f"{title}, {package['repository']}")
        for text in found:
            by_text.setdefault(text, []).append(title)
    for text, titles in sorted(by_text.items(), key=lambda item: item[1]):
        print("\n" + "-" * 78 + "\n" + "\n".join(titles) + "\n\n" + text)
    if without:
        print("\n" + "-" * 78 + "\nWithout a text of their own in the published package:\n\n" + "\n".join(without))


if __name__ == "__main__":
    main()
