"""The pages in a real browser: read, searched and followed with a keyboard alone, at the width of a phone and of a desk."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Playwright, sync_playwright

from docs.blocks import PAGES, pages
from harness.platform import Platform

PHONE = {"width": 360, "height": 740}
DESK = {"width": 1280, "height": 900}
# Contrast of text that is not large (WCAG 2.1, AA).
CONTRAST = 4.5


@pytest.fixture(scope="module")
def playwright() -> Iterator[Playwright]:
    with sync_playwright() as driver:
        yield driver


@pytest.fixture(scope="module")
def browser(playwright: Playwright) -> Iterator[Browser]:
    """Debian's Chromium. As root it has no sandbox of its own, and the pages are the platform's."""
    program = os.environ.get("RINGFENCE_CHROMIUM", "/usr/bin/chromium")
    running = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
    yield running
    running.close()


@pytest.fixture(params=["light", "dark"])
def page(browser: Browser, platform: Platform, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A page at desk width in one colour scheme; whatever the browser complains about fails the test."""
    context = browser.new_context(base_url=platform.url, viewport=DESK, color_scheme=request.param)
    shown = context.new_page()
    complaints: list[str] = []

    def note(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            complaints.append(message.text)

    shown.on("console", note)
    shown.on("pageerror", lambda error: complaints.append(str(error)))
    # The next page may be opened while the icon of the last one is still on its way.
    shown.on("requestfailed", lambda failed: failed.failure == "net::ERR_ABORTED" or complaints.append(failed.url))
    yield shown
    assert complaints == []
    context.close()


def focused(page: Page) -> str:
    return page.evaluate("document.activeElement.textContent.trim() || document.activeElement.name || ''")


def test_every_page_fits_a_phone_and_a_desk(page: Page) -> None:
    """No page scrolls sideways: wide tables and code do, in their own boxes."""
    for path in pages():
        route = path.relative_to(PAGES).with_suffix("").as_posix()
        route = "" if route == "index" else route.removesuffix("/index")
        for size in (PHONE, DESK):
            page.set_viewport_size(size)
            answer = page.goto(f"/docs/{route}".rstrip("/"))
            assert answer and answer.status == 200, route
            wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wide <= 0, f"{route} at {size['width']}: {wide} pixels too wide"
        assert page.locator("h1").count() == 1
        for landmark in ("header", "main", "form[role=search]"):
            assert page.locator(landmark).first.is_visible(), f"{route}: {landmark}"


def test_text_has_contrast(page: Page) -> None:
    """Of every kind of element with text, in both colour schemes."""
    page.goto("/docs/network")
    found = page.evaluate(
        """() => {
          const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
          const light = ([r, g, b]) => {
            const part = (v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
            return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
          };
          const behind = (element) => {
            for (let at = element; at; at = at.parentElement) {
              const colour = rgb(getComputedStyle(at).backgroundColor);
              if (colour.length === 3 || colour[3] > 0) return colour;
            }
            return [255, 255, 255];
          };
          const results = {};
          for (const element of document.querySelectorAll('p, a, li, th, td, code, h1, h2, button, input')) {
            if (!element.textContent.trim() && element.tagName !== 'INPUT') continue;
            const pair = [light(rgb(getComputedStyle(element).color)), light(behind(element))].sort((a, b) => b - a);
            const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
            const name = element.tagName;
            results[name] = Math.min(results[name] ?? 99, ratio);
          }
          return results;
        }"""
    )
    assert len(found) >= 8, found
    assert {name: ratio for name, ratio in found.items() if ratio < CONTRAST} == {}


def test_the_colour_scheme_is_followed(browser: Browser, platform: Platform) -> None:
    colours = {}
    for scheme in ("light", "dark"):
        with browser.new_context(base_url=platform.url, color_scheme=scheme) as context:
            shown = context.new_page()
            shown.goto("/docs")
            colours[scheme] = shown.evaluate("getComputedStyle(document.body).backgroundColor")
    assert colours["light"] != colours["dark"]


def test_a_keyboard_is_enough(page: Page) -> None:
    page.goto("/docs")
    page.keyboard.press("Tab")
    assert focused(page) == "Skip to content"
    assert page.locator(".skip").bounding_box()["y"] >= 0, "the focused link is not on the screen"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"
    # From the content, the next stop is its first link.
    page.keyboard.press("Tab")
    assert page.evaluate("!!document.activeElement.closest('article')")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    target = page.evaluate("document.activeElement.href")
    page.keyboard.press("Enter")
    page.wait_for_url(target)


def test_the_search_is_used_with_a_keyboard(page: Page) -> None:
    page.goto("/docs")
    for _ in range(3):
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.name") == "q"
    page.keyboard.type("private networks")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"/docs/search\?q=private\+networks$"))
    assert page.locator("#query").input_value() == "private networks"
    first = page.locator(".results a").first
    assert "etwork" in first.text_content()
    first.focus()
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"/docs/(network|security|isolation|configuration)"))


