"""Other published clients: the JavaScript one, an older one of Python, and the asynchronous ones of both versions, in programs of their
own; and the unit tests of the server, in the environment that the template has for it.

RINGFENCE_NODE and RINGFENCE_NODE_MODULES name Node and a directory with the pinned JavaScript client, RINGFENCE_OLD_PYTHON an
interpreter with the older client of Python.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from e2b_code_interpreter import Sandbox

from codeint.test_results import RAW
from harness.code_interpreter import RECIPE
from harness.patience import within
from harness.platform import Platform

HERE = Path(__file__).parent


def reported(command: list[str], **variables: str) -> dict[str, object]:
    """What a program prints as JSON."""
    ran = subprocess.run(command, capture_output=True, text=True, timeout=within(120), env={**os.environ, **variables}, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


# A cell for each format.
CELLS = json.dumps({field: f"display({{{mime!r}: {value!r}}}, raw=True)" for field, (mime, value) in RAW.items()})
WANT = {
    "text": "2",
    "stdout": ["hello\n"],
    "stderr": ["bad\n"],
    "error": ["ValueError", "no"],
    "bash": ["of the call\n"],
    "js": "3",
    "cwd": "/tmp",
    "restarted": "False",
    "formats": {field: {field: value} for field, (_, value) in RAW.items()},
    "languages": ["python", "javascript", "bash", "python"],
    "missing": "NotFound",
    "png": True,
    "chart": "line",
    "data": {"a": [1, 2]},
    "json": {"k": [1]},
    "html": "<b>x</b>",
    "timeout": "Timeout",
    "after": "alive",
    "callbacks": ["a\n", "7", "NameError"],
}


def test_the_javascript_client(template: str, tmp_path: Path) -> None:
    # Node finds packages beside the program.
    program = tmp_path / "client.mjs"
    program.write_text((HERE / "client.mjs").read_text())
    (tmp_path / "node_modules").symlink_to(os.environ["RINGFENCE_NODE_MODULES"])
    assert reported([os.environ["RINGFENCE_NODE"], str(program), CELLS]) == WANT


def test_the_example(template: str, tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    program = Path(__file__).resolve().parents[2] / "examples" / "plot_data.py"
    command = [sys.executable, program, plot]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=within(120), check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "mean: 47.0\nJanuary 52, February 41, March 48\n"
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_an_older_client_of_python(template: str) -> None:
    found = reported([os.environ["RINGFENCE_OLD_PYTHON"], str(HERE / "client.py"), CELLS])
    patience = found.pop("patience")
    assert found == WANT
    assert 2 <= patience < within(8), patience


@pytest.mark.parametrize("python", [sys.executable, os.environ.get("RINGFENCE_OLD_PYTHON", "")], ids=["newer", "older"])
def test_the_asynchronous_client_of_python(template: str, python: str) -> None:
    assert reported([python, str(HERE / "async_client.py"), CELLS]) == {**WANT, "beside": ["one", "two"]}


def test_no_layer_has_what_another_has(platform: Platform, template: str, box: Sandbox) -> None:
    """Changing the owner or the mode of a file in a later step would store it twice."""
    with httpx.Client(base_url=platform.url, headers={"X-API-Key": platform.credentials()["E2B_API_KEY"]}) as api:
        (found,) = [one for one in api.get("/templates").json() if template in one["aliases"]]
        layers = api.get(f"/templates/{found['templateID']}/builds/{found['buildID']}/layers").json()["layers"]
    # What was copied for the build is there as well.
    seen = box.commands.run("du -s --block-size=1 /opt | cut -f 1", user="root", timeout=60).stdout
    assert sum(layer["sizeBytes"] for layer in layers) < 1.2 * int(seen), layers


def test_the_units_of_the_server(box: Sandbox) -> None:
    files = sorted((RECIPE / "server" / "tests").glob("test_*.py"))
    assert files
    for file in files:
        box.files.write(f"/tmp/units/{file.name}", file.read_text())
    command = "cd /tmp/units && PYTHONPATH=/opt/code-interpreter/server /opt/code-interpreter/server-environment/bin/python -m unittest 2>&1"
    done = box.commands.run(f"{command} || echo FAILED")
    assert done.stdout.rstrip().endswith("OK") and "Ran 0 tests" not in done.stdout, done.stdout
