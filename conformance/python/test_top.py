"""`ringfence top`: what the sandboxes of all teams use, on a terminal and as text."""

from __future__ import annotations

import json
import signal
import subprocess

import pytest
from e2b import Sandbox

from harness.patience import within
from harness.platform import Platform
from harness.terminal import Terminal
from harness.traffic import until


def words(platform: Platform, *arguments: str) -> list[str]:
    return [str(platform.binary), "--data-dir", str(platform.data_dir), "top", *arguments]


def test_once_is_plain_text_and_json_has_the_same(platform: Platform, sandbox: Sandbox) -> None:
    once = platform.run("top", "--once")
    assert once.returncode == 0, once.stderr
    assert sandbox.sandbox_id in once.stdout and "\x1b" not in once.stdout
    summary, header, *rows = once.stdout.splitlines()
    assert "running" in summary and header.split() == "ID STATE CPU MEMORY DISK RECEIVED SENT AGE TEMPLATE TEAM".split()
    assert any(row.split()[1] == "running" and row.split()[-1] == "default" for row in rows)
    # A pipe gets the same as --once.
    assert platform.run("top").stdout.splitlines()[1] == header
    shown = json.loads(platform.run("top", "--json").stdout)
    assert sandbox.sandbox_id in {item["id"] for item in shown}
    assert json.loads(platform.run("top", "--json", "--team", "no-such-team").stdout) == []


def test_a_batch_goes_on_until_its_reader_is_gone(platform: Platform, sandbox: Sandbox) -> None:
    process = subprocess.Popen(
        words(platform, "--batch", "--interval", "1"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=platform.environment(),
        text=True,
    )
    assert process.stdout
    seen = 0
    while seen < 2:
        seen += sandbox.sandbox_id in process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=within(30)) == 0


def test_the_view_sorts_follows_the_size_and_restores_the_terminal(platform: Platform, sandbox: Sandbox) -> None:
    terminal = Terminal(words(platform, "--interval", "1"), platform.environment())
    try:
        shown = terminal.expect(sandbox.sandbox_id.encode()[:21])
        assert b"\x1b[?1049h" in shown and not terminal.is_restored()
        terminal.expect(b"q quit")
        terminal.type(b"mr")
        terminal.resize(10, 60)
        terminal.expect(b"\x1b[J")
        # What has come since is seen without a key.
        with_more = Sandbox.create(timeout=120)
        try:
            terminal.expect(with_more.sandbox_id.encode()[:21])
        finally:
            with_more.kill()
        terminal.type(b"q")
        assert terminal.wait() == 0
        assert terminal.is_restored() and terminal.seen.endswith(b"\x1b[?1049l")
    finally:
        terminal.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_the_view_and_restores_the_terminal(platform: Platform, number: signal.Signals) -> None:
    terminal = Terminal(words(platform), platform.environment())
    try:
        terminal.expect(b"q quit")
        terminal.process.send_signal(number)
        assert terminal.wait() == 128 + number
        assert terminal.is_restored() and terminal.seen.endswith(b"\x1b[?1049l")
    finally:
        terminal.close()


def test_hostile_names_are_text(platform: Platform) -> None:
    # What steers a terminal is refused in a name; what changes the order of what is seen is not.
    assert platform.run("team", "create", "evil\x1b[2Jteam").returncode != 0
    name, shown = "evil\u202eteam", "evil\\u{202e}team"
    assert platform.run("team", "create", name).returncode == 0
    made = platform.run("key", "create", "--team", name, "--name", "key\u2066\u200b")
    assert made.returncode == 0, made.stderr
    box = Sandbox.create(timeout=120, api_key=made.stdout.strip())
    try:
        until(lambda: box.sandbox_id in platform.run("top", "--once").stdout, "it is listed")
        lists = [("top", "--once"), ("team", "list"), ("sandbox", "list"), ("sandbox", "show", box.sandbox_id)]
        for words in lists:
            said = platform.run(*words).stdout
            assert shown in said and "\u202e" not in said, (words, said)
        keys = platform.run("key", "list").stdout
        assert "key\\u{2066}\\u{200b}" in keys and "\u2066" not in keys, keys
        for words in lists[1:]:
            said = platform.run(*words, "--format", "json").stdout
            assert "\\u202e" in said and "\u202e" not in said and name in json.dumps(json.loads(said), ensure_ascii=False), (words, said)
        refused = platform.run("key", "create", "--team", "no\u202eteam")
        assert refused.returncode == 1 and "\u202e" not in refused.stderr and "no\\u{202e}team" in refused.stderr, refused.stderr
    finally:
        box.kill()
