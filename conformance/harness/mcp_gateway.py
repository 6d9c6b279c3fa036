"""The template of the MCP gateway, built once for a suite: from the recipe as it is, with its packages beside it.

RINGFENCE_MCP_GATEWAY_PACKAGES names a directory with the packages of Python that the recipe pins. They are copied into the sandbox of the
build, where pip is told to look for nothing else, so that a build needs no network and fails where something is not pinned.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from harness.patience import within
from harness.platform import Platform

RECIPE = Path(__file__).resolve().parents[2] / "templates" / "mcp-gateway"
BEFORE = "FROM $BASE\n"
PACKAGES = "COPY wheels /opt/packages/wheels\nENV PIP_NO_INDEX=1 PIP_FIND_LINKS=/opt/packages/wheels\n"


def build(platform: Platform, directory: Path) -> str:
    """Builds the template on a platform, and returns the log. The recipe has its name and its sizes."""
    made = directory / "mcp-gateway"
    shutil.copytree(RECIPE, made)
    shutil.copytree(Path(os.environ["RINGFENCE_MCP_GATEWAY_PACKAGES"]) / "wheels", made / "wheels")
    recipe = made / "Dockerfile"
    text = recipe.read_text()
    assert text.count(BEFORE) == 1, text
    recipe.write_text(text.replace(BEFORE, BEFORE + PACKAGES))
    done = platform.run("template", "build", str(made), timeout_s=within(300))
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr
