"""Bash: an interactive shell without a terminal, whose prompt is the sign that a cell has ended.

An interactive shell is what goes back to its prompt when it is interrupted, wherever a cell is. Cells are evaluated outside of
any function, so that everything that they declare stays.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing

from code_interpreter import events
from code_interpreter.child import ChildKernel
from code_interpreter.events import Event
from code_interpreter.kernel import Environment

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Reads a cell up to a NUL and evaluates it. Cells have no input, so that they cannot read the next one.
CELL = 'IFS= read -r -d "" -u {fd} __rf_cell; __rf_status $__rf_last; eval "$__rf_cell" </dev/null\n'


class BashKernel(ChildKernel):
    """A shell."""

    # The descriptor of its requests, and what is to be run to undo the variables of a call.
    _input = -1
    _undo = ""

    def command(self, requests: int, answers: int) -> Sequence[str]:
        self._input = requests
        self._variables |= {
            "PS1": "",
            "PS2": "",
            "PROMPT_COMMAND": f'__rf_last=$?; printf "%s\\n" "$__rf_last" >&{answers}',
            "HISTFILE": "",
        }
        return ["bash", "--noprofile", "--norc", "--noediting", "+m", "+H", "-i"]

    async def start(self) -> None:
        await super().start()
        # With the function, `$?` at the begin of a cell is what the cell before has left.
        await self._send(b"", b"__rf_status() { return ${1:-0}; }; export -n PS1 PS2 PROMPT_COMMAND; unset HISTFILE\n")
        await self.drain()

    async def _cell(self, code: str) -> AsyncGenerator[tuple[str, object], None]:
        # A shell knows no NUL.
        data = code.replace("\0", "").encode(errors="replace") + b"\0"
        await self._send(data, CELL.format(fd=self._input).encode())
        async with aclosing(self._until_idle()) as all_said:
            async for said in all_said:
                yield said

    async def _silent(self, code: str) -> None:
        async for _ in self._cell(code):
            pass

    async def execute(self, code: str, environment: Environment) -> AsyncGenerator[Event, None]:
        before = sandbox_changes(self._sandbox, environment.sandbox) + prepare(environment.call)
        self._sandbox = dict(environment.sandbox)
        if before:
            await self._silent(before)
        self._undo = undo(environment.call)
        self._count += 1
        yield events.started(self._count)
        async with aclosing(self._cell(code)) as all_said:
            async for name, said in all_said:
                if name != "answer":
                    yield events.output(name, str(said))
                elif said != 0:
                    yield events.error("ExitStatus", str(said))
        await self._undone()

    async def _undone(self) -> None:
        code, self._undo = self._undo, ""
        if code:
            await self._silent(code)

    async def drain(self) -> None:
        await super().drain()
        await self._undone()


def sandbox_changes(had: Mapping[str, str], has: Mapping[str, str]) -> str:
    """Commands that set what is new."""
    changed = {name: value for name, value in has.items() if had.get(name) != value}
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in changed.items() if NAME.fullmatch(name))


def prepare(call: Mapping[str, str]) -> str:
    """Commands that set variables of a call, and keep what they had."""
    return "".join(
        f"[[ -v {name} ]] && __rf_kept_{name}=${name}; export {name}={shlex.quote(value)}\n"
        for name, value in call.items()
        if NAME.fullmatch(name)
    )


def undo(call: Mapping[str, str]) -> str:
    """Commands that undo it."""
    return "".join(
        f"if [[ -v __rf_kept_{name} ]]; then export {name}=$__rf_kept_{name}; unset __rf_kept_{name}; else unset {name}; fi\n"
        for name in call
        if NAME.fullmatch(name)
    )
