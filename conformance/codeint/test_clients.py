"""Other published clients: the JavaScript one, an older one of Python, and the asynchronous ones of both versions, in programs of their
own; and the unit tests of the server, in the environment that the template has for it.

RINGFENCE_NODE and RINGFENCE_NODE_MODULES name Node and a directory with the pinned JavaScript client, RINGFENCE_OLD_PYTHON an
interpreter with the older client of Python.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from e2b_code_interpreter import Sandbox

from codeint.test_results import RAW
from docs.blocks import PAGES, first_program
from harness.code_interpreter import RECIPE
from harness.patience import within
from harness.platform import Platform

HERE = Path(__file__).parent
PICTURE = PAGES / "pictures" / "plot.png"
# The part of two pictures that differs, by the Pillow of the template.
DIFFERENT = """
import base64, io
from PIL import Image, ImageChops
one, other = (Image.open(io.BytesIO(base64.b64decode(text))).convert("RGB") for text in ({!r}, {!r}))
difference = ImageChops.difference(one, other).convert("L").point(lambda value: 255 * (value > 40))
one.size == other.size and difference.histogram()[255] / (one.size[0] * one.size[1])
"""


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


def test_the_first_program_of_the_page(platform: Platform, template: str, tmp_path: Path) -> None:
    """Over HTTPS, and over HTTP as well, with what the platform gives to those who have no TLS."""
    program = tmp_path / "page.py"
    program.write_text(first_program("code-interpreter.md"))
    plain = Platform.credentials(platform)
    assert plain["E2B_SANDBOX_URL"].startswith("http://") and "E2B_SANDBOX_URL" not in platform.credentials()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("E2B_")}
    for given in (platform.credentials(), plain):
        ran = subprocess.run(
            [sys.executable, program], env={**inherited, **given}, capture_output=True, text=True, timeout=within(120), check=False
        )
        assert ran.returncode == 0, ran.stderr
        assert re.fullmatch(r"21\n\d{4,} \[\(0\.0, 1\.0\), \(1\.0, 2\.0\), \(2\.0, 3\.0\)\]\n", ran.stdout), ran.stdout


def test_the_example(template: str, box: Sandbox, tmp_path: Path) -> None:
    """And the picture of it in the documentation. When the plot looks otherwise, `RINGFENCE_WRITE_PICTURES=1` writes a new one; look at it."""
    plot = tmp_path / "plot.png"
    program = Path(__file__).resolve().parents[2] / "examples" / "plot_data.py"
    command = [sys.executable, program, plot]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=within(120), check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "mean: 47.0\nJanuary 52, February 41, March 48\n"
    if os.environ.get("RINGFENCE_WRITE_PICTURES"):
        PICTURE.write_bytes(plot.read_bytes())
    pictures = [base64.b64encode(path.read_bytes()).decode() for path in (plot, PICTURE)]
    part = box.run_code(DIFFERENT.format(*pictures)).text
    assert part is not None and part != "False" and float(part) < 0.01, f"{part} of {PICTURE} differs"


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
    with httpx.Client(base_url=platform.url, headers={"X-API-Key": platform.credentials()["E2B_API_KEY"]}, timeout=within(30)) as api:
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
