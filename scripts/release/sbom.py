#!/usr/bin/env python3
"""Prints what is built into the binary as a CycloneDX bill of materials: every package of cargo with its licence and hash.

Usage: sbom.py REPOSITORY VERSION SECONDS TARGET. It comes from what cargo says of the lock file, so it names what was built.
"""

from __future__ import annotations

import json
import sys
import tomllib
import uuid
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from notices import built_in, cargo  # noqa: E402


def main() -> None:
    root, version, seconds, target = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    wanted = built_in(root, target)
    metadata = json.loads(cargo(root, "metadata", "--format-version=1", f"--filter-platform={target}"))
    locked = tomllib.loads((root / "Cargo.lock").read_text())["package"]
    sums = {(package["name"], package["version"]): package.get("checksum") for package in locked}
    packages = [package for package in metadata["packages"] if package["source"] and (package["name"], package["version"]) in wanted]
    refs = {package["id"]: f"pkg:cargo/{package['name']}@{package['version']}" for package in packages}
    components = []
    for package in sorted(packages, key=lambda package: refs[package["id"]]):
        component = {
            "type": "library",
            "bom-ref": refs[package["id"]],
            "purl": refs[package["id"]],
            "name": package["name"],
            "version": package["version"],
        }
        if package["license"]:
            # Before SPDX, packages separated licences by a slash.
            component["licenses"] = [{"expression": package["license"].replace("/", " OR ")}]
        if checksum := sums.get((package["name"], package["version"])):
            component["hashes"] = [{"alg": "SHA-256", "content": checksum}]
        components.append(component)
    edges = {node["id"]: node["deps"] for node in metadata["resolve"]["nodes"]}

    def below(package: str) -> list[str]:
        # Those that the binary has: not what only builds or tests it.
        kept = (dep["pkg"] for dep in edges[package] if any(kind["kind"] is None for kind in dep["dep_kinds"]))
        return sorted({refs[dep] for dep in kept if dep in refs})

    own = [package["id"] for package in metadata["packages"] if package["source"] is None]
    top = f"pkg:generic/ringfence@{version}"
    bom = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, top)}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": {
                "type": "application",
                "bom-ref": top,
                "name": "ringfence",
                "version": version,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
            },
        },
        "components": components,
        "dependencies": [
            {"ref": top, "dependsOn": sorted({ref for package in own for ref in below(package)})},
            *({"ref": refs[package["id"]], "dependsOn": below(package["id"])} for package in packages),
        ],
    }
    json.dump(bom, sys.stdout, indent=1, sort_keys=True)
    print()


if __name__ == "__main__":
    main()
