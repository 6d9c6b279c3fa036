"""Cells: what is printed, what they return, what fails, and in which language."""

from __future__ import annotations

import pytest
from e2b_code_interpreter import Sandbox


def test_values_output_and_counts(box: Sandbox) -> None:
    first = box.run_code("print('hello')\n1 + 1")
    assert (first.text, first.logs.stdout, first.error, first.execution_count) == ("2", ["hello\n"], None, 1)
    assert first.results[0].is_main_result
    assert box.run_code("x = 'abc'\nx").text == "abc"
    failed = box.run_code("x = (")
    assert failed.error and failed.error.name == "SyntaxError"
    again = box.run_code("import sys; print(x, end=''); print('bad', file=sys.stderr)")
    assert (again.logs.stdout, again.logs.stderr, again.execution_count) == (["abc"], ["bad\n"], 4)


def test_callbacks_get_everything_as_it_comes(shared: Sandbox) -> None:
    seen: dict[str, list[object]] = {"out": [], "err": [], "result": [], "error": []}
    shared.run_code(
        "import sys\nprint('a')\nprint('b', file=sys.stderr)\ndisplay(3)\n4/0",
        on_stdout=lambda message: seen["out"].append((message.line, message.error)),
        on_stderr=lambda message: seen["err"].append((message.line, message.error)),
        on_result=lambda result: seen["result"].append(result.text),
        on_error=lambda error: seen["error"].append((error.name, error.value)),
    )
    assert seen == {"out": [("a\n", False)], "err": [("b\n", True)], "result": ["3"], "error": [("ZeroDivisionError", "division by zero")]}


def test_errors_have_a_name_a_whole_value_and_a_traceback(shared: Sandbox) -> None:
    error = shared.run_code("class Answer(Exception): pass\nraise Answer('x' * 3_000_000)").error
    assert error and error.name == "Answer" and error.value == "x" * 3_000_000
    assert "raise Answer" in error.traceback and "\x1b" not in error.traceback
    left = shared.run_code("import sys; sys.exit(3)").error
    assert left and (left.name, left.value) == ("SystemExit", "3")
    asked = shared.run_code("input()").error
    assert asked and asked.name == "StdinNotImplementedError"
    # The kernel has outlived all of it.
    assert shared.run_code("Answer.__name__").text == "Answer"


def test_text_that_would_break_lines_arrives_as_it_is(shared: Sandbox) -> None:
    text = "a\u2028b\u2029c\u0085d\r\ne\U0001f600\x00\x7f"
    done = shared.run_code(f"print({text!r}, end='')\n{text!r}")
    assert "".join(done.logs.stdout) == text
    assert done.text == repr(text)[1:-1]


def test_jupyter_ways(shared: Sandbox) -> None:
    assert shared.run_code("  if True:\n      y = 5\n  y").text == "5"
    assert shared.run_code("import asyncio\nawait asyncio.sleep(0, 'slept')").text == "slept"
    assert "".join(shared.run_code("!echo from a shell").logs.stdout).strip() == "from a shell"
    assert "".join(shared.run_code("%%bash\necho magic").logs.stdout) == "magic\n"
    assert shared.run_code("list(range(5000))").results[0].json[-1] == 4999
    assert shared.run_code("list(range(1500))").text.endswith("1499]")


def test_packages_that_a_cell_installs_are_imported_at_once(shared: Sandbox) -> None:
    shared.files.write(
        "/home/user/pkg/pyproject.toml",
        '[project]\nname = "rfcell"\nversion = "1.0"\n[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
    )
    shared.files.write(
        "/home/user/pkg/backend.py",
        "import zipfile\n"
        "def build_wheel(to, *_, **__):\n"
        "    info = 'rfcell-1.0.dist-info/'\n"
        "    with zipfile.ZipFile(f'{to}/rfcell-1.0-py3-none-any.whl', 'w') as z:\n"
        "        z.writestr('rfcell.py', 'answer = 42')\n"
        "        z.writestr(info + 'METADATA', 'Metadata-Version: 2.1\\nName: rfcell\\nVersion: 1.0\\n')\n"
        "        z.writestr(info + 'WHEEL', 'Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')\n"
        "        z.writestr(info + 'RECORD', '')\n"
        "    return 'rfcell-1.0-py3-none-any.whl'\n",
    )
    installed = shared.run_code("!pip install --no-build-isolation --no-index ./pkg")
    assert shared.run_code("import rfcell; rfcell.answer").text == "42", installed.logs


SHOW = {
    "python": "import os; print(os.environ.get('NAME'))",
    "bash": 'echo "${NAME-None}"',
    "js": "console.log(process.env.NAME ?? 'None')",
    "ts": "console.log((process.env.NAME as string | undefined) ?? 'None')",
}


