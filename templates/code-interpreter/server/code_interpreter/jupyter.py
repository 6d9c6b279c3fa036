"""Kernels of Jupyter, over its messages on sockets in a private directory.

The sockets hold few messages. A kernel that is ahead of its client waits in the middle of its output, which needs the kernel's
side not to drop messages: that of Python is told so in `code_interpreter_kernel`.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import zmq.asyncio
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager

from code_interpreter import events
from code_interpreter.bounds import Bounds
from code_interpreter.events import Event
from code_interpreter.kernel import Environment, Kernel, KernelDied, KernelFailed, directory

# Messages that wait between kernel and server, on each side.
WAITING = 16
# Seconds between two looks at whether a silent kernel is alive.
LOOK_S = 0.25


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
        self._client: AsyncKernelClient | None = None
        self._context: zmq.asyncio.Context | None = None
        self._sockets: Path | None = None
        # The message that asked for the running cell, and which of the two signs of its end were seen.
        self._running = ""
        self._is_idle = self._is_replied = False
        self._reply: asyncio.Task[dict[str, Any]] | None = None
        self._next: asyncio.Task[dict[str, Any]] | None = None

    async def start(self) -> None:
        self._sockets = Path(tempfile.mkdtemp(prefix="rf-kernel-"))
        # Shared by the sockets of this kernel alone, because the bounds are options of it.
        self._context = zmq.asyncio.Context(io_threads=1)
        self._context.setsockopt(zmq.RCVHWM, WAITING)
        self._context.setsockopt(zmq.LINGER, 0)
        self._manager = Manager(
            transport="ipc",
            ip=str(self._sockets / "s"),
            connection_file=str(self._sockets / "connection.json"),
            context=self._context,
        )
        self._manager.command = self._command
        try:
            await self._manager.start_kernel(cwd=directory(self._cwd), env=self._variables)
            self._client = self._manager.client(context=self._context)
            self._client.start_channels(stdin=False, hb=False)
            await self._client.wait_for_ready(timeout=self._bounds.start_s)
        except Exception as failed:
            await self.stop()
            raise KernelFailed(f"the kernel did not start: {failed}") from failed

    def _parts(self) -> tuple[Manager, AsyncKernelClient]:
        if self._manager is None or self._client is None:
            raise KernelDied("the kernel is not running")
        return self._manager, self._client

    async def execute(self, code: str, environment: Environment) -> AsyncGenerator[Event, None]:
        _, client = self._parts()
        content = {
            "code": code,
            "silent": False,
            "store_history": True,
            "user_expressions": {},
            "allow_stdin": False,
            "stop_on_error": True,
        }
        # Kernels that know nothing of it ignore metadata.
        metadata = {"ringfence": {"sandbox": dict(environment.sandbox), "call": dict(environment.call)}}
        message = client.session.msg("execute_request", content, metadata=metadata)
        self._running = message["header"]["msg_id"]
        self._is_idle = self._is_replied = False
        client.shell_channel.send(message)
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

    async def _until_idle(self) -> AsyncGenerator[dict[str, Any], None]:
        """Messages about the running cell until both its reply and the idle status were there: they arrive on different
        sockets. What is being received when the caller goes away is kept for `drain`."""
        manager, client = self._parts()
        if not self._running:
            return
        while not (self._is_idle and self._is_replied):
            if self._next is None:
                self._next = asyncio.ensure_future(client.get_iopub_msg())
            if self._reply is None and not self._is_replied:
                self._reply = asyncio.ensure_future(client.get_shell_msg())
            waiting = {task for task in (self._next, self._reply) if task is not None}
            done, _ = await asyncio.wait(waiting, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            if not done and not await manager.is_alive():
                raise KernelDied("the kernel has ended")
            # Output first: what it says precedes the reply.
            if self._next in done:
                message = self._next.result()
                self._next = None
                if message["parent_header"].get("msg_id") == self._running:
                    self._is_idle |= is_idle(message)
                    yield message
            if self._reply is not None and self._reply in done:
                message = self._reply.result()
                self._reply = None
                if message["parent_header"].get("msg_id") == self._running:
                    self._is_replied = True
                    yield message
        self._running = ""

    async def interrupt(self) -> None:
        manager, _ = self._parts()
        await manager.interrupt_kernel()

    async def kill(self) -> None:
        if self._manager is not None and self._manager.has_kernel:
            await self._manager.signal_kernel(signal.SIGKILL)

    async def stop(self) -> None:
        for task in (self._next, self._reply):
            if task is not None:
                task.cancel()
        self._next = self._reply = None
        self._running = ""
        if self._client is not None:
            self._client.stop_channels()
        if self._manager is not None and self._manager.has_kernel:
            await self._manager.shutdown_kernel(now=True)
        if self._context is not None:
            self._context.destroy(linger=0)
        if self._sockets is not None:
            shutil.rmtree(self._sockets, ignore_errors=True)
        self._manager = self._client = self._context = self._sockets = None


def is_idle(message: Mapping[str, Any]) -> bool:
    """Whether a message says that nothing runs."""
    return message["msg_type"] == "status" and message["content"]["execution_state"] == "idle"


def translated(message: Mapping[str, Any]) -> list[Event]:
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
