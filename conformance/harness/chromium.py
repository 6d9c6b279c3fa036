"""Chromium without a window, driven by its DevTools protocol over a WebSocket."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

from harness.patience import within
from harness.traffic import until

OPTIONS = (
    *("--headless=new", "--remote-debugging-port=0", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    # A test goes through more pages within seconds than a person would.
    "--disable-ipc-flooding-protection",
    # Its own sandbox refuses to run as root. And nothing of what browsers fetch for themselves.
    *("--no-sandbox", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
)


class Page:
    """A page that scripts are run in."""

    def __init__(self, devtools: ClientConnection) -> None:
        self.devtools = devtools
        self.numbers = itertools.count(1)
        # What the page told by itself: requests, responses, errors.
        self.events: list[dict[str, Any]] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, session: str | None = None, /, **parameters: Any) -> dict[str, Any]:
        """Calls the page, or by its session one of its frames in another process."""
        number = next(self.numbers)
        of_frame = {"sessionId": session} if session else {}
        self.devtools.send(json.dumps({"id": number, "method": method, "params": parameters, **of_frame}))
        while True:
            message = json.loads(self.devtools.recv(timeout=60))
            if message.get("id") == number:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            if "method" in message:
                self.events.append(message)

    def open(self, url: str) -> None:
        failed = self.call("Page.navigate", url=url).get("errorText")
        assert not failed, f"{url}: {failed}"
        loaded = "new Promise((done) => document.readyState === 'complete' ? done(true) : addEventListener('load', () => done(true)))"
        assert self.run(loaded) is True

    def run(self, expression: str) -> Any:
        """The value of an expression, which may be a promise. Fails with what the script has thrown."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        thrown = result.get("exceptionDetails")
        assert not thrown, (thrown.get("exception", {}).get("description") or thrown["text"]) + self.said()
        return result["result"].get("value")

    def said(self) -> str:
        """What the browser wrote to its console, which is where it says why it refused a request."""
        lines = [event["params"]["entry"]["text"] for event in self.events if event["method"] == "Log.entryAdded"]
        return "".join(f"\n  {line}" for line in lines[-5:])


@contextmanager
def chromium(home: Path, authority: str | None) -> Iterator[Page]:
    """A page of a new browser, which trusts an authority of its own besides those of everyone."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    assert program, "chromium is missing on this host"
    trust = home / ".pki" / "nssdb"
    trust.mkdir(parents=True)
    changes = [["-N", "--empty-password"]]
    if authority:
        changes.append(["-A", "-n", "authority", "-t", "C,,", "-i", authority])
    for change in changes:
        subprocess.run(["certutil", "-d", f"sql:{trust}", *change], check=True, capture_output=True)
    profile = home / "profile"
    with open(home / "chromium.log", "wb") as log:
        started = subprocess.Popen(
            [program, *OPTIONS, f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={"HOME": str(home), "PATH": "/usr/bin:/bin"},
            start_new_session=True,
        )
    try:
        address = profile / "DevToolsActivePort"
        until(lambda: address.exists() and address.read_text().count("\n") == 1, "the browser listens", within_s=60)
        port, path = address.read_text().split("\n")
        # No pings: events of a page that is asked nothing are not read, and answers to pings stay behind them.
        with connect(f"ws://127.0.0.1:{port}{path}", max_size=None, open_timeout=within(10), ping_interval=None) as browser:
            browser.send(json.dumps({"id": 1, "method": "Target.createTarget", "params": {"url": "about:blank"}}))
            target = json.loads(browser.recv(timeout=60))["result"]["targetId"]
            with connect(f"ws://127.0.0.1:{port}/devtools/page/{target}", max_size=None, open_timeout=within(10), ping_interval=None) as devtools:
                yield Page(devtools)
            browser.send(json.dumps({"id": 2, "method": "Browser.close"}))
        started.wait(within(60))
    finally:
        started.kill()
        started.wait(20)
