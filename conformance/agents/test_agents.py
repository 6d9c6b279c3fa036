"""Coding agents that work on a repository with keys that they never see: each runs as it is, against the API of its vendor and a code host
of the fake internet, which answer to a key only.
"""

from __future__ import annotations

import base64
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from e2b import CommandExitException, Sandbox

from docs.blocks import first_program
from harness import coding_agents, model_api, package_mirror
from harness.code_host import TOKEN, CodeHost, git
from harness.internet import Internet
from harness.mcp_gateway import Session
from harness.model_api import KEYS, SAID
from harness.patience import within
from harness.platform import Platform

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "work_on_a_repository.py"
LOGIN = base64.b64encode(f"x-access-token:{TOKEN}".encode()).decode()
SECRETS = [*map(model_api.key, KEYS), TOKEN, LOGIN]
# Of each agent the host of its vendor, what the placeholder of the key is called, and what runs it with a prompt.
AGENTS = {
    "codex": ("api.openai.com", "CODEX_API_KEY", "codex exec --dangerously-bypass-approvals-and-sandbox --"),
    "claude": ("api.anthropic.com", "ANTHROPIC_API_KEY", "claude --dangerously-skip-permissions -p --"),
    "gemini": ("generativelanguage.googleapis.com", "GEMINI_API_KEY", "gemini --skip-trust --yolo -m gemini-2.5-flash -p"),
    "opencode": ("api.anthropic.com", "ANTHROPIC_API_KEY", "opencode run --auto -m anthropic/claude-sonnet-4-5 --"),
}
# Agents think that they know who they are; a repository wants it from whoever commits.
CHANGE = "git config user.name agent && git config user.email agent@example.com && echo changed >>README.md && git commit -qam"


def created(agent: str) -> Sandbox:
    """A sandbox for an agent: it reaches the host of its vendor and the code host, and nothing else. The token is for one repository."""
    host, variable, _ = AGENTS[agent]
    network = {"allow_out": [host, "github.com"], "deny_out": ["0.0.0.0/0"]}
    box = Sandbox.create("agents", timeout=600, envs={variable: "placeholder"}, network=network)
    injections = [
        {"type": {"api.openai.com": "openai", "api.anthropic.com": "anthropic"}.get(host, "gemini"), "api_key": model_api.key(host)},
        {"type": "http", "base_url": f"https://github.com/acme/{agent}/*", "headers": {"Authorization": f"Basic {LOGIN}"}},
    ]
    url = f"{os.environ['E2B_API_URL']}/sandboxes/{box.sandbox_id}/injections"
    answer = httpx.put(url, json={"injections": injections}, headers={"X-API-Key": os.environ["E2B_API_KEY"]}, timeout=30)
    assert answer.status_code == 204, answer.text
    return box


@pytest.fixture(params=coding_agents.names())
def agent(request: pytest.FixtureRequest, template: str) -> str:
    return request.param


@pytest.fixture
def box(agent: str) -> Iterator[Sandbox]:
    with created(agent) as box:
        yield box


def prompted(box: Sandbox, agent: str, command: str, cwd: str = "/home/user/work") -> str:
    """What an agent says that was asked to run a command."""
    words = f"{AGENTS[agent][2]} {shlex.quote(f'RUN {command} END')}"
    ran = box.commands.run(f"{words} </dev/null", cwd=cwd, timeout=within(120))
    assert SAID in ran.stdout, ran.stdout + ran.stderr
    return ran.stdout.rpartition(SAID)[2]


def held(box: Sandbox, texts: list[str]) -> list[str]:
    """Where root of a sandbox finds some texts: in all files that have changed since it began, and in the environment and the arguments of every process.
    The memory of another process is closed to root as well."""
    # The search has them in no argument and no file, and does not find itself. Only the user of a process sees its environment.
    program = """
import os, sys
since, texts = float(sys.argv[1]), [bytes.fromhex(text) for text in sys.argv[2:]]
found = []
for directory, below, names in os.walk("/") if os.getuid() == 0 else ():
    if directory == "/":
        # The last two are those of the template: nothing but a build writes there.
        below[:] = [name for name in below if name not in ("proc", "sys", "usr", "opt")]
    for name in names:
        path = os.path.join(directory, name)
        # What is older is of the template, which was built before there was a key.
        if os.path.isfile(path) and not os.path.islink(path) and os.lstat(path).st_ctime >= since:
            try:
                file = open(path, "rb")
            except PermissionError:
                # The agent of the platform, which nobody inside can read.
                continue
            with file:
                end = b""
                while part := file.read(1 << 20):
                    if any(text in end + part for text in texts):
                        found.append(path)
                        break
                    end = part[-200:]
for pid in os.listdir("/proc"):
    if not pid.isdigit() or int(pid) == os.getpid():
        continue
    for name in ("environ", "cmdline"):
        try:
            content = open(f"/proc/{pid}/{name}", "rb").read()
        except OSError:
            continue
        found += [f"/proc/{pid}/{name}" for text in texts if text in content]
print("\\n".join(sorted(set(found))))
"""
    box.files.write("/opt/search.py", program, user="root")
    since = box.get_info().started_at.timestamp() - 60
    words = f"python3 /opt/search.py {since} {' '.join(text.encode().hex() for text in texts)}"
    return [line for user in ("root", "user") for line in box.commands.run(words, user=user, timeout=within(120)).stdout.split()]


