"""The published command line client: lists, creates, runs commands, opens terminals, kills. Every test runs twice, with
routing headers over HTTP and with a host name per sandbox over HTTPS.

RINGFENCE_NODE names the program that runs it and RINGFENCE_NODE_MODULES a directory with the pinned client.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.cli_client import Client, Terminal, used
from harness.patience import within
from harness.platform import Platform
from harness.policies import DENIED, SITE, secure_platform_on_the_internet
from harness.secure import secure_platform
from harness.traffic import until


@pytest.fixture(scope="module")
def platforms(platform: Platform, work_dir: Path) -> Iterator[dict[str, Platform]]:
    with secure_platform(work_dir / "cli") as secure:
        yield {"http": platform, "https": secure}


@pytest.fixture(params=sorted(used))
def client(platforms: dict[str, Platform], request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Client]:
    """A client; the sandboxes that it made end with the test."""
    made = Client(platforms[request.param], tmp_path)
    try:
        yield made
    finally:
        made.ok("sandbox", "kill", "--all")


@pytest.fixture
def box(client: Client) -> str:
    """The id of a sandbox that the client made."""
    return client.ok("sandbox", "create", "-d", "base").strip()


def test_create_list_info_and_kill(client: Client) -> None:
    assert client.ids() == set()
    assert "No sandboxes found" in client.ok("sandbox", "list")
    first = client.ok("sandbox", "create", "--detach").strip()
    second = client.ok("sandbox", "create", "-d", "base", "--timeout", "600").strip()
    assert re.fullmatch("[a-z0-9]+", first) and first != second
    assert client.ids() == {first, second}
    assert client.ids("--limit", "1") < {first, second}
    assert client.ids("--template", "base") == {first, second}
    assert client.ids("--metadata", "none=such") == set()
    assert client.ids("--state", "paused") == set()
    assert client.ids("--started-after", "2020-01-01T00:00:00Z") == {first, second}
    assert client.ids("--started-after", "2120-01-01T00:00:00Z") == set()
    ordered = [
        [item["sandboxId"] for item in json.loads(client.ok("sandbox", "list", "-f", "json", "-o", order))]
        for order in ("asc", "desc")
    ]
    assert ordered == [[first, second], [second, first]]
    table = client.ok("sandbox", "list")
    assert first in table and "Running" in table

    info = json.loads(client.ok("sandbox", "info", "-f", "json", second))
    assert (info["sandboxId"], info["name"], info["state"]) == (second, "base", "running")
    assert second in client.ok("sandbox", "info", second)

    assert "has been killed" in client.ok("sandbox", "kill", first)
    assert client.ids() == {second}
    assert "wasn't found" in client.run("sandbox", "kill", first).stderr
    assert client.run("sandbox", "info", first).returncode == 1
    assert "Killed" not in client.ok("sandbox", "kill", "--all", "--metadata", "none=such")
    assert "Killed" not in client.ok("sandbox", "kill", "--all", "--state", "paused")
    assert "Killed 1" in client.ok("sandbox", "kill", "--all")
    assert client.ids() == set()


def test_pause_and_resume(client: Client) -> None:
    box = client.ok("sandbox", "create", "-d", "base").strip()
    assert box in client.ok("sandbox", "pause", box)
    assert client.ids("--state", "paused") == {box}
    assert client.ids("--state", "running") == set()
    assert json.loads(client.ok("sandbox", "info", "-f", "json", box))["state"] == "paused"
    assert box in client.ok("sandbox", "resume", box)
    assert client.ok("sandbox", "exec", box, "echo", "alive") == "alive\n"
    assert client.run("sandbox", "pause", "inothing0000000000000").returncode == 1
    kept = client.ok(
        *("sandbox", "create", "-d", "base", "--timeout", "600"),
        *("--lifecycle.ontimeout", "pause", "--lifecycle.autoresume"),
    ).strip()
    info = json.loads(client.ok("sandbox", "info", "-f", "json", kept))
    assert info["lifecycle"] == {"onTimeout": "pause", "autoResume": True}
    client.ok("sandbox", "pause", kept)
    # The client connects, which resumes it.
    assert client.ok("sandbox", "exec", kept, "echo", "awake") == "awake\n"


def test_snapshots(client: Client, box: str) -> None:
    client.ok("sandbox", "exec", box, "sh", "-c", "echo kept > state")
    assert box not in client.ok("sandbox", "snapshot", "list")
    client.ok("sandbox", "snapshot", "create", box)
    client.ok("sandbox", "snapshot", "create", "--name", "prepared", box)
    listed = json.loads(client.ok("sandbox", "snapshot", "list", "-f", "json", box))
    named, unnamed = (snapshot["snapshotId"] for snapshot in listed)
    assert named.endswith("/prepared:default") and unnamed.endswith(":default"), listed
    assert len(json.loads(client.ok("sandbox", "snapshot", "list", "-f", "json", "--limit", "1"))) == 1
    assert named in client.ok("sandbox", "snapshot", "list", "--name", "prepared")
    child = client.ok("sandbox", "create", "-d", named).strip()
    assert client.ok("sandbox", "exec", child, "cat", "state") == "kept\n"
    client.ok("sandbox", "kill", child)
    client.ok("sandbox", "snapshot", "delete", named, unnamed)
    assert json.loads(client.ok("sandbox", "snapshot", "list", "-f", "json", box) or "[]") == []


def test_an_unknown_template(client: Client) -> None:
    refused = client.run("sandbox", "create", "-d", "no-such-template")
    assert refused.returncode == 1
    assert "404" in refused.stderr


def test_a_wrong_key(client: Client) -> None:
    key = client.environment["E2B_API_KEY"]
    client.environment["E2B_API_KEY"] = "e2b_" + "0" * 40
    refused = client.run("sandbox", "list")
    client.environment["E2B_API_KEY"] = key
    assert refused.returncode == 1
    assert "Unauthorized" in refused.stderr


def test_exec_passes_output_and_exit_code_on(client: Client, box: str) -> None:
    ran = client.run("sandbox", "exec", box, "sh", "-c", "echo out; echo err >&2; exit 3")
    assert (ran.returncode, ran.stdout) == (3, "out\n")
    assert ran.stderr.startswith("err\n")
    assert client.ok("sandbox", "exec", box, "echo", "it's", "a b") == "it's a b\n"
    assert client.run("sandbox", "exec", box, "no-such-program").returncode == 127


def test_exec_user_directory_and_environment(client: Client, box: str) -> None:
    said = client.ok(
        "sandbox", "exec", "-u", "root", "-c", "/tmp", "-e", "A=b c", box, "sh", "-c", 'id -u; pwd; echo "$A"'
    )
    assert said == "0\n/tmp\nb c\n"
    assert client.ok("sandbox", "exec", box, "sh", "-c", "whoami; pwd") == "user\n/home/user\n"


def test_exec_reads_a_pipe_to_its_end(client: Client, box: str) -> None:
    lines = "".join(f"line {n}\n" for n in range(5000))
    assert client.ok("sandbox", "exec", box, "wc", "-l", stdin=lines).strip() == "5000"
    assert client.ok("sandbox", "exec", box, "cat", stdin="pipéd") == "pipéd"


def test_exec_in_the_background(client: Client, box: str) -> None:
    client.ok("sandbox", "exec", "-b", box, "sh", "-c", "sleep 0.5; echo done > left")
    until(lambda: client.run("sandbox", "exec", box, "cat", "left").stdout == "done\n", "it went on")


def test_exec_in_a_sandbox_that_is_not_there(client: Client) -> None:
    assert client.run("sandbox", "exec", "inothing0000000000000", "true").returncode == 1


def test_a_terminal_on_a_running_sandbox(client: Client, box: str) -> None:
    terminal = Terminal(client, "sandbox", "connect", "-u", "root", "-c", "/tmp", "-e", "A=b", box)
    try:
        terminal.shows(r"# ")
        terminal.type('echo "<$A-$PWD-$(id -u)>"\r')
        terminal.shows("<b-/tmp-0>")
        terminal.type("exit\r")
        assert terminal.end() == 0
    finally:
        terminal.close()
    assert client.ids() == {box}


def test_a_terminal_on_a_new_sandbox_takes_it_along(client: Client) -> None:
    terminal = Terminal(client, "sandbox", "create", "-u", "root", "-c", "/tmp", "-e", "A=b", "base")
    try:
        box = terminal.shows("sandbox ID .*?(i[a-z0-9]{15,})").group(1)
        terminal.shows(r"# ")
        terminal.type('echo "<$A-$PWD-$(whoami)>"\r')
        terminal.shows("<b-/tmp-root>")
        assert client.ids() == {box}
        terminal.type("exit\r")
        assert terminal.end() == 0
    finally:
        terminal.close()
    until(lambda: client.ids() == set(), "it ended with its terminal")


def test_logs(client: Client, box: str) -> None:
    client.ok("sandbox", "exec", box, "true")

    def lines(*options: str) -> list[dict[str, str]]:
        said = client.ok("sandbox", "logs", "--format", "json", *options, box)
        return [json.loads(line) for line in said.splitlines() if line.startswith("{")]

    until(lambda: {"platform", "process"} <= {line["logger"] for line in lines("--level", "debug")}, "both are heard")
    assert {line["logger"] for line in lines("--loggers", "platform")} == {"platform"}
    assert not [line for line in lines("--level", "error") if line["level"] != "ERROR"]
    assert "created" in client.ok("sandbox", "logs", box)


def test_logs_are_followed_to_the_end(client: Client, box: str) -> None:
    following = client.start("sandbox", "logs", "--follow", box)
    try:
        assert following.stdout
        heard = ""
        while "created" not in heard:
            heard += following.stdout.readline() or pytest.fail(heard)
        client.ok("sandbox", "kill", box)
        heard += following.communicate(timeout=within(60))[0]
        assert following.returncode == 0
        assert "Stopped printing logs" in heard
    finally:
        following.kill()
        following.wait()


def test_metrics(client: Client, box: str) -> None:
    def samples() -> list[dict[str, float]]:
        said = client.ok("sandbox", "metrics", "--format", "json", box)
        return [json.loads(line) for line in said.splitlines() if line.startswith("{")]

    until(lambda: len(samples()) > 0, "it was measured")
    assert samples()[0]["memTotal"] == 1024 << 20
    assert "CPU" in client.ok("sandbox", "metrics", box)


def test_metrics_are_followed(client: Client, box: str) -> None:
    following = client.start("sandbox", "metrics", "--follow", box)
    try:
        assert following.stdout
        heard = 0
        # More than there can have been when it began.
        while heard < 3:
            line = following.stdout.readline() or pytest.fail(f"ended after {heard}")
            heard += "Memory" in line
    finally:
        following.kill()
        following.wait()


@pytest.mark.parametrize("way", sorted(used))
def test_nothing_is_left_untried(way: str) -> None:
    """Judges what the tests above have used."""
    program = [os.environ["RINGFENCE_NODE"], os.environ["RINGFENCE_NODE_MODULES"] + "/@e2b/cli/dist/index.js"]

    def offered(*arguments: str) -> str:
        return subprocess.run([*program, "sandbox", *arguments, "--help"], capture_output=True, text=True).stdout

    missing = []
    commands = re.findall(r"^  ([a-z]+)\|", offered(), re.M)
    assert len(commands) > 8
    for command in commands:
        options = re.findall(r"^  (?:(-\w), )?(--[\w.-]+)", offered(command).partition("Options:")[2], re.M)
        ways = [{command}, *({f"{command} {name}" for name in names if name} for names in options if "--help" not in names)]
        missing += [sorted(names) for names in ways if not names & used[way]]
    assert missing == []


def test_network(work_dir: Path, tmp_path: Path) -> None:
    """The client has no options for networks: its sandboxes have the operator's policy, and the log says what was
    refused."""
    with secure_platform_on_the_internet(work_dir / "cli-network", f'deny = "{DENIED}"\n') as (server, internet):
        client = Client(server, tmp_path)
        client.ok("sandbox", "create", "--detach", "base")
        (box,) = client.ids()
        urls = ("http://93.67.0.1/", f"http://{SITE}/", "http://93.66.0.1/", "http://10.9.0.1/")
        tried = [client.ok("sandbox", "exec", box, f"curl -s -m 10 -o /dev/null {url} && echo reached || echo refused") for url in urls]
        assert tried == ["reached\n", "reached\n", "refused\n", "refused\n"]
        until(lambda: "93.66.0.1" in client.ok("sandbox", "logs", box), "the log names what was refused")
        client.ok("sandbox", "kill", box)
