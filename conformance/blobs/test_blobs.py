"""Layers and uploaded files in a bucket: what comes back from it, what is refused, and what is left of failures."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox, Template

from harness.patience import within
from harness.platform import Platform
from harness.s3 import BUCKET, KEY, PREFIX, Gateway, until


@pytest.fixture(scope="module")
def gateway(work_dir: Path) -> Iterator[Gateway]:
    gateway = Gateway(work_dir)
    gateway.start()
    yield gateway
    gateway.close()


@pytest.fixture(scope="module")
def stored(work_dir: Path, gateway: Gateway) -> Iterator[Platform]:
    """A platform whose layers and files are in the bucket."""
    config = f"[sandbox]\ndisk_mb = 768\n[pool]\nper_template = 0\n{gateway.config(grace_s='0')}"
    server = Platform(work_dir / "data", config=config)
    try:
        server.start()
        server.use()
        yield server
        assert KEY not in server.log()
        assert server.terminate() == 0, server.log_tail(12)
    finally:
        server.close()


@pytest.fixture(scope="module")
def api(stored: Platform) -> Iterator[httpx.Client]:
    headers = {"X-API-Key": stored.credentials()["E2B_API_KEY"]}
    with httpx.Client(base_url=stored.url, headers=headers, timeout=60) as client:
        yield client


def built(command: str) -> str:
    name = f"t{uuid.uuid4().hex[:12]}"
    # A layer of its own, also if another template has the same command.
    command = f"echo {name} > ~/name; {command}"
    Template.build(Template().from_template("base").run_cmd(command), f"{name}:v1", cpu_count=1, memory_mb=512)
    return f"{name}:v1"


def local(platform: Platform) -> set[str]:
    return {path.name for path in (platform.data_dir / "layers").iterdir()}


@pytest.fixture
def template(stored: Platform, gateway: Gateway) -> tuple[str, set[str]]:
    """A template that nobody has used, and its layers."""
    before = local(stored)
    name = built("head -c 300000 /dev/urandom > ~/random; echo here > ~/note")
    layers = local(stored) - before
    assert layers and layers <= gateway.layers(), "a build that is ready is in the bucket"
    return name, layers


def lose(platform: Platform, layers: set[str]) -> None:
    for layer in layers:
        shutil.rmtree(platform.data_dir / "layers" / layer)


def create(api: httpx.Client, name: str) -> httpx.Response:
    return api.post("/sandboxes", json={"templateID": name, "timeout": 60})


def works(name: str) -> None:
    box = Sandbox.create(name, timeout=60)
    try:
        assert box.commands.run("cat ~/note").stdout == "here\n"
    finally:
        box.kill()


def test_a_layer_that_the_node_lost_is_fetched_once_for_all(
    stored: Platform, gateway: Gateway, api: httpx.Client, template: tuple[str, set[str]]
) -> None:
    name, layers = template
    lose(stored, layers)
    # What arrives before all of them wait for it would be fetched once anyway.
    gateway.relay.stall(down=100_000)
    fetched = stored.log().count("fetched a layer")
    with ThreadPoolExecutor(6) as threads:
        waiting = [threads.submit(create, api, name) for _ in range(6)]
        assert gateway.relay.stalled.wait(within(30))
        gateway.relay.go_on()
        made = [answer.result() for answer in waiting]
    assert [answer.status_code for answer in made] == [201] * 6, [answer.text for answer in made]
    assert layers <= local(stored)
    assert stored.log().count("fetched a layer") - fetched == len(layers)
    works(name)
    for answer in made:
        assert api.delete(f"/sandboxes/{answer.json()['sandboxID']}").status_code == 204


@pytest.mark.parametrize("damage", ["flipped", "truncated", "gone"])
def test_a_damaged_object_is_refused(
    stored: Platform, gateway: Gateway, api: httpx.Client, template: tuple[str, set[str]], damage: str
) -> None:
    name, layers = template
    [layer] = layers
    lose(stored, layers)
    path = gateway.layer(layer)
    whole = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        middle = len(whole) // 2
        path.write_bytes(whole[:middle] + (bytes([whole[middle] ^ 1]) + whole[middle + 1 :] if damage == "flipped" else b""))
    refused = create(api, name)
    if damage == "gone":
        assert (refused.status_code, refused.json()["error_code"]) == (404, "template_lost"), refused.text
        assert layer in refused.text
    else:
        assert refused.status_code == 500, refused.text
        assert "is damaged" in stored.log_tail(8)
    assert layer not in local(stored)
    until("nothing is left of it", lambda: not any(entry.startswith("new-") for entry in local(stored)))
    path.write_bytes(whole)
    works(name)


def test_while_the_bucket_is_away_others_work(
    stored: Platform, gateway: Gateway, api: httpx.Client, template: tuple[str, set[str]]
) -> None:
    name, layers = template
    kept = built("echo here > ~/note")
    lose(stored, layers)
    gateway.stop()
    try:
        away = create(api, name)
        assert (away.status_code, away.json()["error_code"]) == (503, "template_unavailable"), away.text
        assert str(gateway.relay.port) not in away.text and BUCKET not in away.text
        works(kept)
        with pytest.raises(Exception, match="blob store"):
            built("echo new > ~/note")
        made = api.post("/v3/templates", json={"name": f"t{uuid.uuid4().hex[:12]}"}).json()
        url = api.get(f"/templates/{made['templateID']}/files/{'d' * 64}").json()["url"]
        refused = httpx.put(url, content=b"x" * 1000, timeout=60)
        assert refused.status_code == 503 and "blob store" in refused.text, refused.text
    finally:
        gateway.start()
    assert httpx.put(url, content=b"x" * 1000, timeout=within(30)).status_code == 200
    works(name)


def test_an_uploaded_file_that_the_node_lost_is_fetched(stored: Platform, gateway: Gateway, tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("copied\n" * 1000)
    name = f"t{uuid.uuid4().hex[:12]}"

    def build() -> None:
        template = Template(file_context_path=tmp_path).from_template("base").copy("file.txt", "/home/user/file.txt")
        Template.build(template, f"{name}:v1", cpu_count=1, memory_mb=512, skip_cache=True)

    build()
    uploaded = max((gateway.objects / "files").rglob("*.tar"), key=lambda path: path.stat().st_mtime_ns)
    [copy] = (stored.data_dir / "builds/files").rglob(uploaded.name)
    content = copy.read_bytes()
    assert uploaded.read_bytes()[:-32] == content
    copy.unlink()
    build()
    assert copy.read_bytes() == content
    copy.unlink()
    whole = uploaded.read_bytes()
    uploaded.write_bytes(whole[:10] + bytes([whole[10] ^ 1]) + whole[11:])
    with pytest.raises(Exception, match="no uploaded archive"):
        build()
    assert not copy.exists()
    uploaded.write_bytes(whole)


def test_objects_of_deleted_templates_are_removed_and_no_others(
    stored: Platform, gateway: Gateway, api: httpx.Client, template: tuple[str, set[str]]
) -> None:
    name, layers = template
    keep = built("echo here > ~/note; echo keep > ~/keep")
    kept = gateway.layers() - layers
    assert kept
    foreign = [
        gateway.root / BUCKET / "note",
        gateway.root / BUCKET / "some" / "layers" / f"{'a' * 64}.tar.zst",
        gateway.objects / "layers" / "note.txt",
    ]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("foreign")
    nobody = gateway.layer("b" * 64)
    nobody.write_text("old")
    assert api.delete(f"/templates/{name.split(':')[0]}").status_code < 300
    done = stored.run("gc")
    assert done.returncode == 0, done.stderr
    assert not nobody.exists()
    assert all(path.exists() for path in foreign)
    # Create requests that have found the template may still need its layers.
    assert layers <= gateway.layers()
    assert kept <= gateway.layers()
    works(keep)
    for path in foreign:
        path.unlink()


def test_a_platform_that_is_killed_leaves_no_part_of_an_upload(stored: Platform, gateway: Gateway) -> None:
    before = gateway.layers()
    name = f"t{uuid.uuid4().hex[:12]}"
    template = Template().from_template("base").run_cmd("head -c 20000000 /dev/urandom > ~/random; echo here > ~/note")
    # More than one part, and less than all of them.
    gateway.relay.stall(up=12_000_000)
    info = Template.build_in_background(template, f"{name}:v1", cpu_count=1, memory_mb=512)
    assert gateway.relay.stalled.wait(within(120))
    until("an upload in parts has begun", lambda: gateway.unfinished() == 1)
    stored.kill()
    gateway.relay.go_on()
    assert gateway.layers() == before
    stored.start()
    until("what was left is aborted, and the build begun again", lambda: len(gateway.layers()) > len(before), 120)
    until("no upload is left", lambda: gateway.unfinished() == 0)
    until("the build is final", lambda: Template.get_build_status(info).status.value == "ready")
    works(f"{name}:v1")


def test_a_platform_that_is_killed_leaves_no_part_of_a_layer(
    stored: Platform, gateway: Gateway, api: httpx.Client, template: tuple[str, set[str]]
) -> None:
    name, layers = template
    lose(stored, layers)
    gateway.relay.stall(down=100_000)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(lambda: pytest.raises(httpx.TransportError, create, api, name))
        assert gateway.relay.stalled.wait(within(30))
        stored.kill()
        waiting.result()
    gateway.relay.go_on()
    assert not layers & local(stored)
    stored.start()
    works(name)
    assert not any(entry.startswith("new-") for entry in local(stored))


def refused(directory: Path, config: str) -> str:
    server = Platform(directory / "refused", config=config)
    try:
        server.launch()
        assert server.process and server.process.wait(60) != 0
        server.process = None
        return server.log()
    finally:
        server.close()


def test_wrong_settings_end_the_start(stored: Platform, gateway: Gateway, tmp_path: Path, work_dir: Path) -> None:
    directory = work_dir
    wrong = tmp_path / "wrong.key"
    wrong.write_text("a-wrong-secret")
    for config, told in (
        (gateway.config(secret_access_key_file=f'"{wrong}"'), "blobs.access_key_id"),
        (gateway.config(bucket='"nowhere"'), "blobs.bucket"),
        (gateway.config(), "another database"),
        (gateway.config(allow_http="false"), "blobs.allow_http"),
        (gateway.config(store='"local"'), "blobs.store"),
    ):
        log = refused(directory, config)
        assert told in log and "a-wrong-secret" not in log and KEY not in log, log
    assert PREFIX in refused(directory, gateway.config())


def test_copies_beyond_the_limit_are_removed_and_come_back(
    stored: Platform, gateway: Gateway, api: httpx.Client, template: tuple[str, set[str]]
) -> None:
    name, layers = template
    before = local(stored)
    running = built("echo here > ~/note; echo running > ~/running")
    used = local(stored) - before
    made = api.post("/sandboxes", json={"templateID": running, "timeout": 600})
    assert made.status_code == 201, made.text
    assert stored.config_path is not None
    config = stored.config_path.read_text()
    assert stored.terminate() == 0
    try:
        stored.config_path.write_text(config.replace("[blobs]", "[blobs]\ncache_mb = 0"))
        stored.start()
        done = stored.run("gc")
        assert done.returncode == 0, done.stderr
        assert not layers & local(stored), "nothing has used them since the start"
        assert used <= local(stored), "a sandbox uses them"
        assert layers <= gateway.layers()
        works(name)
        assert layers <= local(stored)
        # What was used just now stays, or every start would wait.
        assert stored.run("gc").returncode == 0
        assert layers <= local(stored)
        # Neither does what is not in the bucket go.
        assert api.delete(f"/sandboxes/{made.json()['sandboxID']}").status_code == 204
        stored.terminate()
        for layer in used:
            gateway.layer(layer).unlink()
        stored.start()
        assert stored.run("gc").returncode == 0
        # It was stored again, and could go then.
        assert used <= gateway.layers()
    finally:
        if stored.process:
            stored.terminate()
        stored.config_path.write_text(config)
        stored.start()
    works(running)


class WithHosts(Platform):
    """A platform that resolves names by a file of its own."""

    hosts: Path

    def launch(self) -> None:
        command = [self.binary, "up", "--data-dir", self.data_dir, "--listen", f"127.0.0.1:{self.port}", "--config", self.config_path]
        own = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', self.hosts]
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                [*own, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment(), start_new_session=True
            )


@pytest.mark.parametrize("path_style", ["true", "false"])
def test_a_server_with_a_certificate(tmp_path: Path, stored: Platform, path_style: str) -> None:
    """With the bucket in the path, and in the name of the host."""
    key, pem = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=s3.test",
         "-addext", "subjectAltName=DNS:s3.test,DNS:*.s3.test", "-addext", "basicConstraints=critical,CA:FALSE",
         "-keyout", key, "-out", pem],
        check=True, capture_output=True,
    )  # fmt: skip
    virtual = ("--virtual-domain", "s3.test") if path_style == "false" else ()
    gateway = Gateway(tmp_path, "--cert", pem, "--key", key, *virtual)
    endpoint = f'"https://s3.test:{gateway.relay.port}"'
    table = gateway.config(endpoint=endpoint, ca_file=f'"{pem}"', path_style=path_style, allow_http="false")
    # The paths of its sockets are short.
    directory = tempfile.mkdtemp(prefix="rf-")
    server = WithHosts(Path(directory) / "data", config=f"[sandbox]\ndisk_mb = 768\n[pool]\nper_template = 0\n{table}")
    server.hosts = tmp_path / "hosts"
    server.hosts.write_text(f"127.0.0.1 localhost s3.test {BUCKET}.s3.test\n")
    try:
        gateway.start()
        server.start()
        server.use()
        # More than a part.
        name = built("head -c 9000000 /dev/urandom > ~/random; echo here > ~/note")
        layers = local(server)
        assert layers and layers <= gateway.layers()
        assert server.terminate() == 0
        lose(server, layers)
        server.start()
        works(name)
        assert layers <= local(server)
        # Another certificate is not trusted, whatever is signed by whom.
        assert server.terminate() == 0
        for path in (key, pem):
            path.rename(path.with_suffix(".old"))
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=other",
             "-addext", "basicConstraints=critical,CA:FALSE", "-keyout", key, "-out", pem],
            check=True, capture_output=True,
        )  # fmt: skip
        lose(server, layers)
        server.start()
        with httpx.Client(base_url=server.url, headers={"X-API-Key": server.credentials()["E2B_API_KEY"]}, timeout=60) as client:
            refused = create(client, name)
        assert (refused.status_code, refused.json()["error_code"]) == (503, "template_unavailable"), refused.text
    finally:
        server.close()
        gateway.close()
        shutil.rmtree(directory, ignore_errors=True)
        stored.use()
