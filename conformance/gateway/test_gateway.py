"""The `mcp` of a create request: servers of standard input and output behind one address, which an official client calls with the token.

RINGFENCE_NODE and RINGFENCE_NODE_MODULES name Node and a directory with the JavaScript SDK.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import mcp_types as types
import pytest
from e2b import AsyncSandbox, Sandbox, SandboxException, Template
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client

from harness import mcp_gateway
from harness.patience import within
from harness.platform import Platform
from harness.traffic import until_async

HERE = Path(__file__).parent
PYTHON = "/opt/mcp-gateway/environment/bin/python"


@pytest.fixture(scope="session")
def template(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A template with a small server and a repository, built on that of the recipe, under the name that clients ask for."""
    mcp_gateway.build(platform, tmp_path_factory.mktemp("recipe"))
    text, older, newer = ((HERE / f"{name}.py").read_text() for name in ("server", "older", "newer"))
    # The repository of a code host, reached as a directory.
    made = (
        Template()
        .from_template("mcp-gateway")
        .run_cmd(f"mkdir -p /srv/small/acme/tools && cat >/srv/small/server.py <<'END'\n{text}\nEND", user="root")
        .run_cmd(f"cat >/srv/small/older.py <<'END'\n{older}\nEND", user="root")
        .run_cmd(f"cat >/srv/small/newer.py <<'END'\n{newer}\nEND", user="root")
        .run_cmd(
            "cd /srv/small/acme/tools && cp ../../server.py . && git init -q && git -c user.name=a -c user.email=a@b add . && "
            "git -c user.name=a -c user.email=a@b commit -qm a && chown -R user /srv/small && "
            "git config --system url.file:///srv/small/.insteadOf https://github.com/",
            user="root",
        )
    )
    Template.build(made, "mcp-gateway", cpu_count=2, memory_mb=1024)
    return "mcp-gateway"


def small(word: str, **more: object) -> dict[str, object]:
    return {"command": PYTHON, "args": ["/srv/small/server.py", word], **more}


OLDER = {"command": PYTHON, "args": ["/srv/small/older.py"]}
NEWER = {"command": PYTHON, "args": ["/srv/small/newer.py"]}
SERVERS = {"one": small("first", env={"SETTING": "s-1"}), "two": small("second")}


@pytest.fixture(scope="module")
def box(template: str) -> Iterator[Sandbox]:
    with Sandbox.create(mcp=SERVERS, timeout=300) as made:  # type: ignore[arg-type]
        yield made


def asked(box: Sandbox, question: Callable[[Client], Awaitable[Any]], stream: asyncio.Event | None = None, **options: Any) -> Any:
    """What an official client is answered by the gateway of a sandbox. `stream` is set once what comes by itself is heard."""

    async def told(response: httpx2.Response) -> None:
        if stream and response.request.method == "GET":
            stream.set()

    async def ask() -> tuple[Any, MCPError | None]:
        trust = ssl.create_default_context(cafile=os.environ["SSL_CERT_FILE"])
        headers = {"Authorization": f"Bearer {box.get_mcp_token()}"}
        async with httpx2.AsyncClient(verify=trust, headers=headers, timeout=60, event_hooks={"response": [told]}) as http:
            async with Client(streamable_http_client(box.get_mcp_url(), http_client=http), **options) as client:
                try:
                    return await question(client), None
                except MCPError as error:
                    return None, error

    answer, refusal = asyncio.run(ask())
    # Raised within the client, it would come in a group of what its tasks raised.
    if refusal:
        raise refusal
    return answer


def called(box: Sandbox, tool: str, **arguments: object) -> str:
    result = asked(box, lambda client: client.call_tool(tool, arguments))
    assert not result.is_error, result
    return result.content[0].text


def test_tools_of_all_servers_are_listed_and_called(box: Sandbox) -> None:
    tools = asked(box, lambda client: client.list_tools()).tools
    # Both have `word`, so it has the name of its server before it.
    assert {tool.name for tool in tools} == {"one__word", "two__word", "add_first", "add_second", "end_first", "end_second"} | {
        f"{what}_{of}" for what in ("work", "grow") for of in ("first", "second")
    }
    assert next(tool for tool in tools if tool.name == "add_first").input_schema["required"] == ["a", "b"]
    assert called(box, "add_second", a=2, b=3) == "5"
    # They run as the user, and know their own settings.
    assert called(box, "one__word") == "first s-1 1000 /home/user"
    assert called(box, "two__word") == "second  1000 /home/user"
    with pytest.raises(MCPError, match="missing"):
        called(box, "missing")


