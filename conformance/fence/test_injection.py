"""Headers that the gateway sets on requests: programs of a sandbox use a secret that is nowhere in it."""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
import tarfile
import uuid
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox, Secret

from harness.internet import Internet
from harness.platform import Platform
from harness.search import search
from harness.traffic import until

API, PLAIN = "api.example.com", "www.example.com"
JAVA = """
import java.net.URI;
import java.net.http.*;

class Get {
    public static void main(String[] urls) throws Exception {
        var client = HttpClient.newHttpClient();
        for (var url : urls) {
            System.out.println(client.send(HttpRequest.newBuilder(URI.create(url)).build(), HttpResponse.BodyHandlers.ofString()).body());
            System.out.println(new String(URI.create(url).toURL().openStream().readAllBytes()));
        }
    }
}
"""


class Injected:
    """A sandbox with a rule for one host, and the secret of the rule."""

    def __init__(self, create: Callable[..., Sandbox], value: str = "Bearer %s") -> None:
        self.name = f"secret-{uuid.uuid4().hex[:8]}"
        self.secret = f"sk-{uuid.uuid4().hex}"
        Secret.create(self.name, self.secret)
        self.header = value % self.secret
        self.box = create(network=self.network(value))

    def network(self, value: str = "Bearer %s") -> dict[str, object]:
        headers = {"Authorization": value % f"${{e2b.secrets.{self.name}}}"}
        return {"rules": {API: [{"transform": {"headers": headers}}]}}

    def run(self, command: str, timeout: float = 90) -> str:
        return self.box.commands.run(command, timeout=timeout).stdout


@pytest.fixture
def injected(create: Callable[..., Sandbox]) -> Injected:
    return Injected(create)


def sent(internet: Internet, path: str, host: str = API) -> list[str | None]:
    return [event["authorization"] for event in internet.events(kind="http", host=host, path=path)]


@pytest.mark.parametrize(
    "program",
    [
        "curl -sS --http1.1",
        "curl -sS --http2",
        "curl -sS -d x=1",
        "curl -sS -H 'Authorization: mine'",
        "curl -sS -T /etc/hostname",
        "wget -qO-",
        "env -i curl -sS",
        """python3 -c 'import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())'""",
        """node -e 'fetch(process.argv[1]).then(got => got.text()).then(console.log)'""",
        """node -e 'require("https").get(process.argv[1], got => got.pipe(process.stdout))'""",
    ],
)
def test_programs(injected: Injected, internet: Internet, program: str) -> None:
    path = f"/{uuid.uuid4().hex}"
    seen = json.loads(injected.run(f"{program} https://{API}{path}"))
    assert (seen["name"], seen["host"]) == (API, API)
    assert sent(internet, path) == [injected.header]


def test_another_host_is_not_decrypted(injected: Injected, internet: Internet) -> None:
    path = f"/{uuid.uuid4().hex}"
    assert injected.box.commands.run(f"curl -sS https://{PLAIN}{path} || echo $?").stdout == "60\n"
    injected.run(f"curl -sSk https://{PLAIN}{path}")
    assert sent(internet, path, PLAIN) == [None]


