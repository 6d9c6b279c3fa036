"""Ready-made templates, built once for a suite: from their recipes as they are, with the packages that they fetch beside them.

An asset of the tests has the packages. They are copied into the sandbox of the build, to `/opt/packages`, where the installers are told to
look for nothing else, so that a build needs no network and fails where something is not pinned.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from harness.patience import within
from harness.platform import Platform

TEMPLATES = Path(__file__).resolve().parents[2] / "templates"
BEFORE = "FROM $BASE\n"
COPIED = "COPY packages /opt/packages\n"
# What tells pip so.
WHEELS = "ENV PIP_NO_INDEX=1 PIP_FIND_LINKS=/opt/packages/wheels\n"


def context(name: str, packages: Path, told: str, directory: Path) -> Path:
    """A copy of a recipe that takes its packages from files; `told` are the lines that tell its installers so."""
    made = directory / name
    shutil.copytree(TEMPLATES / name, made)
    # Nothing changes them, so they are there a second time without being copied, where that is possible.
    shutil.copytree(packages, made / "packages", copy_function=linked)
    recipe = made / "Dockerfile"
    text = recipe.read_text()
    assert text.count(BEFORE) == 1, text
    recipe.write_text(text.replace(BEFORE, BEFORE + COPIED + told))
    return made


def build(platform: Platform, made: Path, *options: str, timeout_s: float = 300) -> str:
    """Builds what `context` made, and returns the log. The recipe has its name, its sizes and its commands."""
    done = platform.run("template", "build", *options, str(made), timeout_s=within(timeout_s))
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr


def linked(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
