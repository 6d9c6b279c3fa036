"""Every method of the published desktop clients, of Python and JavaScript, in programs of their own.

RINGFENCE_NODE and RINGFENCE_NODE_MODULES name Node and a directory with the pinned JavaScript client. The programs say what they have
done, and the tests look: at pictures of the screen, and at the stream as a viewer does, with the password and without.
"""

from __future__ import annotations

import io
import json
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from PIL import Image

from docs.blocks import first_program
from harness.patience import within
from harness.rfb import Refused, viewer

HERE = Path(__file__).parent
# That of the terminal which fills the screen, where nothing is written.
COLOUR, PLACE = (0x20, 0x40, 0x60), (900, 600)


def press(button: int, x: int, y: int, times: int = 1) -> list[list[object]]:
    return [["ButtonPress", button, x, y], ["ButtonRelease", button, x, y]] * times


WANT = {
    "cursor": [512, 384],
    "screen": [1024, 768],
    "moved": [401, 402],
    "left": press(1, 401, 402) + press(1, 410, 420),
    "double": press(1, 411, 421, 2),
    "others": press(3, 412, 422) + press(2, 413, 423),
    "scrolled": press(4, 413, 423, 2) + press(5, 413, 423),
    "dragged": [*press(3, 413, 423), ["ButtonPress", 1, 420, 430], ["ButtonRelease", 1, 450, 460]],
    "keys": ["a", "Prior", "Control_L", "Shift_L", "X", "Shift_L", "H", "i", "comma", "space", "y", "o", "u", "Shift_L", "exclam"],
    "window": [True, "Event Tester"],
    "opened": "~/note.txt - Mousepad",
    "typed": True,
    "launched": "share - Thunar",
    "waited": True,
    "no key": True,
    "twice": "Stream is already running",
}


def seen(picture: bytes) -> tuple[int, ...]:
    """The colour of the place in a picture of the screen."""
    with Image.open(io.BytesIO(picture)) as image:
        assert (image.format, image.size) == ("PNG", (1024, 768))
        return image.convert("RGB").getpixel(PLACE)


def look_at_the_stream(urls: list[str], key: str, host: str) -> None:
    """The page and the stream are there for who has the password."""
    page, bare = map(urlsplit, urls)
    assert (page.scheme, page.netloc, page.path) == ("https", host, "/vnc.html")
    assert parse_qs(page.query) == {"autoconnect": ["true"], "resize": ["scale"], "password": [key]}
    assert parse_qs(bare.query) == {"view_only": ["true"], "resize": ["off"]}
    trust = ssl.create_default_context(cafile=os.environ["SSL_CERT_FILE"])
    with httpx.Client(verify=trust, timeout=60) as client:
        assert "noVNC" in client.get(urls[0]).text
        for file in ("app/ui.js", "core/rfb.js", "index.html"):
            assert client.get(f"https://{host}/{file}").status_code == 200, file
    stream = f"wss://{host}/websockify"
    with viewer(stream, key) as one:
        assert (one.width, one.height) == (1024, 768)
        assert one.pixel(*PLACE) == COLOUR
    for wrong in (key.swapcase(), None):
        with pytest.raises(Refused), viewer(stream, wrong):
            pass


def run(command: list[str], picture: Path) -> dict[str, Any]:
    """Runs a program, looks where it asks, and returns what it has found."""
    pictures = 0
    with subprocess.Popen([*command, str(picture)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdin and program.stdout and program.stderr
        bound = threading.Timer(within(150), program.kill)
        bound.start()
        try:
            for line in program.stdout:
                said = json.loads(line)
                if "urls" in said:
                    look_at_the_stream(**said)
                    said = None
                elif set(said) == {"screen"}:
                    painted = seen(picture.read_bytes()) == COLOUR
                    pictures += painted
                    said = None if painted else "again"
                else:
                    assert program.wait(within(30)) == 0
                    return {**said, "pictures": pictures}
                program.stdin.write(f"{said or 'good'}\n")
                program.stdin.flush()
            program.kill()
            pytest.fail(program.stderr.read())
        finally:
            bound.cancel()
            program.kill()


@pytest.fixture(scope="module")
def programs(template: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[dict[str, Any]]]]:
    """What the programs of both clients find. They run side by side, because most of the time they wait for their desktops."""
    own = tmp_path_factory.mktemp("programs")
    # Node finds packages beside the program.
    script = own / "client.mjs"
    script.write_text((HERE / "client.mjs").read_text())
    (own / "node_modules").symlink_to(os.environ["RINGFENCE_NODE_MODULES"])
    commands = {"python": [sys.executable, str(HERE / "client.py")], "javascript": [os.environ["RINGFENCE_NODE"], str(script)]}
    with ThreadPoolExecutor(len(commands)) as pool:
        yield {name: pool.submit(run, command, own / f"{name}.png") for name, command in commands.items()}


def test_the_client_of_python(programs: dict[str, Future[dict[str, Any]]]) -> None:
    assert programs["python"].result() == {**WANT, "pictures": 2}


def test_the_client_of_javascript(programs: dict[str, Future[dict[str, Any]]]) -> None:
    assert programs["javascript"].result() == {**WANT, "pictures": 3}


def test_the_first_program_of_the_page(template: str, tmp_path: Path) -> None:
    (tmp_path / "page.py").write_text(first_program("desktop.md"))
    ran = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True, timeout=within(120), check=False)
    assert ran.returncode == 0, ran.stderr
    with Image.open(tmp_path / "screen.png") as image:
        assert image.size == (1024, 768)


def test_the_example(template: str, tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    program = HERE.parents[1] / "examples" / "use_a_desktop.py"
    ran = subprocess.run([sys.executable, program, picture], capture_output=True, text=True, timeout=within(120), check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "~/list.txt - Mousepad\nbread, milk\n"
    with Image.open(picture) as image:
        assert image.size == (1024, 768)