def test_prompts_and_resources(box: Sandbox) -> None:
    prompts = asked(box, lambda client: client.list_prompts()).prompts
    assert {prompt.name for prompt in prompts} == {"greet_first", "greet_second"}
    greeting = asked(box, lambda client: client.get_prompt("greet_second", {"name": "Ada"}))
    assert greeting.messages[0].content.text == "Greet Ada"
    resources = asked(box, lambda client: client.list_resources()).resources
    assert {str(resource.uri) for resource in resources} == {"note://first", "note://second"}
    assert asked(box, lambda client: client.read_resource("note://second")).contents[0].text == "note of second"


def test_a_server_that_ends_is_started_again(box: Sandbox) -> None:
    with pytest.raises(MCPError, match="the server two has ended"):
        called(box, "end_second")
    # The other goes on meanwhile.
    assert called(box, "add_first", a=1, b=1) == "2"

    async def until_back(client: Client) -> str:
        async def added() -> str | None:
            try:
                return (await client.call_tool("add_second", {"a": 4, "b": 4})).content[0].text
            except MCPError:
                return None

        return await until_async(added, "the server is back", within_s=60)

    assert asked(box, until_back) == "8"


def test_progress_and_lines_of_a_call(box: Sandbox) -> None:
    steps: list[tuple[float, float | None, str | None]] = []

    async def step(*values: Any) -> None:
        steps.append(values)

    for mode, wanted in (("auto", "info"), ("auto", None), ("legacy", "debug"), ("legacy", None)):
        lines: list[tuple[str, str | None, str]] = []
        steps.clear()

        async def line(said: Any, lines: list[tuple[str, str | None, str]] = lines) -> None:
            lines.append((said.level, said.logger, said.data))

        async def work(client: Client, mode: str = mode, wanted: str | None = wanted) -> str:
            if mode == "legacy" and wanted:
                await client.set_logging_level(wanted)  # type: ignore[arg-type]
            return (await client.call_tool("work_second", progress_callback=step)).content[0].text

        assert asked(box, work, mode=mode, logging_callback=line, log_level=wanted) == "worked"
        assert steps == [(1.0, 2.0, "step 1"), (2.0, 2.0, "step 2")], mode
        error, debug = ("error", "two/worker", "what matters of second"), ("debug", "two/worker", "all of it by second")
        # Newer clients say with a call which they want, and none otherwise. Older ones set a level, and get the usual otherwise.
        assert lines == {("auto", "info"): [error], ("auto", None): [], ("legacy", "debug"): [debug, error], ("legacy", None): [error]}[mode, wanted]


def test_changes_of_a_list(template: str) -> None:
    async def by_listening(client: Client) -> set[str]:
        await client.list_tools()
        async with client.listen(tools_list_changed=True) as events:
            await client.call_tool("grow_first")
            await asyncio.wait_for(anext(aiter(events)), within(30))
        return {tool.name for tool in (await client.list_tools()).tools}

    with Sandbox.create(mcp={"one": small("first"), "old": OLDER}, timeout=120) as box:  # type: ignore[arg-type]
        assert {"grown_first", "older"} < asked(box, by_listening)
        lines: list[str] = []
        messages: list[object] = []

        async def line(said: Any) -> None:
            lines.append(f"{said.logger}: {said.data}")

        async def message(said: object) -> None:
            messages.append(said)

        stream = asyncio.Event()

        async def by_a_stream(client: Client) -> set[str]:
            # What is said before that is lost: such a client opens its stream beside its first requests.
            await asyncio.wait_for(stream.wait(), within(30))
            steps: list[str | None] = []

            async def step(done: float, total: float | None, what: str | None) -> None:
                steps.append(what)

            assert "older_grown" not in {tool.name for tool in (await client.list_tools()).tools}
            assert (await client.call_tool("older", progress_callback=step)).content[0].text == "done"
            assert steps == ["half"]

            async def changed() -> bool:
                return any(isinstance(said, types.ToolListChangedNotification) for said in messages)

            await until_async(changed, "the client is told that the tools have changed", within_s=30)
            # It is a tool that can be called.
            return {tool.name for tool in (await client.list_tools()).tools}

        assert "older_grown" in asked(box, by_a_stream, stream, mode="legacy", message_handler=message, logging_callback=line)
        # Of an older server, the gateway wants every line.
        assert lines == ["old: level debug"]


QUESTIONS = ["sampling/createMessage", "elicitation/create", "roots/list"]


@pytest.fixture(scope="module")
def asks(template: str) -> Iterator[Sandbox]:
    """A sandbox with servers of both versions that ask their clients."""
    with Sandbox.create(mcp={"old": OLDER, "new": NEWER}, timeout=300) as made:  # type: ignore[arg-type]
        yield made


