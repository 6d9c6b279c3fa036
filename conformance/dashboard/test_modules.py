"""The terminal and the files of the dashboard in a real browser, with a real sandbox, under the dashboard's content policy.

The page has the two modules and nothing else. Its origin passes what they ask of the agent on to the sandbox, as the dashboard
does, and can break the streams that are open.
"""

from __future__ import annotations

import http.client
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from e2b import Sandbox

from harness.chromium import Page, chromium
from harness.patience import within
from harness.platform import Platform
from harness.traffic import until

ASSETS = Path(__file__).resolve().parents[2] / "crates/server/src/dashboard/assets"
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'"
AGENT = "/dashboard/agent/box"
DOCUMENT = """<!doctype html><html lang="en"><meta charset="utf-8"><title>modules</title>
<link rel="stylesheet" href="/assets/terminal.css"><link rel="stylesheet" href="/assets/files.css">
<script type="module" src="/page.js"></script><main><h1>Modules</h1><div id="root"></div></main></html>"""
SCRIPT = f"""
import {{ mount as files }} from '/assets/files.js'
import {{ mount as terminal }} from '/assets/terminal.js'
const kinds = {{ files, terminal }}
window.said = []
window.start = (kind) => {{
  window.stop?.()
  window.controller = new AbortController()
  const context = {{ sandbox: 'box', agent: '{AGENT}', signal: window.controller.signal, say: (text) => window.said.push(text) }}
  window.stop = kinds[kind](document.querySelector('#root'), context)
}}
window.grid = () => [...document.querySelectorAll('.terminal-row')].map((row) => row.textContent.trimEnd()).join('\\n')
window.state = () => document.querySelector('.terminal-state, .files-state').textContent
window.button = (text) => [...document.querySelectorAll('button, a')].find((one) => (one.getAttribute('aria-label') ?? one.textContent) === text)
window.press = (text) => {{
  const found = window.button(text)
  if (!found) throw new Error(`no button ${{text}}`)
  found.click()
}}
window.paste = (text) => {{
  const clipboardData = new DataTransfer()
  clipboardData.setData('text/plain', text)
  document.querySelector('.terminal-keys').dispatchEvent(new ClipboardEvent('paste', {{ clipboardData, cancelable: true }}))
}}
window.upload = (name, text) => {{
  const data = new DataTransfer()
  data.items.add(new File([text], name))
  const picker = document.querySelector('input[type=file]')
  picker.files = data.files
  picker.dispatchEvent(new Event('change'))
}}
window.isReady = true
"""
HOSTILE = ("<img src=x onerror=document.title=1>", "photo\u202egpj.exe", "line\nend", "tab\t", "a\u200bb", "\x1b[31mred", " space ", "&amp;", "..%2f", "-rf")


class Origin:
    """Serves the page, and stands between it and the agent."""

    def __init__(self) -> None:
        self.box: Sandbox | None = None
        self.streams: set[http.client.HTTPConnection] = set()
        origin = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                path = urlsplit(self.path).path
                if path.startswith(AGENT):
                    return self.forward()
                asset = ASSETS / path.removeprefix("/assets/")
                if path == "/":
                    self.answer("text/html", DOCUMENT.encode())
                elif path == "/page.js":
                    self.answer("text/javascript", SCRIPT.encode())
                elif asset.parent == ASSETS and asset.is_file():
                    self.answer({".js": "text/javascript", ".css": "text/css"}[asset.suffix], asset.read_bytes())
                else:
                    self.send_error(404)
                return None

            def do_POST(self) -> None:
                self.forward()

            def answer(self, kind: str, content: bytes) -> None:
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.send_header("Content-Security-Policy", POLICY)
                self.send_header("Cache-Control", "no-store")
                self.end_headers()
                self.wfile.write(content)

            def forward(self) -> None:
                box = origin.box
                assert box
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                address = urlsplit(box.envd_api_url)
                connection = http.client.HTTPConnection(address.hostname or "", address.port)
                names = ("Content-Type", "Authorization", "Connect-Protocol-Version", "Keepalive-Ping-Interval")
                headers = {name: self.headers[name] for name in names if self.headers[name]}
                headers |= {"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": "49983"}
                if box._envd_access_token:
                    headers["X-Access-Token"] = box._envd_access_token
                origin.streams.add(connection)
                self.close_connection = True
                try:
                    connection.request(self.command, self.path.removeprefix(AGENT), body, headers)
                    given = connection.getresponse()
                    self.send_response(given.status)
                    self.send_header("Content-Type", given.headers.get("Content-Type", "text/plain"))
                    self.send_header("Connection", "close")
                    self.end_headers()
                    while chunk := given.read1(65536):
                        self.wfile.write(chunk)
                        self.wfile.flush()
                except (OSError, http.client.HTTPException, ValueError, AttributeError):
                    # Broken by the test, or left by the page.
                    pass
                finally:
                    origin.streams.discard(connection)
                    connection.close()

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def break_streams(self) -> None:
        for connection in list(self.streams):
            if connection.sock:
                connection.sock.shutdown(2)


