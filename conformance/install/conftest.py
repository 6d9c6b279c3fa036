"""The files of a release, which all tests of this suite install."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from harness.platform import binary

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All files of a release, of the program under test; or those of RINGFENCE_DIST, as a real release is tried."""
    if given := os.environ.get("RINGFENCE_DIST"):
        return Path(given)
    work = tmp_path_factory.mktemp("release")
    # Symbols are most of it, and a release has none.
    program = work / "ringfence"
    subprocess.run(["strip", "-o", program, binary()], check=True)
    key = work / "key.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", key], check=True, capture_output=True)
    made = subprocess.run(
        [ROOT / "scripts" / "release.sh", "--fast", work / "dist"],
        env=os.environ | {"RINGFENCE_BIN": str(program), "RINGFENCE_SIGNING_KEY_FILE": str(key)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert made.returncode == 0, made.stdout
    return work / "dist"
