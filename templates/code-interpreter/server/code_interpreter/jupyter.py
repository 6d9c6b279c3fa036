"""Kernels of Jupyter, over its messages on sockets in a private directory.

The sockets hold few messages. A kernel that is ahead of its client waits in the middle of its output, which needs the kernel's
side not to drop messages: that of Python is told so in `code_interpreter_kernel`.

Processes and requests are those of `jupyter_client`. Answers are read here, when they are wanted, because its channels take
several turns of the loop and a parsed date for each: a short cell has five messages, and what it takes is mostly theirs. Signatures
are not checked, since whoever can reach the sockets can read the key as well.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import signal
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import zmq.asyncio
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.session import DELIM

from code_interpreter import events
from code_interpreter.bounds import Bounds
from code_interpreter.events import Event
from code_interpreter.kernel import Environment, Kernel, KernelDied, KernelFailed, directory

# Messages that wait between kernel and server, on each side.
WAITING = 16
# Seconds between two looks at whether a silent kernel is alive.
LOOK_S = 0.25
# Seconds after which a kernel that starts is asked again whether it is there: its answer is lost before it knows its listeners.
ASK_S = 0.25
# Messages after which other work has its turn.
TURNS = 16
Message = Mapping[str, Any]
OTHER: Message = {}


class Manager(AsyncKernelManager):
    """A manager whose kernel is a command, without a search for installed ones."""

    command: Sequence[str] = ()

    @property
    def kernel_spec(self) -> KernelSpec:  # type: ignore[override]
        return KernelSpec(argv=[*self.command], display_name="", language="", interrupt_mode="signal")


class JupyterKernel(Kernel):
    """A kernel by the command that starts it; `{connection_file}` stands for the file that says where its sockets are."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], cwd: str, bounds: Bounds) -> None:
        self._command = command
        self._variables = dict(variables)
        self._cwd = cwd
        self._bounds = bounds
        self._manager: Manager | None = None
        self._context: zmq.asyncio.Context | None = None
        self._sockets: Path | None = None
        # For requests and their replies, and for output.
        self._shell: zmq.Socket[bytes] | None = None
        self._output: zmq.Socket[bytes] | None = None
        # The message that asked for the running cell, and which of the two signs of its end were seen.
        self._running = ""
        self._is_idle = self._is_replied = False
        self._woken = asyncio.Event()

    async def start(self) -> None:
        self._sockets = Path(tempfile.mkdtemp(prefix="rf-kernel-"))
        self._context = zmq.asyncio.Context(io_threads=1)
        self._manager = Manager(
            transport="ipc",
            ip=str(self._sockets / "s"),
            connection_file=str(self._sockets / "connection.json"),
            context=self._context,
        )
        self._manager.command = self._command
        try:
            await self._manager.start_kernel(cwd=directory(self._cwd), env=self._variables)
            # Sockets that do not wait by themselves.
            plain = zmq.Context.shadow(self._context.underlying)
            self._shell, self._output = plain.socket(zmq.DEALER), plain.socket(zmq.SUB)
            for socket, channel in ((self._shell, "shell"), (self._output, "iopub")):
                socket.linger = 0
                socket.rcvhwm = WAITING
                if channel == "iopub":
                    socket.subscribe(b"")
                socket.connect(self._manager._make_url(channel))
            async with asyncio.timeout(self._bounds.start_s):
                await self._ready()
        except Exception as failed:
            await self.stop()
            text = "it does not answer" if isinstance(failed, TimeoutError) else str(failed)
            raise KernelFailed(f"the kernel did not start: {text}") from failed

    async def _ready(self) -> None:
        """Returns when the kernel has answered, on both sockets."""
        while True:
            self._ask("kernel_info_request", {}, {})
            try:
                async with asyncio.timeout(ASK_S):
                    return await self.drain()
            except TimeoutError:
                pass

    def _parts(self) -> tuple[Manager, zmq.Socket[bytes], zmq.Socket[bytes]]:
        if self._manager is None or self._shell is None or self._output is None:
            raise KernelDied("the kernel is not running")
        return self._manager, self._shell, self._output

    def _ask(self, kind: str, content: dict[str, Any], metadata: dict[str, Any]) -> None:
        manager, shell, _ = self._parts()
        message = manager.session.send(shell, kind, content, metadata=metadata)
        self._running = message["header"]["msg_id"]
        self._is_idle = self._is_replied = False

    async def execute(self, code: str, environment: Environment) -> AsyncGenerator[Event, None]:
        content = {
            "code": code,
            "silent": False,
            "store_history": True,
            "user_expressions": {},
            "allow_stdin": False,
            "stop_on_error": True,
        }
        # Kernels that know nothing of it ignore metadata.
        self._ask("execute_request", content, {"ringfence": {"sandbox": dict(environment.sandbox), "call": dict(environment.call)}})
        has_failed = False
        async with aclosing(self._until_idle()) as all_said:
            async for said in all_said:
                for event in translated(said):
                    # Kernels say an error twice, as output and in the reply.
                    if event["type"] == "error":
                        if has_failed:
                            continue
                        has_failed = True
                    yield event

    async def drain(self) -> None:
        async for _ in self._until_idle():
            pass

    async def _until_idle(self) -> AsyncGenerator[Message, None]:
        """Messages about the running cell until both its reply and the idle status were there: they arrive on different
        sockets. The reply comes last, whenever it has arrived, because what was said before may be on its way."""
        manager, shell, output = self._parts()
        if not self._running:
            return
        reply: Message | None = None
        for turn in itertools.count(1):
            if self._is_idle and self._is_replied:
                break
            # A kernel that always says something leaves a turn to others: to what ends it, for example.
            if turn % TURNS == 0:
                await asyncio.sleep(0)
            if (message := received(output, self._running)) is not None:
                if message is not OTHER:
                    self._is_idle |= is_idle(message)
                    yield message
            elif (message := received(shell, self._running)) is not None:
                if message is not OTHER:
                    self._is_replied = True
                    reply = message
            elif not await self._wait(shell, output) and not await manager.is_alive():
                raise KernelDied("the kernel has ended")
        if reply is not None:
            yield reply
        self._running = ""

    async def _wait(self, *sockets: zmq.Socket[bytes]) -> bool:
        """Returns when a socket may have something, or after a time in which a kernel may have died. Says which of the two it is.
        Descriptors of these sockets tell of what is new, so that they have been found empty before."""
        loop = asyncio.get_running_loop()
        self._woken.clear()
        for socket in sockets:
            loop.add_reader(socket.fileno(), self._woken.set)
        try:
            async with asyncio.timeout(LOOK_S):
                await self._woken.wait()
        except TimeoutError:
            return False
        finally:
            for socket in sockets:
                loop.remove_reader(socket.fileno())
        return True

    async def interrupt(self) -> None:
        manager, _, _ = self._parts()
        await manager.interrupt_kernel()

    async def kill(self) -> None:
        if self._manager is not None and self._manager.has_kernel:
            await self._manager.signal_kernel(signal.SIGKILL)

    async def stop(self) -> None:
        self._running = ""
        for socket in (self._shell, self._output):
            if socket is not None:
                socket.close(linger=0)
        if self._manager is not None and self._manager.has_kernel:
            await self._manager.shutdown_kernel(now=True)
        if self._context is not None:
            self._context.destroy(linger=0)
        if self._sockets is not None:
            shutil.rmtree(self._sockets, ignore_errors=True)
        self._manager = self._shell = self._output = self._context = self._sockets = None


