"""The main path through the asynchronous API, which uses other transports than the synchronous one."""

from __future__ import annotations

import asyncio
import os

import pytest
from e2b import AsyncSandbox, CommandExitException, PtySize, TimeoutException

from harness.platform import Platform


def test_the_main_path(platform: Platform) -> None:
    async def main() -> None:
        box = await AsyncSandbox.create(timeout=60, metadata={"kind": "async"}, envs={"A": "b"})
        try:
            assert await box.is_running()
            result = await box.commands.run("echo $A; echo err >&2")
            assert (result.stdout, result.stderr) == ("b\n", "err\n")
            with pytest.raises(CommandExitException):
                await box.commands.run("exit 2")
            assert (await box.commands.run("id -u", user="root", cwd="/")).stdout == "0\n"

            data = os.urandom(5 * 1024 * 1024)
            await box.files.write("f", data)
            assert bytes(await box.files.read("f", format="bytes")) == data

            handle = await box.commands.run("cat", background=True, stdin=True)
            assert handle.pid in {item.pid for item in await box.commands.list()}
            await box.commands.send_stdin(handle.pid, "typed\n")
            await box.commands.close_stdin(handle.pid)
            assert (await handle.wait()).stdout == "typed\n"

            sleeper = await box.commands.run("exec sleep 600", background=True)
            again = await box.commands.connect(sleeper.pid)
            assert await sleeper.kill()
            with pytest.raises(CommandExitException):
                await again.wait()

            seen: list[bytes] = []
            terminal = await box.pty.create(PtySize(rows=24, cols=80), on_data=seen.append)
            await box.pty.send_stdin(terminal.pid, b"exit\n")
            assert (await terminal.wait()).exit_code == 0 and seen

            await box.set_timeout(100)
            assert (await box.get_info()).metadata == {"kind": "async"}
            other = await AsyncSandbox.connect(box.sandbox_id)
            assert (await other.commands.run("echo same")).stdout == "same\n"
            items = await AsyncSandbox.list().next_items()
            assert box.sandbox_id in {item.sandbox_id for item in items}
        finally:
            assert await box.kill()
        assert not await box.is_running()

    asyncio.run(main())


def test_many_at_once(platform: Platform) -> None:
    async def one(number: int) -> str:
        async with await AsyncSandbox.create() as box:
            return (await box.commands.run(f"echo {number}")).stdout

    async def main() -> None:
        assert await asyncio.gather(*map(one, range(10))) == [f"{number}\n" for number in range(10)]

    asyncio.run(main())


def test_a_timeout_and_a_kill_in_mid_stream(platform: Platform) -> None:
    async def main() -> None:
        async with await AsyncSandbox.create() as box:
            with pytest.raises(TimeoutException):
                await box.commands.run("sleep 600", timeout=1)
            handle = await box.commands.run("sleep 600", background=True, timeout=0)
            await box.kill()
            with pytest.raises(TimeoutException):
                await handle.wait()

    asyncio.run(main())
