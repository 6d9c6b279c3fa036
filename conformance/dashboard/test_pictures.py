"""The pictures of the dashboard in the documentation are of the pages as they are.

Each is drawn by the pages of this tree with answers that are always the same, and compared with the one in `docs/pictures`. When
the pages have changed, `RINGFENCE_WRITE_PICTURES=1` writes the new ones instead; look at them before they are committed.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Browser, Page, Route, sync_playwright

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "crates/server/src/dashboard/assets"
PICTURES = ROOT / "docs/pictures"
NOW = "2026-01-15T10:30:00Z"
NOW_MS = 1768473000000
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
# Reads of the use of all sandboxes that the list has seen.
POLLED = 40
# Part of the pixels that may differ: browsers and fonts of other versions draw letters a little differently.
DIFFERENT_MAX = 0.04

SANDBOXES = [
    ("i4f1k9qz7c0d2m8xw3b5n", "code-interpreter", "running", {"purpose": "review", "pull": "1432"}, 61, 0.34),
    ("i9a2b7c4d6e8f0g1h3j5k", "base", "running", {"agent": "planner"}, 12, 0.11),
    ("im3n5p7q9r1s2t4u6v8wx", "node-ci", "running", {"job": "test (22.x)", "branch": "main"}, 87, 0.58),
    ("i0z8y6x4w2v1u3t5s7r9q", "base", "paused", {"agent": "researcher", "user": "ada"}, 0, 0),
    ("ih5g3f1e2d4c6b8a9z7y0", "desktop", "running", {"purpose": "browse"}, 44, 0.71),
]


def listed(entry: tuple) -> dict:
    identity, alias, state, metadata, _, _ = entry
    return {
        "sandboxID": identity,
        "templateID": "tmpl0000000000000000",
        "alias": alias,
        "clientID": "node",
        "startedAt": "2026-01-15T10:12:00Z",
        "endAt": "2026-01-15T11:00:00Z",
        "cpuCount": 2,
        "memoryMB": 512,
        "diskSizeMB": 1024,
        "state": state,
        "metadata": metadata,
        "envdVersion": "0.2.0",
    }


def sample(entry: tuple, at_s: int, step: int) -> dict:
    wave = (step * step * 7 % 13) / 13
    return {
        "timestamp": f"2026-01-15T10:{20 + at_s // 60:02d}:{at_s % 60:02d}Z",
        "timestampUnix": NOW_MS // 1000 - 600 + at_s,
        "cpuCount": 2,
        "cpuUsedPct": round(entry[4] * (0.6 + 0.4 * wave), 1),
        "memTotal": 512 << 20,
        "memUsed": int((512 << 20) * entry[5] * (0.9 + 0.1 * wave)),
        "memCache": 40 << 20,
        "diskTotal": 1 << 30,
        "diskUsed": 210 << 20,
        "networkReceived": step * (step + 7) * 1_500,
        "networkSent": step * 21_000,
    }


def answer(path: str, query: dict[str, list[str]], polled: int) -> object:
    """What the platform says, always the same; `polled` is how often it was asked for the use of sandboxes."""
    by_id = {entry[0]: entry for entry in SANDBOXES}
    if path == "session":
        return {"team": {"id": "t", "name": "research"}, "isOperator": False, "domain": "sandbox.example", "expiresAt": "2026-01-15T22:00:00Z", "version": "0.1.0"}
    if path == "api/v2/sandboxes":
        return [listed(entry) for entry in SANDBOXES]
    if path == "api/sandboxes/metrics":
        ids = query.get("sandbox_ids", [""])[0].split(",")
        return {"sandboxes": {identity: sample(by_id[identity], 3 * polled, polled) for identity in ids if identity in by_id}}
    found = re.fullmatch(r"api/sandboxes/(\w+)(/\w+)?", path)
    if found and found[1] in by_id:
        entry = by_id[found[1]]
        if found[2] is None:
            return {**listed(entry), "domain": "sandbox.example"}
        if found[2] == "/metrics":
            return [sample(entry, step * 5, step) for step in range(120)]
    if re.fullmatch(r"api/v2/sandboxes/\w+/logs", path):
        return {"logs": []}
    return []


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as driver:
        program = os.environ.get("RINGFENCE_CHROMIUM", "/usr/bin/chromium")
        options = ["--no-sandbox", "--disable-gpu", "--font-render-hinting=none", "--disable-lcd-text"]
        running = driver.chromium.launch(executable_path=program, args=options)
        yield running
        running.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1120, "height": 700}, locale="en-GB", timezone_id="UTC", color_scheme="light")
    shown = context.new_page()
    shown.clock.install(time=NOW)
    shown.clock.pause_at("2026-01-15T10:30:01Z")
    shown.polled = 0

    def serve(route: Route) -> None:
        address = urlsplit(route.request.url)
        path = address.path.removeprefix("/dashboard").lstrip("/")
        if path.startswith("assets/"):
            name = path.removeprefix("assets/")
            route.fulfill(body=(ASSETS / name).read_bytes(), content_type=TYPES[name.rsplit(".", 1)[1]])
        elif path.startswith(("session", "api/", "agent/")):
            shown.polled += path == "api/sandboxes/metrics"
            value = answer(path, parse_qs(address.query), shown.polled)
            route.fulfill(body=json.dumps(value), content_type="application/json")
        else:
            route.fulfill(body=(ASSETS / "index.html").read_bytes(), content_type="text/html")

    shown.route("http://dashboard.example/**", serve)
    yield shown
    context.close()


def different(browser: Browser, one: bytes, other: bytes) -> float:
    """The part of the pixels that differ; 1 for pictures of different sizes."""
    context = browser.new_context()
    try:
        return context.new_page().evaluate(
            """async ([one, other]) => {
              const drawn = []
              for (const data of [one, other]) {
                const picture = await createImageBitmap(await (await fetch(`data:image/png;base64,${data}`)).blob())
                const canvas = new OffscreenCanvas(picture.width, picture.height).getContext('2d')
                canvas.drawImage(picture, 0, 0)
                drawn.push(canvas.getImageData(0, 0, picture.width, picture.height))
              }
              const [a, b] = drawn
              if (a.width !== b.width || a.height !== b.height) return 1
              let count = 0
              for (let at = 0; at < a.data.length; at += 4) {
                if ([0, 1, 2].some((part) => Math.abs(a.data[at + part] - b.data[at + part]) > 48)) count += 1
              }
              return count / (a.width * a.height)
            }""",
            [base64.b64encode(one).decode(), base64.b64encode(other).decode()],
        )
    finally:
        context.close()


@pytest.mark.parametrize(
    ("name", "path", "text"),
    [("sandboxes", "sandboxes", "pull=1432"), ("sandbox", f"sandboxes/{SANDBOXES[0][0]}", "CPU")],
)
def test_a_picture_is_of_the_page_as_it_is(browser: Browser, page: Page, name: str, path: str, text: str) -> None:
    page.goto(f"http://dashboard.example/dashboard/{path}")
    page.get_by_text(text).first.wait_for()
    # The small plots of the list are made of what was read before.
    while name == "sandboxes" and page.polled < POLLED:
        page.clock.run_for(1000)
    picture = page.screenshot(animations="disabled")
    file = PICTURES / f"{name}.png"
    if os.environ.get("RINGFENCE_WRITE_PICTURES"):
        file.write_bytes(picture)
        return
    part = different(browser, picture, file.read_bytes())
    assert part <= DIFFERENT_MAX, f"{part:.1%} of {file} differ: run this test with RINGFENCE_WRITE_PICTURES=1 and look at the new picture"


def test_the_comparison_sees_another_page(browser: Browser, page: Page) -> None:
    page.goto("http://dashboard.example/dashboard/keys")
    page.get_by_role("heading", name="Keys").first.wait_for()
    assert different(browser, page.screenshot(), (PICTURES / "sandboxes.png").read_bytes()) > DIFFERENT_MAX
