"""JavaScript and TypeScript: Node with `drivers/node.js`, which keeps the state of one context."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path

from code_interpreter import events
from code_interpreter.bounds import Bounds
from code_interpreter.child import ChildKernel
from code_interpreter.events import Event
from code_interpreter.kernel import Environment

DRIVER = Path(__file__).parent / "drivers" / "node.js"


class NodeKernel(ChildKernel):
    """One process of Node."""

    # It hears of an interrupt between two steps of a cell, so what has not then will not.
    grace_s = 2.0

    def __init__(self, variables: Mapping[str, str], cwd: str, bounds: Bounds, modules: str, is_typed: bool) -> None:
        super().__init__(variables, cwd, bounds)
        self._modules = modules
        self._is_typed = is_typed

    def command(self, requests: int, answers: int) -> Sequence[str]:
        return ["node", "--no-warnings", str(DRIVER), str(requests), str(answers), self._modules]

    async def execute(self, code: str, environment: Environment) -> AsyncGenerator[Event, None]:
        self._count += 1
        yield events.started(self._count)
        request = {
            "code": code,
            "typed": self._is_typed,
            "sandbox": dict(environment.sandbox),
            "call": dict(environment.call),
        }
        await self._send(json.dumps(request).encode("ascii") + b"\n")
        async with aclosing(self._until_idle()) as all_said:
            async for name, said in all_said:
                if name != "answer":
                    yield events.output(name, said)
                elif said.get("error"):
                    failed = said["error"]
                    yield events.error(failed["name"], failed["value"], failed["traceback"])
                elif said.get("data"):
                    yield events.result(said["data"], True)
