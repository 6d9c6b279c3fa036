"""The template of the code interpreter, built once for a suite: from the recipe as it is, with its packages beside it.

RINGFENCE_CODE_INTERPRETER_PACKAGES names a directory with the packages that the recipe pins, `wheels` of Python and `npm` of Node.
They are copied into the sandbox of the build, where pip and npm are told to look for nothing else, so that a build needs no
network and fails where something is not pinned.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from harness.patience import within
from harness.platform import Platform

RECIPE = Path(__file__).resolve().parents[2] / "templates" / "code-interpreter"
NAME = "code-interpreter-v1"
BEFORE = "FROM $BASE\n"
PACKAGES = """COPY wheels /opt/packages/wheels
COPY npm /opt/packages/npm
ENV PIP_NO_INDEX=1 PIP_FIND_LINKS=/opt/packages/wheels npm_config_cache=/opt/packages/npm npm_config_offline=true
"""


def context(directory: Path) -> Path:
    """A copy of the recipe that takes packages from files."""
    packages = Path(os.environ["RINGFENCE_CODE_INTERPRETER_PACKAGES"])
    made = directory / "code-interpreter"
    shutil.copytree(RECIPE, made)
    for name in ("wheels", "npm"):
        shutil.copytree(packages / name, made / name)
    recipe = made / "Dockerfile"
    text = recipe.read_text()
    assert text.count(BEFORE) == 1, text
    recipe.write_text(text.replace(BEFORE, BEFORE + PACKAGES))
    return made


def build(platform: Platform, directory: Path, *options: str, timeout_s: float = 300) -> str:
    """Builds the template on a platform, and returns the log. The recipe has its name, its sizes and its commands."""
    done = platform.run("template", "build", *options, str(context(directory)), timeout_s=within(timeout_s))
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr
