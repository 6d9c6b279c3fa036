"""A desktop that a program uses as a person does: it opens a file, writes with the keyboard, and takes a picture of the screen.

    python use_a_desktop.py PICTURE.png
"""

from __future__ import annotations

import sys
from pathlib import Path

from e2b_desktop import CommandExitException, Sandbox


def window(desk: Sandbox, application: str) -> str:
    """The window of an application, once it is there."""
    for _ in range(60):
        try:
            return desk.get_application_windows(application)[0]
        except CommandExitException:
            desk.wait(500)
    raise TimeoutError(f"{application} has shown no window")


def main() -> None:
    with Sandbox.create(timeout=120) as desk:
        desk.files.write("/home/user/list.txt", "milk\n")
        desk.open("/home/user/list.txt")
        editor = window(desk, "mousepad")
        # A click gives the window the keyboard.
        desk.left_click(300, 300)
        desk.press(["ctrl", "home"])
        desk.write("bread, ")
        desk.press(["ctrl", "s"])
        print(desk.get_window_title(editor))
        Path(sys.argv[1]).write_bytes(desk.screenshot())
        print(desk.files.read("/home/user/list.txt"), end="")


if __name__ == "__main__":
    main()