async def sample(_: Any, params: types.CreateMessageRequestParams) -> types.CreateMessageResult:
    assert params.messages[0].content.text == "Say a word" and params.max_tokens == 9  # type: ignore[union-attr]
    return types.CreateMessageResult(role="assistant", content=types.TextContent(type="text", text="word"), model="a model")


async def elicit(_: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
    assert params.message == "Your name?" and "name" in params.requested_schema["properties"]  # type: ignore[union-attr]
    return types.ElicitResult(action="accept", content={"name": "Ada"})


async def roots(_: Any) -> types.ListRootsResult:
    return types.ListRootsResult(roots=[types.Root(uri="file:///home/ada/work", name="work")])  # type: ignore[arg-type]


ANSWERS = {"sampling_callback": sample, "elicitation_callback": elicit, "list_roots_callback": roots}


@pytest.mark.parametrize("mode", ["auto", "legacy"])
@pytest.mark.parametrize("server", ["older", "newer"])
def test_what_a_server_asks_reaches_the_client_of_the_call(asks: Sandbox, server: str, mode: str) -> None:
    """Clients and servers of both versions, which have different ways for it, with each other."""

    async def call(client: Client) -> list[dict[str, Any]]:
        said = (await client.call_tool(f"{server}_asks", {"what": QUESTIONS})).content[0].text  # type: ignore[union-attr]
        return [json.loads(answer) for answer in json.loads(said)]

    text, name, directories = asked(asks, call, mode=mode, **ANSWERS)
    assert (text["content"]["text"], text["model"], name["action"], name["content"]) == ("word", "a model", "accept", {"name": "Ada"})
    assert [(root["uri"], root["name"]) for root in directories["roots"]] == [("file:///home/ada/work", "work")]


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_what_a_client_cannot_answer_is_said(asks: Sandbox, mode: str) -> None:
    lacking = [f"error: {question} of the server old was put to nobody: the client of this call has no {what}"
               for question, what in zip(QUESTIONS, ("sampling", "elicitation", "roots"), strict=True)]

    async def older(client: Client) -> Any:
        return json.loads((await client.call_tool("older_asks", {"what": QUESTIONS})).content[0].text)  # type: ignore[union-attr]

    assert asked(asks, older, mode=mode) == lacking
    # A newer server does without an answer what it did, so its call is what fails.
    with pytest.raises(MCPError, match="roots/list of the server new was put to nobody: the client of this call has no roots"):
        asked(asks, lambda client: client.call_tool("newer_asks", {"what": ["roots/list"]}), mode=mode)

    async def refuse(*_: Any) -> types.ErrorData:
        return types.ErrorData(code=-1, message="not today")

    async def decline(*_: Any) -> types.ElicitResult:
        return types.ElicitResult(action="decline")

    # What a client says instead of an answer is passed on as it is; a newer one does not send the call again then.
    if mode == "legacy":
        assert asked(asks, older, mode=mode, **{**ANSWERS, "sampling_callback": refuse})[0] == "error: not today"
    assert json.loads(asked(asks, older, mode=mode, **{**ANSWERS, "elicitation_callback": decline})[1])["action"] == "decline"


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_a_question_for_one_of_several_clients_is_put_to_none(asks: Sandbox, mode: str) -> None:
    """An older server does not say for which call it asks. The second question comes while another client has a call, too."""
    others: list[asyncio.Task[Any]] = []

    async def slowly(_: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
        waits = asyncio.Event()

        async def line(said: Any) -> None:
            waits.set()

        async def ask_elsewhere() -> Any:
            headers = {"Authorization": f"Bearer {asks.get_mcp_token()}"}
            trust = ssl.create_default_context(cafile=os.environ["SSL_CERT_FILE"])
            async with httpx2.AsyncClient(verify=trust, headers=headers, timeout=60) as http:
                connection = streamable_http_client(asks.get_mcp_url(), http_client=http)
                async with Client(connection, mode=mode, logging_callback=line, log_level="info", **ANSWERS) as other:
                    return await other.call_tool("older_asks", {"what": QUESTIONS[1:2]})

        others.append(asyncio.create_task(ask_elsewhere()))
        # The server says so to the other client when the call has reached it.
        await asyncio.wait_for(waits.wait(), within(30))
        return await elicit(_, params)

    async def call(client: Client) -> tuple[list[str], str]:
        first = json.loads((await client.call_tool("older_asks", {"what": ["elicitation/create", "roots/list"]})).content[0].text)  # type: ignore[union-attr]
        return first, (await others[0]).content[0].text

    (name, directories), other = asked(asks, call, mode=mode, **{**ANSWERS, "elicitation_callback": slowly})
    assert json.loads(name)["content"] == {"name": "Ada"}
    assert directories.endswith("calls of several clients are being answered, and it is not said which of them this is for")
    # Its own question is answered, once it is the only one.
    assert json.loads(json.loads(other)[0])["content"] == {"name": "Ada"}


def test_only_who_has_the_token_is_answered(box: Sandbox) -> None:
    token = box.get_mcp_token()
    trust = ssl.create_default_context(cafile=os.environ["SSL_CERT_FILE"])
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": token or ""}):
        answer = httpx2.post(box.get_mcp_url(), json={}, headers=headers, verify=trust)
        assert (answer.status_code, "token" in answer.text) == (401, True), answer.text
    # Another program that connects reads it as root, and nobody else inside can.
    assert Sandbox.connect(box.sandbox_id).get_mcp_token() == token
    seen = box.commands.run("cat /etc/mcp-gateway/.token; cat /proc/*/environ /proc/*/cmdline 2>/dev/null | tr '\\0' '\\n'; true").stdout
    assert token and token not in seen and "s-1" not in box.commands.run("ps -e -o args=").stdout


def test_the_gateway_outlives_a_pause(box: Sandbox) -> None:
    box.pause()
    again = Sandbox.connect(box.sandbox_id, timeout=300)
    assert called(again, "add_first", a=20, b=1) == "21"


def test_a_server_of_a_repository(template: str) -> None:
    settings = {"runCmd": f"{PYTHON} server.py cloned", "installCmd": "echo yes >installed", "envs": {"SETTING": "s-2"}}
    with Sandbox.create(mcp={"github/acme/tools": settings}, timeout=120) as box:  # type: ignore[dict-item]
        assert called(box, "word") == "cloned s-2 1000 /home/user/mcp-servers/acme_tools"
        assert box.files.read("/home/user/mcp-servers/acme_tools/installed") == "yes\n"


@pytest.mark.parametrize(
    ("servers", "says"),
    [
        ({"exa": {"apiKey": "x"}}, "exa: there is no command. Servers of the catalogue are container images"),
        ({"a": {"command": "/no/such/program"}}, "the server a did not start"),
        ({"a": {"command": "sh", "args": ["-c", "echo why >&2; exit 1"]}}, "it said: why"),
        ({"a_b": {"command": "x"}, "github/a/b": {"runCmd": "x"}}, "a_b: two servers would have this name"),
        ({"a": {"command": "x", "arguments": []}}, "a: 'arguments' is not known"),
        ({"a/b": {"command": "x"}}, "a/b: a name has letters"),
        ({"github/acme/none": {"runCmd": "x"}}, "https://github.com/acme/none: git ended with 128"),
        ({"github/acme/tools": {"runCmd": "x", "installCmd": "echo no; exit 5"}}, "bash ended with 5: no"),
    ],
)
def test_what_cannot_be_started_is_named(template: str, servers: dict[str, object], says: str) -> None:
    with pytest.raises(SandboxException, match="Failed to start MCP gateway") as raised:
        Sandbox.create(mcp=servers, timeout=60)  # type: ignore[arg-type]
    assert says in str(raised.value)


def test_the_asynchronous_sdk_of_python(template: str) -> None:
    async def create() -> tuple[str, str, str | None]:
        box = await AsyncSandbox.create(mcp=SERVERS, timeout=120)  # type: ignore[arg-type]
        return box.sandbox_id, box.get_mcp_url(), await box.get_mcp_token()

    ident, url, token = asyncio.run(create())
    with Sandbox.connect(ident) as box:
        assert (box.get_mcp_url(), box.get_mcp_token()) == (url, token)
        assert called(box, "add_second", a=2, b=5) == "7"


def test_the_javascript_sdk(template: str, tmp_path: Path) -> None:
    # Node finds packages beside the program.
    program = tmp_path / "client.mjs"
    program.write_text((HERE / "client.mjs").read_text())
    (tmp_path / "node_modules").symlink_to(os.environ["RINGFENCE_NODE_MODULES"])
    command = [os.environ["RINGFENCE_NODE"], str(program), json.dumps(SERVERS)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=within(120), check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert "exa: there is no command" in found["refused"], found
    with Sandbox.connect(found["id"]) as box:
        assert (box.get_mcp_url(), [box.get_mcp_token()] * 2) == (found["url"], found["tokens"])
        assert called(box, "one__word") == "first s-1 1000 /home/user"


def test_the_example(template: str) -> None:
    program = HERE.parents[1] / "examples" / "use_mcp_servers.py"
    command = [sys.executable, str(program), "word", PYTHON, "/srv/small/server.py", "third"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=within(120), check=False)
    assert ran.returncode == 0, ran.stderr
    *tools, said = ran.stdout.splitlines()
    assert set(tools) == {"word", "add_third", "end_third", "work_third", "grow_third"} and said == "third  1000 /home/user"
