"""The template of coding agents, built from the recipe in the program, which fetches from the registries of a fake internet.
RINGFENCE_AGENTS_PACKAGES names a directory with what it fetches for some of them: `wheels` with Node, and `npm`, a cache; `agents` has the
names of these agents.
"""

from __future__ import annotations

import os
from pathlib import Path

from harness.patience import within
from harness.platform import Platform

NAME = "agents"


def packages() -> Path:
    return Path(os.environ["RINGFENCE_AGENTS_PACKAGES"])


def names() -> list[str]:
    """The agents that there are packages of."""
    return (packages() / "agents").read_text().split()


def build(platform: Platform) -> str:
    """Builds the template on a platform, and returns the log."""
    done = platform.run("template", "add", NAME, "--build-arg", f"AGENTS={' '.join(names())}", timeout_s=within(300))
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr
