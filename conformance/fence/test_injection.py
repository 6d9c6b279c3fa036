"""Headers that the gateway sets on requests: programs of a sandbox use a secret that is nowhere in it."""

from __future__ import annotations

import base64
import importlib.metadata
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


# Distributions that clients inside need: those of the tests' own environment, which has the same Python.
CLIENTS = (
    "annotated-types anthropic anyio certifi charset-normalizer docstring_parser h11 h2 hpack httpcore httpcore2 httpx httpx2"
    " hyperframe idna jiter openai opentelemetry-api pydantic pydantic_core requests sniffio truststore typing-inspection"
    " typing_extensions urllib3"
).split()
ASK = "model='m', max_tokens=9, messages=[{'role': 'user', 'content': 'x'}]"


def packed() -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz", compresslevel=1) as archive:
        for name in CLIENTS:
            files = importlib.metadata.files(name)
            assert files, name
            for file in files:
                if ".." not in file.parts and "__pycache__" not in file.parts:
                    archive.add(str(file.locate()), str(file))
    return content.getvalue()


def test_python_clients(injected: Injected, internet: Internet) -> None:
    """Clients with roots of their own, from PyPI: they read the variables, or the store of the system."""
    injected.box.files.write("/tmp/site.tar.gz", packed())
    injected.run("mkdir /tmp/site && tar -C /tmp/site -xzf /tmp/site.tar.gz")
    host = f"https://{API}"
    for name, made, asked, suffix in (
        ("httpx", "httpx.Client()", "get('{url}/a').status_code", "/a"),
        ("httpx", "httpx.Client(http2=True)", "get('{url}/a').status_code", "/a"),
        ("requests", "requests.Session()", "post('{url}/a', json={{}}).status_code", "/a"),
        (
            "openai",
            "openai.OpenAI(api_key='placeholder', base_url='{url}/v1')",
            f"chat.completions.with_raw_response.create({ASK.replace('{', '{{').replace('}', '}}')}).status_code",
            "/v1/chat/completions",
        ),
        (
            "anthropic",
            "anthropic.Anthropic(auth_token='placeholder', base_url='{url}')",
            f"messages.with_raw_response.create({ASK.replace('{', '{{').replace('}', '}}')}).status_code",
            "/v1/messages",
        ),
    ):
        path = f"/{uuid.uuid4().hex}"
        made, asked = (text.format(url=host + path) for text in (made, asked))
        injected.box.files.write("/tmp/client.py", f"import {name}\nc = {made}\nfor _ in range(3): print(c.{asked})\n")
        assert injected.run("PYTHONPATH=/tmp/site python3 /tmp/client.py") == "200\n" * 3, name
        assert sent(internet, path + suffix) == [injected.header] * 3, name


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


@pytest.mark.parametrize("version", ["http1.1", "http2"])
def test_no_part_of_an_answer_shows_the_secret(injected: Injected, internet: Internet, version: str) -> None:
    """A server shows the secret in every part that an answer has, and programs ask for it in every form."""
    ways = ["page", "name", "cookie", "trailer", "gzip", "deflate", "raw", "br", "range", "reason", "early", "chunk"]
    token = injected.secret.removeprefix("sk-")

    def asked(how: str, more: str = "") -> str:
        # Bytes that the encodings could be decoded from, with what curl tells of heads and trailers.
        command = f"curl -sSi --{version} --raw -H 'TE: trailers' {more} https://{API}/shows/{how} | base64 -w0"
        return base64.b64decode(injected.run(command)).decode("latin-1")

    hidden = "*" * len(injected.header)
    for how in ways:
        said = asked(how, "--compressed" if how in ("gzip", "deflate", "raw", "br") else "")
        assert token not in said.lower() and base64.b64encode(token.encode()).decode()[:12] not in said, (how, said)
        if how == "br":
            assert " 502" in said.splitlines()[0] and "cannot be searched" in said, said
        else:
            assert " 200" in said.splitlines()[0] and hidden in said, (how, said)
    # The server has got each of them with the secret.
    for how in ways:
        assert sent(internet, f"/shows/{how}")[-1] == injected.header
    # Piece by piece, as three bytes each.
    begin = len("<Bearer ")
    for header in ("Range", "Request-Range"):
        said = asked("range", f"-H '{header}: bytes={begin}-{begin + 2}' -H 'If-Range: \"a\"'")
        assert " 200" in said.splitlines()[0] and hidden in said and "\r\n\r\nsk-" not in said, said


def test_the_log_tells_what_was_set(injected: Injected, platform: Platform) -> None:
    path = f"/{uuid.uuid4().hex}"
    injected.run(f"curl -sS 'https://{API}{path}?key=mine'")
    url = f"{platform.url}/v2/sandboxes/{injected.box.sandbox_id}/logs"

    def logged() -> str:
        return httpx.get(url, headers={"X-API-Key": os.environ["E2B_API_KEY"]}, timeout=60).text

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
    assert httpx.put(url, json={"injections": [rule]}, headers=key, timeout=60).status_code == 204
    assert got(f"/{name}/v1/b") == [f"Bearer {token}"]
    assert got(f"/{name}/v2/b") == [None]
    assert got(f"/{name}/v1/../c") == [] and sent(internet, f"/{name}/c") == [None]
    shown = httpx.get(url, headers=key, timeout=60).text
    assert token not in shown and "openai" in shown
    assert platform.terminate() == 0
    platform.start()
    assert got(f"/{name}/v1/d") == [f"Bearer {token}"]
    assert httpx.put(url, json={"injections": []}, headers=key, timeout=60).status_code == 204
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


def test_the_secret_is_nowhere(
    create: Callable[..., Sandbox], injected: Injected, platform: Platform, internet: Internet
) -> None:
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
    # In the database as a text of a client, and in the log as the name of a secret that a rule refers to in vain.
    Secret.create(canary, "x")
    rules = {API: [{"transform": {"headers": {"X-Canary": f"${{e2b.secrets.{canary}}}"}}}]}
    create(metadata={"canary": canary}, network={"rules": rules})
    Secret.destroy(canary)

    def found(secret: str) -> set[str]:
        return search(secret, box.sandbox_id, platform.data_dir, platform.log_path)

    def nowhere() -> None:
        assert found(injected.secret) == set()
        path = f"/{uuid.uuid4().hex}"
        injected.run(f"curl -sS https://{API}{path}")
        assert sent(internet, path)[-1] == injected.header

    places = {"memory", "environ", "files", "disk image", "agent's memory", "database", "log"}
    assert found(canary) >= places, found(canary)
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
