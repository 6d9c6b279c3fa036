"""Older SDKs for Python, which programs still pin: what every program does, over HTTP and over HTTPS.

After a connect, versions from 2.8 to 2.24 send no sandbox id to the sandbox's address. Over HTTPS the name says which one
is meant; over HTTP nothing does, so there everything but commands and files of a connected sandbox is tried.
"""

from __future__ import annotations

import pytest
from e2b import CommandExitException, NotFoundException, Sandbox

from harness.platform import Platform


@pytest.fixture
def over_https(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--tls"))


def listed() -> set[str]:
    found: set[str] = set()
    pages = Sandbox.list()
    while pages.has_next:
        found |= {item.sandbox_id for item in pages.next_items()}
    return found


def test_commands_and_files(sandbox: Sandbox) -> None:
    assert sandbox.is_running()
    assert sandbox.commands.run("echo hello").stdout == "hello\n"
    with pytest.raises(CommandExitException) as failed:
        sandbox.commands.run("echo no >&2; exit 3")
    assert (failed.value.exit_code, failed.value.stderr) == (3, "no\n")
    sandbox.files.write("notes/a.txt", "some text")
    assert sandbox.files.read("notes/a.txt") == "some text"
    assert [entry.name for entry in sandbox.files.list("notes")] == ["a.txt"]
    assert sandbox.files.exists("notes/a.txt") and not sandbox.files.exists("notes/b.txt")
    sandbox.files.remove("notes/a.txt")
    assert sandbox.files.list("notes") == []


def test_a_killed_process_is_gone(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("exec sleep 1000", background=True)
    assert handle.pid in {process.pid for process in sandbox.commands.list()}
    assert handle.kill() is True
    assert handle.pid not in {process.pid for process in sandbox.commands.list()}


def test_connecting(sandbox: Sandbox, over_https: bool) -> None:
    """The call that sends routing headers to the API."""
    sandbox.files.write("mark", "here")
    again = Sandbox.connect(sandbox.sandbox_id, timeout=300)
    assert again.sandbox_id == sandbox.sandbox_id
    assert again.get_info().sandbox_id == sandbox.sandbox_id
    again.set_timeout(200)
    assert sandbox.connect(timeout=300).sandbox_id == sandbox.sandbox_id
    if over_https:
        assert again.is_running()
        assert again.files.read("mark") == "here"
        assert again.commands.run("cat mark").stdout == "here"
    with pytest.raises(NotFoundException):
        Sandbox.connect("i" + "0" * 20)


def test_the_list_and_the_end(platform: Platform) -> None:
    box = Sandbox.create(timeout=120, metadata={"smoke": "yes"})
    assert box.sandbox_id in listed()
    assert Sandbox.connect(box.sandbox_id).kill() is True
    assert box.sandbox_id not in listed()
    assert Sandbox.kill(box.sandbox_id) is False
    assert box.is_running() is False
