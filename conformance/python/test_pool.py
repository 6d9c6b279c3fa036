"""Sandboxes that are kept ready: each request gets one of its own, with its own settings, and nobody reaches one before."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2b import Sandbox, Template

from harness.beside import beside
from harness.patience import within
from harness.platform import Platform
from harness.ports import free_port
from harness.traffic import get, until

CONFIG = "[sandbox]\ndisk_mb = 768\n\n[pool]\nbase = 3\n"


@pytest.fixture
def pooling(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """A second platform, which keeps sandboxes of `base` ready."""
    with beside(platform, tmp_path_factory.mktemp("pool"), CONFIG) as server:
        yield server


def pooled(server: Platform) -> list[dict[str, Any]]:
    """What the operator sees of the pool."""
    done = server.run("sandbox", "list", "--format", "json")
    assert done.returncode == 0, done.stderr
    return [item for item in json.loads(done.stdout) if item["state"] == "pooled"]


def create(server: Platform, template: str = "base", **more: Any) -> tuple[dict[str, Any], str]:
    """A new sandbox as the API returns it, and the stages of its start."""
    headers = {"X-API-Key": server.credentials()["E2B_API_KEY"]}
    answer = httpx.post(f"{server.url}/sandboxes", headers=headers, json={"templateID": template, **more}, timeout=60)
    assert answer.status_code == 201, answer.text
    return answer.json(), answer.headers["Server-Timing"]


def test_a_request_gets_a_sandbox_with_its_own_settings(pooling: Platform) -> None:
    until(lambda: len(pooled(pooling)) == 3, "the pool is full")
    waiting = {item["id"] for item in pooled(pooling)}
    settings = {"envVars": {"GREETING": "hello"}, "metadata": {"for": "me"}, "timeout": 60, "allow_internet_access": False}
    made, stages = create(pooling, **settings)
    assert "claim;" in stages and made["sandboxID"] in waiting, stages
    box = Sandbox.connect(made["sandboxID"])
    # A connection sets the timeout, which is asked for before.
    info = box.get_info()
    assert info.metadata == {"for": "me"} and info.state == "running"
    asked = time.time()
    seen = box.commands.run('echo "$GREETING $E2B_SANDBOX_ID"; id -un; pwd; date +%s').stdout.split()
    assert seen[:4] == ["hello", made["sandboxID"], "user", "/home/user"]
    assert asked - 1 <= int(seen[4]) <= time.time() + 1
    refused = box.commands.run("curl -sS -m 5 http://93.184.216.34/ 2>&1 || echo failed")
    assert refused.stdout.rstrip().endswith("failed")
    # What another request gets has nothing of this one.
    until(lambda: len(pooled(pooling)) > 0, "another is ready")
    other, stages = create(pooling)
    assert "claim;" in stages and other["sandboxID"] != made["sandboxID"]
    clean = Sandbox.connect(other["sandboxID"])
    assert clean.commands.run('echo "[$GREETING]"').stdout == "[]\n"
    assert clean.get_info().metadata == {}
    for each in (box, clean):
        assert each.kill()


def test_by_default_some_are_ready_and_nobody_notices(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> None:
    """They are in no list, no count and no quota, and the next request gets one."""
    memory_kib = int(next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal")).split()[1])
    wanted = 4 if memory_kib >= 3 << 20 else 0
    metrics = f"127.0.0.1:{free_port()}"
    config = f'metrics_listen = "{metrics}"\n[sandbox]\ndisk_mb = 768\n[limits]\nsandboxes = 1\n'
    with beside(platform, tmp_path_factory.mktemp("default"), config, ready=True) as server:
        if wanted:
            until(lambda: len(pooled(server)) == wanted, "sandboxes are ready")
        headers = {"X-API-Key": server.credentials()["E2B_API_KEY"]}
        with httpx.Client(base_url=server.url, headers=headers, timeout=30) as api:
            assert api.get("/v2/sandboxes").json() == []
        lines = httpx.get(f"http://{metrics}/metrics", timeout=within(30)).text.splitlines()
        counts = [line for line in lines if line.startswith("ringfence_sandboxes{")]
        assert counts and all(line.endswith(" 0") for line in counts), counts
        made, stages = create(server)
        assert ("claim;" in stages) == bool(wanted), stages
        assert Sandbox.connect(made["sandboxID"]).commands.run("echo $E2B_SANDBOX_ID").stdout.strip() == made["sandboxID"]
        if wanted:
            until(lambda: len(pooled(server)) == wanted, "the next one is ready")
        # One sandbox is all that the team may have, and has.
        refused = httpx.post(f"{server.url}/sandboxes", headers=headers, json={"templateID": "base"}, timeout=30)
        assert refused.status_code == 429, refused.text
        assert len(pooled(server)) == wanted


def test_requests_at_the_same_time_get_one_each(pooling: Platform) -> None:
    until(lambda: len(pooled(pooling)) == 3, "the pool is full")

    def own(number: int) -> tuple[str, str]:
        made, _ = create(pooling, envVars={"NUMBER": str(number)})
        box = Sandbox.connect(made["sandboxID"])
        seen = box.commands.run("echo $NUMBER").stdout.strip()
        assert box.kill()
        return made["sandboxID"], seen

    with ThreadPoolExecutor(12) as threads:
        results = list(threads.map(own, range(12)))
    assert len({sandbox_id for sandbox_id, _ in results}) == 12
    assert [seen for _, seen in results] == [str(number) for number in range(12)]


def test_nobody_reaches_a_sandbox_that_is_kept_ready(pooling: Platform) -> None:
    until(lambda: len(pooled(pooling)) == 3, "the pool is full")
    hidden = pooled(pooling)[0]["id"]
    headers = {"X-API-Key": pooling.credentials()["E2B_API_KEY"]}
    with httpx.Client(base_url=pooling.url, headers=headers, timeout=30) as api:
        assert api.get("/sandboxes").json() == []
        for method, path, body in (
            ("GET", f"/sandboxes/{hidden}", None),
            ("DELETE", f"/sandboxes/{hidden}", None),
            ("POST", f"/sandboxes/{hidden}/connect", {"timeout": 60}),
            ("POST", f"/sandboxes/{hidden}/timeout", {"timeout": 60}),
            ("PUT", f"/sandboxes/{hidden}/network", {}),
        ):
            answer = api.request(method, path, json=body)
            assert answer.status_code == 404, (method, path, answer.text)
        assert api.get(f"/sandboxes/{hidden}/logs").json()["logs"] == []
        for port in (49983, 80):
            assert get(pooling.url, f"{port}-{hidden}.{pooling.credentials()['E2B_DOMAIN']}").status_code in (404, 502)
    assert hidden in {item["id"] for item in pooled(pooling)}
    # The operator can end it, and another one takes its place.
    assert pooling.run("sandbox", "kill", hidden).returncode == 0
    until(lambda: hidden not in {item["id"] for item in pooled(pooling)}, "it has ended")
    until(lambda: len(pooled(pooling)) == 3, "the pool is full again")


def test_a_server_of_a_template_answers_when_create_returns(pooling: Platform) -> None:
    name = f"t{uuid.uuid4().hex[:12]}"
    template = (
        Template()
        .from_template("base")
        .set_workdir("/home/user/www")
        .run_cmd("echo served > page")
        .set_start_cmd("exec python3 -m http.server 8000", "curl -sf -o /dev/null localhost:8000/page")
    )
    Template.build(template, name)
    first, stages = create(pooling, name, timeout=300)
    assert "claim;" not in stages

    def ready() -> list[str]:
        return [item["id"] for item in pooled(pooling) if item["template"] == first["templateID"]]

    for _ in range(2):
        until(lambda: ready() != [], "one of the template is ready")
        made, stages = create(pooling, name, envVars={"LATE": "yes"}, timeout=300)
        assert "claim;" in stages, stages
        answer = get(pooling.url, f"8000-{made['sandboxID']}.{pooling.credentials()['E2B_DOMAIN']}", "/page")
        assert (answer.status_code, answer.text) == (200, "served\n")
        box = Sandbox.connect(made["sandboxID"])
        # Commands have the environment of the request; the server was started before it.
        assert box.commands.run("echo $LATE").stdout == "yes\n"
        inside = box.commands.run("tr '\\0' '\\n' < /proc/$(pgrep -f http.server | head -n 1)/environ")
        assert "LATE=" not in inside.stdout
        assert box.kill()
    assert Sandbox.connect(first["sandboxID"]).kill()
    headers = {"X-API-Key": pooling.credentials()["E2B_API_KEY"]}
    assert httpx.delete(f"{pooling.url}/templates/{name}", headers=headers, timeout=within(30)).status_code == 204
    until(lambda: ready() == [], "none of a deleted template is kept", 90)


# A server that is asked for what the create request gave, after it was started: a file, and for clients of the code
# interpreter the token with which it asks the agent.
ASKED = """
import http.server, json, os, urllib.request
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        with open("/run/ringfence/sandbox.json") as file:
            given = json.load(file)
        token = self.headers.get("X-Access-Token")
        asked = urllib.request.Request("http://localhost:49983/envs", headers={"X-Access-Token": token or ""})
        try:
            given["agent"] = json.load(urllib.request.urlopen(asked)).get("KEY")
        except urllib.error.HTTPError as error:
            given["agent"] = error.code
        body = json.dumps(given).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.ThreadingHTTPServer(("", int(os.sys.argv[1])), Answer).serve_forever()
