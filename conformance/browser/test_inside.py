"""Chromium inside a sandbox: prints a document, makes a screenshot, is driven over its debugging port from outside, and goes on
after a pause with its processes on disk.

It is Debian's: the suite has it installed on the host, whose packages the template `base` has.
"""

from __future__ import annotations

import shlex
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from e2b import Sandbox
from websockets.sync.client import ClientConnection, connect

from harness.chromium import OPTIONS, Page
from harness.criu import pause
from harness.patience import within
from harness.platform import Platform
from harness.traffic import get, until

PORT = 9222
# Without what browsers fetch for themselves; the platform's own filter is the sandbox.
BROWSER = shlex.join(["chromium", *(option for option in OPTIONS if not option.startswith("--remote-debugging"))])
PNG = b"\x89PNG\r\n\x1a\n"
DOCUMENT = "<!doctype html><title>before</title><body style='background:#0a0'><script>document.title = 6 * 7</script>"


@pytest.fixture(scope="module")
def box(platform: Platform) -> Iterator[Sandbox]:
    # Chromium refuses requests for other hosts than `localhost` and addresses.
    box = Sandbox.create(timeout=300, network={"mask_request_host": "localhost:${PORT}"})
    try:
        yield box
    finally:
        box.kill()


def test_a_document_and_a_screenshot(box: Sandbox) -> None:
    box.files.write("/home/user/page.html", DOCUMENT)
    dom = box.commands.run(f"{BROWSER} --user-data-dir=/tmp/first --dump-dom file:///home/user/page.html", timeout=within(60))
    assert "<title>42</title>" in dom.stdout, dom.stderr
    shot = f"{BROWSER} --user-data-dir=/tmp/first --window-size=320,200 --screenshot=/tmp/shot.png file:///home/user/page.html"
    box.commands.run(shot, timeout=within(60))
    assert box.files.read("/tmp/shot.png", format="bytes")[:8] == PNG


def devtools(server: Platform, box: Sandbox, path: str) -> ClientConnection:
    """A WebSocket to the debugging port, by the host name of the port."""
    address = urlsplit(server.url)
    assert address.hostname and address.port
    return connect(
        f"ws://{box.get_host(PORT)}{path}",
        sock=socket.create_connection((address.hostname, address.port), timeout=60),
        max_size=None,
    )


def test_it_is_driven_from_outside_and_goes_on_after_a_pause(platform: Platform, box: Sandbox) -> None:
    command = f"exec {BROWSER} --user-data-dir=/tmp/driven --remote-debugging-port={PORT} about:blank >/tmp/driven.log 2>&1"
    browser = box.commands.run(command, background=True, timeout=0)
    browser.disconnect()
    host = box.get_host(PORT)
    until(lambda: get(platform.url, host, "/json/version").status_code == 200, "the debugging port answers", within_s=30)
    version = get(platform.url, host, "/json/version").json()
    assert version["Browser"].startswith(("Chrome/", "HeadlessChrome/"))
    pages = until(lambda: [one for one in get(platform.url, host, "/json/list").json() if one["type"] == "page"], "it has a page")
    (target,) = pages
    # What it names is where it listens itself; a client puts the host of the port in its place.
    path = urlsplit(target["webSocketDebuggerUrl"]).path
    with devtools(platform, box, path) as connection:
        page = Page(connection)
        page.open("file:///home/user/page.html")
        assert page.run("document.title") == "42"
        page.run("window.kept = [1, 2, 3]; window.ticks = 0; setInterval(() => ticks++, 20); 0")
    pause(box)
    box = Sandbox.connect(box.sandbox_id, timeout=300)
    with devtools(platform, box, path) as connection:
        page = Page(connection)
        assert page.run("kept.join()") == "1,2,3"
        # Its own timers, and its processes for drawing and for network.
        before = page.run("ticks")
        until(lambda: page.run("ticks") > before, "timers of the page go on")
        assert page.call("Page.captureScreenshot")["data"].startswith("iVBORw0KGgo")
        page.open("data:text/html,<title>after</title>")
        assert page.run("document.title") == "after"
    assert box.commands.kill(browser.pid) is True
