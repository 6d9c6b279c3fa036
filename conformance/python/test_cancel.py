"""Cancelling builds: by the operation, and by a signal to `ringfence template build`."""

from __future__ import annotations

import json
import signal
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from harness.patience import within
from harness.platform import Platform
from harness.traffic import until


@pytest.fixture
def name(platform: Platform) -> Iterator[str]:
    name = f"c{uuid.uuid4().hex[:12]}"
    yield name
    httpx.delete(f"{platform.url}/templates/{name}", headers={"X-API-Key": platform.credentials()["E2B_API_KEY"]}, timeout=within(30))


@pytest.fixture
def api(platform: Platform) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=platform.url, headers={"X-API-Key": platform.credentials()["E2B_API_KEY"]}, timeout=60) as client:
        yield client


def building(platform: Platform) -> list[str]:
    done = platform.run("sandbox", "list", "--format", "json")
    assert done.returncode == 0, done.stderr
    return [sandbox["id"] for sandbox in json.loads(done.stdout) if sandbox["state"] == "building"]


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_command_cancels_the_build(
    platform: Platform, api: httpx.Client, name: str, tmp_path: Path, sent: signal.Signals
) -> None:
    (tmp_path / "Dockerfile").write_text("FROM e2bdev/base\nRUN echo begun; sleep 600\n")
    command = [platform.binary, "template", "build", "--name", name, "--format", "json", "--data-dir", platform.data_dir, tmp_path]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=platform.environment()
    )
    try:
        lines: list[str] = []
        for line in process.stderr:
            lines.append(line)
            if "[stdout]" in line and "begun" in line:
                break
        assert process.poll() is None, lines
        assert len(building(platform)) == 1
        process.send_signal(sent)
        output, errors = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert process.returncode == 130, errors
    assert f"{sent.name}: cancelling the build" in errors and "the build was cancelled" in errors
    result = json.loads(output)
    assert (result["status"], result["reason"]["message"]) == ("error", "the build was cancelled")
    path = f"/templates/{result['templateID']}/builds/{result['buildID']}"
    assert api.get(f"{path}/status").json()["status"] == "error"
    assert api.post(f"{path}/cancel").status_code == 409
    until(lambda: not building(platform), "the sandbox of the step has ended", within_s=30)
    # The next build has its turn at once, with the step that was finished from the cache.
    (tmp_path / "Dockerfile").write_text("FROM e2bdev/base\nRUN true\n")
    done = platform.run("template", "build", "--name", name, str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_a_build_that_was_not_started_is_cancelled(api: httpx.Client, name: str) -> None:
    made = api.post("/v3/templates", json={"name": name}).json()
    path = f"/templates/{made['templateID']}/builds/{made['buildID']}"
    assert api.post(f"{path}/cancel").status_code == 204
    status = api.get(f"{path}/status").json()
    assert (status["status"], status["reason"]["message"]) == ("error", "the build was cancelled")
    assert api.post(f"/v2{path}", json={"fromTemplate": "base"}).status_code == 400
