"""The command that clients run as root after they have created a sandbox:

    GATEWAY_ACCESS_TOKEN=TOKEN mcp-gateway --config JSON

It ends with 0 when the gateway answers on its port, which then stays, and otherwise with 1 and the reason on its standard error, which
is what the clients show. Clients wait for a minute.
"""

from __future__ import annotations

import dataclasses
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

from mcp_gateway import serve
from mcp_gateway.configuration import Refused, Server, parse
from mcp_gateway.joined import AS_USER, HOME, environment

TOKEN = Path("/etc/mcp-gateway/.token")
REPOSITORIES = f"{HOME}/mcp-servers"
WITHIN_S = 55.0


def fetched(server: Server, deadline: float) -> None:
    """Clones the repository of a server, and installs what it needs."""
    server.cwd = f"{REPOSITORIES}/{server.name}"
    steps = [["git", "clone", "--quiet", "--depth", "1", str(server.repository), server.cwd]]
    if server.install:
        steps.append(["bash", "-c", f"cd -- \"$0\" && {server.install}", server.cwd])
    variables = environment({"GIT_TERMINAL_PROMPT": "0", **server.env})
    for step in steps:
        try:
            ran = subprocess.run(
                ["setpriv", *AS_USER, *step], env=variables, cwd=HOME, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, errors="replace", timeout=max(1.0, deadline - time.monotonic()),
            )
        except subprocess.TimeoutExpired:
            raise Refused(f"{server.repository}: {step[0]} has not ended in time") from None
        if ran.returncode != 0:
            raise Refused(f"{server.repository}: {step[0]} ended with {ran.returncode}: {ran.stdout[-1000:].strip()}")


def start(text: str) -> None:
    """Starts the gateway, and returns when it answers."""
    deadline = time.monotonic() + WITHIN_S
    servers = parse(text)
    token = os.environ.pop("GATEWAY_ACCESS_TOKEN", "")
    if not token or not token.isascii() or not token.isprintable():
        raise Refused("GATEWAY_ACCESS_TOKEN must be set to the token that callers have to send")
    for server in servers:
        if server.repository:
            fetched(server, deadline)
    TOKEN.parent.mkdir(parents=True, exist_ok=True)
    TOKEN.unlink(missing_ok=True)
    # Clients read it as root, and take it as it is: there is no line end.
    with os.fdopen(os.open(TOKEN, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token)
    log = open("/var/log/mcp-gateway.log", "a")  # noqa: SIM115
    process = subprocess.Popen(
        [sys.executable, "-I", "-m", "mcp_gateway", "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd="/",
        start_new_session=True,
    )
    assert process.stdin and process.stdout
    process.stdin.write(json.dumps({"servers": [dataclasses.asdict(server) for server in servers], "token": token}) + "\n")
    process.stdin.close()
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        said = process.stdout.readline().strip() if selector.select(max(0.0, deadline - time.monotonic())) else "the servers have not started in time"
    if said != "ready":
        os.killpg(process.pid, signal.SIGKILL)
        raise Refused(said or "the gateway has ended; /var/log/mcp-gateway.log says why")


def main() -> int:
    match sys.argv[1:]:
        case ["serve"]:
            return serve.main()
        case ["--config", text]:
            try:
                start(text)
            except Refused as error:
                print(f"mcp-gateway: {error}", file=sys.stderr)
                return 1
            return 0
        case ["pull", *names]:
            print(
                f"mcp-gateway: {', '.join(names)}: servers of the catalogue are container images, which do not run here. Install packages "
                "of npm or PyPI in a step of the template instead, and name their command in `mcp`",
                file=sys.stderr,
            )
            return 1
        case _:
            print("usage: mcp-gateway --config JSON, with GATEWAY_ACCESS_TOKEN in the environment", file=sys.stderr)
            return 2


sys.exit(main())
