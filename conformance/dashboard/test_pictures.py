"""The pictures of the dashboard in the documentation are of the pages as they are.

Each is drawn by the pages of this tree with answers that are always the same. What is compared to the letter is the outline of the
page, which is written down beside this file: what it says, as readers of screens are told, and how its elements look by its style
sheets. Neither depends on the fonts of a machine. The pixels are compared with the picture in `docs/pictures` as far as those allow.

When the pages have changed, `RINGFENCE_WRITE_PICTURES=1` writes pictures and outlines instead; look at them before they are committed.
"""

from __future__ import annotations

import base64
import difflib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Browser, Page, Route, sync_playwright

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "crates/server/src/dashboard/assets"
PICTURES = ROOT / "docs/pictures"
OUTLINES = Path(__file__).with_name("outlines")
NOW = "2026-01-15T10:30:00Z"
NOW_MS = 1768473000000
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
# Reads of the use of all sandboxes that the list has seen.
POLLED = 40
# Part of the pixels that may differ: browsers and fonts of other versions draw letters a little differently.
DIFFERENT_MAX = 0.04

# How the elements of a page look, each kind once: what style sheets say, and nothing that fonts have a part in.
STYLES = """() => {
  const names = ['display', 'color', 'background-color', 'border-top', 'border-radius', 'font-size', 'font-weight', 'padding', 'text-decoration-line', 'fill', 'stroke']
  const lines = new Set()
  for (const element of document.body.querySelectorAll('*')) {
    if (!element.checkVisibility()) continue
    const style = getComputedStyle(element)
    const kind = [element.localName, ...element.classList].join('.')
    lines.add(`${kind}: ${names.map((name) => style.getPropertyValue(name)).join('; ')}`)
  }
  return [...lines].sort()
}"""


@dataclass(frozen=True)
class View:
    """A page of which the documentation has a picture, and a text by which it is known to be complete."""

    path: str
    text: str
    width: int = 1120
    height: int = 700
    scheme: str = "light"


SANDBOXES = [
    ("i4f1k9qz7c0d2m8xw3b5n", "code-interpreter", "running", {"purpose": "review", "pull": "1432"}, 61, 0.34),
    ("i9a2b7c4d6e8f0g1h3j5k", "base", "running", {"agent": "planner"}, 12, 0.11),
    ("im3n5p7q9r1s2t4u6v8wx", "node-ci", "running", {"job": "test (22.x)", "branch": "main"}, 87, 0.58),
    ("i0z8y6x4w2v1u3t5s7r9q", "base", "paused", {"agent": "researcher", "user": "ada"}, 0, 0),
    ("ih5g3f1e2d4c6b8a9z7y0", "desktop", "running", {"purpose": "browse"}, 44, 0.71),
]

