"""The dashboard against those who attack it: another origin, a sandbox, another team, and whoever got hold of a cookie.

A browser's requests are made by hand here, so that each header that a browser would refuse to forge can be forged.
"""

from __future__ import annotations

import http.server
import json
import re
import struct
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox

from harness.chromium import Page, chromium
from harness.dashboard import Dashboard
from harness.platform import Platform
from harness.secure import secure_platform
from harness.traffic import program, until, wait_served

MARK = {"X-Ringfence-Dashboard": "1"}
TOKENS = ("envdAccessToken", "trafficAccessToken", "apiKey")
# Sends requests with the cookie in each way that a page has. The result is what the page could read of each answer.
ATTEMPT = """
window.attempt = async (base, requests) => {
  const ways = [{ headers: { 'X-Ringfence-Dashboard': '1', 'Content-Type': 'application/json' } }, {}, { mode: 'no-cors' }]
  const read = []
  for (const [method, path, body] of requests) {
    for (const way of ways) {
      try {
        const answer = await fetch(`${base}/${path}`, { method, body, credentials: 'include', cache: 'no-store', ...way })
        read.push([method, path, answer.status, await answer.text()])
      } catch {
        read.push([method, path, 0, ''])
      }
    }
  }
  return read
}
// A form needs no permission to be sent, and its answer is a document in a frame.
window.submit = (base, path, name) => new Promise((resolve) => {
  const done = () => resolve(true)
  const frame = Object.assign(document.createElement('iframe'), { name: 'answer' })
  const form = Object.assign(document.createElement('form'), { method: 'POST', action: `${base}/${path}`, enctype: 'text/plain', target: 'answer' })
  // As text, it is `{"templateID": "base", "metadata": {"by": "copy", "x": "="}}`.
  form.append(Object.assign(document.createElement('input'), { name, value: '"}}' }))
  document.body.append(frame, form)
  frame.addEventListener('load', done)
  // Where a frame that is refused says nothing.
  setTimeout(done, 5000)
  form.submit()
})
0
"""


class Visitor:
    """One browser, by its cookies."""

    def __init__(self, url: str, **options) -> None:
        self.url = url
        self.client = httpx.Client(base_url=url, headers=MARK, timeout=60, **options)

    def sign_in(self, credential: str) -> httpx.Response:
        return self.client.post("/dashboard/session", json={"credential": credential})

    def get(self, path: str, **options) -> httpx.Response:
        return self.client.get(f"/dashboard/{path}", **options)

    def post(self, path: str, **options) -> httpx.Response:
        return self.client.post(f"/dashboard/{path}", **options)

    def delete(self, path: str, **options) -> httpx.Response:
        return self.client.delete(f"/dashboard/{path}", **options)

    def __enter__(self) -> Visitor:
        return self

    def __exit__(self, *_) -> None:
        self.client.close()


@pytest.fixture
def key(platform: Platform) -> str:
    return platform.credentials()["E2B_API_KEY"]


@pytest.fixture
def visitor(platform: Platform, key: str) -> Iterator[Visitor]:
    """A browser that is signed in."""
    with Visitor(platform.url) as visitor:
        assert visitor.sign_in(key).status_code == 200
        yield visitor


@pytest.fixture
def stranger(platform: Platform) -> Iterator[Visitor]:
    """A browser that is signed in to another team."""
    team = f"stranger-{uuid.uuid4().hex[:8]}"
    assert platform.run("team", "create", team).returncode == 0
    key = platform.run("key", "create", "--team", team).stdout.strip()
    with Visitor(platform.url) as visitor:
        assert visitor.sign_in(key).json()["team"]["name"] == team
        yield visitor


def ran(visitor: Visitor, sandbox: Sandbox, command: str) -> bytes:
    """What a command prints that the page starts by the agent."""
    message = json.dumps({"process": {"cmd": "/bin/sh", "args": ["-c", command]}}).encode()
    answer = visitor.post(
        f"agent/{sandbox.sandbox_id}/process.Process/Start",
        content=struct.pack(">BI", 0, len(message)) + message,
        headers={"Content-Type": "application/connect+json", "Connect-Protocol-Version": "1"},
    )
    assert answer.status_code == 200, answer.text
    return answer.content


