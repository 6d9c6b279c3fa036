"""Contexts: each has its own state, directory and language; and many run at the same time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from e2b import NotFoundException
from e2b_code_interpreter import Sandbox

from harness.patience import within
from harness.traffic import until


def test_contexts_are_made_listed_restarted_and_removed(box: Sandbox) -> None:
    assert [context.language for context in box.list_code_contexts()] == ["python", "javascript"]
    made = box.create_code_context(cwd="/tmp", language="Python")
    assert (made.language, made.cwd) == ("python", "/tmp")
    assert [context.id for context in box.list_code_contexts()][2:] == [made.id]
    assert box.run_code("import os; z = 1; os.getcwd()", context=made).text == "/tmp"
    assert box.run_code("z").error.name == "NameError"
    box.restart_code_context(made)
    again = box.run_code("import os; print('z' in dir()); os.getcwd()", context=made)
    assert (again.logs.stdout, again.text, again.execution_count) == (["False\n"], "/tmp", 1)
    box.remove_code_context(made.id)
    for call in (box.remove_code_context, box.restart_code_context, lambda context: box.run_code("1", context=context)):
        with pytest.raises(NotFoundException):
            call(made)
    # A directory that cannot be entered is what was asked for, and a removed default context is made again.
    assert box.create_code_context(cwd="/nowhere", language="bash").cwd == "/nowhere"
    for context in box.list_code_contexts():
        box.remove_code_context(context)
    assert box.run_code("1 + 1").text == "2"


@pytest.mark.parametrize(("language", "cell"), [("bash", "pwd"), ("js", "console.log(process.cwd())"), ("ts", "console.log(process.cwd() as string)")])
def test_directories_hold_in_every_language(shared: Sandbox, language: str, cell: str) -> None:
    context = shared.create_code_context(cwd="/var/tmp", language=language)
    assert shared.run_code(cell, context=context).logs.stdout == ["/var/tmp\n"]
    shared.remove_code_context(context)


def test_cells_of_one_context_run_in_turn_and_contexts_side_by_side(shared: Sandbox) -> None:
    other = shared.create_code_context()
    # The first of them ends only when the other context has run a cell meanwhile.
    cell = (
        "import pathlib, time; t = time.time(); pathlib.Path('/tmp/one').touch()\n"
        "while not pathlib.Path('/tmp/two').exists(): time.sleep(0.01)\n"
        "time.sleep(0.4); t, time.time()"
    )
    with ThreadPoolExecutor(3) as pool:
        one = [pool.submit(shared.run_code, cell, timeout=within(60)) for _ in range(3)]
        until(lambda: shared.files.exists("/tmp/one"), "the first context runs a cell")
        shared.run_code("import pathlib; pathlib.Path('/tmp/two').touch()", context=other, timeout=within(30))
        spans = sorted(tuple(run.result().results[0].json) for run in one)
    assert all(before[1] <= after[0] for before, after in zip(spans, spans[1:], strict=False)), spans
    shared.remove_code_context(other)


def test_twenty_contexts_at_once(box: Sandbox) -> None:
    def use(number: int) -> str | None:
        context = box.create_code_context(language=("python", "bash", "js", "ts")[number % 4])
        cell = {"python": f"n = {number}", "bash": f"n={number}", "javascript": f"n = {number}", "typescript": f"const n: number = {number}"}
        box.run_code(cell[context.language], context=context)
        show = {"python": "print(n)", "bash": "echo $n", "javascript": "console.log(n)", "typescript": "console.log(n)"}
        return "".join(box.run_code(show[context.language], context=context).logs.stdout)

    with ThreadPoolExecutor(20) as pool:
        assert list(pool.map(use, range(20))) == [f"{number}\n" for number in range(20)]
    assert len(box.list_code_contexts()) == 22
