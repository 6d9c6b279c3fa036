"""The operator inside sandboxes of all teams: `ringfence sandbox exec|shell|cp|forward`."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from e2b import Sandbox

from harness.patience import within
from harness.platform import Platform
from harness.terminal import Terminal
from harness.traffic import until

LARGE = 100 << 20


def words(platform: Platform, *arguments: str) -> list[str]:
    """The command line; what comes after `--` is the command's, so the data directory comes first."""
    return [str(platform.binary), "--data-dir", str(platform.data_dir), "sandbox", *arguments]


def run(platform: Platform, *arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    options.setdefault("stdin", subprocess.DEVNULL if "input" not in options else None)
    if "input" in options:
        del options["stdin"]
    return subprocess.run(
        words(platform, *arguments), capture_output=True, timeout=within(60), env=platform.environment(), **options
    )


def started(platform: Platform, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.Popen(words(platform, *arguments), env=platform.environment(), **options)


def test_a_command_has_its_streams_user_directory_and_exit_code(platform: Platform, sandbox: Sandbox) -> None:
    script = 'echo out; echo err >&2; pwd; id -un; echo "$K $L"; cat; exit 7'
    options = ["--user", "root", "--cwd", "/usr", "-e", "K=a b", "-e", "L"]
    env = platform.environment() | {"L": "given"}
    done = subprocess.run(
        words(platform, "exec", *options, sandbox.sandbox_id, "--", "sh", "-c", script),
        input=b"typed\n",
        capture_output=True,
        timeout=within(60),
        env=env,
    )
    assert (done.returncode, done.stderr) == (7, b"err\n")
    assert done.stdout == b"out\n/usr\nroot\na b given\ntyped\n"
    plain = run(platform, "exec", sandbox.sandbox_id, "--", "id", "-un")
    assert plain.stdout == b"user\n", plain.stderr
    without = run(platform, "exec", "--no-stdin", sandbox.sandbox_id, "--", "cat", input=b"left alone")
    assert (without.returncode, without.stdout) == (0, b"")
    killed = run(platform, "exec", sandbox.sandbox_id, "--", "sh", "-c", "kill -9 $$")
    assert killed.returncode == 128 + 9
    missing = run(platform, "exec", sandbox.sandbox_id, "--", "/no/such/program")
    assert missing.returncode in (126, 127) and missing.stderr
    refused = run(platform, "exec", "--user", "nobody-here", sandbox.sandbox_id, "--", "true")
    assert refused.returncode in (1, 126) and b"nobody-here" in refused.stderr


def test_what_is_left_in_the_background_keeps_no_command_open(platform: Platform, sandbox: Sandbox) -> None:
    done = run(platform, "exec", sandbox.sandbox_id, "--", "sh", "-c", "sleep 300 & echo begun")
    assert (done.returncode, done.stdout) == (0, b"begun\n")


def test_many_bytes_pass_through_a_command_unchanged(platform: Platform, sandbox: Sandbox) -> None:
    data = os.urandom(1 << 20) * (LARGE >> 20)
    done = run(platform, "exec", sandbox.sandbox_id, "--", "cat", input=data)
    assert done.returncode == 0, done.stderr
    assert hashlib.sha256(done.stdout).digest() == hashlib.sha256(data).digest()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_signals_are_passed_on(platform: Platform, sandbox: Sandbox, number: signal.Signals) -> None:
    script = f"trap 'echo caught; exit 5' {number.name[3:]}; echo ready; while :; do sleep 0.1; done"
    process = started(platform, "exec", sandbox.sandbox_id, "--", "bash", "-c", script)
    assert process.stdout and process.stdout.readline() == b"ready\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=within(30))
    assert (process.returncode, out) == (5, b"caught\n"), err


def test_the_third_signal_kills_what_ignores_them(platform: Platform, sandbox: Sandbox) -> None:
    script = "trap 'echo no' TERM; echo $$; while :; do sleep 0.1; done"
    process = started(platform, "exec", sandbox.sandbox_id, "--", "bash", "-c", script)
    assert process.stdout
    pid = process.stdout.readline().decode().strip()
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == b"no\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=within(30))
    assert process.returncode == 128 + signal.SIGKILL
    alive = f"kill -0 {pid} 2>/dev/null && echo alive || echo gone"
    until(lambda: sandbox.commands.run(alive).stdout == "gone\n", "the command is gone")


def test_a_closed_pipe_ends_the_command(platform: Platform, sandbox: Sandbox) -> None:
    process = started(platform, "exec", sandbox.sandbox_id, "--", "yes")
    assert process.stdout and process.stdout.readline() == b"y\n"
    process.stdout.close()
    assert process.wait(timeout=within(30)) == 128 + signal.SIGPIPE
    assert process.stderr
    process.stderr.close()
    until(lambda: "gone" in sandbox.commands.run("pgrep -x yes || echo gone").stdout, "the command is gone")


def test_other_teams_are_entered_and_the_log_says_so(platform: Platform, sandbox: Sandbox) -> None:
    assert run(platform, "exec", sandbox.sandbox_id, "--", "true").returncode == 0
    logs = platform.run("sandbox", "logs", sandbox.sandbox_id, "--format", "json")
    entered = [entry for entry in json.loads(logs.stdout) if entry["fields"].get("event_type") == "operator_entered"]
    assert [entry["fields"]["command"] for entry in entered] == ["exec"], logs.stdout
    assert "the operator enters a sandbox" in platform.log()


def test_a_paused_sandbox_is_refused_unless_it_is_to_be_resumed(platform: Platform, sandbox: Sandbox) -> None:
    assert sandbox.pause() is True
    for command in (["exec", sandbox.sandbox_id, "--", "true"], ["cp", "/etc/hostname", f"{sandbox.sandbox_id}:/tmp/x"]):
        refused = run(platform, *command)
        assert refused.returncode == 1 and b"is paused: --resume" in refused.stderr
    assert run(platform, "exec", "--resume", sandbox.sandbox_id, "--", "true").returncode == 0
    assert run(platform, "exec", sandbox.sandbox_id, "--", "true").returncode == 0


def test_what_is_not_there_is_said(platform: Platform) -> None:
    for command in (["exec", "inotthere", "--", "true"], ["cp", "inotthere:/x", "/tmp/"], ["forward", "inotthere", "80"]):
        missing = run(platform, *command)
        assert missing.returncode == 1 and b"no sandbox inotthere" in missing.stderr
    for command in (["exec", "../etc", "--", "true"], ["cp", "/a", "/b"], ["cp", "a:/x", "b:/y"]):
        bad = run(platform, *command)
        assert bad.returncode == 1 and bad.stderr, command


def test_another_user_of_the_host_enters_nothing(platform: Platform, sandbox: Sandbox) -> None:
    socket_path = platform.data_dir / "operator.sock"
    for path in (f"/sandboxes/{sandbox.sandbox_id}/access?command=exec", f"/sandboxes/{sandbox.sandbox_id}/ports/49983"):
        tried = subprocess.run(
            ["curl", "-sS", "--max-time", "5", "-X", "POST", "--unix-socket", str(socket_path), f"http://operator{path}"],
            user=65534,
            group=65534,
            extra_groups=[],
            capture_output=True,
        )
        assert tried.returncode != 0 and b"token" not in tried.stdout


def test_the_end_of_the_sandbox_ends_the_command(platform: Platform, neighbour: Sandbox) -> None:
    process = started(platform, "exec", neighbour.sandbox_id, "--", "sh", "-c", "echo ready; exec sleep 300")
    assert process.stdout and process.stdout.readline() == b"ready\n"
    neighbour.kill()
    _, err = process.communicate(timeout=within(30))
    assert process.returncode == 1 and b"connection to the sandbox was lost" in err


@pytest.fixture
def terminal(platform: Platform, sandbox: Sandbox):
    shown = Terminal(words(platform, "shell", sandbox.sandbox_id), platform.environment() | {"TERM": "vt220"})
    try:
        shown.expect(b"Connected to")
        shown.type(b"PS1='prompt> '; echo be''gun\r")
        shown.expect(b"begun\r\n")
        yield shown
    finally:
        shown.close()


def test_a_shell_is_a_terminal_of_the_size_and_kind_of_the_operators(terminal: Terminal) -> None:
    assert not terminal.is_restored()
    terminal.type(b"tty; echo $TERM; stty size\r")
    shown = terminal.expect(b"24 80")
    assert b"/dev/pts/" in shown and b"vt220" in shown
    terminal.resize(50, 132)
    terminal.type(b"while [ \"$(stty size)\" != '50 132' ]; do sleep 0.1; done; echo re''sized\r")
    terminal.expect(b"resized")
    # A key, and not a signal for the program of the operator.
    # Told by what the key is to end: the shell alone would get it before that is in the foreground.
    terminal.type(b"sh -c 'echo sle\"\"eping; exec sleep 300'\r")
    terminal.expect(b"sleeping\r\n")
    terminal.type(b"\x03")
    terminal.expect(b"prompt> ")
    terminal.type(b"echo go''es on\r")
    terminal.expect(b"goes on")
    terminal.type(b"exit 9\r")
    assert terminal.wait() == 9
    assert terminal.is_restored()


def test_the_keys_of_a_session_show_help_and_disconnect(terminal: Terminal, sandbox: Sandbox) -> None:
    terminal.type(b"\r~?")
    terminal.expect(b"end the shell and disconnect")
    terminal.type(b"\recho $$-pid; trap '' HUP TERM\r")
    terminal.expect(b"-pid")
    terminal.type(b"echo a~~.b\r")
    terminal.expect(b"a~~.b")
    terminal.type(b"\r~.")
    assert terminal.wait() == 0
    assert terminal.is_restored() and b"Disconnected." in terminal.seen
    until(lambda: "gone" in sandbox.commands.run("pgrep -f '^/bin/bash -i -l$' || echo gone").stdout, "the shell is gone")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_a_session_and_restores_the_terminal(terminal: Terminal, number: signal.Signals) -> None:
    terminal.process.send_signal(number)
    assert terminal.wait() == 128 + number
    assert terminal.is_restored()


def test_the_end_of_the_sandbox_ends_a_session(terminal: Terminal, sandbox: Sandbox) -> None:
    # The alternate screen is left as well.
    terminal.type(b"printf '\\033[?1049h'; echo alt''ernate\r")
    terminal.expect(b"alternate")
    sandbox.kill()
    assert terminal.wait() == 1
    assert terminal.is_restored()
    assert b"\x1b[?1049l" in terminal.seen and b"connection to the sandbox was lost" in terminal.seen


def test_a_shell_needs_a_terminal(platform: Platform, sandbox: Sandbox) -> None:
    refused = run(platform, "shell", sandbox.sandbox_id)
    assert refused.returncode == 1 and b"sandbox exec" in refused.stderr


def test_ports_are_forwarded_both_ways_and_to_their_end(platform: Platform, sandbox: Sandbox) -> None:
    server = "import socket,threading\ns=socket.create_server(('127.0.0.1',7000))\n"
    server += "def f(c):\n while d:=c.recv(65536): c.sendall(d)\n c.sendall(b'end'); c.close()\n"
    server += "while 1: threading.Thread(target=f,args=(s.accept()[0],)).start()"
    sandbox.commands.run(f'python3 -c "{server}"', background=True, timeout=0)
    process = started(platform, "forward", sandbox.sandbox_id, "0:7000", "0:7001")
    try:
        assert process.stdout and process.stderr
        line = process.stdout.readline().decode()
        address, _, inside = line.strip().partition(" -> ")
        assert inside == f"{sandbox.sandbox_id}:7000", line
        host, _, port = address.rpartition(":")
        assert host == "127.0.0.1"

        def echoed(data: bytes) -> bytes:
            with socket.create_connection((host, int(port)), timeout=within(20)) as client:
                try:
                    client.sendall(data)
                    client.shutdown(socket.SHUT_WR)
                    return b"".join(iter(lambda: client.recv(65536), b""))
                except OSError as error:
                    # Nothing listens inside yet: the connection has ended before all was sent, or what was sent was not read.
                    if error.errno not in (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN):
                        raise
                    return b""

        until(lambda: echoed(b"x") == b"xend", "the server answers")
        assert echoed(b"0123456789" * 10_000) == b"0123456789" * 10_000 + b"end"
        other = process.stdout.readline().decode().partition(" -> ")[0].rpartition(":")[2]
        with socket.create_connection((host, int(other)), timeout=within(20)) as client:
            assert client.recv(1) == b""
    finally:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=within(30))
    assert process.returncode == 0 and b"port 7001" in err


def test_files_are_copied_in_both_directions_and_are_the_same(platform: Platform, sandbox: Sandbox, tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.write_bytes(os.urandom(1 << 20) * (LARGE >> 20))
    copied = run(platform, "cp", str(large), f"{sandbox.sandbox_id}:/home/user/large")
    assert copied.returncode == 0, copied.stderr
    assert sandbox.commands.run("sha256sum < large").stdout.split()[0] == hashlib.sha256(large.read_bytes()).hexdigest()
    back = run(platform, "cp", f"{sandbox.sandbox_id}:large", str(tmp_path / "back"))
    assert back.returncode == 0, back.stderr
    assert (tmp_path / "back").read_bytes() == large.read_bytes()
    # Through streams, and into a folder that exists.
    typed = run(platform, "cp", "-", f"{sandbox.sandbox_id}:/tmp/typed", input=b"typed")
    assert typed.returncode == 0, typed.stderr
    assert run(platform, "cp", f"{sandbox.sandbox_id}:/tmp/typed", "-").stdout == b"typed"
    assert run(platform, "cp", f"{sandbox.sandbox_id}:/tmp/typed", str(tmp_path)).returncode == 0
    assert (tmp_path / "typed").read_bytes() == b"typed"
    missing = run(platform, "cp", f"{sandbox.sandbox_id}:/no/such", str(tmp_path / "none"))
    assert missing.returncode == 1 and missing.stderr and not (tmp_path / "none").exists()


def test_folders_are_copied_with_permission_bits_and_without_links(
    platform: Platform, sandbox: Sandbox, tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "a" / "b" / "script").write_text("#!/bin/sh\necho runs\n")
    (tree / "a" / "b" / "script").chmod(0o755)
    (tree / "a" / "secret").write_text("s")
    (tree / "a" / "secret").chmod(0o600)
    (tree / "empty").mkdir()
    (tree / "link").symlink_to("/etc/shadow")
    os.mkfifo(tree / "pipe")
    sent = run(platform, "cp", str(tree), f"{sandbox.sandbox_id}:/tmp")
    assert sent.returncode == 0, sent.stderr
    assert b"link: a link" in sent.stderr and b"pipe: neither" in sent.stderr
    assert sandbox.commands.run("/tmp/tree/a/b/script; stat -c %a /tmp/tree/a/secret; ls /tmp/tree").stdout == (
        "runs\n600\na\nempty\n"
    )
    sandbox.commands.run("ln -s /etc/passwd /tmp/tree/out; ln -s / /tmp/tree/root; mkfifo /tmp/tree/p")
    back = run(platform, "cp", f"{sandbox.sandbox_id}:/tmp/tree", str(tmp_path / "back"))
    assert back.returncode == 0, back.stderr
    found = sorted(str(path.relative_to(tmp_path / "back")) for path in (tmp_path / "back").rglob("*"))
    assert found == ["a", "a/b", "a/b/script", "a/secret", "empty"]
    assert (tmp_path / "back/a/b/script").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "back/a/secret").stat().st_mode & 0o777 == 0o600


HOSTILE = [
    "\x1b[2J\x1b]0;owned\x07",
    "new\nline",
    "-rf",
    "...",
    "\u202egnp.exe",
    "$(touch pwned)",
    "`id`; rm x",
    "C:\\..\\up",
    "%2e%2e%2fup",
    "ends ",
    "x" * 255,
    ".ringfence-cp-1-0",
]


def test_hostile_names_are_files_and_text(platform: Platform, sandbox: Sandbox, tmp_path: Path) -> None:
    for name in HOSTILE:
        sandbox.files.write(f"/tmp/evil/{name}", name)
        sandbox.commands.run(f"ln -s /etc/passwd '/tmp/evil/link {HOSTILE.index(name)} \x1b[31m\u202e'")
    # No text at all.
    sandbox.commands.run("touch /tmp/evil/$'\\xff\\xfe'")
    copied = run(platform, "cp", f"{sandbox.sandbox_id}:/tmp/evil", str(tmp_path))
    for name in HOSTILE:
        assert (tmp_path / "evil" / name).read_text() == name, copied.stderr
    assert not [c for c in copied.stderr.decode() if (ord(c) < 32 and c != "\n") or c == "\u202e"]
    assert b"a link" in copied.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"evil"}


