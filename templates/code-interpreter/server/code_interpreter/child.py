"""Kernels that are programs of our own: a shell, and Node. Both run cells of their input and leave their output to pipes.

The program gets two pipes beside its standard ones: requests arrive on the first, and on the second it says what became of
them, as lines of JSON. Output is read only when it is wanted, so the pipes are the bound of what waits. When a cell has ended,
what it had written is in the pipes already and is read until they are empty.
"""

from __future__ import annotations

import asyncio
import codecs
import ctypes
import json
import os
import signal
import subprocess
from abc import abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from code_interpreter.bounds import Bounds
from code_interpreter.events import Event
from code_interpreter.kernel import Environment, Kernel, KernelDied, KernelFailed, directory

# Most that is read of a pipe at once, and the most of one line about a cell.
PIECE, LINE = 1 << 16, 64 << 20
# Seconds for which the beginning of a line waits for its end. Clients join pieces as if they were lines.
REST_S = 0.05
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class Pipe:
    """The reading end of a pipe, as text."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        os.set_blocking(fd, False)
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def read(self) -> tuple[str, bool]:
        """What is there, and whether there was anything. Raises EOFError at the end."""
        try:
            data = os.read(self.fd, PIECE)
        except BlockingIOError:
            return "", False
        if not data:
            raise EOFError
        return self._decode(data), True


class ChildKernel(Kernel):
    """What the two programs have in common."""

    def __init__(self, variables: Mapping[str, str], cwd: str, bounds: Bounds) -> None:
        self._variables = dict(variables)
        self._cwd = cwd
        self._bounds = bounds
        self._process: subprocess.Popen[bytes] | None = None
        self._pipes: dict[str, Pipe] = {}
        self._requests = -1
        self._said = ""
        # What was read of an output and is not a whole line yet.
        self._rests: dict[str, str] = {}
        self._busy = False
        self._count = 0
        self._sandbox: dict[str, str] = {}
        self._readable = asyncio.Event()

    @abstractmethod
    def command(self, requests: int, answers: int) -> Sequence[str]:
        """The program, which inherits two descriptors."""

    @abstractmethod
    async def execute(self, code: str, environment: Environment) -> AsyncGenerator[Event, None]:
        """Runs a cell."""
        yield {}

    async def start(self) -> None:
        requests, self._requests = os.pipe()
        answers, theirs = os.pipe()
        try:
            self._process = subprocess.Popen(
                self.command(requests, theirs),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(requests, theirs),
                env=self._variables,
                cwd=directory(self._cwd),
                start_new_session=True,
                # It ends with the server, which would start another one.
                preexec_fn=die_with_parent,
            )
        except OSError as failed:
            os.close(answers)
            raise KernelFailed(f"the kernel did not start: {failed}") from failed
        finally:
            os.close(requests)
            os.close(theirs)
        assert self._process.stdout and self._process.stderr
        self._pipes = {
            "stdout": Pipe(os.dup(self._process.stdout.fileno())),
            "stderr": Pipe(os.dup(self._process.stderr.fileno())),
            "answers": Pipe(answers),
        }
        self._process.stdout.close()
        self._process.stderr.close()
        self._busy = True
        try:
            async with asyncio.timeout(self._bounds.start_s):
                async for _ in self._until_idle():
                    pass
        except (KernelDied, TimeoutError) as failed:
            await self.stop()
            raise KernelFailed("the kernel did not start") from failed
        self._count = 0
        self._sandbox = {}

    async def _send(self, data: bytes, stdin: bytes = b"") -> None:
        """Hands over a request, which may be larger than a pipe."""
        process = self._alive()
        assert process.stdin
        if stdin:
            process.stdin.write(stdin)
            process.stdin.flush()
        self._busy = True
        try:
            await asyncio.get_running_loop().run_in_executor(None, write_all, self._requests, data)
        except OSError as failed:
            raise KernelDied("the kernel has ended") from failed

    def _alive(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            raise KernelDied("the kernel is not running")
        return self._process

    async def _until_idle(self) -> AsyncGenerator[tuple[str, Any], None]:
        """Output by its name, and the answer about the cell as `answer`, last."""
        while self._busy:
            ended = False
            try:
                text, _ = self._pipes["answers"].read()
                self._said += text
            except EOFError:
                ended = True
            line, newline, rest = self._said.partition("\n")
            found = False
            for name in ("stdout", "stderr"):
                while True:
                    try:
                        text, is_there = self._pipes[name].read()
                    except EOFError:
                        break
                    if text:
                        found = True
                    if whole := self._whole_lines(name, text):
                        yield name, whole
                    # Without an answer, both pipes have their turn.
                    if not is_there or not newline:
                        break
            if newline or ended:
                for name in list(self._rests):
                    yield name, self._rests.pop(name)
            if newline:
                self._said = rest
                self._busy = False
                yield "answer", json.loads(line)
                return
            if len(self._said) > LINE:
                raise KernelDied("the kernel has said too much about a cell")
            if ended or self._process is None or self._process.poll() is not None:
                raise KernelDied("the kernel has ended")
            if found:
                # A program that always says something leaves a turn to others: to what ends it, for example.
                await asyncio.sleep(0)
            elif not await self._wait():
                for name in list(self._rests):
                    yield name, self._rests.pop(name)

    def _whole_lines(self, name: str, text: str) -> str:
        """What an output has said up to its last newline. The rest is kept, unless it is long."""
        held = self._rests.pop(name, "") + text
        end = held.rfind("\n") + 1
        if len(held) - end > PIECE:
            end = len(held)
        if end < len(held):
            self._rests[name] = held[end:]
        return held[:end]

    async def _wait(self) -> bool:
        """Returns when a pipe can be read, or the process may have ended. Whether there was something in time."""
        loop = asyncio.get_running_loop()
        self._readable.clear()
        for pipe in self._pipes.values():
            loop.add_reader(pipe.fd, self._readable.set)
        try:
            # Not `wait_for`: that of Python 3.11 loses a cancellation that comes together with what it waits for.
            async with asyncio.timeout(REST_S if self._rests else 0.5):
                await self._readable.wait()
            return True
        except TimeoutError:
            return False
        finally:
            for pipe in self._pipes.values():
                loop.remove_reader(pipe.fd)

    async def drain(self) -> None:
        async for _ in self._until_idle():
            pass

    async def interrupt(self) -> None:
        process = self._alive()
        try:
            os.killpg(process.pid, signal.SIGINT)
        except ProcessLookupError as gone:
            raise KernelDied("the kernel has ended") from gone

    async def kill(self) -> None:
        if self._process is not None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    async def stop(self) -> None:
        await self.kill()
        if self._process is not None:
            if self._process.stdin:
                try:
                    self._process.stdin.close()
                except OSError:
                    pass
            await asyncio.get_running_loop().run_in_executor(None, self._process.wait)
        for pipe in self._pipes.values():
            os.close(pipe.fd)
        if self._requests >= 0:
            os.close(self._requests)
        self._process, self._pipes, self._requests, self._said, self._rests, self._busy = None, {}, -1, "", {}, False


def die_with_parent() -> None:
    """Asks for SIGKILL at the end of the server. Runs between fork and exec."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def write_all(fd: int, data: bytes) -> None:
    """Writes everything, however small the pipe is."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]