def test_contents_on_a_phone_open_with_the_keyboard(page: Page) -> None:
    page.set_viewport_size(PHONE)
    page.goto("/docs/sandboxes/files")
    contents = page.locator("details.contents")
    link = contents.get_by_role("link", name="Getting started")
    assert not link.is_visible()
    contents.locator("summary").focus()
    page.keyboard.press("Enter")
    assert link.is_visible()
    assert contents.locator("[aria-current=page]").text_content() == "Files"
    link.click()
    page.wait_for_url(re.compile("/docs/getting-started$"))


def test_a_search_is_only_text(page: Page) -> None:
    for query in ('"><script>document.title="x"</script>', "{{ 7*7 }}", "'", "%00", "é" * 300, ""):
        page.goto(f"/docs/search?q={httpx.QueryParams({'q': query})['q'] if not query else str(httpx.QueryParams({'q': query}))[2:]}")
        assert page.title() == "Search - Ringfence"
        assert page.locator("article script").count() == 0


def test_headers_and_caching(platform: Platform) -> None:
    with httpx.Client(base_url=platform.url, timeout=60) as client:
        first = client.get("/docs/network")
        assert first.status_code == 200
        policy = first.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        # One script, by its digest: not by an address, where files of sandboxes could be.
        (script,) = re.findall("<script>(.*?)</script>", first.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert re.findall("script-src ([^;]*);", policy) == [f"'sha256-{digest}'"]
        assert first.headers["x-content-type-options"] == "nosniff"
        assert "set-cookie" not in first.headers
        tag = first.headers["etag"]
        again = client.get("/docs/network", headers={"If-None-Match": tag})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        assert client.get("/docs/network", headers={"If-None-Match": '"other"'}).status_code == 200
        assert client.head("/docs/network").headers["etag"] == tag
        style = re.search(r'href="(/docs/style\.css\?v=\w+)"', first.text)
        assert style
        answer = client.get(style[1])
        assert answer.headers["content-type"].startswith("text/css") and "immutable" in answer.headers["cache-control"]
        missing = client.get("/docs/no-such-page")
        assert missing.status_code == 404 and "Page not found" in missing.text
        assert client.get("/docs/network/").headers["location"] == "/docs/network"
        assert client.get("/docs/").headers["location"] == "/docs"
        assert client.post("/docs/network").status_code == 405
        # Credentials are neither needed nor looked at.
        assert client.get("/docs", headers={"X-API-Key": "wrong"}).status_code == 200


def test_the_first_address_leads_a_browser_to_pages(platform: Platform) -> None:
    """To the dashboard where a browser may sign in, else to the documentation."""
    html = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    for headers, leads_to in ((html, "/dashboard"), ({**html, "X-Forwarded-Proto": "http"}, "/docs")):
        answer = httpx.get(f"{platform.url}/", headers=headers, timeout=60)
        assert (answer.status_code, answer.headers["location"]) == (307, leads_to)
        assert httpx.get(f"{platform.url}{leads_to}", headers=headers, timeout=60).status_code == 200
    for accept in ("application/json", "*/*", "application/json, text/plain, */*"):
        answer = httpx.get(f"{platform.url}/", headers={"Accept": accept}, timeout=60)
        assert (answer.status_code, answer.json()["code"]) == (404, 404), accept
    assert httpx.post(f"{platform.url}/", headers={"Accept": "text/html"}, timeout=60).status_code == 404


def test_what_no_page_mentions_is_said(page: Page) -> None:
    page.goto("/docs/search?q=How+do+I+create+sandboxes+with+Terraform")
    assert "No page mentions “terraform”" in page.locator("[role=status]").first.text_content()
    assert page.locator(".results li").count() == 0


def test_a_block_is_copied(browser: Browser, platform: Platform) -> None:
    """With the clipboard that browsers have on this machine and over HTTPS, and without it."""
    for has_clipboard in (True, False):
        with browser.new_context(base_url=platform.url) as context:
            if not has_clipboard:
                context.add_init_script("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
            context.grant_permissions(["clipboard-read", "clipboard-write"], origin=platform.url)
            shown = context.new_page()
            shown.goto("/docs/network")
            block = shown.locator(".code").first
            button = block.get_by_role("button", name="Copy")
            # It says so for two seconds.
            shown.evaluate(
                """() => {
                  window.told = [];
                  const status = document.querySelector('span.unseen[role=status]');
                  const tell = new MutationObserver(() => told.push(status.textContent));
                  tell.observe(status, {childList: true, characterData: true, subtree: true});
                }"""
            )
            button.focus()
            shown.keyboard.press("Enter")
            shown.wait_for_function("told.includes('Copied')")
            if has_clipboard:
                copied = shown.evaluate("navigator.clipboard.readText()")
            else:
                shown.evaluate("document.body.append(document.createElement('textarea'))")
                shown.locator("body > textarea").focus()
                shown.keyboard.press("Control+V")
                copied = shown.locator("body > textarea").input_value()
            assert copied == block.locator("code").text_content()


def test_a_key_is_linked(page: Page) -> None:
    page.goto("/docs/configuration#sandbox.max_lifetime_s")
    # The page scrolls there, smoothly.
    page.wait_for_function(
        """() => {
          const top = document.getElementById('sandbox.max_lifetime_s').getBoundingClientRect().top;
          return top >= 0 && top < innerHeight;
        }"""
    )
    page.get_by_role("link", name="pool.total", exact=True).click()
    page.wait_for_url(re.compile(r"#pool\.total$"))


def test_texts_for_agents(platform: Platform) -> None:
    with httpx.Client(base_url=platform.url, timeout=60) as client:
        index = client.get("/llms.txt")
        assert index.status_code == 200 and index.headers["content-type"].startswith("text/plain")
        assert index.text.startswith("# Ringfence\n\n> ")
        links = re.findall(r"\]\((/docs/[^)]+\.md)\)", index.text)
        assert len(links) == len(pages())
        full = client.get("/llms-full.txt").text
        for link in links:
            answer = client.get(link)
            assert answer.status_code == 200, link
            assert answer.text in full


def test_paths_that_are_no_pages(platform: Platform) -> None:
    with httpx.Client(base_url=platform.url, timeout=60) as client:
        for path in ("/docs/../../etc/passwd", "/docs/%2e%2e/dev/api", "/docs/dev/api", "/docs/%00", "/docs//network", "/docs/a" * 500):
            assert client.get(path).status_code in (404, 414), path
        assert Path("/etc/passwd").read_text()[:20] not in client.get("/docs/%2e%2e/%2e%2e/etc/passwd").text
