"""Running programs: output, exit codes, environment, users, input, signals and limits on time."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from e2b import (
    AuthenticationException,
    CommandExitException,
    InvalidArgumentException,
    NotFoundException,
    PtySize,
    Sandbox,
    SandboxException,
    TimeoutException,
)

from harness.patience import within
from harness.traffic import until


def test_output_and_exit_code(sandbox: Sandbox) -> None:
    result = sandbox.commands.run("echo out; echo err >&2")
    assert (result.stdout, result.stderr, result.exit_code, result.error) == ("out\n", "err\n", 0, None)


def test_a_failure_raises_with_everything_it_said(sandbox: Sandbox) -> None:
    with pytest.raises(CommandExitException) as failed:
        sandbox.commands.run("echo out; echo err >&2; exit 7")
    assert failed.value.exit_code == 7
    assert (failed.value.stdout, failed.value.stderr) == ("out\n", "err\n")
    assert failed.value.error == "exit status 7"


def test_a_missing_program_is_127(sandbox: Sandbox) -> None:
    with pytest.raises(CommandExitException) as failed:
        sandbox.commands.run("no-such-program")
    assert failed.value.exit_code == 127


def test_callbacks_see_the_output_while_it_runs(sandbox: Sandbox) -> None:
    seen: list[tuple[str, str]] = []
    sandbox.commands.run(
        "for n in 1 2 3; do echo out$n; echo err$n >&2; done",
        on_stdout=lambda text: seen.append(("out", text)),
        on_stderr=lambda text: seen.append(("err", text)),
    )
    for kind in ("out", "err"):
        assert "".join(text for stream, text in seen if stream == kind) == "".join(f"{kind}{n}\n" for n in (1, 2, 3))


def test_much_output_arrives_whole(sandbox: Sandbox) -> None:
    result = sandbox.commands.run("seq 1 300000")
    assert result.stdout == "".join(f"{n}\n" for n in range(1, 300001))


def test_output_that_is_not_text(sandbox: Sandbox) -> None:
    assert sandbox.commands.run("printf 'h\\303\\251llo \\342\\202\\254'").stdout == "héllo €"
    assert sandbox.commands.run("printf '\\377'").stdout == "\ufffd"


def test_environment(sandbox: Sandbox) -> None:
    result = sandbox.commands.run('echo "$ONE|$TWO"', envs={"ONE": "1 with spaces", "TWO": "$(not run)'\""})
    assert result.stdout == "1 with spaces|$(not run)'\"\n"
    names = sandbox.commands.run("env").stdout
    assert "E2B_SANDBOX=true" in names and f"E2B_SANDBOX_ID={sandbox.sandbox_id}" in names
    assert "E2B_API_KEY" not in names and "RINGFENCE" not in names
    path = sandbox.commands.run("echo $PATH").stdout
    for directory in ("/usr/local/bin", "/usr/bin", "/bin"):
        assert directory in path.strip().split(":")


def test_working_directory(sandbox: Sandbox) -> None:
    assert sandbox.commands.run("pwd").stdout == "/home/user\n"
    assert sandbox.commands.run("pwd", user="root").stdout == "/root\n"
    assert sandbox.commands.run("pwd", cwd="/tmp").stdout == "/tmp\n"
    with pytest.raises(InvalidArgumentException, match="/no/such/place"):
        sandbox.commands.run("pwd", cwd="/no/such/place")


def test_users(sandbox: Sandbox) -> None:
    assert sandbox.commands.run("whoami").stdout == "user\n"
    assert sandbox.commands.run("id -u; echo $HOME $USER $LOGNAME", user="root").stdout == "0\n/root root root\n"
    assert sandbox.commands.run("echo $HOME $USER", user="user").stdout == "/home/user user\n"
    with pytest.raises(AuthenticationException):
        sandbox.commands.run("true", user="nobody-of-that-name")


def test_the_user_cannot_write_what_belongs_to_root(sandbox: Sandbox) -> None:
    with pytest.raises(CommandExitException):
        sandbox.commands.run("echo x > /etc/passwd")


def test_sudo_needs_no_password(sandbox: Sandbox) -> None:
    assert sandbox.commands.run("sudo -n id -u").stdout == "0\n"


def test_a_login_shell_runs_the_command(sandbox: Sandbox) -> None:
    assert sandbox.commands.run("shopt -q login_shell && echo login").stdout == "login\n"


def test_the_host_name_resolves(sandbox: Sandbox) -> None:
    """`sudo` complains, and some servers do not start, where it does not."""
    words = sandbox.commands.run("uname -n; getent hosts $(uname -n)").stdout.split()
    assert words[0] == words[-1]


def test_background_wait_and_kill(sandbox: Sandbox) -> None:
    done = sandbox.commands.run("echo started; sleep 0.2; echo ended; exit 3", background=True)
    with pytest.raises(CommandExitException) as failed:
        done.wait()
    assert failed.value.exit_code == 3 and failed.value.stdout == "started\nended\n"

    handle = sandbox.commands.run("exec sleep 600", background=True)
    assert handle.pid > 1
    assert handle.kill() is True
    with pytest.raises(CommandExitException) as killed:
        handle.wait()
    assert killed.value.exit_code == -1 and "killed" in (killed.value.error or "")
    assert sandbox.commands.kill(handle.pid) is False


def test_list_names_what_runs(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("sleep 600", background=True, envs={"MARK": "x"}, cwd="/tmp")
    listed = {item.pid: item for item in sandbox.commands.list()}
    assert handle.pid in listed
    assert (listed[handle.pid].cmd, listed[handle.pid].args) == ("/bin/bash", ["-l", "-c", "sleep 600"])
    assert (listed[handle.pid].envs, listed[handle.pid].cwd) == ({"MARK": "x"}, "/tmp")
    handle.kill()
    until(lambda: handle.pid not in {item.pid for item in sandbox.commands.list()}, "the process is gone")


def test_connect_to_a_running_process(sandbox: Sandbox) -> None:
    first = sandbox.commands.run("read line; echo got $line; exit 4", background=True, stdin=True)
    first.disconnect()
    again = sandbox.commands.connect(first.pid)
    assert again.pid == first.pid
    sandbox.commands.send_stdin(first.pid, "hello\n")
    with pytest.raises(CommandExitException) as ended:
        again.wait()
    assert (ended.value.stdout, ended.value.exit_code) == ("got hello\n", 4)


def test_a_disconnected_process_lives_on(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("sleep 0.3; echo done > /tmp/done; sleep 600", background=True)
    handle.disconnect()
    until(lambda: "done" in sandbox.commands.run("cat /tmp/done 2>/dev/null || true").stdout, "it went on alone")
    assert sandbox.commands.kill(handle.pid) is True


def test_connecting_to_nothing_is_not_found(sandbox: Sandbox) -> None:
    with pytest.raises(NotFoundException):
        sandbox.commands.connect(999999)
    assert sandbox.commands.kill(999999) is False


def test_standard_input(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("cat", background=True, stdin=True)
    sandbox.commands.send_stdin(handle.pid, "one\n")
    sandbox.commands.send_stdin(handle.pid, "two\n")
    sandbox.commands.close_stdin(handle.pid)
    assert handle.wait().stdout == "one\ntwo\n"


def test_standard_input_is_empty_unless_asked_for(sandbox: Sandbox) -> None:
    assert sandbox.commands.run("cat").stdout == ""


@pytest.mark.parametrize("user", ["user", "root"])
def test_standard_streams_can_be_opened_by_their_names(sandbox: Sandbox, user: str) -> None:
    result = sandbox.commands.run("echo both | tee /dev/stderr; echo out > /dev/stdout; cat /dev/stdin", user=user)
    assert (result.stdout, result.stderr) == ("both\nout\n", "both\n")
    sandbox.files.write("/tmp/page", "page\n", user=user)
    result = sandbox.commands.run("curl -s -o /dev/stdout file:///tmp/page; curl -s -o /dev/stderr file:///tmp/page", user=user)
    assert (result.stdout, result.stderr) == ("page\n", "page\n")
    handle = sandbox.commands.run("cat /dev/stdin > /dev/stdout", background=True, stdin=True, user=user)
    sandbox.commands.send_stdin(handle.pid, "in\n")
    sandbox.commands.close_stdin(handle.pid)
    assert handle.wait().stdout == "in\n"


def test_standard_streams_of_another_user_stay_closed(sandbox: Sandbox) -> None:
    sandbox.commands.run("useradd -m other", user="root")
    victims = [sandbox.commands.run("sleep 600", background=True, stdin=True, user=name) for name in ("root", "other")]
    for victim in victims:
        for stream, mode in ((0, "w"), (1, "r"), (2, "r")):
            tried = sandbox.commands.run(f"python3 -c 'open(\"/proc/{victim.pid}/fd/{stream}\", \"{mode}\")' 2>&1 || true").stdout
            assert "Permission denied" in tried, tried
        victim.kill()


def refusal(call: Callable[[], object]) -> str:
    """The class and the text of the error of a call; empty if there is none."""
    try:
        call()
    except SandboxException as error:
        return f"{type(error).__name__}: {error}"
    return ""


# Takes all terminals, or all processes, also those that become free.
TAKES_ALL = {kind: f"import os, time\nwhile True:\n  try: {take}\n  except OSError: time.sleep(0.02)\n" for kind, take in (
    ("terminal", "os.openpty()"),
    ("process", "os.fork() or time.sleep(600)"),
)}


@pytest.mark.parametrize("kind", list(TAKES_ALL))
def test_a_limit_that_is_no_rate_is_not_called_one(sandbox: Sandbox, kind: str) -> None:
    """Clients would advise to try again later, which does not help."""
    sandbox.files.write("/tmp/all.py", TAKES_ALL[kind])
    sandbox.commands.run("exec python3 /tmp/all.py", background=True, timeout=0)
    calls = {
        "terminal": lambda: sandbox.pty.create(PtySize(rows=24, cols=80)).kill(),
        "process": lambda: sandbox.commands.run("true"),
    }
    until(lambda: f"{kind} limit of the sandbox reached" in refusal(calls[kind]), "the limit is reached")
    assert refusal(calls[kind]).startswith("SandboxException: ")


def test_a_message_that_is_too_long_is_refused_as_such(sandbox: Sandbox) -> None:
    """SDKs send input in base64, so the 16 MiB are 12 MiB of it."""
    handle = sandbox.commands.run("wc -c", background=True, stdin=True, timeout=0)
    with pytest.raises(InvalidArgumentException, match="larger than the limit of 16777216 bytes"):
        sandbox.commands.send_stdin(handle.pid, "x" * (13 << 20))
    sandbox.commands.send_stdin(handle.pid, "x" * (11 << 20))
    sandbox.commands.close_stdin(handle.pid)
    assert handle.wait().stdout == f"{11 << 20}\n"


def test_a_timeout_ends_the_command(sandbox: Sandbox) -> None:
    begun = time.monotonic()
    with pytest.raises(TimeoutException):
        sandbox.commands.run("exec sleep 600.25", timeout=1)
    assert 0.9 < time.monotonic() - begun < within(10)
    until(lambda: sandbox.commands.run("pgrep -f [6]00.25 || true").stdout == "", "the process was killed")


def is_running(sandbox: Sandbox, seconds: str) -> bool:
    """Whether a `sleep` of this name runs. The brackets keep the search from finding itself."""
    return sandbox.commands.run(f"pgrep -fx 'sleep [{seconds[0]}]{seconds[1:]}' || true").stdout != ""


@pytest.mark.parametrize(
    ("line", "goes_on", "is_ended"),
    [
        ("sleep 701; echo done > /tmp/done", ["701"], []),
        ("sleep 702 | sleep 703; true", ["702", "703"], []),
        ("sleep 704 & sleep 705; true", ["704", "705"], []),
        ("sleep 706", [], ["706"]),
    ],
)
def test_an_end_by_force_is_that_of_one_process(sandbox: Sandbox, line: str, goes_on: list[str], is_ended: list[str]) -> None:
    """As on the hosted platform: what the shell has started goes on, whether it waits for it or not."""
    handle = sandbox.commands.run(line, background=True, timeout=0)
    until(lambda: all(is_running(sandbox, seconds) for seconds in goes_on + is_ended), "all of it runs")
    assert handle.kill() is True
    with pytest.raises(CommandExitException):
        handle.wait()
    assert all(is_running(sandbox, seconds) for seconds in goes_on)
    assert not any(is_running(sandbox, seconds) for seconds in is_ended)
    assert not sandbox.files.exists("/tmp/done")


def test_a_time_limit_of_the_sandbox_ends_a_whole_line(sandbox: Sandbox) -> None:
    # The shell may be ended before it has started anything.
    for timeout in (1, 4, 16):
        with pytest.raises(TimeoutException):
            sandbox.commands.run("sleep 711; echo done > /tmp/done", timeout=timeout)
        goes_on = is_running(sandbox, "711")
        if goes_on:
            break
    assert goes_on
    with pytest.raises(CommandExitException) as ended:
        sandbox.commands.run("timeout 1 bash -c 'sleep 712 & sleep 713 | sleep 714; echo done > /tmp/done'")
    assert ended.value.exit_code == 124
    until(lambda: not any(is_running(sandbox, seconds) for seconds in ("712", "713", "714")), "all of it is ended")
    assert not sandbox.files.exists("/tmp/done")


def test_no_timeout_outlives_the_default(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("sleep 2; echo late", background=True, timeout=0)
    assert handle.wait().stdout == "late\n"


def test_orphans_are_reaped(sandbox: Sandbox) -> None:
    sandbox.commands.run("for n in $(seq 50); do (setsid sleep 0.01 >/dev/null 2>&1 &) ; done")
    zombies = "ps -eo stat= | grep -c ^Z || true"
    until(lambda: sandbox.commands.run(zombies).stdout == "0\n", "no zombie is left")


def test_many_commands_at_once(sandbox: Sandbox) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(lambda n: sandbox.commands.run(f"echo {n}").stdout, range(64)))
    assert results == [f"{n}\n" for n in range(64)]


def test_commands_of_two_sandboxes_do_not_meet(sandbox: Sandbox, neighbour: Sandbox) -> None:
    sandbox.commands.run("echo mine > /tmp/file")
    assert neighbour.commands.run("cat /tmp/file 2>/dev/null || echo none").stdout == "none\n"
    handle = sandbox.commands.run("sleep 600", background=True)
    assert handle.pid not in {item.pid for item in neighbour.commands.list()} or handle.kill()
    assert neighbour.commands.run("pgrep sleep || echo none").stdout == "none\n"
