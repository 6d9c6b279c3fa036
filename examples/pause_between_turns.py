"""A workspace that is paused between two turns of a conversation: files and processes wait, and take no processor meanwhile.

    python pause_between_turns.py            # a first turn: prints the id of the workspace
    python pause_between_turns.py SANDBOX    # a later one, perhaps of another program, hours later
"""

from __future__ import annotations

import sys

from e2b import Sandbox


def main() -> None:
    if len(sys.argv) > 1:
        # Resumes it if it is paused.
        box = Sandbox.connect(sys.argv[1], timeout=120)
    else:
        box = Sandbox.create(timeout=120)
        box.files.write("notes.txt", "")
    turn = len(box.files.read("notes.txt").splitlines()) + 1
    box.commands.run(f"echo 'turn {turn}' >> notes.txt")
    print(f"{box.sandbox_id} has had {turn} turns")
    box.pause()


if __name__ == "__main__":
    main()
