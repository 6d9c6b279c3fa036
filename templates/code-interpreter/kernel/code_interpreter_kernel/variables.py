"""Variables of cells: those of the sandbox stay, those of a call are undone after it.

What a cell sets itself is left alone: a variable of the sandbox is set when its value is new, not before every cell.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_of_sandbox: dict[str, str] = {}


@contextmanager
def applied(sandbox: Mapping[str, str], call: Mapping[str, str]) -> Iterator[None]:
    """The environment of one cell."""
    for name in [name for name in _of_sandbox if name not in sandbox]:
        if os.environ.get(name) == _of_sandbox.pop(name):
            del os.environ[name]
    for name, value in sandbox.items():
        if _of_sandbox.get(name) != value:
            os.environ[name] = _of_sandbox[name] = value
    before = {name: os.environ.get(name) for name in call}
    os.environ.update(call)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