@pytest.mark.parametrize("language", SHOW)
def test_variables_of_a_call_are_data_and_undone(template: str, language: str) -> None:
    """Those that the sandbox has, one that it has not, and the path of programs; in the context of the language and in one that was made."""
    value = "it's \"quoted\" $HOME `id`\nand more"
    with Sandbox.create(timeout=120, envs={"V": "of the sandbox"}) as box:
        for where in ({"language": language}, {"context": box.create_code_context(language=language)}):

            def shown(name: str, where: dict[str, object] = where, **envs: str) -> str:
                return "".join(box.run_code(SHOW[language].replace("NAME", name), envs=envs or None, **where).logs.stdout)  # type: ignore[call-overload]

            path = shown("PATH")
            for name, before, given in (("V", "of the sandbox\n", value), ("ABSENT", "None\n", value), ("PATH", path, f"/mine:{path.strip()}")):
                assert shown(name) == before
                assert shown(name, **{name: given}) == f"{given}\n"
                assert shown(name) == before


def test_bash(shared: Sandbox) -> None:
    first = shared.run_code("declare -A m; m[a]=1; f() { echo \"f $1\"; }; cd /tmp; f 2; echo err >&2", language="bash")
    assert (first.logs.stdout, first.logs.stderr, first.error) == (["f 2\n"], ["err\n"], None)
    again = shared.run_code("echo ${m[a]} $PWD; cat; false", language="bash")
    assert again.logs.stdout == ["1 /tmp\n"]
    assert again.error and (again.error.name, again.error.value) == ("ExitStatus", "1")
    assert shared.run_code("echo $?", language="bash").logs.stdout == ["1\n"]
    assert shared.run_code("exit 3", language="bash").error.name == "ContextRestarting"
    assert shared.run_code("echo [${m[a]}]", language="bash").logs.stdout == ["[]\n"]


def test_javascript(shared: Sandbox) -> None:
    first = shared.run_code("import fs, { existsSync as has } from 'fs'\nconst a = 1\nconsole.log(has('/etc'), fs.existsSync('/no'))\n'text'", language="js")
    assert (first.logs.stdout, first.text, first.error) == (["true false\n"], "text", None)
    again = shared.run_code("const a = await Promise.resolve({ b: [1] }); const os = await import('node:os'); a", language="javascript")
    assert again.results[0].json == {"b": [1]} and again.results[0].is_main_result
    assert shared.run_code("await new Promise((done) => setTimeout(() => done(has('/etc') + os.EOL.length), 10))", language="js").text == "2"
    failed = shared.run_code("throw new TypeError('wrong')", language="js").error
    assert failed and (failed.name, failed.value) == ("TypeError", "wrong")
    rejected = shared.run_code("Promise.reject(new Error('lost')); await new Promise((done) => setTimeout(done, 20))", language="js")
    assert rejected.error is None and "lost" in "".join(rejected.logs.stderr)
    assert shared.run_code("a.b.length", language="js").text == "1"
    assert shared.run_code("process.cwd()", language="js").text == "/home/user"


def test_typescript(shared: Sandbox) -> None:
    done = shared.run_code("interface P { x: number }\nconst p: P = { x: 3 }\nconst y = p.x as number\ny * 2", language="ts")
    assert (done.text, done.error) == ("6", None)
    assert shared.run_code("p.x", language="typescript").text == "3"


def test_a_language_that_is_not_there_is_refused_at_once(shared: Sandbox) -> None:
    with pytest.raises(Exception, match="'cobol' is not in this template, which has python, bash, javascript, typescript$"):
        shared.run_code("DISPLAY 1", language="cobol")
    for language in ("r", "Java"):
        with pytest.raises(Exception, match=f"'{language.lower()}' is not in this template.*build argument LANGUAGES={language.lower()}"):
            shared.run_code("1", language=language)


def test_cells_are_numbered_and_found_again(box: Sandbox) -> None:
    """Without the database of cells that the kernel does without."""
    assert box.run_code("'first'").text == "first"
    assert box.run_code("(In[1], Out[1], _)").text == '("\'first\'", \'first\', \'first\')'
    assert "".join(box.run_code("%history").logs.stdout).splitlines()[0] == "'first'"
    assert not box.files.exists("/root/.ipython/profile_default/history.sqlite")


WHO = {"python": "import os; print(os.getuid(), os.environ['HOME'], os.getcwd())", "bash": "echo $(id -u) $HOME $PWD", "js": "console.log(process.getuid(), process.env.HOME, process.cwd())"}


@pytest.mark.parametrize("language", WHO)
def test_cells_run_as_root_in_the_directory_of_the_user(shared: Sandbox, language: str) -> None:
    assert shared.run_code(WHO[language], language=language).logs.stdout == ["0 /root /home/user\n"]
    # No program is taken from the directory that a cell is in.
    if language == "python":
        assert "" not in shared.run_code("os.environ['PATH'].split(':')").results[0].json
    # Commands are those of the user all the same.
    assert shared.commands.run("id -un").stdout == "user\n"


def test_cells_run_as_the_user_where_the_template_says_so(box: Sandbox) -> None:
    command = "CODE_INTERPRETER_CELLS=user exec /opt/code-interpreter/start --port 50123 --no-agent"
    box.commands.run(command, background=True, timeout=0)
    ask = "curl --silent --retry 60 --retry-connrefused --retry-delay 1 http://127.0.0.1:50123/execute --data"
    said = box.commands.run(f"""{ask} '{{"code": "import os; print(os.getuid(), os.environ[\\"HOME\\"])"}}'""", timeout=120).stdout
    assert '"text":"1000 /home/user\\n"' in said, said
