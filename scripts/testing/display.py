"""What is shown while tests run: a table that is redrawn on a terminal, and plain lines elsewhere."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence
from typing import TextIO

# Without a terminal, what runs is said again after so many seconds, so that a log shows that something happens.
EVERY_S = 60.0
# Redrawn so often.
REDRAW_S = 0.5


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60:3d}:{int(seconds) % 60:02d}"


class Display:
    """Prints events at once, and what runs from time to time."""

    def __init__(self, out: TextIO | None = None) -> None:
        self.out = out or sys.stdout
        self.is_live = self.out.isatty() and os.environ.get("TERM") != "dumb"
        self.begun = time.monotonic()
        self._drawn = 0
        self._last = 0.0 if self.is_live else self.begun

    def event(self, text: str) -> None:
        """A line that stays."""
        self._erase()
        print(f"[{clock(time.monotonic() - self.begun)}] {text}", file=self.out, flush=True)

    def text(self, text: str) -> None:
        """Lines that stay, as they are."""
        self._erase()
        print(text, file=self.out, flush=True)

    def running(self, rows: Sequence[tuple[str, float, str]], left: int) -> None:
        """What runs now: names, seconds, and the last line of each output."""
        now = time.monotonic()
        if now - self._last < (REDRAW_S if self.is_live else EVERY_S):
            return
        self._last = now
        if not self.is_live:
            names = ", ".join(f"{name} {seconds:.0f} s" for name, seconds, _ in rows)
            self.event(f"running: {names or 'nothing'}; {left} to come; load {os.getloadavg()[0]:.1f}")
            return
        self._erase()
        width, height = shutil.get_terminal_size()
        lines = [f"  {name:<24} {seconds:6.0f} s  {last}" for name, seconds, last in rows][: max(1, height - 2)]
        lines.append(f"  {left} to come, {clock(now - self.begun)} so far, load {os.getloadavg()[0]:.1f}")
        for line in lines:
            print(line[: width - 1], file=self.out)
        self.out.flush()
        self._drawn = len(lines)

    def _erase(self) -> None:
        """Removes the table, so that what comes next is where it was."""
        if self._drawn:
            self.out.write(f"\x1b[{self._drawn}A\x1b[J")
            self._drawn = 0