def test_it_works_on_a_repository_with_keys_that_are_nowhere_inside(
    agent: str, box: Sandbox, host: CodeHost, internet: Internet
) -> None:
    host.make(f"acme/{agent}")
    later = internet.mark()
    box.commands.run(f"git clone --quiet https://github.com/acme/{agent} work", timeout=within(60))
    # It commits and pushes, looks for keys where programs have them, and says what it found.
    looks = "env; cat /proc/*/environ /proc/*/cmdline 2>/dev/null | tr '\\0' '\\n'"
    said = prompted(box, agent, f"{CHANGE} by-{agent} && git push --quiet origin main && ({looks}) >/home/user/seen; tail -n 1 README.md")
    assert "changed" in said
    bare = host.root / "acme" / f"{agent}.git"
    assert git(bare, "log", "-1", "--format=%an %s", "main") == f"agent by-{agent}\n"
    # The vendor saw the key, and nobody inside had it.
    vendor = AGENTS[agent][0]
    header, value = KEYS[vendor]
    requests = later(kind="model", host=vendor)
    assert len(requests) >= 2 and {request["headers"][header] for request in requests} == {value}, requests
    # What else an agent wants of the code host has no token.
    paths = {event["path"].split("/")[2]: event["authorization"] for event in later(kind="http", host="github.com")}
    assert {name for name, login in paths.items() if login} == {agent}, paths
    seen = box.files.read("/home/user/seen")
    assert "placeholder" in seen and not any(secret in seen for secret in SECRETS)
    background = box.commands.run("exec sleep 600", background=True, timeout=0, envs={"CANARY": "canary-of-the-search"})
    assert held(box, SECRETS) == []
    # The search finds what is there, in a file and in a process.
    box.files.write("/home/user/planted", f"x{LOGIN}y")
    found = held(box, [LOGIN, "canary-of-the-search"])
    assert "/home/user/planted" in found and f"/proc/{background.pid}/environ" in found, found
    background.kill()


def test_it_reaches_these_hosts_and_no_other(agent: str, box: Sandbox, internet: Internet) -> None:
    later = internet.mark()
    for address in ("https://example.com/", "https://93.184.216.34/", "http://api.example.net/", "https://raw.github.com/"):
        with pytest.raises(CommandExitException):
            box.commands.run(f"curl --silent --show-error --insecure --max-time 20 {address}", timeout=within(30))
    assert later(kind="http") == [] and later(kind="tls") == []
    # A key is for its own host: that of another vendor gets none, and is closed.
    other = next(host for host in KEYS if host != AGENTS[agent][0])
    with pytest.raises(CommandExitException):
        box.commands.run(f"curl --silent --show-error --max-time 20 https://{other}/v1/models", timeout=within(30))
    assert later(kind="model") == []


def test_a_wrong_key_is_refused_by_the_vendor(template: str, internet: Internet) -> None:
    later = internet.mark()
    network = {"allow_out": ["api.openai.com"], "deny_out": ["0.0.0.0/0"]}
    with Sandbox.create("agents", timeout=300, envs={"CODEX_API_KEY": "placeholder"}, network=network) as box:
        box.files.write("/tmp/authority.pem", internet.authority.read_text())
        words = "curl --silent --cacert /tmp/authority.pem -o /dev/null -w '%{http_code}' -H 'Authorization: Bearer placeholder'"
        assert box.commands.run(f"{words} -d '{{}}' https://api.openai.com/v1/responses", timeout=within(30)).stdout == "401"
    assert [event["headers"]["authorization"] for event in later(kind="model")] == ["Bearer placeholder"]


