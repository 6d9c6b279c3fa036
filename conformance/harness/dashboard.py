"""The dashboard as a person uses it: a browser whose page is read, clicked and typed into.

A control is found by its name, as a screen reader says it. Every wait is for a condition of the page.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.chromium import Page, chromium
from harness.traffic import until

# In each document before its own scripts. `canned`, where a test has set it, answers instead of the platform.
HELPERS = """
(() => {
  const asked = window.fetch.bind(window)
  window.canned = null
  window.refused = []
  document.addEventListener('securitypolicyviolation', (event) => window.refused.push(`${event.violatedDirective} ${event.blockedURI}`))
  window.fetch = async (url, options) => {
    const answer = window.canned && window.canned(String(url), options ?? {})
    if (!answer) return asked(url, options)
    // `text` is for what is not JSON.
    const { status = 200, headers = {}, body = null, text = body === null ? null : JSON.stringify(body) } = answer
    return new Response(text, { status, headers: { 'content-type': 'application/json', ...headers } })
  }
  const seen = (one) => one.checkVisibility({ visibilityProperty: true })
  const nameOf = (one) => one.getAttribute('aria-label') ?? ([...(one.labels ?? [])].map((label) => label.textContent.trim()).join(' ') || one.textContent.trim())
  const scope = () => [...document.querySelectorAll('dialog[open]')].at(-1) ?? document
  window.control = (name, selector = 'button, a, input, select, textarea') => {
    const all = [...scope().querySelectorAll(selector)].filter(seen).filter((one) => nameOf(one) === name)
    if (!all.length) throw new Error(`no control ${name}: ${[...scope().querySelectorAll(selector)].filter(seen).map(nameOf).join(' | ')}`)
    return all[0]
  }
  window.has = (name) => {
    try {
      return !window.control(name).disabled
    } catch {
      return false
    }
  }
  window.press = (name) => {
    const one = window.control(name, 'button, a')
    if (one.disabled) throw new Error(`${name} is disabled`)
    one.focus()
    one.click()
  }
  window.put = (name, value) => {
    const one = window.control(name, 'input, select, textarea')
    if (one.type === 'checkbox') {
      if (one.checked !== value) one.click()
      return
    }
    one.value = value
    one.dispatchEvent(new Event('input', { bubbles: true }))
    one.dispatchEvent(new Event('change', { bubbles: true }))
  }
  // How much faster than the clock timers are: a test that is about how often something happens need not wait for minutes.
  const later = window.setTimeout.bind(window)
  window.pace = 1
  window.setTimeout = (run, ms = 0, ...rest) => later(run, ms / window.pace, ...rest)
  window.go = async (path) => {
    const before = document.querySelector('main').firstElementChild
    history.pushState(null, '', path)
    dispatchEvent(new PopStateEvent('popstate'))
    // What a test waits for is on the new page.
    while (document.querySelector('main').firstElementChild === before) await new Promise((done) => setTimeout(done, 2))
  }
  window.shows = () => document.querySelector('main')?.innerText ?? ''
  window.grid = () => [...document.querySelectorAll('.terminal-row')].map((row) => row.textContent.trimEnd()).join('\\n')
})()
"""
# The rules of axe whose outcome depends on colours and sizes.
OF_LOOKS = "runOnly: {type: 'rule', values: ['color-contrast', 'target-size', 'link-in-text-block', 'scrollable-region-focusable']}"
KEYS = {"Enter": 13, "Tab": 9, "Escape": 27, " ": 32}


class Dashboard:
    """The dashboard of a platform in a browser."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        page.call("Page.addScriptToEvaluateOnNewDocument", source=HELPERS)

    def open(self, path: str = "/dashboard") -> None:
        self.page.open(f"{self.url}{path}")
        self.wait("document.querySelector('main h1') !== null")

    def run(self, expression: str) -> Any:
        return self.page.run(expression)

    def wait(self, expression: str, within_s: float = 20.0) -> Any:
        def what() -> str:
            return f"{expression}\n{self.run('document.body.innerText')}"

        return until(lambda: self.run(expression), what, within_s=within_s)

    def press(self, name: str) -> None:
        """Presses a button, or follows a link, once it is there."""
        self.wait(f"has({json.dumps(name)})")
        self.run(f"press({json.dumps(name)})")

    def put(self, name: str, value: str | bool) -> None:
        self.wait(f"has({json.dumps(name)})")
        self.run(f"put({json.dumps(name)}, {json.dumps(value)})")

    def heading(self, text: str) -> None:
        self.wait(f"document.querySelector('main h1')?.textContent === {json.dumps(text)}")

    def shows(self, text: str, within_s: float = 20.0) -> None:
        self.wait(f"shows().includes({json.dumps(text)})", within_s)

    def key(self, name: str, modifiers: int = 0) -> None:
        text = {"Enter": "\r", " ": " "}.get(name, "")
        for kind in ("keyDown" if text else "rawKeyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            self.page.call(
                "Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=KEYS.get(name, 0), modifiers=modifiers, **more
            )

    def type(self, text: str) -> None:
        self.page.call("Input.insertText", text=text)

    def sign_in(self, credential: str, path: str = "/dashboard") -> None:
        # Also where a test before this one has failed.
        self.page.call("Network.clearBrowserCookies")
        self.open(path)
        self.heading("Sign in to Ringfence")
        self.put("API key or access token", credential)
        self.press("Sign in")
        self.wait("has('Sign out')")

    def sign_out(self) -> None:
        self.press("Sign out")
        self.heading("Sign in to Ringfence")

    def look(self, scheme: str = "light", width: int = 1280, height: int = 900) -> None:
        """The colour scheme and the size of the window."""
        self.page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.page.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.page.call("Page.captureScreenshot", format="png")["data"]))

    def check(self, is_whole: bool = True) -> None:
        """What axe finds, what is wider than the window, what the content policy refused, and what has no name.

        Of a page that was looked at as a whole already, what the colours and the width decide is enough.
        """
        axe = Path(os.environ["RINGFENCE_NODE_MODULES"]) / "axe-core" / "axe.min.js"
        if not self.run("typeof axe === 'object'"):
            self.run(f"{axe.read_text()}; 0")
        found = self.run(
            f"axe.run(document, {{resultTypes: ['violations'], {'' if is_whole else OF_LOOKS}}})"
            ".then((got) => ({passes: got.passes.length, bad: got.violations.map("
            "(one) => `${one.id}: ${one.nodes.slice(0, 3).map((node) => node.html.slice(0, 200)).join(' ')}`)}))"
        )
        where = self.run("location.pathname")
        assert not found["bad"], f"{where}: {found['bad']}"
        assert found["passes"] > (10 if is_whole else 0), f"{where}: axe has looked at nothing"
        wide = self.run("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        beyond = (
            "[...document.querySelectorAll('main *')].filter((one) => one.getBoundingClientRect().right > document.documentElement.clientWidth)"
            ".map((one) => `${one.tagName}.${one.className}`).slice(0, 5)"
        )
        assert wide <= 0, f"{where}: {wide} pixels too wide, with {self.run(beyond)}"
        assert not self.run("refused"), f"{where}: {self.run('refused')}"


@contextmanager
def dashboard(home: Path, url: str) -> Iterator[Dashboard]:
    """The dashboard in a browser of its own, in which no script may fail."""
    with chromium(home, None) as page:
        yield Dashboard(page, url)
        assert [event for event in page.events if event["method"] == "Runtime.exceptionThrown"] == []
        told = [event["params"]["entry"] for event in page.events if event["method"] == "Log.entryAdded"]
        assert [entry["text"] for entry in told if entry["source"] != "network"] == []
        said = [event["params"] for event in page.events if event["method"] == "Runtime.consoleAPICalled"]
        assert [call["args"] for call in said if call["type"] == "error"] == []
