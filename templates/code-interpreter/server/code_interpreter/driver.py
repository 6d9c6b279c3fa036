"""Languages that a program of ours runs: Node for JavaScript and TypeScript, R, and Java. The programs are in `drivers/`, and each
keeps the state of one context.

A request is a line of JSON with a cell and its variables. The answer is a line of JSON, too: what the cell has shown, in order,
its value, and its error.
"""

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

DRIVERS = Path(__file__).parent / "drivers"


class DriverKernel(ChildKernel):
    """One process of a program. Its name in `drivers/` decides how it is started."""

    def __init__(self, program: Sequence[str], variables: Mapping[str, str], cwd: str, bounds: Bounds, is_typed: bool = False) -> None:
        super().__init__(variables, cwd, bounds)
        self._program = program
        self._is_typed = is_typed

    def command(self, requests: int, answers: int) -> Sequence[str]:
        places = {"{requests}": str(requests), "{answers}": str(answers)}
        return [places.get(word, word) for word in self._program]

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
                    continue
                for shown in said.get("shown", ()):
                    yield events.result(shown, False)
                if said.get("error"):
                    failed = said["error"]
                    yield events.error(failed["name"], failed["value"], failed["traceback"])
                elif said.get("data"):
                    yield events.result(said["data"], True)


class NodeKernel(DriverKernel):
    """JavaScript and TypeScript."""

    # It hears of an interrupt between two steps of a cell, so what has not then will not.
    grace_s = 2.0

    def __init__(self, variables: Mapping[str, str], cwd: str, bounds: Bounds, modules: str, is_typed: bool) -> None:
        program = ["node", "--no-warnings", str(DRIVERS / "node.js"), "{requests}", "{answers}", modules]
        super().__init__(program, variables, cwd, bounds, is_typed)


class RKernel(DriverKernel):
    """R."""

    def __init__(self, variables: Mapping[str, str], cwd: str, bounds: Bounds) -> None:
        program = ["Rscript", "--vanilla", str(DRIVERS / "cells.R"), "{requests}", "{answers}"]
        super().__init__(program, variables, cwd, bounds)


class JavaKernel(DriverKernel):
    """Java, with the classes that the recipe has compiled."""

    # What it has not ended then does not ask whether it is to end.
    grace_s = 2.0

    def __init__(self, variables: Mapping[str, str], cwd: str, bounds: Bounds) -> None:
        program = ["java", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-cp", str(DRIVERS / "classes"), "Cells", "{requests}", "{answers}"]
        super().__init__(program, variables, cwd, bounds)
