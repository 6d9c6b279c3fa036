"""The template of the desktop. RINGFENCE_DESKTOP_PACKAGES names the program `try` in a directory with the packages of Debian that its recipe
installs and `base` lacks.
"""

from __future__ import annotations

import os
from pathlib import Path

from harness import recipes
from harness.platform import Platform

NAME = "desktop"
SOURCE = "RUN rm -rf /etc/apt/sources.list.d/* && echo 'deb [trusted=yes] file:/opt/packages ./' >/etc/apt/sources.list\n"


def build(platform: Platform, directory: Path, *options: str) -> str:
    """Builds the template on a platform, and returns the log."""
    packages = Path(os.environ["RINGFENCE_DESKTOP_PACKAGES"]).parent
    return recipes.build(platform, recipes.context("desktop", packages, SOURCE, directory), *options, timeout_s=400)
