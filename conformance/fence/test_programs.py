"""Programs that people use, in the template `base`, against servers of the fake internet."""

from __future__ import annotations

import base64
import gzip
import io
import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from e2b import Sandbox

from harness.inside import root
from harness.internet import Internet
from harness.internet_names import home

SITE = "www.example.com"
# Not a package that the tests need.
GO = shutil.which("go", path=f"{os.environ['PATH']}:/usr/local/go/bin")
GET = """package main

import ("io"; "net/http"; "os")

func main() {
	response, err := http.Get(os.Args[1])
	if err != nil {
		panic(err)
	}
	io.Copy(os.Stdout, response.Body)
}
"""
JAVA = """
import java.net.URI;
import java.net.http.*;

class Get {
    public static void main(String[] urls) throws Exception {
        // The first request is that of a library, the second of the older class that most programs still use.
        var client = HttpClient.newHttpClient();
        for (var url : urls) {
            System.out.println(client.send(HttpRequest.newBuilder(URI.create(url)).build(), HttpResponse.BodyHandlers.ofString()).body());
            System.out.println(new String(URI.create(url).toURL().openStream().readAllBytes()));
        }
    }
}
"""
TRUST = "SSL_CERT_FILE=/tmp/authority.pem REQUESTS_CA_BUNDLE=/tmp/authority.pem NODE_EXTRA_CA_CERTS=/tmp/authority.pem"


@pytest.fixture
def box(create: Callable[..., Sandbox], internet: Internet) -> Sandbox:
    """One that may reach the site by name and nothing else."""
    box = create(network={"deny_out": ["0.0.0.0/0"], "allow_out": [SITE, "api.example.com"]})
    box.files.write("/tmp/authority.pem", internet.authority.read_text())
    return box


def run(box: Sandbox, command: str, timeout: float = 90) -> str:
    return box.commands.run(command, timeout=timeout).stdout


def test_getent(box: Sandbox) -> None:
    assert home(SITE) in run(box, f"getent hosts {SITE}")
    assert home(SITE) in run(box, f"getent ahosts {SITE}")
    assert run(box, "getent hosts www.example.net || echo none") == "none\n"


@pytest.mark.parametrize("options", ["--http1.1", "--http2", "--http1.1 -d x=1", "--http2 -T /etc/hostname"])
def test_curl(box: Sandbox, options: str) -> None:
    seen = json.loads(run(box, f"curl -sS {options} --cacert /tmp/authority.pem https://{SITE}/curl"))
    assert (seen["server"], seen["name"], seen["path"]) == (home(SITE), SITE, "/curl")
    assert json.loads(run(box, f"curl -sS {options} http://{SITE}/plain"))["server"] == home(SITE)
    assert run(box, "curl -sS -m 10 https://www.example.net/ || echo failed").endswith("failed\n")


def test_wget(box: Sandbox) -> None:
    assert shutil.which("wget"), "wget is missing on this host"
    assert json.loads(run(box, f"wget -q -O - --ca-certificate /tmp/authority.pem https://{SITE}/wget"))["name"] == SITE


def test_python(box: Sandbox) -> None:
    for scheme in ("http", "https"):
        program = f"import urllib.request;print(urllib.request.urlopen('{scheme}://{SITE}/python').read().decode())"
        assert json.loads(run(box, f'{TRUST} python3 -c "{program}"'))["server"] == home(SITE)
    refused = "import urllib.request;urllib.request.urlopen('http://93.184.216.34/',timeout=5)"
    assert "Connection reset by peer" in run(box, f'python3 -c "{refused}" 2>&1 || true')


WEBSOCKET = """
import base64, os, socket, ssl, struct, sys
host = sys.argv[1]
stream = ssl.create_default_context(cafile="/tmp/authority.pem").wrap_socket(socket.create_connection((host, 443)), server_hostname=host)
key = base64.b64encode(os.urandom(16)).decode()
stream.sendall(f"GET /ws HTTP/1.1\\r\\nHost: {host}\\r\\nUpgrade: websocket\\r\\nConnection: Upgrade\\r\\nSec-WebSocket-Key: {key}\\r\\nSec-WebSocket-Version: 13\\r\\n\\r\\n".encode())
reader = stream.makefile("rb")
assert b"101" in reader.readline()
while reader.readline().strip():
    pass
for size in (5, 300, 60000):
    data = os.urandom(size)
    length = bytes([0x80 | size]) if size < 126 else b"\\xfe" + struct.pack("!H", size)
    stream.sendall(b"\\x82" + length + bytes(4) + data)
    assert reader.read(2)[0] == 0x82
    if size >= 126:
        reader.read(2)
    assert reader.read(size) == data
print("echoed")
"""


def test_websocket(box: Sandbox) -> None:
    box.files.write("/tmp/websocket.py", WEBSOCKET)
    assert run(box, f"python3 /tmp/websocket.py {SITE}") == "echoed\n"


def test_node(box: Sandbox) -> None:
    program = f"for (const s of ['http','https']) {{ const a = await fetch(s+'://{SITE}/node'); console.log(JSON.stringify(await a.json())) }}"
    box.files.write("/tmp/fetch.mjs", program)
    lines = run(box, f"{TRUST} node /tmp/fetch.mjs").splitlines()
    assert [json.loads(line)["server"] for line in lines] == [home(SITE)] * 2


def test_java(box: Sandbox, internet: Internet) -> None:
    """With its own TLS and its own sockets, which take both families."""
    events = internet.mark()
    assert "CN=example.com" in run(box, f"keytool -printcert -sslserver {SITE}:443")
    assert {event["server"] for event in events(kind="tls", name=SITE)} == {home(SITE)}


def test_a_java_program(box: Sandbox) -> None:
    """Java has a trust store of its own, so the authority is imported there."""
    box.files.write("/tmp/Get.java", JAVA)
    run(box, "keytool -importcert -noprompt -alias fake -file /tmp/authority.pem -keystore /tmp/trust -storepass changeit 2>&1")
    trust = "-Djavax.net.ssl.trustStore=/tmp/trust -Djavax.net.ssl.trustStorePassword=changeit"
    lines = run(box, f"java {trust} /tmp/Get.java https://{SITE}/java http://{SITE}/java").splitlines()
    assert [(seen["server"], seen["host"], seen["path"]) for seen in map(json.loads, lines)] == [(home(SITE), SITE, "/java")] * 4
    assert "java.net.ConnectException" in run(box, f"java {trust} /tmp/Get.java https://www.example.net/ 2>&1 || true")


if GO:

    def test_go(box: Sandbox, tmp_path: Path) -> None:
        """With the resolver of Go, which reads resolv.conf itself."""
        (tmp_path / "get.go").write_text(GET)
        environment = {**os.environ, "CGO_ENABLED": "0", "GO111MODULE": "off", "GOFLAGS": ""}
        subprocess.run([GO, "build", "-o", tmp_path / "get", tmp_path / "get.go"], check=True, env=environment, timeout=300)
        box.files.write("/tmp/get", (tmp_path / "get").read_bytes())
        for scheme in ("http", "https"):
            assert json.loads(run(box, f"chmod +x /tmp/get; {TRUST} /tmp/get {scheme}://{SITE}/go"))["server"] == home(SITE)


def test_pip(box: Sandbox, internet: Internet) -> None:
    index = internet.documents / "simple" / "tinytool"
    index.mkdir(parents=True)
    with zipfile.ZipFile(index / "tinytool-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tinytool.py", "print('installed')\n")
        wheel.writestr("tinytool-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tinytool\nVersion: 1.0\n")
        wheel.writestr("tinytool-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("tinytool-1.0.dist-info/RECORD", "")
    for scheme in ("http", "https"):
        options = f"--index-url {scheme}://{SITE}/files/simple/ --trusted-host {SITE} --target /tmp/{scheme} --disable-pip-version-check"
        run(box, f"python3 -m pip install -q --no-cache-dir {options} tinytool", timeout=120)
        assert run(box, f"PYTHONPATH=/tmp/{scheme} python3 -m tinytool") == "installed\n"


def test_npm(box: Sandbox, internet: Internet) -> None:
    """A registry is documents: one of each package, which names the archives of its versions and their digests."""
    registry = internet.documents / "npm"
    registry.mkdir()
    for name, code, dependencies in (
        ("tiny-tool", "console.log(require('tiny-words'))", {"tiny-words": "^1.0.0"}),
        ("tiny-words", "module.exports = 'installed'", {}),
    ):
        package = {"name": name, "version": "1.0.0", "main": "index.js", "dependencies": dependencies}
        files = {"package.json": json.dumps(package), "index.js": code, "run.js": f"#!/usr/bin/env node\n{code}\n"}
        if name == "tiny-tool":
            package["bin"] = {name: "run.js"}
            files["package.json"] = json.dumps(package)
        with tarfile.open(registry / f"{name}-1.0.0.tgz", "w:gz") as archive:
            for file, content in files.items():
                entry = tarfile.TarInfo(f"package/{file}")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content.encode()))
        digest = base64.b64encode(hashlib.sha512((registry / f"{name}-1.0.0.tgz").read_bytes()).digest()).decode()
        release = {**package, "dist": {"tarball": f"https://{SITE}/files/npm/{name}-1.0.0.tgz", "integrity": f"sha512-{digest}"}}
        document = {"name": name, "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": release}}
        (registry / name).write_text(json.dumps(document))
    events = internet.mark()
    options = "--no-audit --no-fund --no-update-notifier --fetch-retries=0 --loglevel=error --cache /tmp/npm-cache"
    run(box, f"mkdir /tmp/npm && cd /tmp/npm && {TRUST} npm install {options} --registry https://{SITE}/files/npm/ tiny-tool", timeout=180)
    assert run(box, "node -e \"require('/tmp/npm/node_modules/tiny-tool')\" && /tmp/npm/node_modules/.bin/tiny-tool") == "installed\n" * 2
    fetched = {event["path"] for event in events(kind="http", host=SITE)}
    assert fetched == {f"/files/npm/{name}" for name in ("tiny-tool", "tiny-tool-1.0.0.tgz", "tiny-words", "tiny-words-1.0.0.tgz")}
    failed = run(box, f"cd /tmp/npm && {TRUST} npm install {options} --registry https://www.example.net/files/npm/ other-tool 2>&1 || true")
    assert "npm error code EAI_AGAIN" in failed, failed
    assert events(host="www.example.net") == []


