#!/usr/bin/env python3
"""Writes an archive of a container image for `docker load` and `podman load`, from tar archives that become its layers.

Usage: image.py OUTPUT VERSION SECONDS COMPRESSION LAYER...

The archive is an OCI layout, and has the `manifest.json` that older versions of Docker read. It depends on its arguments alone:
nothing in it tells where or when it was made. A standard library is enough for that, so no tool and no daemon is needed.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import sys
import tarfile
from datetime import UTC, datetime
from pathlib import Path

REPOSITORY = "ringfence"
# What a container needs besides all privileges: one volume, and addresses that the outside of the container reaches.
CONFIG = {
    "Entrypoint": ["/usr/lib/ringfence/start"],
    "Cmd": ["up"],
    "Env": [
        "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "RINGFENCE_LISTEN=0.0.0.0:3000",
    ],
    "ExposedPorts": {"3000/tcp": {}},
    "Volumes": {"/var/lib/ringfence": {}},
    "StopSignal": "SIGTERM",
    "WorkingDir": "/",
}


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def compact(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def main() -> None:
    output, version, seconds, level, *layers = sys.argv[1:]
    # A tag has fewer characters than a version.
    tag = version.replace("~", "-").replace("+", "-")
    blobs: dict[str, bytes] = {}

    def keep(content: bytes, kind: str) -> dict[str, object]:
        blobs[digest(content)] = content
        return {"mediaType": kind, "digest": f"sha256:{digest(content)}", "size": len(content)}

    plain = [Path(layer).read_bytes() for layer in layers]
    packed = [gzip.compress(content, int(level), mtime=0) for content in plain]
    made = datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    config = {
        "architecture": "amd64",
        "os": "linux",
        "created": made,
        "config": CONFIG | {"Labels": {"org.opencontainers.image.title": REPOSITORY, "org.opencontainers.image.version": version}},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest(content)}" for content in plain]},
        "history": [{"created": made, "created_by": "scripts/release.sh"} for _ in plain],
    }
    kind = "application/vnd.oci.image"
    described = keep(compact(config), f"{kind}.config.v1+json")
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{kind}.manifest.v1+json",
        "config": described,
        "layers": [keep(content, f"{kind}.layer.v1.tar+gzip") for content in packed],
    }
    entry = keep(compact(manifest), f"{kind}.manifest.v1+json")
    entry["annotations"] = {
        "io.containerd.image.name": f"docker.io/library/{REPOSITORY}:{tag}",
        "org.opencontainers.image.ref.name": tag,
    }
    files = {
        "oci-layout": compact({"imageLayoutVersion": "1.0.0"}),
        "index.json": compact({"schemaVersion": 2, "mediaType": f"{kind}.index.v1+json", "manifests": [entry]}),
        "manifest.json": compact(
            [
                {
                    "Config": f"blobs/sha256/{digest(compact(config))}",
                    "RepoTags": [f"{REPOSITORY}:{tag}"],
                    "Layers": [f"blobs/sha256/{digest(content)}" for content in packed],
                }
            ]
        ),
        **{f"blobs/sha256/{name}": content for name, content in sorted(blobs.items())},
    }
    with tarfile.open(output, "w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in files.items():
            entry_of = tarfile.TarInfo(name)
            entry_of.size, entry_of.mode, entry_of.mtime = len(content), 0o644, int(seconds)
            archive.addfile(entry_of, io.BytesIO(content))


if __name__ == "__main__":
    main()
