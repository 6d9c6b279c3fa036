"""Debian's registry of images, beyond the link of the fake internet, and images that are made of programs of this host."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import platform as machine
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from harness.internet import Internet
from harness.internet_names import home
from harness.traffic import until

USER, PASSWORD = "puller", "registry-canary-0123456789"
# Of both, by `htpasswd -B`.
HTPASSWD = "puller:$2y$05$5hB3CbvWM4RD8ITCGkfKW.FgMdqDgg8aY8CY0m9Db0nCTcfSRkODy\n"
PROGRAMS = ("bash", "cat", "chmod", "chown", "dirname", "env", "id", "ls", "mkdir", "rm", "sleep", "stat")
ARCH = {"x86_64": "amd64", "aarch64": "arm64"}[machine.machine()]
KIND = "application/vnd.oci.image"
ENVIRONMENT = ["PATH=/usr/bin:/bin", "FROM_IMAGE=yes", "EMPTY="]


def member(archive: tarfile.TarFile, name: str, data: bytes = b"", **fields: object) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in {"mode": 0o755, **fields}.items():
        setattr(info, field, value)
    archive.addfile(info, io.BytesIO(data))


def layer(fill: Callable[[tarfile.TarFile], None]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        fill(archive)
    return gzip.compress(buffer.getvalue(), 1)


def saved(layers: list[bytes], env: list[str]) -> bytes:
    """An image of layers that are not compressed, as `docker save` writes it."""
    config = {
        "architecture": ARCH,
        "os": "linux",
        "config": {"Env": env},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]},
    }
    names = [f"layer{number}.tar" for number in range(len(layers))]
    manifest = [{"Config": "config.json", "RepoTags": ["a:1"], "Layers": names}]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        member(archive, "manifest.json", json.dumps(manifest).encode())
        member(archive, "config.json", json.dumps(config).encode())
        for name, data in zip(names, layers, strict=True):
            member(archive, name, data)
    return buffer.getvalue()


def programs(archive: tarfile.TarFile) -> None:
    """A root file system without a distribution: a shell, a few programs and their libraries."""
    files = {Path(path) for name in PROGRAMS if (path := shutil.which(name))}
    for file in list(files):
        shown = subprocess.run(["ldd", file], capture_output=True, text=True).stdout
        files |= {Path(path) for path in re.findall(r"(/\S+) \(0x", shown)}
    for file in sorted(files):
        member(archive, str(file).removeprefix("/"), file.resolve().read_bytes())
    member(archive, "bin/sh", type=tarfile.SYMTYPE, linkname="/usr/bin/bash")
    member(archive, "bin/bash", type=tarfile.SYMTYPE, linkname="/usr/bin/bash")
    member(archive, "etc/passwd", b"root:x:0:0:root:/root:/bin/bash\napp:x:1500:1500::/srv:/bin/bash\n", mode=0o644)
    member(archive, "etc/group", b"root:x:0:\napp:x:1500:\n", mode=0o644)
    member(archive, "root", type=tarfile.DIRTYPE, mode=0o700)
    member(archive, "srv/mine", b"mine\n", mode=0o640, uid=1500, gid=1500)
    member(archive, "srv/hard", type=tarfile.LNKTYPE, linkname="srv/mine")
    member(archive, "srv/gone", b"gone\n")
    member(archive, "srv/dir/old", b"old\n")


def changes(archive: tarfile.TarFile) -> None:
    member(archive, "srv/.wh.gone")
    member(archive, "srv/dir/.wh..wh..opq")
    member(archive, "srv/dir/new", b"new\n")


class Registry:
    """A registry that runs."""

    def __init__(self, host: str, port: int, authority: Path | None, closed: bool) -> None:
        self.host, self.port = host, port
        # Its certificate is for the name, which only the fake internet resolves.
        self.client = httpx.Client(
            base_url=f"{'https' if authority else 'http'}://{home(host)}:{port}",
            auth=(USER, PASSWORD) if closed else None,
            timeout=60,
            verify=False,  # noqa: S501
        )

    def blob(self, name: str, data: bytes) -> dict[str, object]:
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        begun = self.client.post(f"/v2/{name}/blobs/uploads/")
        assert begun.status_code == 202, begun.text
        # Its query holds the state of the upload.
        put = self.client.put(httpx.URL(begun.headers["location"]).copy_merge_params({"digest": digest}), content=data)
        assert put.status_code == 201, put.text
        return {"digest": digest, "size": len(data)}

    def push(self, name: str, tag: str, layers: list[bytes], arch: str = ARCH, env: list[str] = ENVIRONMENT) -> None:
        config = {
            "architecture": arch,
            "os": "linux",
            "config": {"Env": env, "User": "app", "WorkingDir": "/srv"},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(gzip.decompress(layer)).hexdigest()}" for layer in layers]},
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": f"{KIND}.manifest.v1+json",
            "config": {"mediaType": f"{KIND}.config.v1+json", **self.blob(name, json.dumps(config).encode())},
            "layers": [{"mediaType": f"{KIND}.layer.v1.tar+gzip", **self.blob(name, layer)} for layer in layers],
        }
        put = self.client.put(
            f"/v2/{name}/manifests/{tag}", content=json.dumps(manifest), headers={"content-type": str(manifest["mediaType"])}
        )
        assert put.status_code == 201, put.text


@contextmanager
def registry(
    internet: Internet,
    directory: Path,
    host: str,
    port: int,
    *,
    tls: bool = False,
    closed: bool = False,
    auth: dict[str, object] | None = None,
) -> Iterator[Registry]:
    """A registry at a port of a host, for as long as the context lasts: with a certificate of the authority of the fake
    internet, with a user, and with other settings of who may do what. What it has stays for the next one at the port.
    """
    directory.mkdir(parents=True, exist_ok=True)
    http: dict[str, object] = {"addr": f"0.0.0.0:{port}"}
    config: dict[str, object] = {
        "version": 0.1,
        "log": {"level": "error"},
        "storage": {"filesystem": {"rootdirectory": str(directory / f"registry-{port}")}},
        "http": http,
    }
    if tls:
        pem = next(path for path in internet.certificates.iterdir() if host.endswith(path.stem))
        http["tls"] = {"certificate": str(pem), "key": str(pem)}
        http["host"] = f"https://{home(host)}:{port}"
    if closed:
        users = directory / f"htpasswd-{port}"
        users.write_text(HTPASSWD)
        config["auth"] = {"htpasswd": {"realm": "images", "path": str(users)}}
    if auth:
        config["auth"] = auth
    path = directory / f"registry-{port}.json"
    path.write_text(json.dumps(config))
    started = Registry(host, port, internet.authority if tls else None, closed)
    with internet.beyond("docker-registry", "serve", path):

        def answers() -> bool:
            try:
                return started.client.get("/v2/").status_code == (401 if auth else 200)
            except httpx.HTTPError:
                return False

        try:
            until(answers, "the registry answers", within_s=20)
            yield started
        finally:
            started.client.close()
