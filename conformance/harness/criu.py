"""The CRIU with which platforms keep the processes of paused sandboxes on disk."""

from __future__ import annotations

import os


def criu_config() -> str:
    """The section of the configuration file."""
    return f'[pause]\ncriu = "{os.environ["RINGFENCE_CRIU"]}"\n'
