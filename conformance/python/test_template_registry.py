"""Finished templates in registries (`ringfence template push|pull NAME oci://…`), with Debian's registry and skopeo."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2b import Sandbox, Template

from harness.beside import beside
from harness.patience import within
from harness.platform import Platform
from harness.ports import free_port
from harness.registry import HTPASSWD, PASSWORD, USER
from harness.tokens import Tokens, certificate
from harness.traffic import until

MANIFEST = "application/vnd.oci.image.manifest.v1+json"


@contextmanager
def serving(directory: Path, **config: Any) -> Iterator[int]:
    """A registry on a port of localhost, for as long as the context lasts."""
    port = free_port()
    root = directory / f"registry-{port}"
    http = {"addr": f"127.0.0.1:{port}", **config.pop("http", {})}
    path = directory / f"registry-{port}.json"
    storage = {"filesystem": {"rootdirectory": str(root)}, "redirect": {"disable": True}}
    path.write_text(json.dumps({"version": 0.1, "log": {"level": "error"}, "storage": storage, "http": http, **config}))
    process = subprocess.Popen(
        ["docker-registry", "serve", path], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    scheme = "https" if "tls" in http else "http"

    def answers() -> bool:
        assert process.poll() is None, "the registry has ended"
        try:
            return httpx.get(f"{scheme}://localhost:{port}/v2/", verify=False, timeout=within(30)).status_code in (200, 401)  # noqa: S501
        except httpx.HTTPError:
            return False

    try:
        until(answers, "the registry answers", within_s=20)
        yield port
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rf-") as path:
        yield Path(path)


@pytest.fixture(scope="module")
def built(platform: Platform) -> Iterator[str]:
    """A template with a server, and a layer for each step."""
    name = f"t{uuid.uuid4().hex[:12]}"
    template = (
        Template()
        .from_template("base")
        .run_cmd("echo served > ~/index.html")
        .run_cmd("head -c 3000000 /dev/urandom > ~/random; sha256sum ~/random > ~/sum")
        .set_workdir("/home/user")
        .set_start_cmd("python3 -m http.server 8000", "curl -sf http://localhost:8000/index.html")
    )
    Template.build(template, f"{name}:v1", cpu_count=1, memory_mb=512)
    yield name
    httpx.delete(f"{platform.url}/templates/{name}", headers={"X-API-Key": platform.credentials()["E2B_API_KEY"]}, timeout=within(30))


@pytest.fixture
def other(platform: Platform, built: str, directory: Path) -> Iterator[Platform]:
    """A platform that has not built the template."""
    with beside(platform, directory) as server:
        yield server


def settings(directory: Path, port: int, issuer: Path | None = None) -> tuple[str, str]:
    """The flag with a configuration that trusts a registry."""
    path = directory / f"config-{port}.toml"
    trust = f'registry_ca_files = "localhost:{port}={issuer}"' if issuer else f'insecure_registries = "localhost:{port}"'
    path.write_text(f"[builds]\n{trust}\n")
    return "--config", str(path)


def works(name: str) -> None:
    with Sandbox.create(name, timeout=120) as box:
        seen = box.commands.run("curl -s localhost:8000/index.html; sha256sum -c ~/sum; nproc")
        assert seen.stdout.split() == ["served", "/home/user/random:", "OK", "1"]


def skopeo(*arguments: str) -> str:
    done = subprocess.run(["skopeo", *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_template_goes_through_registries(built: str, platform: Platform, other: Platform, directory: Path) -> None:
    with serving(directory) as port, serving(directory) as mirror:
        trust = settings(directory, port)
        place = f"oci://localhost:{port}/templates/served:v1"
        # Plain HTTP only where the operator says so.
        refused = platform.run("template", "push", f"{built}:v1", place)
        assert refused.returncode == 1 and "localhost" in refused.stderr, refused.stdout
        pushed = platform.run("template", "push", f"{built}:v1", place, *trust)
        assert pushed.returncode == 0, pushed.stderr
        assert re.search(r"with (\d+) layers, .* of which \1 layers were new", pushed.stdout), pushed.stdout
        assert not list(platform.data_dir.glob(".push-*"))
        digest = pushed.stdout.split("@")[1].split()[0]
        again = platform.run("template", "push", f"{built}:v1", place, *trust)
        assert f"@{digest} " in again.stdout and "0 layers were new" in again.stdout, again.stdout + again.stderr

        # Other programs see an artifact, and copy it as it is.
        raw = skopeo("inspect", "--raw", "--tls-verify=false", place.replace("oci:", "docker:"))
        manifest = json.loads(raw)
        assert manifest["artifactType"] == "application/vnd.ringfence.template.v1"
        assert {layer["mediaType"] for layer in manifest["layers"]} == {"application/vnd.ringfence.template.layer.v1.tar+zstd"}
        copied = f"docker://localhost:{mirror}/copy:latest"
        skopeo("copy", "--src-tls-verify=false", "--dest-tls-verify=false", place.replace("oci:", "docker:"), copied)
        assert skopeo("inspect", "--raw", "--tls-verify=false", copied) == raw

        trust = settings(directory, mirror)
        pulled = other.run("template", "pull", "pulled", f"oci://localhost:{mirror}/copy", *trust)
        assert pulled.returncode == 0, pulled.stderr
        works("pulled")
        # By digest, and in the other order.
        pulled = other.run("template", "pull", f"oci://localhost:{mirror}/copy@{digest}", "pinned", *trust)
        assert pulled.returncode == 0, pulled.stderr
        works("pinned")
        wrong = f"sha256:{'0' * 64}"
        for source, want in (
            (f"oci://localhost:{mirror}/copy:nothing", "does not have"),
            (f"oci://localhost:{mirror}/nothing", "does not have"),
            (f"oci://localhost:{mirror}/copy@{wrong}", "does not have"),
            (f"oci://localhost:{mirror}/COPY", "repository"),
        ):
            refused = other.run("template", "pull", "refused", source, *trust)
            assert refused.returncode == 1 and want in refused.stderr, refused.stderr
        refused = platform.run("template", "push", f"{built}:v1", f"{place}@{wrong}", *trust)
        assert refused.returncode == 1 and "under a tag" in refused.stderr, refused.stderr


def test_what_is_not_a_template_is_refused(built: str, platform: Platform, directory: Path) -> None:
    with serving(directory) as port:
        trust = settings(directory, port)
        place = f"oci://localhost:{port}/t:v1"
        assert platform.run("template", "push", f"{built}:v1", place, *trust).returncode == 0
        client = httpx.Client(base_url=f"http://localhost:{port}", timeout=within(30))
        good = client.get("/v2/t/manifests/v1", headers={"accept": MANIFEST}).json()
        swapped = {**good, "layers": good["layers"][::-1]}
        image = {**good, "artifactType": "application/x"}
        fewer = {**good, "layers": good["layers"][:1]}
        longer = {**good, "layers": [{**good["layers"][0], "size": good["layers"][0]["size"] + 1}, *good["layers"][1:]]}
        for tag, content, want in (
            ("swapped", swapped, "not those of its configuration"),
            ("image", image, "--from-image"),
            ("fewer", fewer, "not those of its configuration"),
            ("longer", longer, "bytes"),
        ):
            put = client.put(f"/v2/t/manifests/{tag}", content=json.dumps(content), headers={"content-type": MANIFEST})
            assert put.status_code == 201, put.text
            refused = platform.run("template", "pull", "refused", f"oci://localhost:{port}/t:{tag}", *trust)
            assert refused.returncode == 1 and want in refused.stderr, (tag, refused.stderr)
        # What the registry stores is damaged.
        digest = good["layers"][-1]["digest"].removeprefix("sha256:")
        [blob] = directory.glob(f"registry-{port}/docker/registry/v2/blobs/sha256/{digest[:2]}/{digest}/data")
        data = bytearray(blob.read_bytes())
        data[len(data) // 2] ^= 1
        blob.write_bytes(data)
        refused = platform.run("template", "pull", "refused", place, *trust)
        assert refused.returncode == 1 and "digest" in refused.stderr, refused.stderr
        assert platform.run("template", "show", "refused").returncode == 1
        client.close()


def test_a_registry_with_users_and_a_certificate(built: str, platform: Platform, directory: Path) -> None:
    key, pem = certificate(directory)
    users = directory / "htpasswd"
    users.write_text(HTPASSWD)
    password = directory / "password"
    password.write_text(PASSWORD + "\n")
    tls = {"tls": {"certificate": str(pem), "key": str(key)}}
    with serving(directory, http=tls, auth={"htpasswd": {"realm": "templates", "path": str(users)}}) as port:
        place = f"oci://localhost:{port}/t:v1"
        trust = settings(directory, port, pem)
        login = ("--registry-user", USER, "--registry-password-file", str(password))
        push = ("template", "push", f"{built}:v1", place)
        unknown = platform.run(*push, *login)
        assert unknown.returncode == 1 and "certificate" in unknown.stderr.lower(), unknown.stderr
        nobody = platform.run(*push, *trust)
        assert nobody.returncode == 1 and "requires credentials" in nobody.stderr, nobody.stderr
        wrong = platform.run(*push, *trust, "--registry-user", "other", "--registry-password-file", str(password))
        assert wrong.returncode == 1 and "does not accept" in wrong.stderr, wrong.stderr
        done = platform.run(*push, *trust, *login)
        assert done.returncode == 0, done.stderr
        assert PASSWORD not in done.stdout + done.stderr + wrong.stderr + platform.log()
        pulled = platform.run("template", "pull", f"{built}:again", place, *trust, *login)
        assert pulled.returncode == 0, pulled.stderr
        works(f"{built}:again")
        assert platform.run("template", "pull", "refused", place, *trust).returncode == 1


def test_a_registry_with_tokens(built: str, platform: Platform, directory: Path) -> None:
    key, pem = certificate(directory)
    password = directory / "password"
    password.write_text(PASSWORD)
    login = ("--registry-user", USER, "--registry-password-file", str(password))
    with Tokens(key, pem) as tokens:
        thread = threading.Thread(target=tokens.serve_forever)
        thread.start()
        realm = f"http://localhost:{tokens.server_port}/token"
        auth = {"token": {"realm": realm, "service": "templates", "issuer": "tokens", "rootcertbundle": str(pem)}}
        try:
            with serving(directory, auth=auth) as port:
                path = Path(settings(directory, port)[1])
                path.write_text(f'[builds]\ninsecure_registries = "localhost:{port},localhost:{tokens.server_port}"\n')
                trust = ("--config", str(path))
                place = f"oci://localhost:{port}/team/t:v1"
                push = ("template", "push", f"{built}:v1", place, *trust)
                nobody = platform.run(*push)
                assert nobody.returncode == 1 and "requires credentials" in nobody.stderr, nobody.stderr
                done = platform.run(*push, *login)
                assert done.returncode == 0, done.stderr
                assert set(tokens.asked) == {"repository:team/t:pull,push"}
                tokens.asked.clear()
                pulled = platform.run("template", "pull", f"{built}:tokens", place, *trust, *login)
                assert pulled.returncode == 0, pulled.stderr
                assert set(tokens.asked) == {"repository:team/t:pull"}
        finally:
            tokens.shutdown()
            thread.join()
