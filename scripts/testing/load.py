"""Load beside hunted tests: `python3 -m testing.load burn`, or `disk DIRECTORY`. Ends with whoever started it."""

from __future__ import annotations

import os
import sys
import tempfile

PIECE = 1 << 20
PIECES = 64


def burn(parent: int) -> None:
    """Uses a processor."""
    while os.getppid() == parent:
        sum(number * number for number in range(100_000))


def write(parent: int, directory: str) -> None:
    """Writes to a disk, and waits for it, again and again. The file has no name, so that nothing is left of it."""
    data = os.urandom(PIECE)
    with tempfile.TemporaryFile(dir=directory) as file:
        while os.getppid() == parent:
            file.seek(0)
            file.truncate()
            for _ in range(PIECES):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())


def main(words: list[str]) -> int:
    parent = os.getppid()
    if words == ["burn"]:
        burn(parent)
    elif len(words) == 2 and words[0] == "disk":
        write(parent, words[1])
    else:
        print("usage: load burn | load disk DIRECTORY", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
