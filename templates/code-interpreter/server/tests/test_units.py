"""Units of the server: lines, results, requests and access."""

from __future__ import annotations

import asyncio
import json
import math
import os
import tempfile
import unittest
from contextlib import aclosing
from pathlib import Path

import aiohttp
from aiohttp import web

from code_interpreter import events, requests
from code_interpreter.access import Access, Refused, Unanswered
from code_interpreter.bash import prepare, sandbox_changes, undo
from code_interpreter.bounds import Bounds
from code_interpreter.kernel import Environment
from code_interpreter.languages import Languages


class Lines(unittest.TestCase):
    """What is on the stream."""

    def test_lines_are_ascii_and_one(self) -> None:
        line = events.line(events.output("stdout", "a\u2028\u0085\n\U0001f600"))
        self.assertTrue(line.isascii())
        self.assertEqual(line.count(b"\n"), 1)
        self.assertEqual(json.loads(line)["text"], "a\u2028\u0085\n\U0001f600")

    def test_numbers_that_json_lacks_are_null(self) -> None:
        event = events.result({"application/json": {"a": [math.nan, (math.inf, 1.5)]}}, True)
        self.assertEqual(json.loads(events.line(event))["json"], {"a": [None, [None, 1.5]]})


class Results(unittest.TestCase):
    """Fields of results."""

    def test_absent_formats_have_no_field(self) -> None:
        self.assertEqual(events.result({"text/html": ["<b>", "</b>"]}, False), {"type": "result", "is_main_result": False, "html": "<b></b>"})

    def test_quotes_around_a_text_are_left_out(self) -> None:
        for text, want in (("'a'", "a"), ('"a"', "a"), ("'a\"", "'a\""), ("'", "'"), ("''", "")):
            self.assertEqual(events.unquoted(text), want)

    def test_pictures_have_no_line_breaks(self) -> None:
        self.assertEqual(events.result({"image/png": "aa\nbb\n", "x/y": 1}, True)["png"], "aabb")


class Requests(unittest.TestCase):
    """Bodies."""

    def test_what_is_absent_or_null(self) -> None:
        for body in (b'{"code": "1"}', b'{"code": "1", "context_id": null, "language": null, "env_vars": null}'):
            self.assertEqual(requests.execute(body), requests.Execute("1"))
        self.assertEqual(requests.create(b""), requests.Create())

    def test_what_is_refused(self) -> None:
        for body in (b"\xff", b"[", b"3", b"{}", b'{"code": "", "env_vars": {"A=B": ""}}', b'{"code": "", "language": "a\\u0000"}'):
            with self.assertRaises(requests.Invalid):
                requests.execute(body)


class Shell(unittest.TestCase):
    """Commands about variables."""

    def test_values_are_data_and_odd_names_are_left_out(self) -> None:
        self.assertEqual(sandbox_changes({"A": "1"}, {"A": "1", "B": "it's", "C;D": "x"}), "export B='it'\"'\"'s'\n")
        self.assertEqual(prepare({"a b": "1"}) + undo({"a b": "1"}), "")


class Noise(unittest.IsolatedAsyncioTestCase):
    """Kernels that never stop to say something, and do not hear of an interrupt."""

    CELLS = {
        "bash": "trap '' INT; while :; do echo noise; done",
        "python": "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: print('noise', flush=True)",
    }

    async def abandoned(self, language: str) -> None:
        place = os.environ.get("CODE_INTERPRETER", "/opt/code-interpreter")
        kernel = Languages(Bounds(), f"{place}/environment/bin/python", f"{place}/kernel").make(language, "/tmp")
        await kernel.start()
        try:
            async with aclosing(kernel.execute(self.CELLS[language], Environment())) as said:
                async for event in said:
                    if event["type"] == "stdout":
                        break
            await kernel.interrupt()
            turns = asyncio.ensure_future(self.turns())
            with self.assertRaises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await kernel.drain()
            # Others had their turn meanwhile.
            turns.cancel()
            self.assertGreater(self.seen, 5)
        finally:
            await kernel.stop()

    async def turns(self) -> None:
        self.seen = 0
        while True:
            self.seen += 1
            await asyncio.sleep(0.01)

    async def test_bash(self) -> None:
        await self.abandoned("bash")

    async def test_python(self) -> None:
        await self.abandoned("python")


class PartsOfLines(unittest.IsolatedAsyncioTestCase):
    """Pieces of output of a program that writes parts of lines."""

    def setUp(self) -> None:
        self.kernel = Languages(Bounds(), "python3", "/").make("bash", "/tmp")

    def test_a_piece_ends_with_a_line(self) -> None:
        pieces = [self.kernel._whole_lines("stdout", text) for text in ("4", "2\nan", "d ", "on\n", "x" * 70_000, "y\n")]
        self.assertEqual(pieces, ["", "42\n", "", "and on\n", "x" * 70_000, "y\n"])

    async def test_what_has_no_end_is_not_kept(self) -> None:
        await self.kernel.start()
        try:
            with tempfile.TemporaryDirectory() as place:
                cell = f"printf begun; until [ -e {place}/seen ]; do sleep 0.02; done; printf ended"
                shown = ""
                async with aclosing(self.kernel.execute(cell, Environment())) as said:
                    async for event in said:
                        shown += event.get("text", "")
                        if shown == "begun":
                            Path(place, "seen").touch()
            self.assertEqual(shown, "begunended")
        finally:
            await self.kernel.stop()


class Asked(unittest.IsolatedAsyncioTestCase):
    """What the agent says about a token."""

    async def asyncSetUp(self) -> None:
        self.requests = 0
        self.answer: web.Response | None = None

        async def envs(request: web.Request) -> web.Response:
            self.requests += 1
            if request.headers.get("X-Access-Token") != "right":
                return web.json_response({"message": "no"}, status=401)
            return self.answer or web.json_response({"A": "1", "B": 2})

        app = web.Application()
        app.router.add_get("/envs", envs)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.session = aiohttp.ClientSession()
        self.given = Path(tempfile.mkdtemp()) / "sandbox.json"
        port = self.runner.addresses[0][1]
        self.access = Access(self.session, f"http://127.0.0.1:{port}", str(self.given))

    async def asyncTearDown(self) -> None:
        await self.session.close()
        await self.runner.cleanup()

    async def test_an_answer_holds_until_the_sandbox_changes_hands(self) -> None:
        self.given.write_text("one")
        for _ in range(3):
            self.assertEqual(await self.access.variables("right"), {"A": "1"})
        self.assertEqual(self.requests, 1)
        other = self.given.with_suffix(".new")
        other.write_text("another")
        other.rename(self.given)
        await self.access.variables("right")
        self.assertEqual(self.requests, 2)

    async def test_refusals_are_not_kept_and_nothing_else_is_a_yes(self) -> None:
        for token in (None, "", "wrong"):
            with self.assertRaises(Refused):
                await self.access.variables(token)
        self.answer = web.Response(status=503)
        with self.assertRaises(Unanswered):
            await self.access.variables("right")
        self.answer = web.json_response([1])
        with self.assertRaises(Unanswered):
            await self.access.variables("right")
        await self.runner.cleanup()
        with self.assertRaises(Unanswered):
            await asyncio.wait_for(self.access.variables("right"), 10)


if __name__ == "__main__":
    unittest.main()