def received(socket: zmq.Socket[bytes], about: str) -> Message | None:
    """A message that a socket has, which is `OTHER` if it is not about a request."""
    try:
        frames = socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
    # Identities, a delimiter, a signature, and four parts of JSON.
    try:
        header, parent, _, content = frames[frames.index(DELIM) + 2 :][:4]
        if json.loads(parent).get("msg_id") != about:
            return OTHER
        return {"msg_type": json.loads(header)["msg_type"], "content": json.loads(content)}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as failed:
        raise KernelDied("the kernel says what is no message") from failed


def is_idle(message: Message) -> bool:
    """Whether a message says that nothing runs."""
    return message["msg_type"] == "status" and message["content"]["execution_state"] == "idle"


def translated(message: Message) -> list[Event]:
    """The events of a message of Jupyter. Most of its kinds have none."""
    content = message["content"]
    match message["msg_type"]:
        case "execute_input":
            return [events.started(content["execution_count"])]
        case "stream":
            return [events.output(content["name"], content["text"])] if content["text"] else []
        case "execute_result":
            return [events.result(content["data"], True)]
        case "display_data":
            return [events.result(content["data"], False)]
        case "error":
            return [failure(content)]
        case "execute_reply" if content["status"] == "error":
            return [failure(content)]
        case "execute_reply" if content["status"] in ("abort", "aborted"):
            return [events.error("ExecutionAborted", "the kernel has not run the cell")]
    return []


def failure(content: Mapping[str, Any]) -> Event:
    """The error of a cell, with its traceback as one text."""
    return events.error(content.get("ename", ""), content.get("evalue", ""), "\n".join(content.get("traceback", [])))