@pytest.fixture(scope="module")
def origin(platform: Platform) -> Iterator[Origin]:
    origin = Origin()
    try:
        yield origin
    finally:
        origin.server.shutdown()
        origin.server.server_close()


@pytest.fixture(scope="module")
def page(origin: Origin, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("home"), None) as page:
        page.open(f"http://127.0.0.1:{origin.server.server_port}/")
        eventually(page, "window.isReady")
        yield page
        # The content policy had nothing to refuse, and no script has failed. What a test had refused is no failure.
        told = [event["params"]["entry"] for event in page.events if event["method"] == "Log.entryAdded"]
        assert [entry["text"] for entry in told if entry["source"] != "network"] == []
        assert [event for event in page.events if event["method"] == "Runtime.exceptionThrown"] == []


@pytest.fixture
def box(origin: Origin, sandbox: Sandbox, page: Page) -> Iterator[Sandbox]:
    origin.box = sandbox
    yield sandbox
    page.run("window.stop?.()")
    assert page.run("document.querySelector('#root').childElementCount") == 0


def eventually(page: Page, expression: str) -> Any:
    return until(lambda: page.run(expression), lambda: f"{expression}: {page.run('document.body.innerText')}")


def press(page: Page, name: str) -> None:
    """Presses a button once it is there: what says that something was done may be there before the list is read again."""
    eventually(page, f"button({json.dumps(name)}) !== undefined")
    page.run(f"press({json.dumps(name)})")


def keys(page: Page, text: str) -> None:
    page.call("Input.insertText", text=text)


