"""The code blocks of the pages, and the program that the blocks of one language on one page make together.

Readers copy blocks one after the other, so all blocks of a page in one language run in one process, in their order. A
block that cannot run says why in its first line: ```` ```sh no-run="needs systemd" ````. Languages are declared: a block
without one, or with one that is not listed here, is an error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs"
# For readers of the repository, not of the product.
FOR_DEVELOPERS = {"dev", "decisions"}
RUN = ("sh", "python", "javascript", "go")
# `toml` is given to the platform as its configuration, `json` is parsed, `text` is what programs print or draw.
CHECKED = ("toml", "json")
TEXT = ("text", "yaml", "http")

FENCE = re.compile(r"^(?P<indent> *)```(?P<info>.*)\n(?P<body>(?:.*\n)*?)(?P=indent)```[ ]*$", re.M)
INFO = re.compile(r'^(?P<language>[a-z]+)(?: no-run="(?P<reason>[^"]{8,})")?$')


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str
    line: int
    language: str
    reason: str | None
    text: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """The Markdown files that the platform serves."""
    found = [path for path in PAGES.rglob("*.md") if path.relative_to(PAGES).parts[0] not in FOR_DEVELOPERS]
    return sorted(found)


def blocks_of(page: str, text: str) -> list[Block]:
    """The blocks of one page; raises ValueError for a block whose first line is not understood."""
    found = []
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        info = INFO.match(match["info"])
        if not info or info["language"] not in RUN + CHECKED + TEXT:
            raise ValueError(f'{page}:{line}: expected a language and perhaps no-run="reason", not {match["info"]!r}')
        indent = len(match["indent"])
        body = "".join(row[indent:] for row in match["body"].splitlines(keepends=True))
        found.append(Block(page, line, info["language"], info["reason"], body))
    return found


def blocks() -> list[Block]:
    """The blocks of all pages."""
    return [
        block for path in pages() for block in blocks_of(path.relative_to(ROOT).as_posix(), path.read_text())
    ]


def first_program(page: str) -> str:
    """The first program in Python on the page of a template, which the suite of the template runs: that of the pages has no templates."""
    found = blocks_of(page, (PAGES / page).read_text())
    return python([next(block for block in found if block.language == "python")])


def shell(run: list[Block]) -> str:
    """A script that ends at the first failure and says which block failed."""
    parts = ["set -euo pipefail", "trap 'echo \"failed in $block\" >&2' ERR", "set -E"]
    for block in run:
        parts += [f"block={block.name}", block.text]
    return "\n".join(parts)


def python(run: list[Block]) -> str:
    """A program whose tracebacks name the lines of the page."""
    return "".join(
        f"exec(compile({chr(10) * block.line + block.text!r}, {block.page!r}, 'exec'), globals())\n" for block in run
    )


def javascript(run: list[Block]) -> str:
    """A module; an import that a later block repeats is left out there."""
    seen: set[str] = set()
    lines = []
    for block in run:
        lines.append(f"// {block.name}")
        for line in block.text.splitlines():
            if line.startswith("import "):
                if line in seen:
                    continue
                seen.add(line)
            lines.append(line)
    return "\n".join(lines) + "\n"
