"""The template of the desktop, built once for a suite: from the recipe as it is, with its packages beside it.

RINGFENCE_DESKTOP_PACKAGES names the program `try` in a directory with the packages of Debian that the recipe installs and `base`
lacks. They are copied into the sandbox of the build as its one source of packages, so that a build needs no network.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from harness.patience import within
from harness.platform import Platform

RECIPE = Path(__file__).resolve().parents[2] / "templates" / "desktop"
NAME = "desktop"
BEFORE = "FROM $BASE\n"
PACKAGES = """COPY packages /opt/packages
RUN rm -rf /etc/apt/sources.list.d/* && echo 'deb [trusted=yes] file:/opt/packages ./' >/etc/apt/sources.list
"""


def build(platform: Platform, directory: Path) -> str:
    """Builds the template on a platform, and returns the log. The recipe has its name and its sizes."""
    made = directory / "desktop"
    shutil.copytree(RECIPE, made)
    # Nothing changes them, so they are there a second time without being copied, where that is possible.
    shutil.copytree(Path(os.environ["RINGFENCE_DESKTOP_PACKAGES"]).parent, made / "packages", copy_function=linked)
    recipe = made / "Dockerfile"
    text = recipe.read_text()
    assert text.count(BEFORE) == 1, text
    recipe.write_text(text.replace(BEFORE, BEFORE + PACKAGES))
    done = platform.run("template", "build", str(made), timeout_s=within(400))
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr


def linked(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
