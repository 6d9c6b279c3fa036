"""A program with a desktop client of Python: it calls every method and prints what came of it as JSON.

    python client.py FILE

The older client has no `create`. Where its caller has to look, it prints what there is to see and waits for a line: after it has written
a picture of the screen to FILE, which is repeated for as long as the line is `again`, and while the stream is on.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable

from e2b_desktop import CommandExitException, Sandbox

EVENTS = "/home/user/events"
TITLE = "Event Tester"


def soon(look: Callable[[], object]) -> object:
    """What a look shows as soon as it shows anything."""
    deadline = time.monotonic() + 60
    while True:
        try:
            seen = look()
        except CommandExitException:
            seen = None
        if seen:
            return seen
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing was shown at line {look.__code__.co_firstlineno}")


def titled(desk: Sandbox, window: str) -> object:
    """The title of a window, once it has what it shows: while a program starts it has the program's name alone."""
    return soon(lambda: " - " in (title := desk.get_window_title(window)) and title)


def asked(what: dict[str, object]) -> str:
    """What the caller says to what there is to see."""
    print(json.dumps(what), flush=True)
    return sys.stdin.readline().strip()


def events(desk: Sandbox, buttons: int = 0) -> list[list[object]]:
    """What a window was told since it was last asked: buttons with their place on the screen, and keys."""
    # The server tells keys in order, so one at the end says that those before it have arrived. Buttons may come later: the window manager holds
    # each back until it has looked at it.
    desk.press("f12")

    def seen() -> str:
        text = desk.files.read(EVENTS)
        is_whole = text.count("keysym 0xffc9") == 2 and len(re.findall("^Button.* event", text, re.MULTILINE)) >= buttons
        return text if is_whole else ""

    text = str(soon(seen))
    desk.commands.run(f": >{EVENTS}")
    found: list[list[object]] = []
    for part in text.split("\n\n"):
        name = part.split(" event")[0].strip()
        if "Button" in name:
            place = part.split("root:(")[1].split(")")[0]
            found.append([name, int(part.split("button ")[1].split(",")[0]), *map(int, place.split(","))])
        elif name == "KeyPress" and "F12" not in part:
            found.append([part.split("(keysym ")[1].split(", ")[1].split(")")[0]])
    return found


def calls(desk: Sandbox) -> dict[str, object]:
    found: dict[str, object] = {"cursor": desk.get_cursor_position(), "screen": desk.get_screen_size()}
    desk.commands.run(f"xev -geometry 300x200+300+300 -event button -event keyboard >>{EVENTS}", background=True, timeout=0)
    window = str(soon(lambda: desk.commands.run(f"xdotool search --onlyvisible --name '{TITLE}'").stdout.strip()))
    # The window manager places it, and gives it the keyboard when it is clicked.
    soon(lambda: desk.commands.run(f"xdotool windowmove --sync {window} 300 300 windowfocus --sync {window}").exit_code == 0)
    desk.left_click(400, 400)
    soon(lambda: "ButtonRelease" in desk.files.read(EVENTS))
    desk.commands.run(f": >{EVENTS}")

    desk.move_mouse(401, 402)
    found["moved"] = desk.get_cursor_position()
    # One click after the other: what the window manager has held back has the place where the mouse is by then.
    desk.left_click()
    found["left"] = events(desk, 2)
    desk.left_click(410, 420)
    found["left"] += events(desk, 2)
    desk.double_click(411, 421)
    found["double"] = events(desk, 4)
    desk.right_click(412, 422)
    found["others"] = events(desk, 2)
    desk.middle_click(413, 423)
    found["others"] += events(desk, 2)
    desk.scroll("up", 2)
    desk.scroll("down", 1)
    found["scrolled"] = events(desk, 6)
    desk.mouse_press("right")
    desk.mouse_release("right")
    desk.drag((420, 430), (450, 460))
    found["dragged"] = events(desk, 4)
    desk.press("a")
    desk.press("page_up")
    desk.press(["ctrl", "shift", "x"])
    desk.write("Hi, you!")
    found["keys"] = [key for (key,) in events(desk)]
    found["window"] = [desk.get_current_window_id() == window, desk.get_window_title(window)]
    desk.commands.run("pkill xev")

    desk.files.write("/home/user/note.txt", "first\n")
    desk.open("/home/user/note.txt")
    (editor, *_) = soon(lambda: [*filter(None, desk.get_application_windows("mousepad"))])  # type: ignore[misc]
    found["opened"] = titled(desk, editor)
    soon(lambda: desk.get_current_window_id() == editor)
    long = "'quoted' \"text\" -- of more than one piece, $HOME"
    desk.write(long)
    desk.press(["ctrl", "s"])
    found["typed"] = soon(lambda: (text := desk.files.read("/home/user/note.txt")) != "first\n" and text) == f"{long}first\n"
    desk.press(["ctrl", "q"])
    desk.launch("thunar", "/usr/share")
    (files, *_) = soon(lambda: [*filter(None, desk.get_application_windows("thunar"))])  # type: ignore[misc]
    found["launched"] = titled(desk, files)
    soon(lambda: desk.get_current_window_id() == files)
    desk.press(["alt", "f4"])
    begun = time.monotonic()
    desk.wait(300)
    found["waited"] = time.monotonic() - begun >= 0.3

    desk.commands.run("xfce4-terminal --fullscreen --hide-menubar --hide-scrollbar --color-bg=#204060 -x sleep 600", background=True, timeout=0)
    soon(lambda: any(desk.get_application_windows("xfce4-terminal")))
    for take in (lambda: bytes(desk.screenshot()), lambda: b"".join(desk.screenshot("stream"))):
        answer = "again"
        while answer == "again":
            with open(sys.argv[1], "wb") as file:
                file.write(take())
            answer = asked({"screen": desk.get_screen_size()})

    try:
        desk.stream.get_auth_key()
    except RuntimeError as error:
        found["no key"] = "require_auth" in str(error)
    desk.stream.start(require_auth=True)
    try:
        desk.stream.start()
    except RuntimeError as error:
        found["twice"] = str(error)
    key = desk.stream.get_auth_key()
    urls = [desk.stream.get_url(auth_key=key), desk.stream.get_url(auto_connect=False, view_only=True, resize="off")]
    asked({"urls": urls, "key": key, "host": desk.get_host(6080)})
    desk.stream.stop()
    soon(lambda: "x11vnc" not in desk.commands.run("ps -e -o comm=").stdout)
    return found


def main() -> None:
    desk = Sandbox.create(timeout=300) if "create" in vars(Sandbox) else Sandbox(timeout=300)
    try:
        print(json.dumps(calls(desk)))
    finally:
        desk.kill()


if __name__ == "__main__":
    main()
