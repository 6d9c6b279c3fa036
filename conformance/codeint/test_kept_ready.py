"""A code interpreter that was kept ready, one of a snapshot, and one without a token: what each has, and who can run cells in it."""

from __future__ import annotations

import json
from typing import Any

import httpx
from e2b_code_interpreter import Sandbox

from harness.platform import Platform
from harness.traffic import until

KERNELS = "pgrep -f code_interpreter_kerne[l]"


def ready(platform: Platform) -> list[str]:
    """Sandboxes that are kept ready. Of `base` there are none, so they are of the code interpreter."""
    done = platform.run("sandbox", "list", "--format", "json")
    assert done.returncode == 0, done.stderr
    return [item["id"] for item in json.loads(done.stdout) if item["state"] == "pooled"]


def create(platform: Platform, template: str, **more: Any) -> tuple[dict[str, Any], str]:
    """A new sandbox as the API returns it, and the stages of its start."""
    headers = {"X-API-Key": platform.credentials()["E2B_API_KEY"]}
    body = {"templateID": template, "timeout": 120, **more}
    answer = httpx.post(f"{platform.url}/sandboxes", headers=headers, json=body, timeout=60)
    assert answer.status_code == 201, answer.text
    return answer.json(), answer.headers["Server-Timing"]


def executed(box: Sandbox, token: str | None, code: str = "1 + 1") -> httpx.Response:
    """What the server of a sandbox answers to who has a token."""
    headers = {"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": "49999", **({"X-Access-Token": token} if token else {})}
    return httpx.post(f"{box._jupyter_url}/execute", json={"code": code}, headers=headers, timeout=60)


def test_one_that_was_kept_ready_has_a_kernel_and_what_its_request_gave(platform: Platform, template: str) -> None:
    # The template is used, so one of it is kept ready.
    with Sandbox.create(timeout=120):
        waiting = until(lambda: ready(platform), "one is ready", within_s=120)
        made, stages = create(platform, template, envVars={"V": "of the request"}, secure=True)
    assert "claim;" in stages and made["sandboxID"] in waiting, stages
    with Sandbox.connect(made["sandboxID"], timeout=120) as box:
        kernel = box.commands.run(KERNELS).stdout.strip()
        first = box.run_code("import os; print(os.environ['V']); os.getpid()")
        assert (first.logs.stdout, first.text, first.execution_count) == (["of the request\n"], kernel, 1)
        assert box.run_code("echo $V", language="bash").logs.stdout == ["of the request\n"]
        for token in (None, "wrong"):
            answer = executed(box, token)
            assert (answer.status_code, "access token" in answer.text) == (401, True), (token, answer.text)
        assert box.run_code("1 + 1").execution_count == 2
        # What the next request gets has nothing of this one.
        until(lambda: ready(platform), "another is ready", within_s=120)
        other, stages = create(platform, template, secure=True)
        assert "claim;" in stages, stages
        with Sandbox.connect(other["sandboxID"], timeout=120) as clean:
            first = clean.run_code("import os; os.environ.get('V', 'none')")
            assert (first.text, first.execution_count) == ("none", 1)
            assert executed(clean, box._envd_access_token).status_code == 401


def test_without_a_token_whoever_reaches_the_port_runs_cells(platform: Platform, template: str) -> None:
    made, _ = create(platform, template, envVars={"V": "of the request"}, secure=False)
    with Sandbox.connect(made["sandboxID"], timeout=120) as box:
        answer = executed(box, None, "import os; os.environ['V']")
        assert answer.status_code == 200 and '"text":"of the request"' in answer.text, answer.text
        assert box.run_code("20 + 1").text == "21"


def test_a_sandbox_of_a_snapshot_goes_on_with_the_variables(box: Sandbox) -> None:
    box.run_code("a = [1]")
    box.run_code("b=2", language="bash")
    box.run_code("c = 3", language="js")
    context = box.create_code_context(cwd="/tmp")
    box.run_code("d = 4", context=context)
    running = box.commands.run(KERNELS).stdout
    snapshot = box.create_snapshot().snapshot_id
    try:
        with Sandbox.create(snapshot, timeout=300) as copy:
            assert copy.commands.run(KERNELS).stdout == running
            assert copy.run_code("a.append(2); a").text == "[1, 2]"
            assert copy.run_code("echo $b", language="bash").logs.stdout == ["2\n"]
            assert copy.run_code("c", language="js").text == "3"
            assert copy.run_code("import os; os.getcwd(), d", context=context).text == "('/tmp', 4)"
            assert executed(copy, box._envd_access_token).status_code == 401
            assert box.run_code("a").text == "[1]"
    finally:
        Sandbox.delete_snapshot(snapshot)