"""


def test_a_server_learns_what_the_request_gave(pooling: Platform, tmp_path: Path) -> None:
    """Whether it was started for the request or before it; who may know it; and nothing of one sandbox is in another."""
    name = f"t{uuid.uuid4().hex[:12]}"
    (tmp_path / "asked.py").write_text(ASKED)
    template = (
        Template(file_context_path=tmp_path)
        .from_template("base")
        .copy("asked.py", "/home/user/asked.py")
        .set_start_cmd(
            "python3 asked.py 49999 & python3 asked.py 8000",
            "(echo > /dev/tcp/localhost/49999) && (echo > /dev/tcp/localhost/8000)",
        )
    )
    Template.build(template, name)
    domain = pooling.credentials()["E2B_DOMAIN"]

    def asked(box: Sandbox, port: int, token: str | None) -> dict[str, Any]:
        headers = {"Host": f"{port}-{box.sandbox_id}.{domain}", **({"X-Access-Token": token} if token else {})}
        answer = httpx.get(pooling.url, headers=headers, timeout=30)
        assert answer.status_code == 200, answer.text
        return answer.json()

    boxes = []
    for number, stage in enumerate(("start-command;", "claim;", "claim;")):
        if number:
            until(lambda: any(item["template"] == boxes[0].get_info().template_id for item in pooled(pooling)), "one is ready")
        given = {"envVars": {"KEY": f"secret {number}"}, "metadata": {"n": str(number)}}
        made, stages = create(pooling, name, secure=True, **given, timeout=120)
        assert stage in stages, stages
        boxes.append(Sandbox.connect(made["sandboxID"]))
        want = {"sandboxID": made["sandboxID"], "templateID": made["templateID"], **given}
        own = boxes[-1]._envd_access_token
        # Its own token reaches the code interpreter, and no other server.
        assert asked(boxes[-1], 49999, own) == {**want, "agent": f"secret {number}"}
        for port, token in ((49999, None), (8000, own), (49999, boxes[0]._envd_access_token if number else "0" * 64)):
            assert asked(boxes[-1], port, token) == {**want, "agent": 401}
        # The user whose environment it is, and root; nobody else.
        read = "cat /run/ringfence/sandbox.json"
        assert json.loads(boxes[-1].commands.run(read).stdout) == want
        assert json.loads(boxes[-1].commands.run(read, user="root").stdout) == want
        assert "Permission denied" in boxes[-1].commands.run(f"{read} 2>&1 || true", user="nobody", cwd="/").stdout
    # What was in one is not in what is made of its files.
    snapshot = boxes[1].create_snapshot()
    child = Sandbox.create(snapshot.snapshot_id, timeout=60)
    assert child.commands.run("cat /run/ringfence/sandbox.json").stdout.count("secret") == 0
    for box in (child, *boxes):
        assert box.kill()
    Sandbox.delete_snapshot(snapshot.snapshot_id)


def test_a_restart_keeps_claimed_sandboxes_alone(pooling: Platform) -> None:
    until(lambda: len(pooled(pooling)) == 3, "the pool is full")
    made, stages = create(pooling, timeout=600)
    assert "claim;" in stages
    before = {item["id"] for item in pooled(pooling)}
    pooling.kill()
    pooling.start()
    assert Sandbox.connect(made["sandboxID"]).commands.run("echo alive").stdout == "alive\n"
    until(lambda: len(pooled(pooling)) == 3, "the pool is full again")
    assert before.isdisjoint({item["id"] for item in pooled(pooling)})