def test_apt(box: Sandbox, internet: Internet, tmp_path: Path) -> None:
    package = tmp_path / "tiny"
    (package / "DEBIAN").mkdir(parents=True)
    (package / "DEBIAN" / "control").write_text("Package: tiny-tool\nVersion: 1.0\nArchitecture: all\nMaintainer: x <x@example.com>\nDescription: tiny\n")
    (package / "opt").mkdir()
    (package / "opt" / "tiny-tool").write_text("installed\n")
    repository = internet.documents / "debian"
    repository.mkdir()
    subprocess.run(["dpkg-deb", "--build", "--root-owner-group", package, repository / "tiny.deb"], check=True, capture_output=True)
    data = (repository / "tiny.deb").read_bytes()
    control = (package / "DEBIAN" / "control").read_text()
    index = f"{control}Filename: ./tiny.deb\nSize: {len(data)}\nSHA256: {hashlib.sha256(data).hexdigest()}\n"
    (repository / "Packages").write_text(index)
    (repository / "Packages.gz").write_bytes(gzip.compress(index.encode()))
    root(box, f"echo 'deb [trusted=yes] http://{SITE}/files/debian ./' > /tmp/tiny.list; mkdir -p /tmp/none")
    options = "-o Dir::Etc::sourcelist=/tmp/tiny.list -o Dir::Etc::sourceparts=/tmp/none -o APT::Get::List-Cleanup=0"
    said = root(box, f"apt-get {options} update 2>&1 && cd /tmp && apt-get {options} download tiny-tool 2>&1 && dpkg-deb -x /tmp/tiny-tool*.deb /tmp/out", timeout=120)
    assert root(box, "cat /tmp/out/opt/tiny-tool") == "installed\n", said


def test_git(box: Sandbox, internet: Internet, tmp_path: Path) -> None:
    """Over git's own protocol, clone and push."""
    bare, work = internet.documents / "project.git", tmp_path / "work"
    for command in (
        f"git init -q --bare -b main {bare}",
        f"git -C {bare} config http.receivepack true",
        f"git init -q -b main {work}",
        f"git -C {work} -c user.name=a -c user.email=a@example.com commit -q --allow-empty -m first",
        f"git -C {work} push -q {bare} main",
    ):
        subprocess.run(command.split(), check=True, capture_output=True)
    remote = f"https://{SITE}/git/project.git"
    git = "GIT_SSL_CAINFO=/tmp/authority.pem git -c http.version=HTTP/1.1"
    said = run(
        box,
        f"cd /tmp && {git} clone -q {remote} clone && cd clone && git -c user.name=b -c user.email=b@example.com commit -q --allow-empty -m second"
        f" && {git} push -q origin main && git log --format=%s",
    )
    assert said == "second\nfirst\n"
    log = subprocess.run(["git", "-C", bare, "log", "--format=%s", "main"], check=True, capture_output=True, text=True).stdout
    assert log == said
