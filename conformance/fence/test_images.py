"""Templates from images: a registry of the fake internet, with users and without, and an image of programs of this host."""

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
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox, Template

from harness.internet import Internet
from harness.internet_names import home
from harness.platform import Platform
from harness.traffic import until

HOST = "registry.example.org"
OPEN, CLOSED = 5000, 5001
USER, PASSWORD = "puller", "registry-canary-0123456789"
# Of both, by `htpasswd -B`.
HTPASSWD = "puller:$2y$05$5hB3CbvWM4RD8ITCGkfKW.FgMdqDgg8aY8CY0m9Db0nCTcfSRkODy\n"
PROGRAMS = ("bash", "cat", "chmod", "chown", "dirname", "env", "id", "ls", "mkdir", "rm", "stat")
ARCH = {"x86_64": "amd64", "aarch64": "arm64"}[machine.machine()]


def member(archive: tarfile.TarFile, name: str, data: bytes = b"", **fields: object) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in {"mode": 0o755, **fields}.items():
        setattr(info, field, value)
    archive.addfile(info, io.BytesIO(data))


def layer(fill: object) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        fill(archive)  # type: ignore[operator]
    return gzip.compress(buffer.getvalue(), 1)


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
    """Debian's registry, beyond the link."""

    def __init__(self, port: int) -> None:
        self.port = port
        credentials = (USER, PASSWORD) if port == CLOSED else None
        self.client = httpx.Client(base_url=f"http://{home(HOST)}:{port}", auth=credentials, timeout=60)

    def blob(self, name: str, data: bytes) -> dict[str, object]:
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        begun = self.client.post(f"/v2/{name}/blobs/uploads/")
        assert begun.status_code == 202, begun.text
        # Its query holds the state of the upload.
        put = self.client.put(httpx.URL(begun.headers["location"]).copy_merge_params({"digest": digest}), content=data)
        assert put.status_code == 201, put.text
        return {"digest": digest, "size": len(data)}

    def push(self, name: str, tag: str, layers: list[bytes], arch: str = ARCH) -> None:
        config = {
            "architecture": arch,
            "os": "linux",
            "config": {"Env": ["PATH=/usr/bin:/bin", "FROM_IMAGE=yes", "EMPTY="], "User": "app", "WorkingDir": "/srv"},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(gzip.decompress(layer)).hexdigest()}" for layer in layers]},
        }
        kind = "application/vnd.oci.image"
        manifest = {
            "schemaVersion": 2,
            "mediaType": f"{kind}.manifest.v1+json",
            "config": {"mediaType": f"{kind}.config.v1+json", **self.blob(name, json.dumps(config).encode())},
            "layers": [{"mediaType": f"{kind}.layer.v1.tar+gzip", **self.blob(name, layer)} for layer in layers],
        }
        put = self.client.put(
            f"/v2/{name}/manifests/{tag}", content=json.dumps(manifest), headers={"content-type": str(manifest["mediaType"])}
        )
        assert put.status_code == 201, put.text


@pytest.fixture(scope="module")
def registries(internet: Internet, work_dir: Path) -> Iterator[dict[int, Registry]]:
    (work_dir / "htpasswd").write_text(HTPASSWD)
    with internet_registry(internet, work_dir, OPEN) as one, internet_registry(internet, work_dir, CLOSED) as two:
        image = [layer(programs), layer(changes)]
        for registry in (one, two):
            registry.push("tools/shell", "1", image)
        one.push("tools/other", "1", image, arch="riscv64")
        yield {OPEN: one, CLOSED: two}


class internet_registry:  # noqa: N801, used as a function
    """A registry on a port, for as long as the context lasts."""

    def __init__(self, internet: Internet, work_dir: Path, port: int) -> None:
        config = {
            "version": 0.1,
            "log": {"level": "error"},
            "storage": {"filesystem": {"rootdirectory": str(work_dir / f"registry-{port}")}},
            "http": {"addr": f"0.0.0.0:{port}"},
        }
        if port == CLOSED:
            config["auth"] = {"htpasswd": {"realm": "images", "path": str(work_dir / "htpasswd")}}
        path = work_dir / f"registry-{port}.json"
        path.write_text(json.dumps(config))
        self.registry = Registry(port)
        self.program = internet.beyond("docker-registry", "serve", path)

    def __enter__(self) -> Registry:
        self.program.__enter__()

        def answers() -> bool:
            try:
                return self.registry.client.get("/v2/").status_code == 200
            except httpx.HTTPError:
                return False

        until(answers, "the registry answers", within_s=20)
        return self.registry

    def __exit__(self, *what: object) -> None:
        self.registry.client.close()
        self.program.__exit__(*what)  # type: ignore[arg-type]


