"""An older SDK for JavaScript on Node, which programs still pin: what every program does, over HTTP and over HTTPS.

RINGFENCE_NODE names the program and RINGFENCE_NODE_MODULES a directory with the pinned SDK.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from harness.platform import Platform
from harness.secure import secure_platform

HERE = Path(__file__).parent


def test_over_http(platform: Platform, tmp_path: Path) -> None:
    run(platform, tmp_path, files="no")


def test_over_https(work_dir: Path, tmp_path: Path) -> None:
    with secure_platform(work_dir / "smoke") as server:
        run(server, tmp_path, files="yes")


def run(platform: Platform, directory: Path, files: str) -> None:
    shutil.copy(HERE / "smoke.mjs", directory)
    shutil.copy(HERE.parent / "javascript" / "resolve.cjs", directory)
    (directory / "node_modules").symlink_to(Path(os.environ["RINGFENCE_NODE_MODULES"]).resolve())
    ran = subprocess.run(
        [os.environ["RINGFENCE_NODE"], "--test", "--test-reporter=spec", "--test-timeout=60000", "smoke.mjs"],
        cwd=directory,
        env={
            **platform.environment(),
            **platform.credentials(),
            "HOME": str(directory),
            "NODE_OPTIONS": f"--require={directory}/resolve.cjs",
            "RINGFENCE_FILES": files,
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    print(f"\n{ran.stdout}")
    closing = [line.split() for line in ran.stdout.splitlines() if line.startswith("ℹ ")]
    counts = {words[1]: words[2] for words in closing if len(words) == 3}
    assert ran.returncode == 0
    assert (counts["pass"], counts["skipped"]) == (counts["tests"], "0") == ("4", "0")
