"""Names, metadata, file names, commands, logs and output of builds that are made to mislead: the command line, a terminal and the
pages of the documentation show them as text. `conformance/dashboard` has the same texts on every page of the dashboard."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from e2b import Sandbox

from harness.hostile import HOSTILE, unseen
from harness.patience import within
from harness.platform import Platform
from harness.terminal import Terminal
from harness.traffic import until

# What an argument of a program can be: no NUL, and only what UTF-8 has.
ARGUMENTS = [text for text in HOSTILE if "\x00" not in text and "\ud800" not in text]
# What the name of a file can be.
FILES = [text for text in ARGUMENTS if "/" not in text and len(text.encode()) <= 255]

# Commands that say what is not there.
ABSENT = (("sandbox", "show"), ("sandbox", "logs"), ("sandbox", "kill"), ("template", "show"), ("template", "delete"), ("key", "revoke"))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """A platform whose teams have such names."""
    server = Platform(tmp_path_factory.mktemp("hostile") / "data", config="[sandbox]\ndisk_mb = 256\n")
    try:
        server.start()
        server.use()
        yield server
        assert server.terminate() == 0, server.log_tail(12)
        assert server.down().returncode == 0
    finally:
        server.close()


def said(platform: Platform, *words: str) -> tuple[str, int]:
    """What a command prints for a person, which has nothing hidden in it."""
    ran = platform.run(*words)
    assert unseen(ran.stdout) == [] and unseen(ran.stderr) == [], (words, ran.stdout, ran.stderr)
    assert "panicked" not in ran.stderr
    return ran.stdout + ran.stderr, ran.returncode


def test_there_are_forty() -> None:
    assert len(set(HOSTILE)) >= 40


def test_names_and_refusals_on_the_command_line(own: Platform) -> None:
    """Of teams, keys, users and templates, and of what is not there."""
    accepted = 0
    for at, text in enumerate(ARGUMENTS):
        words = ["--", text] if text.startswith("-") else [text]
        _, made = said(own, "team", "create", *words)
        accepted += made == 0
        said(own, "key", "create", f"--name={text}")
        said(own, "user", "create", *words)
        for refused in (ABSENT[at % len(ABSENT)], ABSENT[(at + 1) % len(ABSENT)]):
            assert said(own, *refused, *words)[1] != 0, (refused, text)
        assert said(own, "key", "create", f"--team={text} is not there")[1] != 0
    assert accepted >= 20, "most are names, and those that steer a terminal are refused"
    for words in (("team", "list"), ("key", "list"), ("user", "list"), ("sandbox", "list"), ("template", "list"), ("top", "--once")):
        for more in ((), ("--json",) if words[0] == "top" else ("--format", "json")):
            _, code = said(own, *words[: 1 if more and words[0] == "top" else 2], *more)
            assert code == 0
    # A line of a name is a line of the list: nobody can add one.
    teams = json.loads(said(own, "team", "list", "--format", "json")[0])
    assert len(said(own, "team", "list")[0].splitlines()) == len(teams) + 1


def test_metadata_commands_and_files_of_a_sandbox(own: Platform, tmp_path: Path) -> None:
    metadata = {f"k{at}": text for at, text in enumerate(ARGUMENTS) if len(text) < 200}
    box = Sandbox.create(metadata=metadata | {"<b>name</b>": "\u202e"}, timeout=300)
    try:
        # Programs of such names, which the log of the sandbox tells.
        for text in FILES:
            path = f"/tmp/bin/{text}"
            box.files.write(path, "#!/bin/sh\nexit 0\n")
            box.files.write(f"/tmp/evil/{text}", text)
        box.commands.run("chmod -R a+x /tmp/bin")
        for text in FILES:
            box.commands.run("'" + f"/tmp/bin/{text}".replace("'", "'\\''") + "'")
        box.commands.run("/tmp/bin/photo\u202egpj.exe")
        shown, _ = said(own, "sandbox", "show", box.sandbox_id)
        assert box.sandbox_id in shown
        until(lambda: said(own, "sandbox", "logs", box.sandbox_id)[0].count("process_end") >= len(FILES), "the log has all of them", 60)
        log = said(own, "sandbox", "logs", box.sandbox_id, "--format", "json")[0]
        # The log has the name of a program only where that is a plain word.
        assert {entry["fields"]["command"] for entry in json.loads(log) if "command" in entry["fields"]} == {"bash", "chmod"}
        said(own, "sandbox", "list")
        said(own, "top", "--once")

        copied = own.run("sandbox", "cp", f"{box.sandbox_id}:/tmp/evil", str(tmp_path))
        assert unseen(copied.stderr) == [] and copied.returncode == 0, copied.stderr
        for text in FILES:
            assert (tmp_path / "evil" / text).read_bytes() == text.encode()
        for text in FILES:
            assert said(own, "sandbox", "cp", f"{box.sandbox_id}:/tmp/nothing/{text}", str(tmp_path))[1] == 1
    finally:
        box.kill()


def test_a_terminal(own: Platform) -> None:
    """`top` draws a terminal itself: of what it shows, nothing is hidden and nothing steers."""
    names = [text for text in ARGUMENTS if unseen(text) and not re.search(r"[\x00-\x1f\x7f]", text)]
    for name in names:
        own.run("team", "create", name)
    boxes = []
    try:
        for name in names:
            key = own.run("key", "create", f"--team={name}").stdout.strip()
            if key:
                boxes.append(Sandbox.create(timeout=120, api_key=key))
        assert len(boxes) >= 5
        words = [str(own.binary), "--data-dir", str(own.data_dir), "top", "--interval", "1"]
        terminal = Terminal(words, own.environment(), rows=60, cols=200)
        try:
            drawn = b""
            for box in boxes:
                until(lambda box=box: box.sandbox_id in own.run("top", "--once").stdout, "it is listed")
            terminal.type(b"r")
            drawn += terminal.expect(b"q quit")
            for box in boxes:
                drawn += terminal.seen if box.sandbox_id.encode() in drawn + terminal.seen else terminal.expect(box.sandbox_id.encode())
            terminal.type(b"q")
            assert terminal.wait() == 0
            # Without the sequences by which it moves, colours and clears.
            text = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", (drawn + terminal.seen).decode())
            assert [character for character in unseen(text) if character != "\r"] == []
        finally:
            terminal.close()
    finally:
        for box in boxes:
            box.kill()


def test_the_output_of_a_build(own: Platform, tmp_path: Path) -> None:
    """What a step prints is the log that `template build` shows while it builds."""
    (tmp_path / "lines").write_text("\n".join(text for text in HOSTILE if "\ud800" not in text))
    (tmp_path / "template.toml").write_text('name = "hostile"\n')
    (tmp_path / "Dockerfile").write_text("FROM e2bdev/base\nCOPY lines /tmp/lines\nRUN cat /tmp/lines\nRUN cat /tmp/lines >&2; false\n")
    text, code = said(own, "template", "build", str(tmp_path))
    assert code != 0 and "<script>" in text and "\\u{202e}" in text, text
    said(own, "template", "show", "hostile")
    said(own, "template", "list")


def test_pages_of_the_documentation(own: Platform) -> None:
    """The search, and addresses that are no page: what was asked for is text in the answer, in HTML and in the text for agents."""
    with httpx.Client(base_url=own.url, timeout=within(30)) as client:
        plain = client.get("/docs/search?q=nothing-of-that").text
        for text in HOSTILE:
            asked = quote(text.encode("utf-8", "surrogatepass"), safe="")
            answer = client.get(f"/docs/search?q={asked}")
            assert answer.status_code == 200
            # The page has the elements of a page of results and no others: tags come from the templates alone.
            tags = set(re.findall(r"<(/?[a-zA-Z!][a-zA-Z0-9-]*)", answer.text))
            assert "img" not in tags and "iframe" not in tags and "b" not in tags, (text, tags)
            assert answer.text.count("<script") == plain.count("<script") and "<svg onload" not in answer.text
            value = re.search(r'<input[^>]* value="([^"]*)"', answer.text)
            assert not value or "<" not in value[1]
            if value and "\x00" not in text and "\ud800" not in text and len(text) < 200:
                assert html.unescape(value[1]).strip()[:3] == text.strip()[:3], (text, value[1])
            missing = client.get(f"/docs/{asked}")
            assert missing.status_code in {308, 400, 404}, (text, missing.status_code)
            assert "<img src=x" not in missing.text and missing.text.count("<script") <= plain.count("<script")
            assert "taken" not in re.sub(r"&lt;.*?&gt;", "", missing.headers.get("location", ""))
