"""Starts the kernel: `python -m code_interpreter_kernel -f CONNECTION_FILE`."""

from __future__ import annotations

import sys
from typing import Any

import zmq
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp
from traitlets import Type

from code_interpreter_kernel import formatters, variables

# Messages that wait for the server.
WAITING = 16


class CellKernel(IPythonKernel):
    """A kernel whose cells have variables of their own."""

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
