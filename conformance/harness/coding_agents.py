"""The template of coding agents. RINGFENCE_AGENTS_PACKAGES names a directory with what its recipe fetches for some of them: `wheels` with
Node, and `npm`, a cache; `agents` has the names of these agents.
"""

from __future__ import annotations

import os
from pathlib import Path

from harness import recipes
from harness.platform import Platform

NAME = "agents"


def packages() -> Path:
    return Path(os.environ["RINGFENCE_AGENTS_PACKAGES"])


def names() -> list[str]:
    """The agents that there are packages of."""
    return (packages() / "agents").read_text().split()


def build(platform: Platform, directory: Path) -> str:
    """Builds the template on a platform, and returns the log."""
    made = recipes.context(NAME, packages(), recipes.WHEELS + recipes.NPM, directory)
    return recipes.build(platform, made, "--build-arg", f"AGENTS={' '.join(names())}")
