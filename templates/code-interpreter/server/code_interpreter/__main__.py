"""Runs the server: `python -m code_interpreter --python PYTHON --kernel DIRECTORY --modules DIRECTORY`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal

import aiohttp
from aiohttp import web

from code_interpreter.access import AGENT, Access
from code_interpreter.app import Interpreter
from code_interpreter.bounds import Bounds
from code_interpreter.contexts import Contexts
from code_interpreter.languages import Languages


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="code_interpreter")
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", type=int, default=49999)
    parser.add_argument("--python", required=True, help="the interpreter of cells")
    parser.add_argument("--kernel", required=True, help="the directory of code_interpreter_kernel")
    parser.add_argument("--modules", default="", help="the directory with the node_modules of drivers/node.js")
    parser.add_argument("--agent", default=AGENT, help="the agent of the sandbox, which knows the access token")
    parser.add_argument("--no-agent", action="store_true", help="let everybody run cells, where there is no sandbox")
    parser.add_argument("--keepalive", type=float, default=Bounds.keepalive_s, help="seconds between two signs of life")
    return parser.parse_args()


async def serve(given: argparse.Namespace) -> None:
    """Serves until a signal."""
    bounds = Bounds(keepalive_s=given.keepalive)
    languages = Languages(bounds, given.python, given.kernel, given.modules)
    contexts = Contexts(languages, bounds)
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    timeout = aiohttp.ClientTimeout(total=10)
    async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:
        access = Access(session, None if given.no_agent else given.agent)
        app = Interpreter(contexts, access, bounds).app()
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, keepalive_timeout=640)
        await runner.setup()
        try:
            # The port opens when a cell can run, so that nobody finds a server that is not ready.
            await contexts.start()
            await web.TCPSite(runner, given.host, given.port, reuse_address=True).start()
            await ended.wait()
        finally:
            await runner.cleanup()
            await contexts.close()


def main() -> None:
    """Runs the server."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    asyncio.run(serve(arguments()))


if __name__ == "__main__":
    main()
