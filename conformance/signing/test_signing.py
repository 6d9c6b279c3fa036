"""Signed requests and injection rules with Qiniu's SDKs for Python and Node, unmodified, over HTTP.

RINGFENCE_QINIU_PYTHON names the interpreter of an environment with the pinned Python SDK; RINGFENCE_NODE and
RINGFENCE_NODE_MODULES Node and a directory with the pinned Node SDK, of which the published versions only sign.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from harness.platform import Platform

HERE = Path(__file__).parent


def test_the_python_client(platform: Platform) -> None:
    run(platform, [os.environ["RINGFENCE_QINIU_PYTHON"], str(HERE / "python_client.py")], HERE)


def test_the_node_client(platform: Platform, tmp_path: Path) -> None:
    shutil.copy(HERE / "node_client.mjs", tmp_path)
    (tmp_path / "node_modules").symlink_to(Path(os.environ["RINGFENCE_NODE_MODULES"]).resolve())
    run(platform, [os.environ["RINGFENCE_NODE"], "node_client.mjs"], tmp_path)


def test_a_second_user(platform: Platform) -> None:
    """Users of one team have rules of their own, also of the same name."""
    assert platform.run("user", "create", "second").returncode == 0
    created = platform.run("access-key", "create", "--user", "second")
    assert created.returncode == 0, created.stderr
    pair = dict(line.split("=", 1) for line in created.stdout.split())
    key = platform.run("key", "create", "--user", "second")
    assert key.returncode == 0, key.stderr
    second = {**platform.credentials(), **pair, "E2B_API_KEY": key.stdout.strip()}
    python = [os.environ["RINGFENCE_QINIU_PYTHON"], str(HERE / "python_client.py")]
    run(platform, python, HERE, second)
    # While the first has a rule of that name.
    run(platform, [*python, "beside", second["RINGFENCE_ACCESS_KEY"], second["RINGFENCE_SECRET_KEY"]], HERE)


def run(platform: Platform, command: list[str], directory: Path, credentials: dict[str, str] | None = None) -> None:
    ran = subprocess.run(
        command,
        cwd=directory,
        env={**platform.environment(), **(credentials or platform.credentials()), "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    print(f"\n{ran.stdout}")
    assert (ran.returncode, ran.stdout.strip()) == (0, "ok")
