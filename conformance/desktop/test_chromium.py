"""The desktop with Chromium instead of Firefox: a template of its own, with the build argument `BROWSER`.

The host of the suite has Chromium, so `base` has it, and nothing is fetched for it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2b_desktop import Sandbox

from desktop.test_desktop import GREEN, picture, served, window
from harness import desktop
from harness.platform import Platform
from harness.traffic import until

NAME = "desktop-chromium"


@pytest.fixture(scope="module")
def desk(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    desktop.build(platform, tmp_path_factory.mktemp("recipe"), "--name", NAME, "--build-arg", "BROWSER=chromium")
    with Sandbox.create(NAME, timeout=600) as made:
        yield made


def test_an_address_opens_in_chromium(desk: Sandbox) -> None:
    """Nobody says a word of its own sandbox, neither to it nor it to the user."""
    served(desk)
    desk.open("http://localhost:8000/")
    browser = window(desk, "chromium")
    until(lambda: "Served inside" in desk.get_window_title(browser), lambda: desk.get_window_title(browser), within_s=90)
    until(lambda: picture(desk).getpixel((600, 500)) == GREEN, "the page is shown", within_s=60)
    # No bar with a warning or a question is between the page and its toolbar: below the last row that is not of the page, all is page.
    column = [picture(desk).getpixel((600, y)) for y in range(140, 500, 5)]
    first = column.index(GREEN)
    assert first * 5 + 140 < 260 and set(column[first:]) == {GREEN}, column
    assert desk.commands.run("x-www-browser --version").stdout.startswith("Chromium")


def test_a_page_of_chromium_is_used_by_mouse_and_keyboard(desk: Sandbox) -> None:
    # The title says when the input takes what is typed, and then what it has.
    asks = "<input autofocus onfocus='document.title = this.value || \"Asked\"' oninput='document.title = this.value'>"
    served(desk, f"<title>Opened</title><body style='background: rgb(0, 200, 0)'>{asks}")
    desk.commands.run("x-www-browser --new-window http://localhost:8000/", background=True, timeout=0)

    def shown(title: str) -> str:
        return next((one for one in desk.get_application_windows("chromium") if title in desk.get_window_title(one)), "")

    page = until(lambda: shown("Asked"), "the other window has an input", within_s=60)
    until(lambda: desk.get_current_window_id() == page, "it has the keyboard")
    desk.write("typed here")
    until(lambda: "typed here" in desk.get_window_title(page), lambda: desk.get_window_title(page), within_s=30)