def test_the_page_is_the_same_for_everybody_and_says_what_it_may_load(platform: Platform, key: str) -> None:
    with Visitor(platform.url) as visitor:
        before = visitor.get("sandboxes")
        visitor.sign_in(key)
        after = visitor.get("sandboxes")
    assert before.status_code == 200 and before.content == after.content
    policy = before.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy and before.headers["x-frame-options"] == "DENY", "it cannot be framed"
    assert before.headers["cross-origin-opener-policy"] == "same-origin"
    assert before.headers["cross-origin-resource-policy"] == "same-origin"
    assert before.headers["referrer-policy"] == "no-referrer"


def test_a_key_or_an_access_token_signs_in_and_nothing_else(platform: Platform, key: str) -> None:
    made = httpx.post(f"{platform.url}/access-tokens", headers={"X-API-Key": key}, json={"name": "browser"}, timeout=30)
    token = made.json()["token"]
    with Visitor(platform.url) as visitor:
        assert visitor.get("session").status_code == 401
        for wrong in ("", "x", "e2b_" + "ab" * 20, "sk_e2b_" + "ab" * 20, key + "00", "e2b_"):
            answer = visitor.sign_in(wrong)
            assert answer.status_code == 401 and "set-cookie" not in answer.headers, wrong
        for body in (b"", b"[]", b'{"credential": 5}', f'{{"credentials": "{key}"}}'.encode(), key.encode()):
            answer = visitor.post("session", content=body)
            assert answer.status_code == 400 and key not in answer.text
        assert visitor.post("session", content=b'{"credential": "' + b"a" * 5000 + b'"}').status_code == 413
        assert visitor.get("api/v2/sandboxes").status_code == 401
        for good in (key, token, f"  {key}\n"):
            answer = visitor.sign_in(good)
            assert answer.status_code == 200 and answer.json()["team"]["name"]
            cookie = answer.headers["set-cookie"]
            assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and "Path=/dashboard" in cookie
            assert visitor.get("api/v2/sandboxes").status_code == 200
            assert good.strip() not in answer.text
    assert key not in platform.log() and token not in platform.log()


def test_a_replayed_cookie_after_sign_out_is_refused(visitor: Visitor, platform: Platform) -> None:
    (cookie,) = visitor.client.cookies.jar
    assert visitor.delete("session").status_code == 204
    assert not list(visitor.client.cookies.jar), "the browser forgets it"
    for path in ("session", "api/v2/sandboxes", "agent/i0/files?path=/etc/hosts"):
        answer = httpx.get(
            f"{platform.url}/dashboard/{path}", headers={**MARK, "Cookie": f"{cookie.name}={cookie.value}"}, timeout=30
        )
        assert answer.status_code == 401, path
    assert cookie.value not in platform.log()


def test_an_open_stream_ends_with_the_session(visitor: Visitor, sandbox: Sandbox) -> None:
    message = json.dumps({"process": {"cmd": "/bin/sh", "args": ["-c", "echo begun; sleep 300"]}}).encode()
    with visitor.client.stream(
        "POST",
        f"/dashboard/agent/{sandbox.sandbox_id}/process.Process/Start",
        content=struct.pack(">BI", 0, len(message)) + message,
        headers={"Content-Type": "application/connect+json", "Connect-Protocol-Version": "1"},
    ) as stream:
        chunks = stream.iter_raw()
        seen = b""
        while b"YmVndW4K" not in seen:  # "begun" and a line end
            seen += next(chunks)
        assert visitor.delete("session").status_code == 204
        with pytest.raises(httpx.RemoteProtocolError):
            for _ in chunks:
                pass


