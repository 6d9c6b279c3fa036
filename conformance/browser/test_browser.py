"""The JavaScript SDK in a real browser: a page of another origin, with routing headers over HTTP and with a host name per
sandbox over HTTPS. What the page does is in `page.mjs`.

RINGFENCE_NODE names the program that bundles the SDK and RINGFENCE_NODE_MODULES a directory with the SDK and the bundler.
"""

from __future__ import annotations

import http.server
import json
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.chromium import Page, chromium
from harness.platform import Platform
from harness.secure import secure_platform
from harness.traffic import program

HERE = Path(__file__).parent
# Modules of Node that the SDK names, and needs for templates only. Bundlers put nothing in their place.
ABSENT = ("fs", "stream", "crypto", "os", "path", "url")
TESTS = re.findall(r"^  async (\w+)\(", (HERE / "page.mjs").read_text(), re.M)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The page's script with the SDK in it."""
    directory = tmp_path_factory.mktemp("bundle")
    modules = Path(os.environ["RINGFENCE_NODE_MODULES"]).resolve()
    (directory / "node_modules").symlink_to(modules)
    (directory / "page.mjs").write_text((HERE / "page.mjs").read_text())
    (directory / "absent.cjs").write_text("module.exports = {}\n")
    absent = [f"--alias:node:{name}=./absent.cjs" for name in ABSENT]
    subprocess.run(
        [modules / ".bin" / "esbuild", "page.mjs", "--bundle", "--format=iife", "--outfile=page.js", "--log-level=error", *absent],
        cwd=directory,
        env={**os.environ, "PATH": f"{Path(os.environ['RINGFENCE_NODE']).parent}:{os.environ['PATH']}"},
        check=True,
        timeout=120,
    )
    return (directory / "page.js").read_bytes()


@pytest.fixture(scope="module", params=["http", "https"])
def server(request: pytest.FixtureRequest, platform: Platform, work_dir: Path) -> Iterator[Platform]:
    if request.param == "http":
        yield platform
    else:
        with secure_platform(work_dir / "browser") as secure:
            yield secure


@pytest.fixture(scope="module")
def page(server: Platform, bundle: bytes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The page, open in a browser, at an origin that is not the platform's."""
    given = server.credentials()
    options = {"apiKey": given["E2B_API_KEY"], "domain": given["E2B_DOMAIN"]}
    for name, variable in (("apiUrl", "E2B_API_URL"), ("sandboxUrl", "E2B_SANDBOX_URL")):
        if variable in given:
            options[name] = given[variable]
    parts = {"options": json.dumps(options), "server": program("browser_server.py")}
    content = "".join(f'<script type="text/plain" id="{name}">{text.replace("</", "")}</script>' for name, text in parts.items())
    document = f'<!doctype html><meta charset="utf-8"><title>page</title>{content}<script src="page.js"></script>'.encode()

    class Origin(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = {"/": ("text/html", document), "/page.js": ("text/javascript", bundle)}.get(self.path)
            self.send_response(200 if found else 404)
            if found:
                self.send_header("Content-Type", found[0])
            self.end_headers()
            self.wfile.write(found[1] if found else b"")

        def log_message(self, *_: object) -> None:
            pass

    origin = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Origin)
    threading.Thread(target=origin.serve_forever, daemon=True).start()
    try:
        with chromium(tmp_path_factory.mktemp("home"), given.get("SSL_CERT_FILE")) as page:
            page.open(f"http://app.localhost:{origin.server_port}/")
            yield page
    finally:
        origin.shutdown()
        origin.server_close()


@pytest.mark.parametrize("name", TESTS)
def test_page(page: Page, name: str) -> None:
    page.run(f"tests.{name}()")


def test_the_protocol(page: Page, server: Platform) -> None:
    """Browsers agree on HTTP/2 where there is TLS."""
    responses = [event["params"]["response"] for event in page.events if event["method"] == "Network.responseReceived"]
    used = {response["protocol"] for response in responses if f":{server.port}/" in response["url"]}
    assert used == ({"h2"} if "E2B_API_URL" not in server.credentials() else {"http/1.1"})
