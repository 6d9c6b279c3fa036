"""The JavaScript SDK on Node: the suites beside this file, run by Node's own test runner against one platform.

RINGFENCE_NODE names the program and RINGFENCE_NODE_MODULES a directory with the pinned SDK. The suites are copied next
to it, so that they import the SDK by its name like any program does.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from harness.platform import Platform

HERE = Path(__file__).parent
SUITES = ("lifecycle", "commands", "pty", "files", "traffic", "git")
# These make calls that the agent does not serve: the Filesystem RPCs and compressed uploads.
UNSERVED = ("filesystem", "compression")


def test_every_suite_is_named() -> None:
    assert {path.name.removesuffix(".test.mjs") for path in HERE.glob("*.test.mjs")} == {*SUITES, *UNSERVED}


@pytest.mark.parametrize("suite", SUITES)
def test_javascript(platform: Platform, tmp_path: Path, suite: str) -> None:
    modules = Path(os.environ["RINGFENCE_NODE_MODULES"]).resolve()
    version = json.loads((modules / "e2b" / "package.json").read_text())["version"]
    for source in HERE.glob("*.mjs"):
        shutil.copy(source, tmp_path)
    (tmp_path / "node_modules").symlink_to(modules)
    command = [os.environ["RINGFENCE_NODE"], "--test", "--test-reporter=spec", "--test-timeout=120000"]
    environment = {**platform.environment(), **platform.credentials(), "HOME": str(tmp_path)}
    ran = subprocess.run(
        [*command, f"{suite}.test.mjs"],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    print(f"\ne2b {version}, {suite}\n{ran.stdout}")
    counts = dict(line.split()[1:3] for line in ran.stdout.splitlines() if line.startswith("ℹ ") and len(line.split()) == 3)
    assert ran.returncode == 0
    assert int(counts["pass"]) > 0
    assert (counts["pass"], counts["skipped"], counts["todo"]) == (counts["tests"], "0", "0")