def test_python_clients(injected: Injected, internet: Internet) -> None:
    """httpx, with its certifi, as the clients of AI services use it."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        packages = Path(httpx.__file__).parent.parent
        for name in ("httpx", "httpcore", "h11", "h2", "hpack", "hyperframe", "anyio", "certifi", "idna", "typing_extensions.py"):
            archive.add(packages / name, name)
    injected.box.files.write("/tmp/site.tar", packed.getvalue())
    injected.run("mkdir /tmp/site && tar -C /tmp/site -xf /tmp/site.tar")
    for client in ("httpx.Client()", "httpx.Client(http2=True)"):
        path = f"/{uuid.uuid4().hex}"
        code = f"import httpx; c = {client}; [print(c.get('https://{API}{path}').status_code) for _ in range(3)]"
        assert injected.run(f'PYTHONPATH=/tmp/site python3 -c "{code}"') == "200\n" * 3
        assert sent(internet, path) == [injected.header] * 3


def test_java(injected: Injected, internet: Internet) -> None:
    path = f"/{uuid.uuid4().hex}"
    injected.box.files.write("/tmp/Get.java", JAVA)
    said = injected.run(f"java /tmp/Get.java https://{API}{path}")
    assert [json.loads(line)["host"] for line in said.splitlines()] == [API, API]
    assert sent(internet, path) == [injected.header] * 2
    assert "ringfence-egress-gateway-0" in injected.run("keytool -list -cacerts -storepass changeit 2>&1")


def test_git(create: Callable[..., Sandbox], internet: Internet, tmp_path: Path) -> None:
    """Clone and push with the token as the password of Basic authentication."""
    bare, work = internet.documents / "private.git", tmp_path / "work"
    for command in (
        f"git init -q --bare -b main {bare}",
        f"git -C {bare} config http.receivepack true",
        f"git init -q -b main {work}",
        f"git -C {work} -c user.name=a -c user.email=a@example.com commit -q --allow-empty -m first",
        f"git -C {work} push -q {bare} main",
    ):
        subprocess.run(command.split(), check=True, capture_output=True)
    token = f"ghp_{uuid.uuid4().hex}"
    name = f"secret-{uuid.uuid4().hex[:8]}"
    basic = base64.b64encode(f"x-access-token:{token}".encode()).decode()
    Secret.create(name, basic)
    headers = {"Authorization": f"Basic {Secret.fill(name)}"}
    box = create(network={"rules": {API: [{"transform": {"headers": headers}}]}})
    since = internet.mark()
    said = box.commands.run(
        f"cd /tmp && export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=http.version GIT_CONFIG_VALUE_0=HTTP/1.1 && git clone -q https://{API}/git/private.git clone && cd clone"
        " && git -c user.name=b -c user.email=b@example.com commit -q --allow-empty -m second"
        " && git push -q origin main && git log --format=%s",
        timeout=90,
    ).stdout
    assert said == "second\nfirst\n"
    seen = {event["authorization"] for event in since(kind="http", host=API)}
    assert seen == {f"Basic {basic}"}


def test_echoes_are_hidden(injected: Injected) -> None:
    said = injected.run(f"curl -sSi --http1.1 --compressed https://{API}/headers")
    assert injected.secret[3:] not in said and said.count("*" * len(injected.header)) == 2, said


def test_the_log_tells_what_was_set(injected: Injected, platform: Platform) -> None:
    path = f"/{uuid.uuid4().hex}"
    injected.run(f"curl -sS 'https://{API}{path}?key=mine'")
    url = f"{platform.url}/v2/sandboxes/{injected.box.sandbox_id}/logs"

    def logged() -> str:
        return httpx.get(url, headers={"X-API-Key": os.environ["E2B_API_KEY"]}).text

    until(lambda: "egress_injected" in logged(), "the request is in the log")
    assert path in logged() and injected.secret not in logged() and "key=mine" not in logged()


def test_injections_come_and_go(create: Callable[..., Sandbox], platform: Platform, internet: Internet) -> None:
    """The rules of the API, on a sandbox that began without any."""
    box = create()
    url = f"{platform.url}/sandboxes/{box.sandbox_id}/injections"
    key = {"X-API-Key": os.environ["E2B_API_KEY"]}

    def got(path: str) -> list[str | None]:
        box.commands.run(f"curl -sSk 'https://{API}{path}'")
        return sent(internet, path)

    name = uuid.uuid4().hex
    assert got(f"/{name}/a") == [None]
    token = f"sk-{uuid.uuid4().hex}"
    rule = {"type": "openai", "api_key": token, "base_url": f"https://{API}/{name}/v1/*"}
    assert httpx.put(url, json={"injections": [rule]}, headers=key).status_code == 204
    assert got(f"/{name}/v1/b") == [f"Bearer {token}"]
    assert got(f"/{name}/v2/b") == [None]
    assert got(f"/{name}/v1/../c") == [] and sent(internet, f"/{name}/c") == [None]
    shown = httpx.get(url, headers=key).text
    assert token not in shown and "openai" in shown
    assert platform.terminate() == 0
    platform.start()
    assert got(f"/{name}/v1/d") == [f"Bearer {token}"]
    assert httpx.put(url, json={"injections": []}, headers=key).status_code == 204
    assert got(f"/{name}/v1/e") == [None]


CANARY = """
import mmap, os, sys, time
kept = {name!r} + "-memory"
open("/home/user/kept", "w").write({name!r} + "-file")
open("/dev/shm/kept", "w").write({name!r} + "-shm")
print("ready", flush=True)
time.sleep(600)
"""
KEEPER = f"""
import http.client, ssl, sys, time
connection = http.client.HTTPSConnection("{API}")
for _ in range(3):
    connection.request("GET", "/headers", headers={{"Authorization": "mine"}})
    kept = connection.getresponse().read()
open("/home/user/answer", "wb").write(kept)
print("ready", flush=True)
time.sleep(600)
"""


def test_the_secret_is_nowhere(injected: Injected, platform: Platform, internet: Internet) -> None:
    box = injected.box
    canary = f"canary{uuid.uuid4().hex}"
    box.set_timeout(300)
    box.files.write("/tmp/canary.py", CANARY.format(name=canary))
    box.files.write("/tmp/keeper.py", KEEPER)
    kept = []
    for command in (f"CANARY={canary} python3 /tmp/canary.py", "python3 /tmp/keeper.py"):
        handle = box.commands.run(command, background=True, timeout=0)
        assert next(iter(handle))[0] == "ready\n"
        kept.append(handle)
    Sandbox.create(timeout=60, metadata={"canary": canary}).kill()

    def found(secret: str) -> set[str]:
        return search(secret, box.sandbox_id, platform.data_dir, platform.log_path)

    def nowhere() -> None:
        assert found(injected.secret) == set()
        path = f"/{uuid.uuid4().hex}"
        injected.run(f"curl -sS https://{API}{path}")
        assert sent(internet, path)[-1] == injected.header

    assert found(canary) >= {"memory", "environ", "files", "disk image", "agent's memory"}, found(canary)
    nowhere()
    # After a restart the same certificate is trusted, and the same secret is set.
    assert platform.terminate() == 0
    platform.start()
    nowhere()
    # After a change of the secret, the old one is not set any more.
    old, injected.secret = injected.secret, f"sk-{uuid.uuid4().hex}"
    Secret.update(injected.name, injected.secret)
    injected.header = f"Bearer {injected.secret}"
    nowhere()
    assert found(old) == set()
    # Without rules, requests pass as they are, to a server that the sandbox then does not trust.
    box.update_network({})
    path = f"/{uuid.uuid4().hex}"
    injected.run(f"curl -sSk https://{API}{path}")
    assert sent(internet, path) == [None]
    assert found(injected.secret) == set()
