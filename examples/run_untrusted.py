"""Runs a program that nobody has read: without network, for a bounded time, and gets back what it wrote.

    python run_untrusted.py PROGRAM.py
"""

from __future__ import annotations

import sys
from pathlib import Path

from e2b import CommandExitException, Sandbox, TimeoutException

# Seconds that the program may run, and that the sandbox lives at most.
PROGRAM_S, SANDBOX_S = 10, 60


def main() -> int:
    program = Path(sys.argv[1]).read_text()
    with Sandbox.create(timeout=SANDBOX_S, allow_internet_access=False) as box:
        box.files.write("/home/user/program.py", program)
        try:
            done = box.commands.run("python3 program.py", timeout=PROGRAM_S)
        except CommandExitException as failed:
            print(f"it failed with {failed.exit_code}: {failed.stderr.strip()}")
            return 1
        except TimeoutException:
            print(f"it did not end within {PROGRAM_S} s")
            return 1
        print(done.stdout, end="")
        for entry in box.files.list("/home/user"):
            if entry.name.endswith(".txt"):
                print(f"{entry.name}: {box.files.read(entry.path).strip()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
