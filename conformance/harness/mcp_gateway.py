"""The template of the MCP gateway. RINGFENCE_MCP_GATEWAY_PACKAGES names a directory with `wheels` that its recipe pins."""

from __future__ import annotations

import os
from pathlib import Path

from harness import recipes
from harness.platform import Platform


def build(platform: Platform, directory: Path, *options: str) -> str:
    """Builds the template on a platform, and returns the log."""
    packages = Path(os.environ["RINGFENCE_MCP_GATEWAY_PACKAGES"])
    return recipes.build(platform, recipes.context("mcp-gateway", packages, recipes.WHEELS, directory), *options)
