"""Provides one asset: `python3 -m testing.prepare NAME`. A process of its own, so that several run beside the compile."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from testing.assets import Assets
from testing.cache import Cache, default_root

ROOT = Path(__file__).resolve().parents[2]


def main(names: list[str]) -> int:
    assets = Assets(ROOT, Cache(default_root()))
    for name in names:
        begun = time.monotonic()
        made = assets.provide(name)
        print(f"{name}: {'made' if made else 'kept from before'} in {time.monotonic() - begun:.1f} s: {assets.directory(name)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