def test_a_link_on_the_host_leads_no_copy_out_of_the_target(platform: Platform, sandbox: Sandbox, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("before")
    (tmp_path / "target" / "evil").mkdir(parents=True)
    (tmp_path / "target" / "evil" / "folder").symlink_to(outside)
    (tmp_path / "target" / "evil" / "file").symlink_to(outside / "file")
    sandbox.files.write("/tmp/evil/folder/file", "after")
    sandbox.files.write("/tmp/evil/file", "after")
    sandbox.files.write("/tmp/evil/good", "after")
    copied = run(platform, "cp", f"{sandbox.sandbox_id}:/tmp/evil", str(tmp_path / "target"))
    assert copied.returncode == 1
    assert (outside / "file").read_text() == "before" and len(list(outside.iterdir())) == 1
    assert (tmp_path / "target" / "evil" / "good").read_text() == "after"
    assert not list((tmp_path / "target").rglob(".ringfence-cp-*"))
    single = run(platform, "cp", f"{sandbox.sandbox_id}:/tmp/evil/file", str(tmp_path / "target/evil/file"))
    assert single.returncode == 1 and (outside / "file").read_text() == "before"


def test_a_file_with_holes_does_not_fill_the_disk_of_the_host(platform: Platform, sandbox: Sandbox, tmp_path: Path) -> None:
    sandbox.commands.run("truncate -s 1T /tmp/huge")
    bounded = run(platform, "cp", "--max-size", "10", f"{sandbox.sandbox_id}:/tmp/huge", str(tmp_path))
    assert bounded.returncode == 1 and b"--max-size" in bounded.stderr
    assert list(tmp_path.iterdir()) == []
    stopped = started(platform, "cp", f"{sandbox.sandbox_id}:/tmp/huge", str(tmp_path))
    until(lambda: any(path.stat().st_size for path in tmp_path.iterdir()), "the copy has begun")
    stopped.send_signal(signal.SIGINT)
    stopped.communicate(timeout=within(30))
    assert stopped.returncode == 128 + signal.SIGINT and list(tmp_path.iterdir()) == []
