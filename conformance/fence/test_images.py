"""Templates from images: a registry of the fake internet, with users and without, and an image of programs of this host."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox, Template

from harness.internet import Internet
from harness.internet_names import home
from harness.platform import Platform
from harness.registry import PASSWORD, USER, Registry, changes, layer, programs, registry
from harness.search import files_with
from harness.tokens import certificate
from harness.traffic import until

HOST = "registry.example.org"
# The last has a certificate, of an authority that is not the system's.
OPEN, CLOSED, SECURE = 5000, 5001, 5002
# A registry that wants tokens, and who gives them.
TOKENS, REALM = 5003, 5004


@pytest.fixture(scope="module")
def registries(internet: Internet, work_dir: Path) -> Iterator[dict[int, Registry]]:
    directory = work_dir / "registries"
    with (
        registry(internet, directory, HOST, OPEN) as one,
        registry(internet, directory, HOST, CLOSED, closed=True) as two,
        registry(internet, directory, HOST, SECURE, tls=True, closed=True) as three,
    ):
        image = [layer(programs), layer(changes)]
        for server in (one, two, three):
            server.push("tools/shell", "1", image)
        one.push("tools/other", "1", image, arch="riscv64")
        yield {OPEN: one, CLOSED: two, SECURE: three}


@pytest.fixture
def name(platform: Platform) -> Iterator[str]:
    name = f"t{uuid.uuid4().hex[:12]}"
    yield name
    headers = {"X-API-Key": platform.credentials()["E2B_API_KEY"]}
    httpx.delete(f"{platform.url}/templates/{name}", headers=headers, timeout=60)


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


@pytest.mark.parametrize("port", [CLOSED, SECURE])
def test_a_registry_with_users(registries: dict[int, Registry], platform: Platform, name: str, port: int) -> None:
    reference = f"{HOST}:{port}/tools/shell:1"
    with pytest.raises(Exception, match="(?i)unauthori[sz]ed|credentials|denied|log in") as refused:
        build(Template().from_image(reference), name)
    assert reference in str(refused.value)
    with pytest.raises(Exception, match="(?i)unauthori[sz]ed|credentials|denied|log in"):
        build(Template().from_image(reference, username=USER, password="wrong"), name)
    build(Template().from_image(reference, username=USER, password=PASSWORD).run_cmd("id"), name)
    with Sandbox.create(name, timeout=120) as box:
        assert box.commands.run("cat /srv/mine", user="root").stdout == "mine\n"
    assert files_with(name, platform.data_dir), "what is kept is found"
    assert files_with(PASSWORD, platform.data_dir) == [], "the password is nowhere on the host"


@pytest.mark.parametrize(
    ("image", "words"),
    [("tools/none:1", "tools/none"), ("tools/shell:none", "none"), ("tools/other:1", "riscv64|architecture")],
)
def test_images_that_are_not_there_say_so(registries: dict[int, Registry], name: str, image: str, words: str) -> None:
    with pytest.raises(Exception, match=words):
        build(Template().from_image(f"{HOST}:{OPEN}/{image}"), name)


def test_a_certificate_of_an_unknown_issuer_is_refused(registries: dict[int, Registry], name: str) -> None:
    """An issuer for another name of the same registry does not help."""
    with pytest.raises(Exception, match=f"TLS with other.example.org:{SECURE}"):
        build(Template().from_image(f"other.example.org:{SECURE}/tools/shell:1", username=USER, password=PASSWORD), name)


def test_a_mirror_is_asked_instead(registries: dict[int, Registry], name: str) -> None:
    lines = build(Template().from_image("mirrored.example.com/tools/shell:1"), name)
    assert any("FROM mirrored.example.com" in line for line in lines), lines
    with Sandbox.create(name, timeout=120) as box:
        assert box.commands.run("cat /srv/mine", user="root").stdout == "mine\n"


def test_a_dockerfile_takes_files_of_images(
    registries: dict[int, Registry], platform: Platform, name: str, tmp_path: Path
) -> None:
    image = f"{HOST}:{OPEN}/tools/shell:1"
    (tmp_path / "Dockerfile").write_text(
        f"FROM {image} AS first\nRUN echo $FROM_IMAGE > /env\nFROM {image}\n"
        f"COPY --from=first /env /env\nCOPY --from={image} /srv/mine /taken\nCOPY --from=e2bdev/base /usr/bin/env /tools/\n"
    )
    done = platform.run("template", "build", "--name", name, str(tmp_path), timeout_s=180)
    assert done.returncode == 0, done.stderr
    with Sandbox.create(name, timeout=120) as box:
        seen = box.commands.run("cat /env; stat -c %u:%g:%a /taken /tools/env; ls /srv", user="root")
        assert seen.stdout == "yes\n1500:1500:640\n0:0:755\ndir\nhard\nmine\n"
    (tmp_path / "Dockerfile").write_text(f"FROM {HOST}:{CLOSED}/tools/shell:1\n")
    done = platform.run("template", "build", "--name", name, str(tmp_path), timeout_s=180)
    assert done.returncode == 1 and "line 1: " in done.stderr, done.stderr


@pytest.fixture
def tokens(internet: Internet, work_dir: Path) -> Iterator[None]:
    """A registry that wants tokens, beyond the link, with the image."""
    directory = work_dir / "tokens"
    with registry(internet, directory, HOST, TOKENS) as server:
        server.push("tools/shell", "1", [layer(programs), layer(changes)])
    key, pem = certificate(directory)
    realm = f"http://{HOST}:{REALM}/token"
    auth = {"token": {"realm": realm, "service": "templates", "issuer": "tokens", "rootcertbundle": str(pem)}}
    root = Path(__file__).parent.parent
    program = (sys.executable, "-c", f"import runpy, sys; sys.path.insert(0, {str(root)!r}); runpy.run_module('harness.tokens', run_name='__main__')")
    with (
        internet.beyond(*program, str(REALM), key, pem),
        registry(internet, directory, HOST, TOKENS, auth=auth),
    ):

        def answers() -> bool:
            try:
                return httpx.get(f"http://{home(HOST)}:{REALM}/", timeout=60).status_code == 401
            except httpx.HTTPError:
                return False

        until(answers, "the server of tokens answers", within_s=20)
        yield


def logins(directory: Path, **known: str) -> dict[str, str]:
    """What `docker login` would leave, as a variable."""
    auths = {host: {"auth": base64.b64encode(f"{USER}:{password}".encode()).decode()} for host, password in known.items()}
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"auths": auths}))
    return {"DOCKER_CONFIG": str(directory)}


def test_images_of_a_dockerfile_are_fetched_with_credentials(
    registries: dict[int, Registry], tokens: None, platform: Platform, name: str, tmp_path: Path
) -> None:
    """Of one with users, one that wants tokens, and one that wants nothing, in one Dockerfile."""
    basic, bearer, free = (f"{HOST}:{port}" for port in (CLOSED, TOKENS, OPEN))
    files = tmp_path / "files"
    files.mkdir()
    (files / "Dockerfile").write_text(
        f"FROM {basic}/tools/shell:1\nCOPY --from={bearer}/tools/shell:1 /srv/mine /bearer\n"
        f"COPY --from={free}/tools/shell:1 /srv/mine /free\n"
    )

    def build(known: dict[str, str], *hosts: str) -> subprocess.CompletedProcess[str]:
        flags = [flag for host in hosts for flag in ("--registry-login", host)]
        command = [platform.binary, "template", "build", "--name", name, *flags, "--data-dir", platform.data_dir, files]
        environment = platform.environment() | logins(tmp_path / "docker", **known)
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=180, env=environment, check=False
        )

    right = {basic: PASSWORD, bearer: PASSWORD}
    # Nothing is sent that was not asked for, and what is not there cannot be.
    done = build(right, bearer)
    assert done.returncode == 1 and "line 1: " in done.stderr and "requires credentials" in done.stderr, done.stderr
    done = build(right, basic)
    assert done.returncode == 1 and "requires credentials" in done.stderr and bearer in done.stderr, done.stderr
    done = build({basic: PASSWORD}, basic, bearer)
    assert done.returncode == 1 and f"docker login {bearer}" in done.stderr, done.stderr
    wrong = {basic: PASSWORD, bearer: "wrong-canary-word"}
    done = build(wrong, basic, bearer)
    assert done.returncode == 1 and "does not accept the credentials" in done.stderr, done.stderr
    done = build(right, basic, bearer)
    assert done.returncode == 0, done.stderr
    with Sandbox.create(name, timeout=120) as box:
        seen = box.commands.run("cat /srv/mine /bearer /free", user="root")
        assert seen.stdout == "mine\nmine\nmine\n"
    image = ("template", "build", "--name", name, "--from-image", f"{bearer}/tools/shell:1", "--registry-login")
    environment = platform.environment() | logins(tmp_path / "docker", **right)
    for host, code in ((basic, 1), (bearer, 0)):
        done = subprocess.run(
            [platform.binary, *image, host, "--data-dir", platform.data_dir],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=180, env=environment, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
    assert files_with(name, platform.data_dir), "what is kept is found"
    for canary in (PASSWORD, "wrong-canary-word"):
        assert files_with(canary, platform.data_dir) == [], "the password is nowhere on the host"
        assert canary not in platform.log()


def test_private_addresses_are_closed_to_images_too(name: str) -> None:
    with pytest.raises(Exception, match="10.9.0.1"):
        build(Template().from_image(f"10.9.0.1:{OPEN}/tools/shell:1"), name)


def test_a_sandbox_that_does_not_become_ready_is_ended(internet: Internet, platform: Platform, name: str) -> None:
    ready = internet.documents / name
    ready.touch()
    template = Template().from_template("base").set_start_cmd("sleep infinity", f"curl -sf http://www.example.com/files/{name}")
    build(template, name)
    ready.unlink()
    headers = {"X-API-Key": platform.credentials()["E2B_API_KEY"]}
    with httpx.Client(base_url=platform.url, headers=headers, timeout=60) as api:
        answer = api.post("/sandboxes", json={"templateID": name})
        assert (answer.status_code, "ready command" in answer.text) == (504, True), answer.text
        listed = api.get("/v2/sandboxes").json()
        assert not any(sandbox["alias"] == name for sandbox in listed if "alias" in sandbox)