def key(page: Page, name: str, modifiers: int = 0) -> None:
    """Presses a key; modifiers are 1 for Alt, 2 for Control, 8 for Shift."""
    codes = {"Enter": 13, "Tab": 9, "Escape": 27, "ArrowUp": 38, "PageUp": 33}
    for kind in ("rawKeyDown", "keyUp"):
        page.call("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=codes.get(name, ord(name[0].upper())), modifiers=modifiers)


def enter(page: Page, command: str) -> None:
    keys(page, command)
    key(page, "Enter")


def shell(page: Page) -> None:
    """A terminal whose shell waits for a command."""
    page.run("start('terminal')")
    eventually(page, "state() === 'Connected.' && /[$#]$/m.test(grid())")


def test_a_shell_is_used_by_keyboard(page: Page, box: Sandbox) -> None:
    shell(page)
    enter(page, "echo $((6*7))-$TERM; stty size")
    eventually(page, "/^42-xterm-256color$/m.test(grid())")
    rows = page.run("document.querySelectorAll('.terminal-row').length")
    eventually(page, f"/^{rows} \\d+$/m.test(grid())")
    enter(page, "printf '\\033[31mred\\033[0m \\033[48;2;1;2;3mtrue\\033[0m 界\\n'")
    eventually(page, "document.querySelector('.fg-1')?.textContent === 'red'")
    assert page.run("[...document.querySelectorAll('.terminal-row span')].some((span) => span.style.backgroundColor === 'rgb(1, 2, 3)')")
    assert page.run("document.querySelector('.wide').getBoundingClientRect().width > 10")
    # An interrupt, and the last command again, by the history of the shell. What is interrupted says itself that it has
    # begun: a shell loses an interrupt that comes while it starts the next command of its line.
    enter(page, "clear; sh -c \"echo be''gun; exec sleep 600\"")
    eventually(page, "/^begun$/m.test(grid())")
    key(page, "c", 2)
    enter(page, "echo after-$?")
    eventually(page, "/^after-130$/m.test(grid())")
    # What is said to screen readers: each announcement replaces the one before.
    page.run(
        "window.heard = ''; new MutationObserver(() => { heard += document.querySelector('[role=log]').textContent })"
        ".observe(document.querySelector('[role=log]'), { childList: true, characterData: true, subtree: true }); 0"
    )
    key(page, "ArrowUp")
    key(page, "Enter")
    eventually(page, "/^after-0$/m.test(grid())")
    eventually(page, "heard.includes('after-0')")


def test_the_history_is_scrolled_and_the_focus_leaves(page: Page, box: Sandbox) -> None:
    shell(page)
    enter(page, "seq 500")
    eventually(page, "/^500$/m.test(grid())")
    key(page, "PageUp", 8)
    eventually(page, "!/^500$/m.test(grid()) && /^4[0-9][0-9]$/m.test(grid())")
    keys(page, " ")
    eventually(page, "/^500$/m.test(grid())")
    assert page.run("document.activeElement.className") == "terminal-keys"
    key(page, "Escape", 2 | 8)
    assert page.run("document.activeElement.textContent") == "Copy"


def test_several_lines_are_pasted_after_a_question(page: Page, box: Sandbox) -> None:
    shell(page)
    # A program that does not know of pastes.
    enter(page, "echo re''ady; exec cat")
    eventually(page, "/^ready$/m.test(grid())")
    page.run("paste('one\\n\\u202etwo\\n')")
    assert page.run("document.querySelector('.terminal-question pre').textContent") == "one\n\\u{202e}two\n"
    assert page.run("document.activeElement.textContent") == "Cancel"
    press(page, "Cancel")
    assert page.run("document.querySelector('.terminal-question').hidden")
    page.run("paste('three\\nfour\\n'); press('Paste')")
    # As it was typed, and as the program printed it.
    eventually(page, "grid().match(/^four$/mg)?.length === 2")
    assert "one" not in page.run("grid()")


def test_a_full_screen_program_knows_the_size(page: Page, box: Sandbox) -> None:
    shell(page)
    page.run("document.querySelector('.terminal-scroll').style.height = '300px'")
    rows = 17
    eventually(page, f"document.querySelectorAll('.terminal-row').length === {rows}")
    # The program is told by a request of its own.
    enter(page, f"until stty size | grep -q '^{rows} '; do :; done; stty size")
    eventually(page, f"/^{rows} \\d+$/m.test(grid())")
    enter(page, "printf '\\033[?1049h\\033[Hother'; read; printf '\\033[?1049l'")
    eventually(page, "grid().startsWith('other')")
    key(page, "Enter")
    eventually(page, "/stty size/.test(grid()) && !grid().startsWith('other')")


def test_a_flood_of_output_leaves_the_page_alive(page: Page, box: Sandbox) -> None:
    shell(page)
    enter(page, "stty -echo; head -c 8000000 /dev/urandom; printf '\\033c'; echo do''ne; stty sane")
    assert page.run("new Promise((done) => requestAnimationFrame(() => setTimeout(() => done(1), 0)))") == 1
    eventually(page, "/^done$/m.test(grid())")


def test_a_shell_ends_and_another_begins(page: Page, box: Sandbox) -> None:
    shell(page)
    enter(page, "exit 3")
    eventually(page, "state() === 'The shell has ended: exit status 3.'")
    assert page.run("[...document.querySelectorAll('button')].find((one) => one.textContent === 'Reconnect').hidden")
    page.run("document.querySelector('input[name=user]').value = 'root'; document.querySelector('input[name=directory]').value = '/etc'; press('New shell')")
    eventually(page, "state() === 'Connected.' && /[$#]$/m.test(grid())")
    enter(page, "whoami; pwd")
    eventually(page, "/^root$/m.test(grid()) && /^\\/etc$/m.test(grid())")
    page.run("document.querySelector('input[name=directory]').value = '/no/such'; press('New shell')")
    eventually(page, "/^No shell: .*does not exist.*invalid_argument/.test(state())")


def test_a_broken_stream_is_connected_again_by_a_button_only(page: Page, box: Sandbox, origin: Origin) -> None:
    shell(page)
    enter(page, "kept=17; echo se''t")
    eventually(page, "/^set\\n.*[$#]$/m.test(grid())")
    before = len(box.commands.list())
    origin.break_streams()
    eventually(page, "/^The connection has ended/.test(state())")
    assert origin.streams == set()
    press(page, "Reconnect")
    eventually(page, "state() === 'Connected.'")
    enter(page, "echo still-$kept")
    eventually(page, "/^still-17$/m.test(grid())")
    assert len(box.commands.list()) == before


@pytest.mark.parametrize("how", ["stop()", "controller.abort()", "press('New shell')"])
def test_a_terminal_that_is_left_ends_its_shell(page: Page, box: Sandbox, how: str) -> None:
    shell(page)
    (process,) = box.commands.list()
    page.run(how)
    until(lambda: process.pid not in [other.pid for other in box.commands.list()], "the shell has ended")


def folder(page: Page) -> None:
    page.run("start('files')")
    eventually(page, "state() === '' && document.querySelector('caption') !== null")


def test_hostile_names_are_text(page: Page, box: Sandbox) -> None:
    for name in HOSTILE:
        box.files.write(f"/home/user/{name}", name)
    folder(page)
    assert page.run("document.querySelector('h3').textContent") == "/home/user"
    names = page.run("[...document.querySelectorAll('tbody th bdi')].map((one) => one.textContent)")
    assert {"<img src=x onerror=document.title=1>", "photo\\u{202e}gpj.exe", "line\\nend", "tab\\t", "a\\u{200b}b", "\\x1b[31mred", "\\x20space\\x20", "&amp;", "..%2f", "-rf"} <= set(names)
    assert page.run("document.querySelectorAll('#root img').length") == 0
    assert page.run("document.title") == "modules"
    # Each of them is the file that it looks like.
    press(page, "View photo\\u{202e}gpj.exe")
    eventually(page, "document.querySelector('.files-view pre')?.textContent === 'photo\\\\u{202e}gpj.exe'")
    download = page.run("fetch([...document.querySelectorAll('a[download]')].find((one) => one.getAttribute('aria-label') === 'Download line\\\\nend').href).then((got) => got.text())")
    assert download == "line\nend"
    press(page, "Remove line\\nend")
    assert page.run("document.activeElement.textContent") == "Cancel"
    press(page, "Remove")
    eventually(page, "state() === 'Removed line\\\\nend.' && document.activeElement.tagName === 'H3'")
    assert not box.files.exists("/home/user/line\nend")


def test_files_are_made_renamed_uploaded_and_viewed(page: Page, box: Sandbox) -> None:
    folder(page)
    press(page, "New folder")
    keys(page, "new one")
    key(page, "Enter")
    page.run("document.querySelector('.files-question')?.requestSubmit()")
    eventually(page, "state() === 'The folder was created.'")
    press(page, "Open the folder new one")
    eventually(page, "document.querySelector('h3').textContent === '/home/user/new one'")
    page.run("upload('up.txt', 'first\\nsecond')")
    eventually(page, "state() === '1 of 1 uploaded.'")
    assert box.files.read("/home/user/new one/up.txt") == "first\nsecond"
    # Not replaced without a question.
    page.run("upload('up.txt', 'other')")
    eventually(page, "document.querySelector('.files-question') !== null")
    press(page, "Cancel")
    assert box.files.read("/home/user/new one/up.txt") == "first\nsecond"
    page.run("upload('up.txt', 'other')")
    eventually(page, "document.querySelector('.files-question') !== null")
    # As it says already of the first one.
    page.run("document.querySelector('.files-state').textContent = ''")
    press(page, "Replace")
    eventually(page, "state() === '1 of 1 uploaded.' && document.querySelector('.files-question') === null")
    assert box.files.read("/home/user/new one/up.txt") == "other"
    box.files.write("/home/user/new one/taken", "")
    press(page, "Rename up.txt")
    page.run("document.querySelector('.files-question input').value = 'taken'; document.querySelector('.files-question').requestSubmit()")
    eventually(page, "/already_exists/.test(state())")
    press(page, "Rename up.txt")
    page.run("document.querySelector('.files-question input').value = 'moved'; document.querySelector('.files-question').requestSubmit()")
    eventually(page, "state() === 'Renamed to moved.'")
    assert box.files.read("/home/user/new one/moved") == "other"
    press(page, "Parent folder")
    eventually(page, "document.querySelector('h3').textContent === '/home/user'")


def test_what_is_shown_is_bounded(page: Page, box: Sandbox) -> None:
    box.commands.run("mkdir many && cd many && seq 1007 | xargs touch")
    box.files.write("/home/user/large", "x" * (1 << 20) + "yyy")
    box.files.write("/home/user/binary", b"\x7fELF\0\0")
    folder(page)
    # One line, which a browser would lay out for seconds if it were left in one piece.
    press(page, "View large")
    eventually(page, "document.querySelector('.files-view pre')?.textContent === 'x'.repeat(1 << 20)")
    assert page.run("(() => { const begun = performance.now(); document.querySelector('.files-view pre').style.width = '301px'; document.body.offsetHeight; return performance.now() - begun })()") < within(2) * 1000
    assert page.run("document.querySelector('.files-view p').textContent") == "Only the first 1.0 MiB are shown."
    press(page, "View binary")
    eventually(page, "/binary/.test(document.querySelector('.files-view p')?.textContent)")
    press(page, "Open the folder many")
    eventually(page, "document.querySelectorAll('tbody tr').length === 1000")
    assert page.run("document.querySelector('.files-table p').textContent").startswith("7 more entries")


def test_each_control_has_a_name(page: Page, box: Sandbox) -> None:
    box.files.write("/home/user/a", "")
    for kind in ("files", "terminal"):
        if kind == "files":
            folder(page)
        else:
            shell(page)
        nodes = page.call("Accessibility.getFullAXTree")["nodes"]
        controls = [node for node in nodes if node.get("role", {}).get("value") in ("button", "textbox", "link", "checkbox", "combobox")]
        assert len(controls) >= 5
        assert [node for node in controls if not node.get("name", {}).get("value")] == [], json.dumps(controls)[:500]
