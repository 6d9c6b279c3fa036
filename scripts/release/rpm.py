#!/usr/bin/env python3
"""Prints the description of an RPM for `cargo generate-rpm`: the manifest of a package of its own, whose files are those of the Debian package.

Usage: rpm.py TREE VERSION SCRIPTS. A tilde sorts before the release with both, so the version is the same.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

CONFIG = "/etc/ringfence/ringfence.toml"


def main() -> None:
    tree, version, scripts = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    words = {
        "name": "ringfence",
        "version": version,
        "release": "1",
        "license": "Apache-2.0",
        "summary": "Self-hosted platform of isolated Linux sandboxes",
        "post_install_script": (scripts / "post").read_text(),
        "pre_uninstall_script": (scripts / "preun").read_text(),
        "post_uninstall_script": (scripts / "postun").read_text(),
    }
    # The packager asks for these, and what is below counts.
    print('[package]\nname = "ringfence"\nversion = "0.0.0"\n[package.metadata.generate-rpm]')
    # A string of JSON is one of TOML.
    for name, value in words.items():
        print(f"{name} = {json.dumps(value)}")
    for path in sorted(path for path in tree.rglob("*") if path.is_file() and "DEBIAN" not in path.parts):
        place = f"/{path.relative_to(tree)}"
        print("[[package.metadata.generate-rpm.assets]]")
        print(f"source = {json.dumps(str(path))}\ndest = {json.dumps(place)}\nmode = \"{path.stat().st_mode & 0o777:o}\"")
        if place == CONFIG:
            print('config = "noreplace"')
        elif place.startswith("/usr/share/doc/"):
            print("doc = true")
    # `mkfs.ext4` by its file, because the package has other names elsewhere.
    print('[package.metadata.generate-rpm.requires]\n"/usr/sbin/mkfs.ext4" = "*"')
    print("[package.metadata.generate-rpm.recommends]")
    # An older one is passed over.
    print('criu = ">= 4.2"')
    print("\n".join(f'{name} = "*"' for name in ("kmod", "procps-ng", "iproute", "python3", "sudo", "ca-certificates")))


if __name__ == "__main__":
    main()