@pytest.fixture
def name(platform: Platform) -> Iterator[str]:
    name = f"t{uuid.uuid4().hex[:12]}"
    yield name
    headers = {"X-API-Key": platform.credentials()["E2B_API_KEY"]}
    httpx.delete(f"{platform.url}/templates/{name}", headers=headers)


def build(template: object, name: str) -> list[str]:
    lines: list[str] = []
    Template.build(template, name, on_build_logs=lambda entry: lines.append(entry.message))
    return lines


def test_an_image_becomes_a_template(registries: dict[int, Registry], name: str) -> None:
    template = (
        Template()
        .from_image(f"{HOST}:{OPEN}/tools/shell:1")
        .run_cmd('echo "$FROM_IMAGE" > ~/env; id -un > ~/by')
        .run_cmd("id -u > /root/by", user="root")
    )
    lines = build(template, name)
    assert any("FROM" in line and HOST in line for line in lines), lines
    with Sandbox.create(name, timeout=120) as box:
        seen = box.commands.run("pwd; cat ~/env ~/by; ls /srv /srv/dir; stat -c '%U %a %h' /srv/mine; id -un")
        assert seen.stdout == "/home/user\nyes\nuser\n/srv:\ndir\nhard\nmine\n\n/srv/dir:\nnew\napp 640 2\nuser\n"
        assert box.files.read("/root/by", user="root") == "0\n"
        # Nothing of the host's own /usr is there.
        assert not box.files.exists("/usr/bin/python3")
    again = build(template, name)
    assert sum(line.startswith("CACHED") for line in again) == 3, again


def test_a_registry_with_users(registries: dict[int, Registry], platform: Platform, name: str) -> None:
    reference = f"{HOST}:{CLOSED}/tools/shell:1"
    with pytest.raises(Exception, match="(?i)unauthori[sz]ed|credentials|denied|log in") as refused:
        build(Template().from_image(reference), name)
    assert reference in str(refused.value)
    with pytest.raises(Exception, match="(?i)unauthori[sz]ed|credentials|denied|log in"):
        build(Template().from_image(reference, username=USER, password="wrong"), name)
    build(Template().from_image(reference, username=USER, password=PASSWORD).run_cmd("id"), name)
    with Sandbox.create(name, timeout=120) as box:
        assert box.commands.run("cat /srv/mine", user="root").stdout == "mine\n"
    kept = subprocess.run(
        ["grep", "-rlaF", PASSWORD, platform.data_dir], capture_output=True, text=True, check=False
    )
    assert kept.stdout == "", "the password is nowhere on the host"


@pytest.mark.parametrize(
    ("image", "words"),
    [("tools/none:1", "tools/none"), ("tools/shell:none", "none"), ("tools/other:1", "riscv64|architecture")],
)
def test_images_that_are_not_there_say_so(registries: dict[int, Registry], name: str, image: str, words: str) -> None:
    with pytest.raises(Exception, match=words):
        build(Template().from_image(f"{HOST}:{OPEN}/{image}"), name)


def test_private_addresses_are_closed_to_images_too(name: str) -> None:
    with pytest.raises(Exception, match="10.9.0.1"):
        build(Template().from_image(f"10.9.0.1:{OPEN}/tools/shell:1"), name)


def test_a_sandbox_that_does_not_become_ready_is_ended(platform: Platform, name: str) -> None:
    until_s = int(time.time()) + 15
    template = Template().from_template("base").set_start_cmd("sleep infinity", f'test "$(date +%s)" -lt {until_s}')
    build(template, name)
    until(lambda: time.time() > until_s, "its time has come", within_s=30)
    headers = {"X-API-Key": platform.credentials()["E2B_API_KEY"]}
    with httpx.Client(base_url=platform.url, headers=headers, timeout=60) as api:
        answer = api.post("/sandboxes", json={"templateID": name})
        assert (answer.status_code, "ready command" in answer.text) == (504, True), answer.text
        listed = api.get("/v2/sandboxes").json()
        assert not any(sandbox["alias"] == name for sandbox in listed if "alias" in sandbox)