def test_a_revoked_key_ends_its_sessions(platform: Platform) -> None:
    team = f"revoked-{uuid.uuid4().hex[:8]}"
    assert platform.run("team", "create", team).returncode == 0
    key = platform.run("key", "create", "--team", team).stdout.strip()
    with Visitor(platform.url) as visitor:
        assert visitor.sign_in(key).status_code == 200
        assert visitor.get("api/v2/sandboxes").status_code == 200
        (entry,) = json.loads(platform.run("key", "list", "--team", team, "--format", "json").stdout)
        assert platform.run("key", "revoke", entry["id"]).returncode == 0
        for path in ("api/v2/sandboxes", "session"):
            assert visitor.get(path).status_code == 401, path


def test_a_forged_origin_is_refused(visitor: Visitor, sandbox: Sandbox, platform: Platform) -> None:
    """Whatever the browser says of a request that another page made: none of it reaches the API or an agent."""
    host = re.sub(r"^http://", "", platform.url)
    forged = [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": f"https://{host}"},
        {"Origin": f"http://8000-{sandbox.sandbox_id}.{host}"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "none"},
        {"Sec-Fetch-Dest": "script"},
        {"Sec-Fetch-Dest": "iframe"},
        {"Service-Worker": "script"},
        {"X-Ringfence-Dashboard": ""},
    ]
    for headers in forged:
        for answer in (
            visitor.post("api/sandboxes", json={"templateID": "base"}, headers=headers),
            visitor.get("api/v2/sandboxes", headers=headers),
            visitor.delete(f"api/sandboxes/{sandbox.sandbox_id}", headers=headers),
            visitor.post(f"agent/{sandbox.sandbox_id}/files?path=/tmp/x", files={"file": b"x"}, headers=headers),
            visitor.delete("session", headers=headers),
            visitor.post("session", json={"credential": "x"}, headers=headers),
        ):
            assert answer.status_code == 403, (headers, answer.text)
            assert "access-control-allow-origin" not in answer.headers
    assert sandbox.is_running() and not sandbox.files.exists("/tmp/x")
    assert visitor.get("session").status_code == 200
    asked = visitor.client.options("/dashboard/api/sandboxes", headers={"Origin": "http://evil.example"})
    assert asked.status_code >= 400 and "access-control-allow-origin" not in asked.headers