def test_the_agents_are_there_and_cannot_change_themselves(template: str) -> None:
    with Sandbox.create("agents", timeout=300) as box:
        for agent in coding_agents.names():
            file = box.commands.run(f"readlink -f $(command -v {agent})").stdout.strip()
            assert file.startswith("/opt/agents/npm/"), file
            assert box.commands.run(f"find -L {file} /opt/agents/npm/{agent} -writable 2>/dev/null | head -3").stdout == ""
        assert box.commands.run("node --version").stdout.startswith("v24.")
        # What a task needs beside the agent.
        box.commands.run("npm --version && npx --version && git --version && python3 -c 'import ensurepip, venv'", timeout=within(60))


def test_what_the_program_brings_is_built_from_its_own_copy(platform: Platform, template: str) -> None:
    """By `template add` while the platform runs, and by `up --with` when it starts; a second start finds it there."""
    if "code-interpreter" in platform.options:
        with Sandbox.create("code-interpreter-v1", timeout=120) as box:
            token = box._envd_access_token or ""
            run = f"curl --silent --fail -H 'X-Access-Token: {token}' localhost:49999/execute -d '{{\"code\": \"40 + 2\"}}'"
            assert '"text":"42"' in box.commands.run(run).stdout.replace(" ", "")
    with Sandbox.create("mcp-gateway", timeout=120) as box:
        served = box.commands.run("mcp-gateway pull exa 2>&1 || true", user="root").stdout
        assert served.startswith("mcp-gateway: exa: servers of the catalogue are container images"), served
        assert box.commands.run("uvx --version").stdout.startswith("uv")
    # It is there now, so nothing is built, whatever its registries would say.
    for unless in (("--unless-present",), ()):
        again = platform.run("template", "add", *unless, "--format", "json", "mcp-gateway", "--build-arg", "BASE=registry.invalid/none")
        assert (again.returncode == 0) is bool(unless), again.stderr
    refused = platform.run("template", "add", "nothing")
    assert refused.returncode == 1 and "agents, code-interpreter, desktop, mcp-gateway" in refused.stderr


def test_servers_of_npm_and_pypi_behind_the_gateway(platform: Platform, template: str, internet: Internet, tmp_path: Path) -> None:
    """The first program of the page about the gateway: `npx` and `uvx` fetch them when the sandbox is created, which stays."""
    later = internet.mark()
    (tmp_path / "page.py").write_text(first_program("mcp-gateway.md"))
    ran = subprocess.run([sys.executable, tmp_path / "page.py"], capture_output=True, text=True, timeout=within(120), check=False)
    assert ran.returncode == 0, ran.stderr
    url, token = ran.stdout.splitlines()
    with Sandbox.connect(url.partition("50005-")[2].partition(".")[0], timeout=300) as box:
        assert (url, token) == (f"https://{box.get_host(50005)}/mcp", box.get_mcp_token())
        session = Session(platform, box)
        assert sorted(tool["name"] for tool in session.ask("tools/list")["tools"]) == ["of_npm", "of_pypi"]
        for tool, says in (("of_npm", "node hello 1000"), ("of_pypi", "python hello 1000")):
            assert session.ask("tools/call", name=tool, arguments={"word": "hello"})["content"][0]["text"] == says
        refused = httpx.post(f"{platform.url}/mcp", headers={"Host": box.get_host(50005), "Authorization": "Bearer wrong"}, json={}, timeout=30)
        assert (refused.status_code, "token" in refused.text) == (401, True), refused.text
    assert package_mirror.tarball(package_mirror.OF_NPM, "1.0.0") in {event["path"] for event in later(kind="http", host=package_mirror.NODE)}
    assert any(event["path"].endswith(".whl") for event in later(kind="http", host=package_mirror.PYTHON))


def test_the_example(host: CodeHost, template: str) -> None:
    host.make("acme/example")
    task = f"RUN {CHANGE} by-the-example && tail -n 1 README.md END"
    keys = {"OPENAI_API_KEY": model_api.key("api.openai.com"), "GITHUB_TOKEN": TOKEN}
    command = [sys.executable, EXAMPLE, "acme/example", task]
    ran = subprocess.run(command, env={**os.environ, **keys}, capture_output=True, text=True, timeout=within(120), check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert SAID in ran.stdout and "by-the-example" in ran.stdout and "README.md | 1 +" in ran.stdout
    assert git(host.root / "acme" / "example.git", "log", "-1", "--format=%s", "agent") == "by-the-example\n"
