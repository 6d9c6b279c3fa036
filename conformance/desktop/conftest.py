"""The template of the desktop, and desktops of it by the published client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from e2b_desktop import Sandbox

from harness import desktop
from harness.platform import Platform


@pytest.fixture(scope="session")
def template(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of the template, built once. It is the one that the client asks for where a program names none."""
    desktop.build(platform, tmp_path_factory.mktemp("recipe"))
    return desktop.NAME


@pytest.fixture
def desk(template: str) -> Iterator[Sandbox]:
    """A desktop for one test."""
    with Sandbox.create(timeout=300) as made:
        yield made
