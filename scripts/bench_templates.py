"""Measures the ready-made templates for SPECIFICATION.md, by a client on the same machine.

`bench-templates.sh` runs it with the release binary, the client of the code interpreter and CRIU. Sizes and memory do not depend on what
else the machine does, times do: so the load is printed with them. Arguments name the templates, all of them by default.

The size is that of the layers above `base`, or above the image that a recipe begins with. Memory is what the host counts for the control
group of a sandbox in which nothing is asked for any more: what its processes hold, and beside it files that are kept because there is room.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "conformance"))

from e2b import Sandbox  # noqa: E402
from e2b_code_interpreter import Sandbox as Interpreter  # noqa: E402
from harness.criu import criu_config  # noqa: E402
from harness.platform import Platform  # noqa: E402
from harness.ports import free_port  # noqa: E402
from harness.traffic import until  # noqa: E402

MB = 1 << 20
CREATES, CELLS = 8, 200
KEPT_READY_S = 60
# Of a sandbox whose memory changes by less than this within as many seconds, nothing goes on any more.
SETTLED_MB, SETTLED_S = 1, 15


def load() -> str:
    return f"load average {os.getloadavg()[0]:.1f}"


def show(what: str, times: list[float]) -> None:
    times = sorted(times)
    p50, p99 = (times[math.ceil(len(times) * share) - 1] for share in (0.5, 0.99))
    print(f"{what}: n {len(times)}, min {times[0]:.1f}, p50 {p50:.1f}, p99 {p99:.1f}, max {times[-1]:.1f} ms, {load()}", flush=True)


class Bench:
    def __init__(self, server: Platform, metrics_url: str) -> None:
        self.server = server
        headers = {"X-API-Key": server.credentials()["E2B_API_KEY"]}
        self.api = httpx.Client(base_url=server.url, headers=headers, timeout=600)
        self.metrics_url = metrics_url

    def metrics(self) -> str:
        return httpx.get(self.metrics_url, timeout=60).text

    def get(self, path: str) -> Any:
        answer = self.api.get(path)
        assert answer.is_success, answer.text
        return answer.json()

    def build(self, template: str) -> str:
        """Builds a template from the recipe in the program, and returns its name."""
        begun = time.monotonic()
        done = self.server.run("template", "add", "--no-cache", template, timeout_s=3600)
        assert done.returncode == 0, done.stderr[-4000:]
        print(f"{template}: built in {time.monotonic() - begun:.0f} s, {load()}", flush=True)
        ident = re.search(r"template (\S+) is ready", done.stdout).group(1)  # type: ignore[union-attr]
        (build,) = [one["buildID"] for one in self.get(f"/templates/{ident}")["builds"] if one["status"] == "ready"]
        layers = self.get(f"/templates/{ident}/builds/{build}/layers")["layers"]
        print(f"{template}: {sum(layer['sizeBytes'] for layer in layers) / 1e6:.0f} MB in {len(layers)} layers", flush=True)
        return next(one["aliases"][0] for one in self.get("/templates") if one["templateID"] == ident)

    def memory(self, box: Sandbox, what: str) -> None:
        """What a sandbox takes once nothing goes on in it."""
        seen: list[tuple[float, float, float]] = []

        def is_settled() -> bool:
            samples = self.get(f"/sandboxes/{box.sandbox_id}/metrics")
            if samples:
                seen.append((time.monotonic(), samples[-1]["memUsed"] / MB, samples[-1]["memCache"] / MB))
            late = [used for at, used, _ in seen if at > time.monotonic() - SETTLED_S]
            return bool(late) and seen[0][0] < time.monotonic() - SETTLED_S and max(late) - min(late) < SETTLED_MB

        until(is_settled, lambda: f"{what} is idle: {seen[-5:]}", within_s=300, every_s=1)
        print(f"{what}: {seen[-1][1]:.0f} MiB, and {seen[-1][2]:.0f} MiB of files", flush=True)


def code_interpreter(bench: Bench, name: str) -> None:
    with Interpreter.create(name, timeout=3600) as box:
        bench.memory(box, "code-interpreter, idle, no cell run")
        assert box.run_code("1 + 1").text == "2"
        times = []
        for _ in range(CELLS):
            begun = time.perf_counter()
            assert box.run_code("1 + 1").text == "2"
            times.append((time.perf_counter() - begun) * 1000)
        show("cell in a running context", times)
        bench.memory(box, "code-interpreter, idle, after cells")
    times = []
    most = waiting(bench)
    for _ in range(CREATES):
        # A create takes what is ready, and another is made ready for the next.
        until(lambda: waiting(bench) >= max(1, most), "sandboxes are kept ready", within_s=KEPT_READY_S)
        most = max(most, waiting(bench))
        begun = time.perf_counter()
        with Interpreter.create(name, timeout=600) as box:
            assert box.run_code("1 + 1").text == "2"
            times.append((time.perf_counter() - begun) * 1000)
    show("create and the first cell, kept ready", times)


def waiting(bench: Bench) -> int:
    """How many sandboxes are ready before they are asked for."""
    found = re.search(r'^ringfence_pool_sandboxes\{[^}]*state="ready"[^}]*\} (\d+)', bench.metrics(), re.MULTILINE)
    return int(found.group(1)) if found else 0


def desktop(bench: Bench, name: str) -> None:
    # As the client of the desktop starts it.
    with Sandbox.create(name, timeout=3600, envs={"DISPLAY": ":0"}) as box:
        box.commands.run("Xvfb :0 -ac -screen 0 1024x768x24 -retro -dpi 96 -nolisten tcp -nolisten unix", background=True, timeout=0)
        until(lambda: box.commands.run("xdpyinfo -display :0 >/dev/null 2>&1 && echo there || true").stdout, "a display")
        box.commands.run("startxfce4", background=True, timeout=0)
        until(lambda: box.commands.run("pgrep -x xfdesktop || true").stdout, "a session", within_s=60)
        bench.memory(box, "desktop, idle, with its session")


def gateway(bench: Bench, name: str) -> None:
    python = "/opt/mcp-gateway/environment/bin/python"
    with Sandbox.create(name, timeout=3600) as box:
        bench.memory(box, "mcp-gateway, idle, not started")
        box.files.write("/home/user/server.py", "from mcp.server.mcpserver import MCPServer\nMCPServer('small').run()\n")
        config = json.dumps({"small": {"command": python, "args": ["/home/user/server.py"]}})
        box.commands.run(f"mcp-gateway --config '{config}'", user="root", envs={"GATEWAY_ACCESS_TOKEN": "token"}, timeout=60)
        bench.memory(box, "mcp-gateway, idle, with one small server of Python")


def agents(bench: Bench, name: str) -> None:
    with Sandbox.create(name, timeout=3600) as box:
        bench.memory(box, "agents, idle, no agent")


CASES: dict[str, Callable[[Bench, str], None]] = {
    "code-interpreter": code_interpreter,
    "mcp-gateway": gateway,
    "agents": agents,
    "desktop": desktop,
}


def main() -> None:
    cases = sys.argv[1:] or list(CASES)
    with tempfile.TemporaryDirectory(prefix="rf-bench-", dir=os.environ.get("TMPDIR", "/var/tmp")) as directory:
        metrics = f"127.0.0.1:{free_port()}"
        more = os.environ.get("BENCH_CONFIG", "")
        server = Platform(Path(directory) / "data", config=f'metrics_listen = "{metrics}"\n{more}\n{criu_config()}', ready=True)
        try:
            server.start()
            server.use()
            bench = Bench(server, f"http://{metrics}/metrics")
            for case in cases:
                CASES[case](bench, bench.build(case))
        finally:
            if server.process:
                server.terminate()
            server.close()


main()
