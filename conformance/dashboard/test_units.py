"""The modules of the dashboard without a page, in Node: the terminal emulator, the client of the agent, hostile names.

RINGFENCE_NODE names the program. The tests are in `units`; each file is one test here. The emulator is also compared with
another terminal, tmux, on what real programs print.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.traffic import until

UNITS = Path(__file__).parent / "units"
FILES = sorted(file.name for file in UNITS.glob("*.test.mjs"))
COLUMNS, ROWS = 80, 24
# Erasing, inserting, scrolling, the region, the saved cursor.
OTHERS = ("\x1b[K", "\x1b[1K", "\x1b[2K", "\x1b[J", "\x1b[1J", "\r\x1b[4hnew\x1b[4l", "\x1bM", "\x1bD", "\x1b[5;15r", "\x1b[r", "\x1b7", "\x1b8")


def node(*words: str | Path, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([os.environ["RINGFENCE_NODE"], *words], input=data, capture_output=True, timeout=240)


def test_there_are_units() -> None:
    assert len(FILES) >= 6


@pytest.mark.parametrize("name", FILES)
def test_unit(name: str) -> None:
    ran = node("--test", "--test-reporter=tap", UNITS / name)
    said = ran.stdout.decode(errors="replace")
    assert ran.returncode == 0, said + ran.stderr.decode(errors="replace")
    passed = re.search(r"^# pass (\d+)$", said, re.M)
    assert passed and int(passed[1]) > 0, said
    for count in ("fail", "cancelled", "skipped", "todo"):
        assert re.search(rf"^# {count} 0$", said, re.M), said


class Tmux:
    """A server of tmux with one session of a fixed size."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.socket = directory / "tmux"
        self.environment = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "TERM": "xterm-256color", "HOME": str(directory)}

    def run(self, *words: str) -> str:
        ran = subprocess.run(
            ["tmux", "-u", "-f", "/dev/null", "-S", str(self.socket), *words], env=self.environment, capture_output=True, text=True, timeout=30
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    def shows(self, output: bytes) -> tuple[list[str], tuple[int, int]]:
        """What it shows, and where its cursor is, after a program that prints this."""
        name = f"s{uuid.uuid4().hex[:8]}"
        file = self.directory / name
        # Its title comes last, so what has it has read all before.
        file.write_bytes(output + b"\x1b]2;" + name.encode() + b"\x07")
        # Echo is off, and line ends are as in the file.
        command = f"stty raw -echo; cat {file}; tmux -S {self.socket} wait-for -S {name}; exec sleep 60"
        self.run("new-session", "-d", "-s", name, "-x", str(COLUMNS), "-y", str(ROWS), "sh", "-c", command)
        try:
            self.run("set-option", "-t", name, "status", "off")
            self.run("wait-for", name)
            until(lambda: self.run("display-message", "-p", "-t", name, "#{pane_title}") == f"{name}\n", "the server has read everything")
            last = self.run("capture-pane", "-p", "-t", name) + self.run("display-message", "-p", "-t", name, "#{cursor_x} #{cursor_y}")
            *rows, cursor = last.splitlines()
            x, y = cursor.split()
            return [row.rstrip() for row in rows], (int(x), int(y))
        finally:
            self.run("kill-session", "-t", name)


@pytest.fixture(scope="module")
def tmux(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tmux]:
    server = Tmux(tmp_path_factory.mktemp("t"))
    server.run("new-session", "-d", "-s", "first", "-x", str(COLUMNS), "-y", str(ROWS), "sleep", "300")
    server.run("set-option", "-g", "status", "off")
    try:
        yield server
    finally:
        server.run("kill-server")


def ours(output: bytes) -> tuple[list[str], tuple[int, int]]:
    ran = node(UNITS / "show.mjs", str(COLUMNS), str(ROWS), data=output)
    assert ran.returncode == 0, ran.stderr.decode(errors="replace")
    *rows, cursor = ran.stdout.decode().splitlines()
    x, y = cursor.split()
    return rows, (int(x), int(y))


def printed(seed: int) -> bytes:
    """Output of a program that uses the whole screen, by a seed.

    It has nothing in which tmux differs from xterm: halves of wide characters, a backspace across a wrapped line, lines
    inserted outside the region and the column after that, characters inserted beyond the right half of the screen.
    """
    choose = random.Random(seed)
    words = ["text", "0123456789", "é", "──┐", "x" * 90, "text\b", "\r\n", "\n", "\r", "\t"]
    parts = []
    for _ in range(300):
        count = choose.randrange(1, 30)
        match choose.randrange(8):
            case 0 | 1 | 2 | 3:
                parts.append(choose.choice(words))
            case 4:
                parts.append(f"\x1b[{count}{choose.choice('ABCDGdPXEF')}")
            case 5:
                parts.append(f"\x1b[{count};{choose.randrange(1, 90)}{choose.choice('Hf')}")
            case 6:
                parts.append(choose.choice([f"\x1b[r\x1b[{count}d\x1b[{count // 2}{choose.choice('LM')}\r", f"\r\x1b[{count}@", f"\x1b[{count}S"]))
            case 7:
                parts.append(choose.choice(OTHERS))
    return "".join(parts).encode()


@pytest.mark.parametrize("seed", range(12))
def test_it_shows_what_another_terminal_shows(tmux: Tmux, seed: int) -> None:
    output = printed(seed)
    rows, cursor = tmux.shows(output)
    got, at = ours(output)
    assert got == rows
    # A cursor that waits at the right edge is beyond it for the other.
    assert at == (min(cursor[0], COLUMNS - 1), cursor[1])