@contextmanager
def copied(platform: Platform) -> Iterator[tuple[int, list[http.server.BaseHTTPRequestHandler]]]:
    """A copy of the page and its files at an address of its own, whose requests go to the platform: its port, and who asked it."""
    asked: list[http.server.BaseHTTPRequestHandler] = []

    class Copy(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self)
            answer = httpx.get(f"{platform.url}{self.path}", timeout=30)
            content = answer.text
            if self.path.endswith("/api.js"):
                content, count = re.subn(r"^(export const BASE = )'/dashboard'$", rf"\1'{platform.url}/dashboard'", content, flags=re.M)
                content, sent = re.subn("credentials: 'same-origin'", "credentials: 'include'", content)
                assert (count, sent) == (1, 1), "the copy does not ask the platform"
            self.send_response(answer.status_code)
            # Nothing of what the platform says that its page may load.
            self.send_header("Content-Type", answer.headers["content-type"])
            self.end_headers()
            self.wfile.write(content.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Copy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port, asked
    finally:
        server.shutdown()
        server.server_close()


def framed(page: Page) -> dict[str, str]:
    """What is in the frames of the page, those of other processes too: the text by the address."""
    texts = {one["frame"]["url"]: "" for one in page.call("Page.getFrameTree")["frameTree"].get("childFrames", [])}
    gone = {event["params"]["sessionId"] for event in page.events if event["method"] == "Target.detachedFromTarget"}
    attached = [event["params"] for event in page.events if event["method"] == "Target.attachedToTarget"]
    for one in attached:
        if one["targetInfo"]["type"] != "iframe" or one["sessionId"] in gone:
            continue
        asked = "[location.href, document.body?.innerText ?? '']"
        address, text = page.call("Runtime.evaluate", one["sessionId"], expression=asked, returnByValue=True)["result"]["value"]
        texts[address] = text
    return texts


def test_a_stolen_page_gets_nothing(platform: Platform, key: str, sandbox: Sandbox, tmp_path: Path) -> None:
    """In a browser that is signed in: a copy of the page elsewhere, and the page in a frame of a page of a sandbox."""
    base = f"{platform.url}/dashboard"
    create = json.dumps({"templateID": "base", "timeout": 60, "metadata": {"by": "copy"}})
    harmless = [["GET", "session", None], ["GET", "api/v2/sandboxes", None], ["POST", "api/sandboxes", create]]
    one = sandbox.sandbox_id
    harmful = [
        *harmless,
        ["POST", f"api/sandboxes/{one}/timeout", '{"timeout": 5}'],
        ["POST", f"api/sandboxes/{one}/pause", "{}"],
        ["POST", "api/api-keys", '{"name": "theirs"}'],
        ["GET", f"agent/{one}/files?path=/etc/hostname", None],
        ["POST", f"agent/{one}/files?path=/tmp/theirs", "content"],
        ["DELETE", f"api/sandboxes/{one}", None],
        ["DELETE", "session", None],
    ]
    with (
        httpx.Client(base_url=platform.url, headers={"X-API-Key": key}, timeout=60) as api,
        chromium(tmp_path, None) as page,
        copied(platform) as (port, asked),
    ):

        def state() -> list[object]:
            shown = api.get(f"/sandboxes/{one}").json()
            listed = [sorted(entry[name] for entry in api.get(path).json()) for path, name in (("/v2/sandboxes", "sandboxID"), ("/api-keys", "id"))]
            return [shown["state"], shown["endAt"], sandbox.files.exists("/tmp/theirs"), *listed]

        def made() -> list[str]:
            return [entry["sandboxID"] for entry in api.get("/v2/sandboxes", params={"metadata": "by=copy"}).json()]

        page.call("Target.setAutoAttach", autoAttach=True, waitForDebuggerOnStart=False, flatten=True)
        shown = Dashboard(page, platform.url)
        shown.sign_in(key)
        # The requests are good ones: with the mark, the page itself reads each answer and creates a sandbox.
        page.run(ATTEMPT)
        own = page.run(f"attempt({json.dumps(base)}, {json.dumps(harmless)})")
        assert [status for _, _, status, text in own if text and one in text or status == 201] == [200, 201], own
        assert own[0][2] == 200 and "team" in own[0][3]
        (created,) = made()
        assert api.delete(f"/sandboxes/{created}").status_code == 204

        before = state()
        # The same machine at another port is the same site, to which the browser sends the cookie; another name is another site.
        for host in ("127.0.0.1", "localhost"):
            page.open(f"http://{host}:{port}/dashboard/sandboxes")
            shown.wait("document.body.innerText.includes('The dashboard cannot be shown')")
            page.run(ATTEMPT)
            read = page.run(f"attempt({json.dumps(base)}, {json.dumps(harmful)})")
            assert len(read) == 3 * len(harmful)
            assert [entry for entry in read if entry[2] != 0 or entry[3]] == [], host
            form = '{"templateID": "base", "metadata": {"by": "copy", "x": "'
            page.run(f"submit({json.dumps(base)}, 'api/sandboxes', {json.dumps(form)})")
            assert one not in page.run("document.documentElement.innerHTML")
            assert made() == [] and state() == before, host
        assert asked and not [handler for handler in asked if handler.headers["Host"].startswith("localhost") and handler.headers["Cookie"]]

        # The copy, which says nothing of frames, shows that a page in a frame would be seen.
        frames = "".join(f'<iframe src="{source}"></iframe>' for source in (f"{base}/sandboxes", f"http://127.0.0.1:{port}/dashboard/sandboxes"))
        sandbox.files.write("/tmp/served/index.html", f"<!doctype html><title>frames</title>{frames}")
        sandbox.commands.run("python3 -m http.server 8000 --directory /tmp/served", background=True)
        name = sandbox.get_host(8000)
        wait_served(platform.url, name)
        page.open(f"http://{name}/" if ":" in name else f"http://{name}:{platform.port}/")
        assert page.run("document.title") == "frames" and page.run("frames.length") == 2
        copy = f"http://127.0.0.1:{port}/dashboard/sandboxes"
        until(lambda: "cannot be shown" in framed(page).get(copy, ""), lambda: f"{framed(page)}")
        found = framed(page)
        assert [(address, text) for address, text in found.items() if address.startswith(platform.url) or "Sign" in text] == [], found
        assert state() == before

        # And the session is what it was.
        shown.open("/dashboard/sandboxes")
        shown.wait("has('Sign out')")
        shown.shows(one)


def test_a_download_is_refused_to_other_pages(visitor: Visitor, sandbox: Sandbox) -> None:
    path = f"agent/{sandbox.sandbox_id}/files?path=/etc/hostname"
    bare = {"X-Ringfence-Dashboard": ""}
    good = {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Dest": "document"}
    assert visitor.get(path, headers={**bare, **good}).status_code == 200
    for wrong in ({"Sec-Fetch-Site": "same-site"}, {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Dest": "script"}):
        assert visitor.get(path, headers={**bare, **good, **wrong}).status_code == 403, wrong


def test_a_second_team_sees_nothing(visitor: Visitor, stranger: Visitor, sandbox: Sandbox) -> None:
    assert sandbox.sandbox_id in visitor.get("api/v2/sandboxes").text
    assert stranger.get("api/v2/sandboxes").json() == []
    for answer in (
        stranger.get(f"api/sandboxes/{sandbox.sandbox_id}"),
        stranger.delete(f"api/sandboxes/{sandbox.sandbox_id}"),
        stranger.get(f"agent/{sandbox.sandbox_id}/files?path=/etc/hostname"),
        stranger.post(f"agent/{sandbox.sandbox_id}/filesystem.Filesystem/ListDir", json={"path": "/"}),
    ):
        assert answer.status_code == 404, answer.text
    # A team that is named is still not the session's.
    own = visitor.get("session").json()["team"]["id"]
    assert stranger.get("api/v2/sandboxes", headers={"X-Team-ID": own}).json() == []
    assert sandbox.is_running()


def test_no_answer_has_a_token(visitor: Visitor, key: str) -> None:
    """A page that was taken over could send tokens elsewhere, where they would outlive the session."""
    made = visitor.post("api/sandboxes", json={"templateID": "base", "secure": True, "network": {"allowPublicTraffic": False}})
    assert made.status_code == 201, made.text
    sandbox = made.json()["sandboxID"]
    answers = [
        made,
        visitor.get(f"api/sandboxes/{sandbox}"),
        visitor.post(f"api/sandboxes/{sandbox}/connect", json={"timeout": 60}),
        visitor.get("api/v2/sandboxes"),
    ]
    for answer in answers:
        assert answer.status_code < 300 and sandbox in answer.text
        assert not [token for token in TOKENS if token in answer.text], answer.text
        assert answer.headers["cache-control"] == "no-store"
    # The one operation that is a token itself.
    teams = visitor.get("api/teams")
    assert teams.status_code == 404 and key not in teams.text
    assert key not in visitor.get("api/t%65ams").text
    assert visitor.delete(f"api/sandboxes/{sandbox}").status_code == 204


def test_a_page_of_a_sandbox_is_a_download(visitor: Visitor, sandbox: Sandbox) -> None:
    sandbox.files.write("/tmp/a\"b;<script>é.html", "<script>alert(1)</script>")
    answer = visitor.get(f"agent/{sandbox.sandbox_id}/files", params={"path": "/tmp/a\"b;<script>é.html"})
    assert answer.status_code == 200 and answer.text == "<script>alert(1)</script>"
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["content-disposition"] == "attachment; filename*=UTF-8''a%22b%3B%3Cscript%3E%C3%A9.html"
    assert "sandbox" in answer.headers["content-security-policy"] and answer.headers["x-content-type-options"] == "nosniff"


def test_a_signed_link_cannot_run_at_this_origin(sandbox: Sandbox, platform: Platform) -> None:
    """It is answered at the address of the platform, which is the dashboard's origin."""
    sandbox.files.write("/tmp/page.html", "<script>alert(1)</script>")
    link = httpx.URL(sandbox.download_url("/tmp/page.html"))
    answer = httpx.get(f"{platform.url}{link.raw_path.decode()}", timeout=30)
    assert answer.status_code == 200 and "alert" in answer.text
    assert answer.headers["content-security-policy"] == "sandbox"
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_sandbox_never_gets_the_cookie(visitor: Visitor, sandbox: Sandbox, platform: Platform) -> None:
    sandbox.files.write("/tmp/server.py", program("http_server.py"))
    sandbox.commands.run("python3 /tmp/server.py 0.0.0.0 8000", background=True)
    host = sandbox.get_host(8000)
    wait_served(platform.url, host)
    (cookie,) = visitor.client.cookies.jar
    sent = f"theirs=1; {cookie.name}={cookie.value}; __Host-ringfence-dashboard={cookie.value}; more=2"
    seen = httpx.get(platform.url, headers={"Host": host, "Cookie": sent}, timeout=30).text
    assert "theirs=1; more=2" in seen and cookie.value not in seen


def test_only_the_calls_of_the_page_reach_an_agent(visitor: Visitor, sandbox: Sandbox) -> None:
    for path in ("init", "process.Process/../init", "files/../init", "%69nit", "process.Process/", "", "envs", "files/x"):
        answer = visitor.post(f"agent/{sandbox.sandbox_id}/{path}", json={})
        assert answer.status_code == 404, path
    assert visitor.client.put(f"/dashboard/agent/{sandbox.sandbox_id}/files?path=/tmp/x").status_code == 404
    assert b"cm9vdAo=" in ran(visitor, sandbox, "id -un | sed s/user/root/")


def test_a_paused_sandbox_is_not_woken(visitor: Visitor, platform: Platform) -> None:
    box = Sandbox.create(timeout=60, lifecycle={"on_timeout": "pause", "auto_resume": True})
    try:
        box.pause()
        for answer in (
            visitor.get(f"agent/{box.sandbox_id}/files?path=/etc/hostname"),
            visitor.post(f"agent/{box.sandbox_id}/filesystem.Filesystem/ListDir", json={"path": "/"}),
        ):
            assert answer.status_code == 409 and "resume it first" in answer.json()["message"]
        assert visitor.get(f"api/sandboxes/{box.sandbox_id}").json()["state"] == "paused"
    finally:
        box.kill()


def test_uploads_are_the_page_s_own(visitor: Visitor, sandbox: Sandbox) -> None:
    path = f"agent/{sandbox.sandbox_id}/files?path=/tmp/up"
    assert visitor.post(path, files={"file": b"content"}, headers={"X-Ringfence-Dashboard": ""}).status_code == 403
    assert visitor.post(path, files={"file": b"content"}).status_code == 200
    assert sandbox.files.read("/tmp/up") == "content"


def test_a_browser_elsewhere_is_sent_to_https(platform: Platform, key: str) -> None:
    """A reverse proxy that says that it was asked over HTTP passes a password that others could read."""
    for forwarded in ({"X-Forwarded-Proto": "http"}, {"X-Forwarded-For": "192.0.2.7"}):
        with Visitor(platform.url) as visitor:
            visitor.client.headers.update(forwarded)
            page = visitor.get("")
            assert page.status_code == 403 and "HTTPS" in page.text and page.headers["content-type"].startswith("text/html")
            assert visitor.sign_in(key).status_code == 403
            first = visitor.client.get("/", headers={"Accept": "text/html"})
            assert first.headers["location"] == "/docs"
    with Visitor(platform.url) as visitor:
        visitor.client.headers["X-Forwarded-Proto"] = "https"
        answer = visitor.sign_in(key)
        assert answer.status_code == 200 and "__Host-" in answer.headers["set-cookie"]
        first = visitor.client.get("/", headers={"Accept": "text/html"})
        assert first.headers["location"] == "/dashboard"


def test_over_https_no_neighbour_can_set_the_cookie(work_dir: Path) -> None:
    with secure_platform(work_dir / "dashboard") as secure:
        url = secure.url.replace("http://", "https://")
        with Visitor(url, verify=False) as visitor:
            answer = visitor.sign_in(secure.credentials()["E2B_API_KEY"])
            cookie = answer.headers["set-cookie"]
            assert re.fullmatch(
                r"__Host-ringfence-dashboard=[0-9a-f]{64}; Path=/; Secure; HttpOnly; SameSite=Strict; Max-Age=43200", cookie
            )
            token = cookie.split("=")[1].split(";")[0]
            assert visitor.get("session").status_code == 200
        # Over HTTP, or by the name that a sandbox could set, it is nothing.
        for name, at in (("__Host-ringfence-dashboard", secure.url), (f"ringfence-dashboard-{secure.port}", url)):
            answer = httpx.get(f"{at}/dashboard/session", headers={**MARK, "Cookie": f"{name}={token}"}, verify=False, timeout=30)
            assert answer.status_code == 401, name


def test_the_first_address_leads_browsers_to_the_dashboard(platform: Platform) -> None:
    answer = httpx.get(platform.url, headers={"Accept": "text/html"}, timeout=30)
    assert answer.status_code == 307 and answer.headers["location"] == "/dashboard"
    assert httpx.get(platform.url, timeout=30).status_code == 404, "other clients get the answer of the API"


def test_the_operator_signs_in_by_a_code_of_the_command_line(platform: Platform, sandbox: Sandbox, visitor: Visitor) -> None:
    printed = platform.run("dashboard")
    assert printed.returncode == 0 and f"{platform.url}/dashboard" in printed.stdout, printed.stderr
    (code,) = re.findall(r"rfop_[0-9a-f]{32}", printed.stdout)
    with Visitor(platform.url) as operator:
        session = operator.sign_in(code).json()
        assert session["isOperator"] is True and session["team"] is None
        with Visitor(platform.url) as second:
            again = second.sign_in(code)
            assert again.status_code == 401 and "five minutes" in again.json()["message"], "a code works once"
        listed = operator.get("operator-api/sandboxes").json()
        assert sandbox.sandbox_id in {entry["id"] for entry in listed}
        assert "ringfence_sandboxes" in operator.get("operator-api/metrics").text
        assert operator.get(f"operator-api/sandboxes/{sandbox.sandbox_id}/logs").status_code == 200
        # The node is a part of the server, which says its own version.
        (node,) = operator.get("operator-api/nodes").json()
        assert (node["state"], node["version"]) == ("connected", session["version"]) and node["sandboxes"] >= 1
        assert 0 < node["memory_available_bytes"] <= node["memory_bytes"] and node["cores"] > 0 and 0 <= node["pressure"] <= 100
        assert "joined_at" not in node
        # Neither a team's contents nor the ways to change the platform.
        for answer in (
            operator.get("api/v2/sandboxes"),
            operator.get(f"agent/{sandbox.sandbox_id}/files?path=/etc/hostname"),
        ):
            assert answer.status_code == 403 and "operator" in answer.json()["message"]
        for answer in (
            operator.post("operator-api/dashboard/codes"),
            operator.post("operator-api/backup"),
            operator.get("operator-api/template?team=x&name=base"),
            operator.post("operator-api/collections", json={}),
            operator.get("operator-api/layers/x"),
            operator.post("operator-api/nodes"),
            operator.post("operator-api/node-tokens"),
            operator.get(f"operator-api/nodes/{node['id']}"),
            operator.delete(f"operator-api/nodes/{node['id']}"),
            operator.get("operator-api/sandboxes/../template"),
            operator.post(f"operator-api/sandboxes/{sandbox.sandbox_id}"),
        ):
            assert answer.status_code == 404, answer.request.url
        assert operator.delete(f"operator-api/sandboxes/{sandbox.sandbox_id}").status_code == 204
        assert not sandbox.is_running()
    for path in ("sandboxes", "metrics", "nodes", f"sandboxes/{sandbox.sandbox_id}"):
        assert visitor.get(f"operator-api/{path}").status_code == 403, "a team is not the operator"
    assert code not in platform.log()
