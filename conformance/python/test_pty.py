"""Terminals: a shell that has one, its size, its input and its end."""

from __future__ import annotations

import pytest
from e2b import CommandExitException, PtySize, Sandbox


def read_until(output, wanted: bytes) -> bytes:
    """Reads terminal output until it contains `wanted`."""
    seen = b""
    for _, _, data in output:
        seen += data or b""
        if wanted in seen:
            return seen
    raise AssertionError(f"the terminal ended before {wanted!r}: {seen!r}")


def test_a_shell_on_a_terminal(sandbox: Sandbox) -> None:
    terminal = sandbox.pty.create(PtySize(rows=30, cols=100))
    output = iter(terminal)
    # The quotes keep the echo of the typed line from looking like its result.
    sandbox.pty.send_stdin(terminal.pid, b"tty; stty size; echo T=$TERM 'do''ne'\n")
    seen = read_until(output, b"done")
    assert b"/dev/pts/" in seen and b"30 100" in seen and b"T=xterm-256color" in seen

    sandbox.pty.resize(terminal.pid, PtySize(rows=40, cols=120))
    sandbox.pty.send_stdin(terminal.pid, b"stty size; echo 'agai''n'\n")
    assert b"40 120" in read_until(output, b"again")

    sandbox.pty.send_stdin(terminal.pid, b"exit 5\n")
    for _ in output:
        pass
    with pytest.raises(CommandExitException) as ended:
        terminal.wait()
    assert ended.value.exit_code == 5


def test_interrupt_reaches_the_foreground(sandbox: Sandbox) -> None:
    terminal = sandbox.pty.create(PtySize(rows=24, cols=80), cwd="/tmp", envs={"MARK": "here"})
    output = iter(terminal)
    # One job says that it is ready and then waits: between two, an interrupt would find no job in the foreground.
    sandbox.pty.send_stdin(terminal.pid, b"sh -c 'echo $MARK $PWD rea\"\"dy; exec sleep 600'\n")
    assert b"here /tmp ready" in read_until(output, b"ready")
    # An interrupt makes the terminal forget what was typed and not yet read, so the next line waits for its echo.
    sandbox.pty.send_stdin(terminal.pid, b"\x03")
    read_until(output, b"^C")
    sandbox.pty.send_stdin(terminal.pid, b"echo 'ali''ve'\n")
    read_until(output, b"alive")
    assert sandbox.pty.kill(terminal.pid) is True
    with pytest.raises(CommandExitException):
        terminal.wait()
    assert sandbox.pty.kill(terminal.pid) is False


def test_connect_to_a_terminal(sandbox: Sandbox) -> None:
    first = sandbox.pty.create(PtySize(rows=24, cols=80), user="root")
    first.disconnect()
    again = sandbox.pty.connect(first.pid)
    sandbox.pty.send_stdin(first.pid, b"echo user=$(id -u) 'to''o'\n")
    assert b"user=0 too" in read_until(iter(again), b"user=0 too")
    assert again.kill() is True
