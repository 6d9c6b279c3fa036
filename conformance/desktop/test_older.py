"""Every method of an older published client, of version 1 of the SDK. RINGFENCE_OLD_PYTHON is an interpreter that has it."""

from __future__ import annotations

import os
from pathlib import Path

from desktop.test_clients import HERE, WANT, run


def test_an_older_client_of_python(template: str, tmp_path: Path) -> None:
    assert run([os.environ["RINGFENCE_OLD_PYTHON"], str(HERE / "client.py")], tmp_path / "screen.png") == {**WANT, "pictures": 2}
