"""What goes wrong and what goes on: kernels that die, cells that never end, pauses, forks, and much output."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from e2b import SandboxException, TimeoutException
from e2b_code_interpreter import Sandbox

from harness.patience import within
from harness.platform import Platform
from harness.traffic import until


def test_a_kernel_runs_when_create_returns(box: Sandbox) -> None:
    """Before the first cell: nothing has to be started for it."""
    assert len(box.commands.run("pgrep -f code_interpreter_kerne[l]").stdout.split()) == 1
    first = box.run_code("import os; os.getpid()")
    assert (first.text, first.execution_count) == (box.commands.run("pgrep -f code_interpreter_kerne[l]").stdout.strip(), 1)


def test_a_kernel_that_dies_is_replaced(shared: Sandbox) -> None:
    shared.run_code("v = 1")

    def kill(_: object) -> None:
        shared.commands.run("pkill -9 -f code_interpreter_kerne[l]", user="root")

    died = shared.run_code("import time; print('last'); time.sleep(600)", on_stdout=kill)
    assert died.error and died.error.name == "ContextRestarting"
    assert "".join(died.logs.stdout) == "last\n"
    after = shared.run_code("'v' in dir()")
    assert (after.text, after.execution_count) == ("False", 1)


@pytest.mark.parametrize(
    ("language", "cell", "after"),
    [
        ("python", "print('last'); import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "print('v' in dir())"),
        ("python", "print('last'); import os; os._exit(3)", "print('v' in dir())"),
        ("js", "console.log('last'); process.kill(process.pid, 'SIGKILL')", "console.log(typeof v !== 'undefined' ? 'True' : 'False')"),
        ("js", "console.log('last'); process.exit(3)", "console.log(typeof v !== 'undefined' ? 'True' : 'False')"),
    ],
)
def test_a_cell_that_kills_its_kernel_is_told_so_and_the_next_one_has_another(shared: Sandbox, language: str, cell: str, after: str) -> None:
    shared.run_code("v = 1", language=language)
    died = shared.run_code(cell, language=language)
    assert died.error and died.error.name == "ContextRestarting"
    # What it printed before may have been on its way.
    assert "".join(died.logs.stdout) in ("last\n", "")
    assert shared.run_code(after, language=language).logs.stdout == ["False\n"]


@pytest.mark.parametrize(
    ("language", "pid", "after"),
    [
        ("python", "v = 1; import os; print(os.getpid())", "print('v' in dir())"),
        ("bash", "v=1; echo $$", "[ -n \"$v\" ] && echo True || echo False"),
        ("js", "v = 1; console.log(process.pid)", "console.log(typeof v !== 'undefined' ? 'True' : 'False')"),
    ],
)
def test_a_kernel_that_is_killed_while_nothing_runs(shared: Sandbox, language: str, pid: str, after: str) -> None:
    """The next cell says that the variables are lost, and does not run."""
    kernel = "".join(shared.run_code(pid, language=language).logs.stdout).strip()
    shared.commands.run(f"kill -9 {kernel}", user="root")
    next_one = shared.run_code(after, language=language)
    assert next_one.error and next_one.error.name == "ContextRestarting" and next_one.logs.stdout == []
    assert shared.run_code(after, language=language).logs.stdout == ["False\n"]


@pytest.mark.parametrize(
    ("language", "setup", "endless", "check", "want"),
    [
        ("python", "k = 1", "while True: pass", "print(k)", "1\n"),
        ("python", "k = 2", "import time; time.sleep(600)", "print(k)", "2\n"),
        ("bash", "k=3", "while :; do :; done", "echo $k", "3\n"),
        ("bash", "k=4", "sleep 600", "echo $k", "4\n"),
        ("js", "k = 5", "await new Promise(() => setTimeout(() => {}, 600000))", "console.log(k)", "5\n"),
        # What never yields cannot be interrupted, so the context has another process.
        ("js", "k = 6", "while (true);", "console.log(typeof k)", "undefined\n"),
    ],
)
def test_a_cell_that_never_ends_is_interrupted_when_its_client_goes(shared: Sandbox, language: str, setup: str, endless: str, check: str, want: str) -> None:
    # The timeout is that of the whole request. Only the last one of these cells has to have begun by then.
    for timeout in (0.5, 2, 8) if want == "undefined\n" else (0.5,):
        shared.run_code(setup, language=language)
        with pytest.raises(TimeoutException):
            shared.run_code(endless, language=language, timeout=timeout)
        seen = shared.run_code(check, language=language).logs.stdout
        if seen == [want]:
            break
    assert seen == [want]


def test_who_leaves_the_queue_interrupts_nobody(shared: Sandbox) -> None:
    cell = "import time, pathlib; pathlib.Path('/tmp/runs').touch()\nwhile not pathlib.Path('/tmp/go').exists(): time.sleep(0.05)\n'whole'"
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(shared.run_code, cell, timeout=within(120))
        try:
            until(lambda: shared.files.exists("/tmp/runs"), "the first cell runs")
            with pytest.raises(TimeoutException):
                shared.run_code("1", timeout=0.3)
        finally:
            shared.files.write("/tmp/go", "")
        assert running.result().text == "whole"


@pytest.mark.parametrize(("language", "cell"), [("python", "for _ in range(100): print('x' * 999_999)"), ("bash", "yes 123456789 | head -c 100000000")])
def test_much_output_is_passed_on_and_not_kept(box: Sandbox, language: str, cell: str) -> None:
    size = 0

    def count(message: object) -> None:
        nonlocal size
        size += len(message.line)  # type: ignore[attr-defined]

    done = box.run_code(cell, language=language, on_stdout=count, timeout=within(120))
    assert (size, done.error) == (100_000_000, None)
    peak = box.commands.run("cat /proc/$(pgrep -f -- '-m code_interpreter ' | head -1)/status | grep VmHWM").stdout.split()
    assert int(peak[1]) < 256 << 10, peak


def test_a_client_that_reads_nothing_stops_the_cell(box: Sandbox) -> None:
    """The cell is held back where its client does not read: neither it nor the server collects what was not read."""
    headers = {"X-Access-Token": box._envd_access_token or "", "E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": "49999"}
    code = "import pathlib\nfor n in range(3000):\n    print('y' * 999_999)\n    pathlib.Path('/tmp/at').write_text(str(n))"
    with httpx.stream("POST", f"{box._jupyter_url}/execute", json={"code": code}, headers=headers, timeout=30) as answer:
        assert answer.status_code == 200
        until(lambda: box.files.exists("/tmp/at"), "the cell has begun")
        seen = [-1]

        def stands() -> bool:
            seen.append(int(box.commands.run("sleep 0.5; cat /tmp/at").stdout or 0))
            return seen[-1] == seen[-2]

        until(stands, lambda: f"the cell goes on: {seen}")
        assert seen[-1] < 500, seen
    assert box.run_code("'free'").text == "free"


def forked(platform: Platform, parent: Sandbox) -> Sandbox:
    """A fork, which the SDK has no method for."""
    headers = {"X-API-Key": platform.credentials()["E2B_API_KEY"]}
    answer = httpx.post(f"{platform.url}/sandboxes/{parent.sandbox_id}/fork", headers=headers, json={"timeout": 120}, timeout=60)
    assert answer.status_code == 201, answer.text
    return Sandbox.connect(answer.json()[0]["sandbox"]["sandboxID"], timeout=300)


def test_variables_outlive_a_pause_and_a_fork(platform: Platform, box: Sandbox) -> None:
    box.run_code("a = [1]")
    box.run_code("b=2", language="bash")
    box.run_code("c = 3", language="js")
    kernels = "pgrep -f code_interpreter_kerne[l]"
    running = box.commands.run(kernels).stdout
    box.pause()
    again = Sandbox.connect(box.sandbox_id, timeout=300)
    # They are the same processes, and run before anything is asked of them.
    assert again.commands.run(kernels).stdout == running
    assert again.run_code("a.append(2); a").text == "[1, 2]"
    fork = forked(platform, again)
    try:
        assert fork.commands.run(kernels).stdout == running
        assert fork.run_code("a.append(3); a").text == "[1, 2, 3]"
        assert fork.run_code("echo $b", language="bash").logs.stdout == ["2\n"]
        assert fork.run_code("c", language="js").text == "3"
        assert again.run_code("a").text == "[1, 2]"
        # Who may run cells in the parent may not in the fork.
        token = again._envd_access_token or ""
        headers = {"E2b-Sandbox-Id": fork.sandbox_id, "E2b-Sandbox-Port": "49999", "X-Access-Token": token}
        refused = httpx.post(f"{fork._jupyter_url}/execute", json={"code": "1"}, headers=headers, timeout=within(30))
        assert refused.status_code == 401, refused.text
    finally:
        fork.kill()


def test_a_server_that_dies_comes_back(box: Sandbox) -> None:
    box.commands.run("pkill -9 -f -- '-m code_interpreter '", user="root")

    def answers() -> bool:
        try:
            return box.run_code("1 + 1").text == "2"
        except SandboxException:
            return False

    until(answers, "another server answers", within_s=30)
    until(lambda: box.commands.run("pgrep -fc code_interpreter_kernel").stdout.strip() == "1", "kernels end with their server")


def test_only_the_token_of_the_sandbox_runs_cells(box: Sandbox, shared: Sandbox) -> None:
    url, port = f"{box._jupyter_url}/execute", {"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": "49999"}
    for token in ({}, {"X-Access-Token": "wrong"}, {"X-Access-Token": shared._envd_access_token}):
        answer = httpx.post(url, json={"code": "1"}, headers={**port, **token}, timeout=within(30))
        assert (answer.status_code, "access token" in answer.text) == (401, True), (token, answer.text)
    right = httpx.post(url, json={"code": "1"}, headers={**port, "X-Access-Token": box._envd_access_token}, timeout=within(30))
    assert right.status_code == 200 and right.text.splitlines()[-1] == '{"type":"end_of_execution"}'
    assert right.text.isascii()


def test_contexts_are_open_to_who_reaches_the_port_and_the_port_can_be_closed(box: Sandbox) -> None:
    """No published client sends the token of the sandbox with requests about contexts, so the token of its traffic is what closes
    them; clients send that one always."""
    port = {"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": "49999"}
    seen = httpx.get(f"{box._jupyter_url}/contexts", headers=port, timeout=within(30))
    assert seen.status_code == 200 and [sorted(each) for each in seen.json()] == [["cwd", "id", "language"]] * 2
    with Sandbox.create(timeout=120, network={"allow_public_traffic": False}) as closed:
        port["E2b-Sandbox-Id"] = closed.sandbox_id
        for headers in ({}, {"E2B-Traffic-Access-Token": "wrong"}, {"X-Access-Token": closed._envd_access_token or ""}):
            for method, path in (("GET", "contexts"), ("POST", "contexts"), ("POST", "execute"), ("GET", "health")):
                answer = httpx.request(method, f"{closed._jupyter_url}/{path}", headers={**port, **headers}, json={"code": "1"}, timeout=within(30))
                assert answer.status_code == 403, (headers, method, path, answer.text)
        assert closed.run_code("1 + 1").text == "2"
        context = closed.create_code_context()
        closed.restart_code_context(context)
        assert [each.id for each in closed.list_code_contexts()][2:] == [context.id]
        closed.remove_code_context(context)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("{", "the body is not JSON"),
        ("[]", "the body must be an object"),
        ("{}", "code is missing"),
        ('{"code": 1}', "code must be a string"),
        ('{"code": "1", "context_id": "a", "language": "python"}', "give context_id or language, not both"),
        ('{"code": "1", "env_vars": {"A": 1}}', "env_vars must have names without ="),
    ],
)
def test_bad_requests_say_what_is_wrong(shared: Sandbox, body: str, says: str) -> None:
    headers = {"X-Access-Token": shared._envd_access_token or "", "E2b-Sandbox-Id": shared.sandbox_id, "E2b-Sandbox-Port": "49999"}
    answer = httpx.post(f"{shared._jupyter_url}/execute", content=body, headers=headers, timeout=within(30))
    assert answer.status_code == 400 and says in answer.text, answer.text
