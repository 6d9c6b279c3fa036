"""Issuers of certificates that are not those of the system: the operator's, and those that a step of a template adds."""

from __future__ import annotations

import json
import uuid
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox, Template

from harness.beside import beside
from harness.inside import root
from harness.internet import RESOLVER, Internet
from harness.internet_names import home
from harness.platform import Platform
from harness.registry import changes, layer, programs, registry

SITE, INJECTED, REGISTRY, PORT = "www.example.com", "api.example.com", "registry.example.org", 5005
GET = """
import java.net.URI;
import java.net.http.*;

class Get {
    public static void main(String[] urls) throws Exception {
        var request = HttpRequest.newBuilder(URI.create(urls[0])).build();
        System.out.println(HttpClient.newHttpClient().send(request, HttpResponse.BodyHandlers.ofString()).body());
    }
}
"""
FETCH = f"fetch('https://{SITE}/node').then(answer => answer.text()).then(console.log)"


@pytest.fixture(scope="module")
def index(internet: Internet) -> str:
    """An index of Python packages with one package."""
    directory = internet.documents / "trusted" / "trustedtool"
    directory.mkdir(parents=True)
    with zipfile.ZipFile(directory / "trustedtool-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("trustedtool.py", "print('installed')\n")
        about = "trustedtool-1.0.dist-info"
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: trustedtool\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    return f"https://{SITE}/files/trusted/"


@pytest.fixture
def name() -> str:
    return f"t{uuid.uuid4().hex[:12]}"


@pytest.fixture
def trusting(platform: Platform, internet: Internet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """A platform whose operator trusts the authority of the fake internet."""
    config = f'[sandbox]\ndisk_mb = 768\n[egress]\nresolvers = "{RESOLVER}:53"\nca_files = "{internet.authority}"\n'
    with beside(platform, tmp_path_factory.mktemp("trusting"), config) as server:
        yield server


def trusts(box: Sandbox) -> None:
    """Every runtime trusts the issuer of the servers, told where or not."""
    box.files.write("/tmp/Get.java", GET)
    python = f"import urllib.request as r; print(r.urlopen('https://{SITE}/python').read().decode())"
    for command in (
        f"curl -sS https://{SITE}/curl",
        # What sudo leaves of the environment: the store alone must do.
        f"env -i /usr/bin/curl -sS https://{SITE}/curl",
        f'python3 -c "{python}"',
        f'env -i /usr/bin/python3 -c "{python}"',
        f'node -e "{FETCH}"',
        f"java /tmp/Get.java https://{SITE}/java",
    ):
        assert json.loads(box.commands.run(command, timeout=90).stdout)["server"] == home(SITE), command


def tools_trust(box: Sandbox, index: str) -> None:
    """Tools trust the certificates, and so does what is built on them."""
    pip = f"python3 -m pip install -q --no-cache-dir --disable-pip-version-check --index-url {index} --target /tmp/tools trustedtool"
    assert box.commands.run(f"{pip} && PYTHONPATH=/tmp/tools python3 -m trustedtool", timeout=120).stdout == "installed\n"
    box.commands.run(f"npm ping --registry https://{SITE}/", timeout=90)
    # As a repository it is empty, if its certificate is trusted.
    assert box.commands.run(f"git ls-remote https://{SITE}/nothing").stdout == ""


def test_sandboxes_and_builds_trust_the_authorities_of_the_operator(
    trusting: Platform, internet: Internet, work_dir: Path, index: str, name: str
) -> None:
    key = {"X-API-Key": trusting.credentials()["E2B_API_KEY"]}
    rule = {"type": "openai", "api_key": "sk-of-nobody", "base_url": f"https://{INJECTED}/*"}
    made = httpx.post(f"{trusting.url}/sandboxes", headers=key, timeout=60, json={"templateID": "base", "timeout": 300, "injections": [rule]})
    assert made.status_code == 201, made.text
    with Sandbox.connect(made.json()["sandboxID"]) as box:
        trusts(box)
        tools_trust(box, index)
        # The gateway, which connects to that server itself.
        box.commands.run(f"curl -sSf https://{INJECTED}/{name}")
        (event,) = internet.events(kind="http", path=f"/{name}")
        assert event["authorization"] == "Bearer sk-of-nobody"
        # Nothing but certificates, first that of the gateway.
        pem = box.files.read("/run/ringfence/ca.pem")
        assert pem.count("BEGIN CERTIFICATE") == 2 and pem.endswith(internet.authority.read_text().split("-----BEGIN CERTIFICATE-----")[1])
        # The tool of the system makes a bundle that has them as well.
        made_anew = root(box, "update-ca-certificates 2>&1; env -i /usr/bin/curl -sS https://www.example.com/again", timeout=60)
        assert home(SITE) in made_anew, made_anew
    with registry(internet, work_dir / "trusted-registry", REGISTRY, PORT, tls=True) as images:
        images.push("tools/shell", "1", [layer(programs), layer(changes)])
        Template.build(Template().from_image(f"{REGISTRY}:{PORT}/tools/shell:1").run_cmd("cat /srv/mine", user="root"), name)
    step = f"curl -sSf https://{SITE}/step && env -i /usr/bin/curl -sSf https://{SITE}/step"
    Template.build(Template().from_template("base").run_cmd(step), f"{name}-steps")


def test_an_issuer_that_a_step_adds_is_trusted(platform: Platform, internet: Internet, name: str, tmp_path: Path) -> None:
    """Without the tool that collects such certificates."""
    (tmp_path / "site.crt").write_bytes(internet.authority.read_bytes())
    local = "/usr/local/share/ca-certificates"
    template = Template(file_context_path=tmp_path).from_template("base").copy("site.crt", f"{local}/site/site.crt", user="root")
    Template.build(template, name)
    with Sandbox.create(name, timeout=300) as box:
        trusts(box)
    with Sandbox.create(timeout=60) as box:
        failed = box.commands.run(f'curl -sS https://{SITE}/ 2>&1 || true; node -e "{FETCH}" 2>&1 || true').stdout
        assert "certificate" in failed and home(SITE) not in failed, failed
    headers = {"X-API-Key": platform.credentials()["E2B_API_KEY"]}
    assert httpx.delete(f"{platform.url}/templates/{name}", headers=headers, timeout=60).status_code == 204
