"""The template of the code interpreter, and sandboxes of it by the published client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from e2b_code_interpreter import Sandbox

from harness import code_interpreter
from harness.platform import Platform


@pytest.fixture(scope="session")
def template(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of the template, built once. It is the one that the client asks for where a program names none."""
    code_interpreter.build(platform, tmp_path_factory.mktemp("recipe"))
    return code_interpreter.NAME


@pytest.fixture(scope="module")
def shared(template: str) -> Iterator[Sandbox]:
    """A sandbox that the tests of a file share; each has what it needs in names of its own."""
    with Sandbox.create(timeout=300) as box:
        yield box


@pytest.fixture
def box(template: str) -> Iterator[Sandbox]:
    """A sandbox for one test."""
    with Sandbox.create(timeout=300) as made:
        yield made
