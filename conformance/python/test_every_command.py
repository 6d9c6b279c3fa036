"""Every method of `commands`, `pty` and their handles with every parameter, through both APIs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from e2b import (
    CommandExitException,
    InvalidArgumentException,
    NotFoundException,
    PtySize,
    SandboxException,
    TimeoutException,
)

from harness.patience import within
from harness.surface import CLASSES, FLAVOURS, Box, both, methods, parameters, untried

SIZE = PtySize(rows=24, cols=80)


def takes(box: Box, kind: str, method: str, parameter: str) -> bool:
    """Whether this version of the SDK has the parameter."""
    known = methods(CLASSES[kind][box.flavour])
    return method in known and parameter in parameters(known[method])


async def ends(handle: Any, **listeners: Any) -> CommandExitException:
    """How a command that fails has failed."""
    with pytest.raises(CommandExitException) as failed:
        await handle.wait(**listeners)
    return failed.value


class Screen:
    """Output of a terminal. The synchronous API delivers it only while a caller waits for the end."""

    def __init__(self) -> None:
        self.data = b""
        self.watcher: asyncio.Task[Any] | None = None

    def show(self, data: bytes) -> None:
        self.data += data

    async def open(self, box: Box, method: str, *arguments: Any, **named: Any) -> Any:
        if box.is_async:
            handle = await getattr(box.pty, method)(*arguments, on_data=self.show, **named)
            self.watcher = asyncio.create_task(handle.wait())
        else:
            handle = await getattr(box.pty, method)(*arguments, **named)
            self.watcher = asyncio.create_task(handle.wait(on_pty=self.show))
        return handle

    async def shows(self, box: Box, wanted: bytes) -> None:
        async def there() -> bool:
            return wanted in self.data

        try:
            await box.until(there, f"{wanted!r} is on the screen")
        except AssertionError as failed:
            raise AssertionError(f"{failed}: {self.data!r}") from None

    async def code(self) -> int:
        """The exit code, in whatever way the SDK reports it."""
        assert self.watcher
        try:
            return (await asyncio.wait_for(self.watcher, within(30))).exit_code
        except CommandExitException as failed:
            return failed.exit_code


@both
async def test_running(box: Box) -> None:
    out: list[str] = []
    err: list[str] = []
    result = await box.commands.run(
        'echo "$A|$PWD|$(id -un)"; echo err >&2',
        background=False,
        envs={"A": "it's \"quoted\" $HOME é"},
        user="root",
        cwd="/tmp",
        on_stdout=out.append,
        on_stderr=err.append,
        stdin=False,
        timeout=30,
        request_timeout=30,
    )
    assert result.stdout == "it's \"quoted\" $HOME é|/tmp|root\n" == "".join(out)
    assert result.stderr == "err\n" == "".join(err)
    assert result.exit_code == 0 and result.error is None
    with pytest.raises(CommandExitException) as failed:
        await box.commands.run("echo out; exit 3")
    assert (failed.value.exit_code, failed.value.stdout, failed.value.error) == (3, "out\n", "exit status 3")
    with pytest.raises(InvalidArgumentException, match="/no/such/place"):
        await box.commands.run("true", cwd="/no/such/place")
    with pytest.raises(TimeoutException):
        await box.commands.run("exec sleep 600", timeout=0.5)


@both
async def test_discarded_output(box: Box) -> None:
    if not takes(box, "commands", "run", "retain_output"):
        return
    out: list[str] = []
    result = await box.commands.run("seq 3", retain_output=False, on_stdout=out.append)
    assert result.stdout is None and "".join(out) == "1\n2\n3\n"
    handle = await box.commands.run("read line; echo $line", background=True, stdin=True)
    again = await box.commands.connect(handle.pid, retain_output=False)
    await handle.send_stdin("heard\n")
    assert (await handle.wait()).stdout == "heard\n"
    assert (await again.wait()).stdout is None


@both
async def test_input(box: Box) -> None:
    handle = await box.commands.run("cat", background=True, stdin=True, timeout=0)
    await box.commands.send_stdin(handle.pid, "text é\n", request_timeout=30)
    await box.commands.send_stdin(handle.pid, b"bytes\n")
    await handle.send_stdin("by handle\n", request_timeout=30)
    await handle.close_stdin(request_timeout=30)
    assert (await handle.wait()).stdout == "text é\nbytes\nby handle\n"

    other = await box.commands.run("cat", background=True, stdin=True)
    await box.commands.send_stdin(other.pid, "x" * 300_000)
    await box.commands.close_stdin(other.pid, request_timeout=30)
    assert (await other.wait()).stdout == "x" * 300_000

    deaf = await box.commands.run("exec sleep 600", background=True)
    with pytest.raises(SandboxException, match="stdin"):
        await box.commands.send_stdin(deaf.pid, "x")
    with pytest.raises(NotFoundException):
        await box.commands.send_stdin(999999, "x")
    with pytest.raises(NotFoundException):
        await box.commands.close_stdin(999999)


@both
async def test_input_as_a_stream(box: Box) -> None:
    if "stream_input" not in methods(CLASSES["commands"][box.flavour]):
        return
    count = 500
    handle = await box.commands.run("cat", background=True, stdin=True)
    if box.is_async:
        stream = await box.commands.stream_input(handle.pid, timeout=30)
        for n in range(count):
            await stream.send(f"line {n}\n" if n % 2 else f"line {n}\n".encode())
        await stream.close()
        with pytest.raises(SandboxException):
            await stream.send("late")
    else:
        lines = (f"line {n}\n" if n % 2 else f"line {n}\n".encode() for n in range(count))
        await box.commands.stream_input(handle.pid, lines, timeout=30)
    # The end of the stream is not the end of the input.
    await box.commands.send_stdin(handle.pid, "after\n")
    await handle.close_stdin()
    assert (await handle.wait()).stdout == "".join(f"line {n}\n" for n in range(count)) + "after\n"
    with pytest.raises(NotFoundException):
        stream = await box.commands.stream_input(999999, *([] if box.is_async else [["x"]]))
        await stream.close()


@both
async def test_the_list_connecting_and_killing(box: Box) -> None:
    handle = await box.commands.run(
        "read line; echo $line; exit 4", background=True, stdin=True, envs={"MARK": "x"}, cwd="/tmp"
    )
    (listed,) = [item for item in await box.commands.list(request_timeout=30) if item.pid == handle.pid]
    assert (listed.cmd, listed.args[:2], listed.envs, listed.cwd) == ("/bin/bash", ["-l", "-c"], {"MARK": "x"}, "/tmp")
    await handle.disconnect()
    out: list[str] = []
    if box.is_async:
        again = await box.commands.connect(
            handle.pid, timeout=30, request_timeout=30, on_stdout=out.append, on_stderr=out.append
        )
        await again.send_stdin("heard\n")
        failed = await ends(again)
    else:
        again = await box.commands.connect(handle.pid, timeout=30, request_timeout=30)
        await again.send_stdin("heard\n")
        failed = await ends(again, on_pty=None, on_stdout=out.append, on_stderr=out.append)
    assert (failed.exit_code, failed.stdout, "".join(out)) == (4, "heard\n", "heard\n")

    for kill in ("commands", "handle"):
        sleeper = await box.commands.run("exec sleep 600", background=True)
        killed = box.commands.kill(sleeper.pid, request_timeout=30) if kill == "commands" else sleeper.kill()
        assert await killed is True
        failed = await ends(sleeper)
        assert (failed.exit_code, failed.error) == (-1, "signal: killed")
        assert await box.commands.kill(sleeper.pid) is False
        # An end is reported to late clients for some time.
        assert (await ends(await box.commands.connect(sleeper.pid))).exit_code == -1
    with pytest.raises(NotFoundException):
        await box.commands.connect(999999)
    assert await box.commands.list() == []


@both
async def test_terminals(box: Box) -> None:
    screen = Screen()
    handle = await screen.open(
        box, "create", SIZE, user="root", cwd="/tmp", envs={"MARK": "here"}, timeout=60, request_timeout=30
    )
    await box.pty.send_stdin(handle.pid, b'echo "<$MARK-$PWD-$(id -u)-$TERM>"; stty size\n', request_timeout=30)
    await screen.shows(box, b"<here-/tmp-0-xterm-256color>")
    await screen.shows(box, b"24 80")
    await box.pty.resize(handle.pid, PtySize(rows=50, cols=132), request_timeout=30)
    await box.pty.send_stdin(handle.pid, b"stty size\n")
    await screen.shows(box, b"50 132")

    second = Screen()
    await second.open(box, "connect", handle.pid, timeout=60, request_timeout=30)
    await box.pty.send_stdin(handle.pid, b"echo 'bo''th'; exit 7\n")
    assert (await screen.code(), await second.code()) == (7, 7)
    assert b"both" in screen.data and b"both" in second.data
    with pytest.raises(NotFoundException):
        await box.pty.resize(handle.pid, SIZE)


@both
async def test_a_terminal_is_killed(box: Box) -> None:
    screen = Screen()
    handle = await screen.open(box, "create", SIZE)
    assert await box.pty.kill(handle.pid, request_timeout=30) is True
    assert await screen.code() == -1
    assert await box.pty.kill(handle.pid) is False
    # An end is reported to late clients for some time.
    late = Screen()
    await late.open(box, "connect", handle.pid)
    assert await late.code() == -1
    with pytest.raises(NotFoundException):
        await Screen().open(box, "connect", 999999)


@both
async def test_a_terminal_reads_a_stream(box: Box) -> None:
    if "stream_input" not in methods(CLASSES["pty"][box.flavour]):
        return
    screen = Screen()
    handle = await screen.open(box, "create", SIZE)
    typed: list[str | bytes] = ["echo 'str''eamed'\n", b"exit 5\n"]
    if box.is_async:
        stream = await box.pty.stream_input(handle.pid, timeout=30)
        for piece in typed:
            await stream.send(piece)
        await stream.close()
    else:
        await box.pty.stream_input(handle.pid, typed, timeout=30)
    assert await screen.code() == 5
    assert b"streamed" in screen.data


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("kind", ["commands", "command handle", "pty"])
def test_nothing_is_left_untried(kind: str, flavour: str) -> None:
    """Judges what the tests above have called."""
    assert untried(CLASSES[kind][flavour]) == {}
