"""Limits of the server, each from both sides: what is just allowed, and what is one too many."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import unittest
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from code_interpreter.access import Access
from code_interpreter.app import Interpreter
from code_interpreter.bounds import Bounds
from code_interpreter.contexts import Contexts
from code_interpreter.languages import Languages


class Limits(unittest.IsolatedAsyncioTestCase):
    """A server with small bounds, and requests to it."""

    async def asyncSetUp(self) -> None:
        self.session = aiohttp.ClientSession()
        self.place = tempfile.TemporaryDirectory()

    async def asyncTearDown(self) -> None:
        await self.session.close()
        await self.runner.cleanup()
        await self.contexts.close()
        self.place.cleanup()

    async def serve(self, **bounds: Any) -> None:
        """Starts a server, without a kernel."""
        installed = os.environ.get("CODE_INTERPRETER", "/opt/code-interpreter")
        own = Bounds(**bounds)
        self.contexts = Contexts(Languages(own, f"{installed}/environment/bin/python", f"{installed}/kernel"), own)
        self.interpreter = Interpreter(self.contexts, Access(self.session, None), own)
        self.runner = web.AppRunner(self.interpreter.app(), handler_cancellation=True)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.port = self.runner.addresses[0][1]

    async def ask(self, method: str, path: str, body: object = None) -> tuple[int, str]:
        """The status and the text of an answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.request(method, f"http://127.0.0.1:{self.port}{path}", data=data) as answer:
            return answer.status, await answer.text()

    async def run_cell(self, code: str) -> tuple[int, str]:
        """A cell of bash."""
        return await self.ask("POST", "/execute", {"code": code, "language": "bash"})

    async def until_running(self, count: int) -> None:
        """Returns when some cells run or wait."""
        async with asyncio.timeout(30):
            while self.interpreter._executions != count:
                await asyncio.sleep(0.01)

    async def test_contexts(self) -> None:
        await self.serve(contexts=2)
        made = [await self.ask("POST", "/contexts", {"language": "bash"}) for _ in range(3)]
        self.assertEqual([status for status, _ in made], [200, 200, 429])
        self.assertEqual(made[2][1], "there are 2 contexts, and no more are allowed: remove one")
        # The one of a language that is used for the first time is one too many as well.
        self.assertEqual((await self.run_cell("true"))[0], 429)
        await self.ask("DELETE", f"/contexts/{json.loads(made[0][1])['id']}")
        self.assertEqual((await self.run_cell("true"))[0], 200)

    async def test_cells(self) -> None:
        await self.serve(executions=2)
        end = Path(self.place.name, "end")
        cell = f"until [ -e {end} ]; do sleep 0.02; done; echo done"
        # The second one waits for the first.
        cells = [asyncio.create_task(self.run_cell(cell)) for _ in range(2)]
        await self.until_running(2)
        self.assertEqual(await self.run_cell("true"), (429, "2 cells run or wait, and no more are allowed"))
        end.touch()
        for status, text in await asyncio.gather(*cells):
            self.assertEqual((status, '"text":"done\\n"' in text), (200, True), text)
        self.assertEqual((await self.run_cell("true"))[0], 200)

    async def test_the_size_of_a_request(self) -> None:
        await self.serve(body=1000)
        body = json.dumps({"code": "echo whole #", "language": "bash"})
        largest = body.replace("#", "#" * (1001 - len(body))).encode()
        self.assertEqual(len(largest), 1000)
        status, text = await self.ask("POST", "/execute", largest)
        self.assertEqual((status, '"text":"whole\\n"' in text), (200, True), text)
        status, text = await self.ask("POST", "/execute", largest.replace(b"#", b"##", 1))
        self.assertEqual(status, 413, text)

    async def test_signs_of_life(self) -> None:
        await self.serve(keepalive_s=0.2)
        _, text = await self.run_cell("true")
        self.assertNotIn("keepalive", text)
        _, text = await self.run_cell("sleep 0.7; echo done")
        kinds = [json.loads(line)["type"] for line in text.splitlines()]
        # A machine that stands still makes the cell last longer.
        self.assertGreaterEqual(kinds.count("keepalive"), 2, kinds)
        self.assertEqual(kinds[-2:], ["stdout", "end_of_execution"])

    async def test_a_client_that_reads_nothing(self) -> None:
        await self.serve(stalled_s=0.5)
        body = json.dumps({"code": "yes", "language": "bash"})
        head = f"POST /execute HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1)
        try:
            with self.assertLogs("code_interpreter.app", "ERROR") as logged:
                writer.write((head + body).encode())
                await self.until_running(1)
                # It counts as gone, and its cell is interrupted.
                await self.until_running(0)
            self.assertIn("a stream was cut", logged.output[0])
            status, text = await self.run_cell("echo free")
            self.assertEqual((status, '"text":"free\\n"' in text), (200, True), text)
        finally:
            writer.close()

    async def test_the_start_of_a_kernel(self) -> None:
        await self.serve(start_s=0.01)
        status, text = await self.ask("POST", "/contexts", {"language": "python"})
        self.assertEqual((status, text), (500, "the kernel did not start: it does not answer"))
        self.assertEqual(json.loads((await self.ask("GET", "/contexts"))[1]), [])


class Defaults(unittest.TestCase):
    """What the documentation says."""

    def test_bounds(self) -> None:
        bounds = Bounds()
        self.assertEqual((bounds.contexts, bounds.executions, bounds.body), (64, 256, 32 << 20))
        self.assertEqual((bounds.start_s, bounds.keepalive_s, bounds.stalled_s), (45, 30, 600))


if __name__ == "__main__":
    unittest.main()
