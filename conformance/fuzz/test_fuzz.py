"""A property-based fuzzer over the REST API as it describes itself: whatever is sent, valid or not, the answer is one
that the description names, with the body that it names, and never a failure of the server.

RINGFENCE_SCHEMATHESIS names the fuzzer. Its seed is fixed, so that a failure comes again; it writes how to repeat one.
Every check of the fuzzer is on. Operations that the description says are not built yet, those that answer 501, are tried
like any other, and 501 is what they must answer: no other failure, and no success, which the description does not name.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.patience import within
from harness.platform import Platform

HERE = Path(__file__).parent
SEED = 20261121
# Per operation and phase; the whole takes about a minute.
EXAMPLES = 40
# Sandboxes, keys and tokens for the fuzzer to find, so that it reaches more than 404. It ends some of them.
STANDING = 60
SANDBOX = {"templateID": "base", "timeout": 1800, "injections": [{"type": "github", "token": "ghp_a_secret"}]}

# Other values than the true ones stay likely: what matters is both.
CONFIG = """
seed = {seed}
workers = 1
continue-on-failure = true
hooks = "hooks"
request-timeout = 30

[generation]
max-examples = {examples}

[dictionaries.sandboxes]
values = {sandboxes}

[dictionaries.templates]
values = ["base"]

[dictionaries.keys]
values = {keys}

[dictionaries.tokens]
values = {tokens}

[parameters]
"path.templateID" = {{ dictionary = "templates", probability = 0.5 }}
"path.alias" = {{ dictionary = "templates", probability = 0.5 }}
"path.sandboxID" = {{ dictionary = "sandboxes", probability = 0.7 }}
"path.apiKeyID" = {{ dictionary = "keys", probability = 0.5 }}
"path.accessTokenID" = {{ dictionary = "tokens", probability = 0.5 }}
"body.templateID" = {{ dictionary = "templates", probability = 0.7 }}

[[operations]]
include-method = "DELETE"
parameters."path.sandboxID" = {{ dictionary = "sandboxes", probability = 0.1 }}

[[operations]]
include-path = "/sandboxes/{{sandboxID}}/github-token"
# 400 where no injection has a token any more, because the fuzzer replaced them.
checks.positive_data_acceptance.expected-statuses = ["2xx", "400", "401", "404"]
"""

# For each operation that is not built yet.
NOT_BUILT = """
[[operations]]
include-operation-id = "{id}"
# There is little to find: the same answer to everything that gets that far.
generation.max-examples = 3
checks.not_a_server_error.expected-statuses = ["2xx", "4xx", "501"]
"""


@pytest.fixture
def keys(platform: Platform) -> dict[str, str]:
    return {"X-API-Key": platform.credentials()["E2B_API_KEY"]}


def made(platform: Platform, headers: dict[str, str], path: str, body: dict[str, Any], name: str) -> str:
    """As many of a kind as the fuzzer is to find: their ids, as text for its configuration."""
    with httpx.Client(base_url=platform.url, headers=headers, timeout=30) as client:
        answers = [client.post(path, json=body) for _ in range(STANDING)]
    assert {answer.status_code for answer in answers} == {201}, answers[-1].text
    return json.dumps([answer.json()[name] for answer in answers])


def end_all(platform: Platform, headers: dict[str, str]) -> int:
    """Kills every sandbox and returns their number."""
    ended = 0
    with httpx.Client(base_url=platform.url, headers=headers, timeout=60) as client:
        while listed := client.get("/v2/sandboxes").json():
            for sandbox in listed:
                assert client.delete(f"/sandboxes/{sandbox['sandboxID']}").status_code in (204, 404)
                ended += 1
    return ended


def not_built(platform: Platform) -> dict[str, tuple[str, re.Pattern[str]]]:
    """The operations that are not built yet: method and form of the path, by id. The server's tests hold the list."""
    found = {}
    for path, item in httpx.get(f"{platform.url}/openapi.json", timeout=60).json()["paths"].items():
        for method, operation in item.items():
            if "501" in operation["responses"]:
                form = re.compile(re.sub(r"\\{[^}]*\\}", "[^/]+", re.escape(path)))
                found[operation["operationId"]] = (method.upper(), form)
    return found


def test_no_answer_is_a_surprise(platform: Platform, keys: dict[str, str], tmp_path: Path) -> None:
    # Health answers 503 while the platform starts.
    before = len(platform.log())
    config = CONFIG.format(
        seed=SEED,
        examples=EXAMPLES,
        sandboxes=made(platform, keys, "/sandboxes", SANDBOX, "sandboxID"),
        keys=made(platform, keys, "/api-keys", {"name": "fuzzed"}, "id"),
        tokens=made(platform, keys, "/access-tokens", {"name": "fuzzed"}, "id"),
    )
    missing = not_built(platform)
    config += "".join(NOT_BUILT.format(id=operation) for operation in missing)
    (tmp_path / "schemathesis.toml").write_text(config)
    (tmp_path / "hooks.py").write_text((HERE / "hooks.py").read_text())
    command = [
        *(os.environ["RINGFENCE_SCHEMATHESIS"], "run", f"{platform.url}/openapi.json", "--no-color"),
        *("--checks", "all", "--header", f"X-API-Key: {keys['X-API-Key']}"),
    ]
    ran = subprocess.run(
        command,
        cwd=tmp_path,
        env={**platform.environment(), "HOME": str(tmp_path), "PYTHONPATH": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=min(870, within(400)),
    )
    print(f"\n{ran.stdout}")
    # If the fuzzer had ended its own key, the rest would have tested nothing but refusals.
    assert httpx.get(f"{platform.url}/v2/sandboxes", headers=keys, timeout=60).status_code == 200
    ended = end_all(platform, keys)
    assert ran.returncode == 0
    # It was not all refused at the door, and every operation had its turn.
    assert ended > 0
    selected = re.search(r"Selected: (\d+)/(\d+)", ran.stdout)
    tested = re.search(r"Tested: (\d+)", ran.stdout)
    generated = re.search(r"(\d+) generated", ran.stdout)
    assert selected and tested and generated
    assert selected.group(1) == selected.group(2) == tested.group(1)
    assert int(generated.group(1)) > 1000
    log = platform.log()[before:]
    assert "panicked" not in log
    assert re.findall(r"status=2\d\d", log)
    failures = [line for line in log.splitlines() if re.search(r"status=5\d\d", line)]
    surprising = [line for line in failures if not is_expected(line, missing)]
    assert surprising == []
    # Every operation that is not built said so.
    assert bool(failures) == bool(missing)


def is_expected(line: str, missing: dict[str, tuple[str, re.Pattern[str]]]) -> bool:
    """Whether a log line is about an operation that is not built, or that a host without CRIU lacks, with the documented
    response."""
    if re.search(r'INFO .*(path="/sandboxes/[^/"]+/fork" status=501|this host cannot fork sandboxes)', line):
        return True
    told = re.search(r"method=(\S+) path=\"?([^\" ]+)\"? status=501\b", line)
    if told is None:
        return False
    method, path = told.groups()
    return any(method == asked and form.fullmatch(path) for asked, form in missing.values())
