"""Starts the kernel: `python -m code_interpreter_kernel -f CONNECTION_FILE`."""

from __future__ import annotations

import sys
import threading
from typing import Any

import zmq
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp
from traitlets import Type

from code_interpreter_kernel import formatters, variables

# Messages that wait for the server.
WAITING = 16


class NoThread:
    """Stands for the thread that hands messages to subshells, which clients of the server cannot ask for. Without it, the kernel
    reads its socket itself; it wants to know from which thread it was made all the same."""

    parent_thread = threading.main_thread()

    def __bool__(self) -> bool:
        return False


class CellKernel(IPythonKernel):
    """A kernel whose cells have variables of their own."""

    # It sleeps before each reply, for clients that take the reply for the end of the output. The server waits for both.
    _execute_sleep = 0
    # Of the thread that is not there.
    _supports_kernel_subshells = False

    async def do_execute(self, *arguments: Any, cell_meta: Any = None, cell_id: Any = None, **options: Any) -> Any:
        """Runs a cell with what its metadata says about variables."""
        given = (cell_meta or {}).get("ringfence") or {}
        with variables.applied(given.get("sandbox") or {}, given.get("call") or {}):
            return await super().do_execute(*arguments, cell_meta=cell_meta, cell_id=cell_id, **options)


class App(IPKernelApp):
    """The program around the kernel."""

    kernel_class = Type(CellKernel, klass="ipykernel.kernelbase.Kernel")
    outstream_class = "code_interpreter_kernel.output.BoundedStream"

    def init_iopub(self, context: zmq.Context[Any]) -> None:
        """Opens the socket of all output as one that waits where it would drop messages."""
        context.setsockopt(zmq.SNDHWM, WAITING)
        context.setsockopt(zmq.XPUB_NODROP, 1)
        super().init_iopub(context)

    def init_control(self, context: zmq.Context[Any]) -> None:
        """Opens the socket for requests that are no cells."""
        super().init_control(context)
        self.shell_channel_thread = NoThread()

    def init_kernel(self) -> None:
        """Makes the kernel and its shell."""
        # Cells wait for each other's commits to a database of all that was ever typed. `In`, `Out` and `%history` do without.
        self.config.HistoryManager.enabled = False
        super().init_kernel()

    def init_shell(self) -> None:
        """Prepares what cells find."""
        super().init_shell()
        formatters.register(self.shell)


def main() -> None:
    """Runs until the server ends it."""
    # Not a directory of the cells: what lies there must not replace modules of the kernel before it runs.
    app = App.instance()
    app.initialize(sys.argv[1:])
    # Cells import from their directory.
    if "" not in sys.path:
        sys.path.insert(0, "")
    app.start()


if __name__ == "__main__":
    main()
