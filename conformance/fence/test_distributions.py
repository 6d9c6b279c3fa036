"""Templates from a real distribution: Debian, made of its packages, in a registry of the fake internet; what sandboxes need
is installed from a repository there, or is missing and named. And a server of it that answers when a sandbox is created.
"""

from __future__ import annotations

import gzip
import hashlib
import subprocess
import sys
import tarfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox, Template

from harness.internet import Internet
from harness.platform import Platform
from harness.registry import Registry, layer, member, registry

HOST, PORT, SITE = "registry.example.org", 5000, "www.example.com"
# What an image of a distribution lacks, with what it needs.
PACKAGES = "sudo ca-certificates openssl"
APP = '''
import http.server, numpy
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = str(int(numpy.arange(10).sum())).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.ThreadingHTTPServer(("", 8000), Answer).serve_forever()
'''
READY = "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/')"


@pytest.fixture(scope="module")
def outside(internet: Internet) -> list[str]:
    """A prefix for commands that need the packages of the real internet."""
    return ["nsenter", f"--net=/proc/self/fd/{internet.outside}"]


@pytest.fixture(scope="module")
def debian(internet: Internet, outside: list[str], work_dir: Path) -> Iterator[Registry]:
    """Debian with Python, without sudo and certificates; a second time with a repository that has both."""
    directory = work_dir / "debian"
    repository = internet.documents / "distribution"
    for path in (directory, repository):
        path.mkdir(parents=True)
    root = directory / "root.tar"
    fetch = f'chroot "$1" sh -c "cd /var/tmp && apt-get -q download {PACKAGES}"'
    hooks = [f"--customize-hook={fetch}", f'--customize-hook=mv "$1"/var/tmp/*.deb {repository}']
    made = subprocess.run(
        [*outside, "mmdebstrap", "--quiet", "--mode=root", "--variant=apt", "--dpkgopt=force-unsafe-io", "--include=python3", *hooks, "bookworm", root],
        pass_fds=[internet.outside], capture_output=True, text=True, timeout=400, check=False,
    )
    assert made.returncode == 0, made.stderr
    index = []
    for file in sorted(repository.glob("*.deb")):
        control = subprocess.run(["dpkg-deb", "-f", file], check=True, capture_output=True, text=True).stdout.strip()
        data = file.read_bytes()
        index.append(f"{control}\nFilename: ./{file.name}\nSize: {len(data)}\nSHA256: {hashlib.sha256(data).hexdigest()}\n")
    (repository / "Packages").write_text("\n".join(index))

    def sources(archive: tarfile.TarFile) -> None:
        line = f"deb [trusted=yes] http://{SITE}/files/distribution ./\n"
        member(archive, "etc/apt/sources.list", line.encode(), mode=0o644)

    image = gzip.compress(root.read_bytes(), 1)
    root.unlink()
    with registry(internet, work_dir / "debian-registry", HOST, PORT) as server:
        server.push("debian", "bare", [image])
        server.push("debian", "12", [image, layer(sources)])
        yield server


@pytest.fixture
def name(platform: Platform) -> Iterator[str]:
    name = f"t{uuid.uuid4().hex[:12]}"
    yield name
    headers = {"X-API-Key": platform.credentials()["E2B_API_KEY"]}
    httpx.delete(f"{platform.url}/templates/{name}", headers=headers)


def build(template: object, name: str) -> list[str]:
    lines: list[str] = []
    Template.build(template, name, on_build_logs=lambda entry: lines.append(f"{entry.level} {entry.message}"))
    return lines


def test_what_sandboxes_need_is_installed(debian: Registry, name: str) -> None:
    lines = build(Template().from_image(f"{HOST}:{PORT}/debian:12").run_cmd("sudo -n id -un > ~/by"), name)
    assert not [line for line in lines if line.startswith("warn")], lines
    with Sandbox.create(name, timeout=120) as box:
        seen = box.commands.run('cat ~/by; . /etc/os-release; echo "$ID"; id -un; sudo -n cat /etc/shadow | wc -l; echo ${BASH_VERSION%%.*}')
        assert seen.stdout.split()[:3] == ["root", "debian", "user"]
        certificates = box.commands.run("grep -c BEGIN /etc/ssl/certs/ca-certificates.crt; sudo apt-get check; dpkg --audit")
        assert int(certificates.stdout.split()[0]) > 100
        # What the host's own /usr has and this image not.
        assert not box.files.exists("/usr/bin/gcc")


def test_what_cannot_be_installed_is_named(debian: Registry, name: str) -> None:
    """Its own sources do not answer here as a repository does."""
    lines = build(Template().from_image(f"{HOST}:{PORT}/debian:bare").run_cmd("id -un"), name)
    warned = [line for line in lines if line.startswith("warn")]
    assert ["sudo" in line and "ca-certificates" in line for line in warned] == [True], lines
    with Sandbox.create(name, timeout=120) as box:
        assert box.commands.run("id -un; pwd").stdout == "user\n/home/user\n"


def test_a_server_with_numpy_answers_when_create_returns(
    debian: Registry, internet: Internet, outside: list[str], platform: Platform, name: str, tmp_path: Path
) -> None:
    wheels = internet.documents / "simple" / "numpy"
    wheels.mkdir(parents=True)
    for package, into in (("numpy==2.2.6", wheels), ("pip==25.1.1", tmp_path)):
        subprocess.run(
            [*outside, sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--python-version=3.11", "--only-binary=:all:", "-d", into, package],
            pass_fds=[internet.outside], check=True, capture_output=True, timeout=300,
        )
    next(tmp_path.glob("pip-*.whl")).rename(tmp_path / "pip.zip")
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "main.py").write_text(APP)
    index = f"--index-url http://{SITE}/files/simple/ --trusted-host {SITE}"
    dockerfile = f"""
FROM {HOST}:{PORT}/debian:12
COPY pip.zip /tmp/pip.zip
RUN python3 /tmp/pip.zip/pip install --break-system-packages {index} numpy && rm /tmp/pip.zip
WORKDIR /srv/app
COPY app .
USER user
"""
    template = Template(file_context_path=tmp_path).from_dockerfile(dockerfile)
    build(template.set_start_cmd("exec python3 main.py", f'python3 -c "{READY}"'), name)
    for _ in range(2):
        with Sandbox.create(name, timeout=120) as box:
            answer = httpx.get(f"{platform.url}/", headers={"Host": box.get_host(8000)})
            assert (answer.status_code, answer.text) == (200, "45")