TEMPLATE, BUILD = "nodeci7q2m9w4x8z1k5t", "0f6c2f3e-5a0b-4c7e-9d41-7b8f2a6c9e10"
LOG = [
    (0, "base", "FROM e2bdev/base"),
    (4, "1/3", "RUN apt-get install -y nodejs"),
    (9, "1/3", "Setting up nodejs (18.20.4+dfsg-1~deb12u1) ..."),
    (11, "2/3", "COPY package.json package-lock.json /srv/"),
    (12, "3/3", "RUN npm ci --prefix /srv"),
    (31, "3/3", "added 214 packages in 19s"),
    (33, "finalize", "the template is ready"),
]
VIEWS = {
    "sandboxes": View("sandboxes", "pull=1432"),
    "sandbox": View(f"sandboxes/{SANDBOXES[0][0]}", "Measured "),
    "build": View(f"templates/{TEMPLATE}/builds/{BUILD}", "All of them"),
    "phone": View("sandboxes", "pull=1432", 390, 760, "dark"),
}


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
        return {"sandboxes": {identity: sample(by_id[identity], 3 * min(polled, POLLED), min(polled, POLLED)) for identity in ids if identity in by_id}}
    found = re.fullmatch(r"api/sandboxes/(\w+)(/\w+)?", path)
    if found and found[1] in by_id:
        entry = by_id[found[1]]
        if found[2] is None:
            return {**listed(entry), "domain": "sandbox.example"}
        if found[2] == "/metrics":
            return [sample(entry, step * 5, step) for step in range(120)]
    if re.fullmatch(r"api/v2/sandboxes/\w+/logs", path):
        return {"logs": []}
    build = f"api/templates/{TEMPLATE}/builds/{BUILD}"
    if path == f"{build}/status":
        return {"templateID": TEMPLATE, "buildID": BUILD, "status": "ready", "logs": [], "logEntries": []}
    if path == f"{build}/logs":
        return {"logs": [{"timestamp": f"2026-01-15T10:21:{at:02d}.000Z", "level": "info", "step": step, "message": text} for at, step, text in LOG]}
    if path == f"{build}/layers":
        return {"hasBase": True, "layers": [{"layerID": f"{at}c41d8e07f2b", "sizeBytes": size << 20} for at, size in enumerate((86, 1, 143))]}
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
def page(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    view = VIEWS[getattr(request, "param", "sandboxes")]
    size = {"width": view.width, "height": view.height}
    context = browser.new_context(viewport=size, locale="en-GB", timezone_id="UTC", color_scheme=view.scheme)
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


def outline(page: Page) -> str:
    """What the page says and how it looks, without what depends on fonts."""
    return "\n".join([page.locator("body").aria_snapshot(), "", *page.evaluate(STYLES), ""])


def show(page: Page, view: View) -> None:
    page.goto(f"http://dashboard.example/dashboard/{view.path}")
    page.get_by_text(view.text).first.wait_for()
    if "/builds/" in view.path:
        # The log is read beside the status, and says with the next read that it is over.
        whole = page.get_by_text(f"{len(LOG)} lines.", exact=True)
        for _ in range(50):
            if whole.is_visible():
                break
            page.clock.run_for(1000)
        whole.wait_for()
    # The small plots of the list are made of what was read before.
    while view.path == "sandboxes" and page.polled < POLLED:
        page.clock.run_for(1000)
    if view.path == "sandboxes":
        # However long that took by the clock of the page.
        page.clock.pause_at("2026-01-15T10:40:05Z")
        aged = page.get_by_text("28 min ago").first
        for _ in range(50):
            if aged.is_visible():
                break
            page.clock.run_for(1000)
        aged.wait_for()


@pytest.mark.parametrize(("name", "page"), [(name, name) for name in VIEWS], indirect=["page"], ids=list(VIEWS))
def test_a_picture_is_of_the_page_as_it_is(browser: Browser, page: Page, name: str) -> None:
    show(page, VIEWS[name])
    said, picture = outline(page), page.screenshot(animations="disabled")
    file, beside = PICTURES / f"{name}.png", OUTLINES / f"{name}.txt"
    if os.environ.get("RINGFENCE_WRITE_PICTURES"):
        file.write_bytes(picture)
        beside.parent.mkdir(exist_ok=True)
        beside.write_text(said)
        return
    what = "run this test with RINGFENCE_WRITE_PICTURES=1 and look at the new picture"
    changed = list(difflib.unified_diff(beside.read_text().splitlines(), said.splitlines(), "as pictured", "as it is", lineterm="", n=1))
    assert not changed, "\n".join([f"the page of {file} has changed: {what}", *changed])
    part = different(browser, picture, file.read_bytes())
    assert part <= DIFFERENT_MAX, f"{part:.1%} of {file} differ: {what}"


def test_the_comparison_sees_another_page(browser: Browser, page: Page) -> None:
    page.goto("http://dashboard.example/dashboard/keys")
    page.get_by_role("heading", name="Keys").first.wait_for()
    assert different(browser, page.screenshot(), (PICTURES / "sandboxes.png").read_bytes()) > DIFFERENT_MAX


@pytest.mark.parametrize(
    "change",
    [
        "document.querySelector('main button').textContent = 'Make sandbox'",
        "document.querySelector('main button').style.backgroundColor = 'rgb(200, 0, 0)'",
        "document.querySelector('main label').remove()",
    ],
    ids=["a word", "a colour", "a field"],
)
def test_the_outline_sees_what_pixels_hardly_show(browser: Browser, page: Page, change: str) -> None:
    show(page, VIEWS["sandboxes"])
    page.evaluate(change)
    assert outline(page) != (OUTLINES / "sandboxes.txt").read_text()


def test_each_picture_is_one_of_a_view_and_is_shown() -> None:
    """No picture of the dashboard is left behind when a view goes, and none is made that no page shows."""
    page = (ROOT / "docs/dashboard.md").read_text()
    assert re.findall(r"^!\[[^\]]{20,}\]\(pictures/(\w+)\.png\)$", page, re.MULTILINE) == ["sandboxes", "sandbox", "build", "phone"]
    assert set(VIEWS) == {"sandboxes", "sandbox", "build", "phone"} == {file.stem for file in OUTLINES.iterdir()}
    of_others = {"desktop", "plot"}
    assert {file.stem for file in PICTURES.glob("*.png")} - of_others == set(VIEWS)
