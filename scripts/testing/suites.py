"""The table of suites: what each runs in which form, what it needs, and what may run beside it.

A suite is one pytest run with its own platforms. In the default form every suite of the table runs, some with fewer files
or cycles; `--long` gives all of them everything. What only the long form runs is in `long_only`, with the reason beside
it: it must also be in docs/dev/testing.md.

Tests that measure, fill or change the host as a whole cannot have a neighbour. They have the marker `alone` where they are
written, with the reason. Here they are suites of their own with `alone=True`, which begin when everything else has ended; the
files are found by the marker.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from testing.options import CLIENTS

# Where a variable of a suite has the path of an asset.
PLACEHOLDER = re.compile(r"\{([^}]+)\}")
SDK = "python-2.63.0"
CRIU = {"RINGFENCE_CRIU": "{criu}"}
GO = {"RINGFENCE_GO": "{go}"}
NODE = {"RINGFENCE_NODE": "{node}"}
VERSITYGW = {"RINGFENCE_VERSITYGW": "{versitygw}"}
# Cycles of the default form. The moments differ in each run, so what one run tries less of, many runs make up for; the
# long form has the numbers of the tests themselves.
FEWER_CYCLES = {
    "RINGFENCE_CRASH_CYCLES": "60",
    "RINGFENCE_BUILD_CYCLES": "8",
    "RINGFENCE_FORK_CYCLES": "8",
    "RINGFENCE_PAUSE_CYCLES": "8",
    "RINGFENCE_SNAPSHOT_CYCLES": "8",
}
FEWER_FAULTS = {"RINGFENCE_FAULT_CYCLES": "7"}
# Each replacement of a spawner is looked at as often as the processor allows.
FEWER_RESPAWNS = {"RINGFENCE_RESPAWNS": "30"}


@dataclass(frozen=True)
class Suite:
    """One pytest run."""

    name: str
    step: str
    # Arguments of pytest in the default form, from `conformance`.
    arguments: tuple[str, ...]
    # Those of the long form, where they differ.
    long_only: tuple[str, ...] | None = None
    # Expected seconds on two cores with other suites beside it, by which suites are ordered; a guess is good enough.
    seconds: int = 60
    # After so many seconds it is ended, and has failed.
    bound: int = 900
    # Environment of Python that has pytest and the SDK.
    python: str = SDK
    # Variables that name what it needs; `{NAME}` is the path of an asset.
    environment: Mapping[str, str] = field(default_factory=dict)
    # Variables of the default form alone.
    fewer: Mapping[str, str] = field(default_factory=dict)
    # Packages of the system beyond those of every run.
    packages: tuple[str, ...] = ()
    # Runs where every name below `localhost` is this machine.
    names: bool = False
    # Runs when nothing else does.
    alone: bool = False
    # Suites of one group never run at the same time.
    group: str | None = None

    def chosen(self, long: bool) -> tuple[str, ...]:
        """Arguments of pytest in one of the two forms."""
        return self.long_only if long and self.long_only is not None else self.arguments

    def needs(self) -> list[str]:
        """Assets that the suite needs."""
        named = [name for value in self.environment.values() for name in PLACEHOLDER.findall(value)]
        return list(dict.fromkeys([self.python, *named]))


def files(directory: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{directory}/test_{name}.py" for name in names)


BESIDE = ("-m", "not alone")
ALONE = ("-m", "alone")
# Files that run in the long form alone: systems and images are fetched from mirrors, for minutes; and an older desktop client, which
# runs the same commands in a sandbox as the newer one.
LONG_ONLY = frozenset(
    {"install/test_install.py", "install/test_systemd.py", "desktop/test_older.py", "desktop/test_chromium.py", "codeint/test_debian.py"}
)
CONFORMANCE = Path(__file__).resolve().parents[2] / "conformance"


@cache
def alone() -> frozenset[str]:
    """The files and tests of `conformance` that have the marker `alone`: `escape/test_x.py` where a whole file has it, and
    `escape/test_x.py::test_y`. Files are read, not imported, because they need packages that this program must not.
    """
    found = set()
    for file in CONFORMANCE.glob("*/test_*.py"):
        text = file.read_text()
        if "mark.alone" in text:
            name = str(file.relative_to(CONFORMANCE))
            for statement in ast.parse(text).body:
                if isinstance(statement, ast.Assign) and is_marked(statement.value):
                    found.add(name)
                elif isinstance(statement, ast.FunctionDef) and any(map(is_marked, statement.decorator_list)):
                    found.add(f"{name}::{statement.name}")
    return frozenset(found)


def is_marked(value: ast.expr) -> bool:
    """Whether an expression is `pytest.mark.alone(...)`, or a list with it."""
    if isinstance(value, ast.List):
        return any(map(is_marked, value.elts))
    return isinstance(value, ast.Call) and ast.unparse(value.func) == "pytest.mark.alone"


def alone_files(directory: str) -> tuple[str, ...]:
    """The files of a directory with tests that have the marker."""
    return tuple(sorted({name.partition("::")[0] for name in alone() if name.startswith(f"{directory}/")}))


def is_alone(test: str) -> bool:
    """Whether a file as a whole, or a test, has the marker."""
    name = test.partition("[")[0]
    return name in alone() or name.partition("::")[0] in alone()


# What an operator does, what is in a sandbox, what runs in a build and what becomes of processes does not depend on the client.
NOT_OF_THE_CLIENT = tuple(
    f"--ignore={file}"
    for file in files(
        "python",
        *("base", "from_source", "limits", "operator", "operator_sandboxes", "operator_inside", "top", "hostile_text", "pool"),
        *("pause_answer", "pause_on_disk", "pause_programs"),
        *("page_out", "snapshot_memory", "template_files", "dockerfiles", "template_registry", "image_families", "events"),
    )
)
# These call every method of the SDK with every parameter, and judge what was called in one process.
EVERY_CALL = files("python", "every_call", "every_command", "every_file", "every_git_helper")
SHARED = "escape/test_shared_inodes.py::test_nothing_that_can_be_opened_is_shared"
LIMITS = "escape/test_limits.py"
FORKED = (
    *("--forked", *BESIDE),
    *files("escape", "kernel", "files_of_the_host", "proc_and_sys"),
    SHARED,
    "escape/test_agent_survives.py::test_nothing_that_acts_on_another_process_reaches_the_agent",
    "escape/test_network.py",
    *("--deselect", "escape/test_network.py::test_the_control_channel_refuses_peers_inside"),
    f"{LIMITS}::test_what_the_kernel_counts_per_user_is_counted_per_sandbox",
    f"{LIMITS}::test_a_fork_bomb_is_held",
    f"{LIMITS}::test_a_memory_hog_is_killed_and_the_agent_lives",
    f"{LIMITS}::test_an_fd_hog_meets_its_own_limit",
    f"{LIMITS}::test_limits_hold_for_terminals_too",
)
JAVASCRIPT = "javascript/test_javascript.py"


def smoke(version: str) -> tuple[Suite, Suite]:
    """What every program does, with a version that programs still pin, over both transports."""
    file = ("smoke/test_python.py",)
    return (
        Suite(f"smoke-{version}", "sdk", file, seconds=15, bound=300, python=f"python-{version}"),
        Suite(f"smoke-{version}-tls", "sdk", ("--tls", *file), seconds=15, bound=300, python=f"python-{version}", names=True),
    )


def node(name: str, arguments: tuple[str, ...], modules: str, step: str = "", **other: object) -> Suite:
    """A suite of a client on Node."""
    environment = {**NODE, "RINGFENCE_NODE_MODULES": f"{{npm-{modules}}}", **other.pop("environment", {})}  # type: ignore[dict-item]
    return Suite(name, step or name, ("-s", *arguments), environment=environment, **other)  # type: ignore[arg-type]


ALL: tuple[Suite, ...] = (
    # The whole of what the SDK does, once.
    Suite("python", "sdk", (*BESIDE, "python"), seconds=480, bound=2400, environment=CRIU | GO),
    Suite(
        "python-alone",
        "sdk",
        (*ALONE, *alone_files("python")),
        seconds=60,
        environment=CRIU | GO,
        alone=True,
    ),
    # What a version of the client changes is its calls. Everything else reaches the platform as the same requests.
    Suite(
        "python-2.45.1",
        "sdk",
        ("smoke/test_python.py", *EVERY_CALL, "python/test_rest.py"),
        (*BESIDE, "python", *NOT_OF_THE_CLIENT),
        seconds=60,
        bound=1500,
        python="python-2.45.1",
        environment=CRIU | GO,
    ),
    # What the transport changes is how a sandbox is reached. What a build does does not depend on how it was asked for.
    Suite(
        "python-tls",
        "sdk",
        ("--tls", *EVERY_CALL, *files("python", "rest", "traffic", "auth", "files", "pty")),
        (
            *("--tls", *BESIDE, "python", *NOT_OF_THE_CLIENT),
            *(f"--ignore={file}" for file in files("python", "template_builds", "snapshots", "fork")),
        ),
        seconds=80,
        bound=1500,
        environment=CRIU | GO,
        names=True,
    ),
    # What they have in common with the suites before and cannot run beside another one. The default form has it once.
    Suite("python-2.45.1-alone", "sdk", (), (*ALONE, "python/test_sizes.py"), python="python-2.45.1", environment=CRIU | GO, alone=True),
    Suite(
        "python-tls-alone",
        "sdk",
        (),
        ("--tls", *ALONE, "python/test_sizes.py"),
        environment=CRIU | GO,
        names=True,
        alone=True,
    ),
    smoke("2.45.1")[1],
    *smoke("2.20.3"),
    *smoke("2.8.1"),
    Suite("blobs", "blobs", ("blobs",), seconds=40, bound=600, environment=VERSITYGW),
    # What templates do is the same with a bucket; the store of layers and of uploaded files is what differs.
    Suite(
        "python-s3",
        "blobs",
        ("--s3", *files("python", "templates", "template_files")),
        ("--s3", *files("python", "templates", "template_builds", "template_files", "dockerfiles")),
        seconds=30,
        bound=600,
        environment=VERSITYGW,
    ),
    node("javascript", ("javascript",), "javascript-2.51.0", seconds=150, bound=1200, environment=CRIU),
    # As with Python: each call of the other version once, over one transport.
    node(
        "javascript-2.49.0",
        (f"{JAVASCRIPT}::test_over_http", f"{JAVASCRIPT}::test_forks", f"{JAVASCRIPT}::test_nothing_is_left_untried[http]"),
        "javascript-2.49.0",
        "javascript",
        long_only=("-s", "javascript"),
        seconds=50,
        bound=1200,
        environment=CRIU,
    ),
    node("javascript-2.8.4", ("smoke/test_javascript.py",), "javascript-2.8.4", "javascript", seconds=15, bound=300),
    node("cli", ("cli",), "cli", seconds=175),
    # A service of three servers behind one port: what one of them has made, the next one is asked about.
    node(
        "javascript-balanced",
        ("--balanced", f"{JAVASCRIPT}::test_over_http"),
        "javascript-2.51.0",
        "javascript",
        seconds=60,
        bound=600,
        environment=CRIU | VERSITYGW,
    ),
    Suite(
        "cli-balanced",
        "cli",
        (),
        ("-s", "--balanced", "cli", "-k", "http and not https"),
        seconds=120,
        environment={**NODE, "RINGFENCE_NODE_MODULES": "{npm-cli}", **CRIU, **VERSITYGW},
    ),
    Suite("go", "go", ("-s", "go"), seconds=60, environment=GO),
    # In the sandbox, Chromium is that of the host, whose packages `base` has.
    node("browser", ("browser", "--criu"), "browser", seconds=60, environment=CRIU, packages=("chromium", "libnss3-tools")),
    # Its pages are checked with what the browser's modules have for that.
    node(
        "dashboard",
        ("dashboard", "--criu"),
        "browser",
        "dashboard",
        seconds=120,
        bound=900,
        python="python-docs",
        environment=CRIU,
        packages=("chromium", "fonts-dejavu-core"),
    ),
    node(
        "mcp",
        ("mcp",),
        "mcp",
        seconds=20,
        environment={"RINGFENCE_MCP_PYTHON": "{python-mcp-2.3.0}:{python-mcp-1.30.0}"},
    ),
    node("signing", ("signing",), "signing", seconds=15, environment={"RINGFENCE_QINIU_PYTHON": "{python-signing}"}),
    node(
        "codeint",
        # Over HTTPS, because the older client finds a port by its name alone.
        ("--tls", "--criu", *files("codeint", "cells", "clients", "contexts", "kept_ready", "life", "results")),
        "codeint",
        seconds=120,
        names=True,
        python="python-codeint-2.11.5",
        environment=CRIU
        | {"RINGFENCE_CODE_INTERPRETER_PACKAGES": "{code-interpreter-packages}", "RINGFENCE_OLD_PYTHON": "{python-codeint-2.8.1}"},
    ),
    # The names of mirrors are not below `localhost`, so this one is for itself.
    Suite(
        "codeint-debian",
        "codeint",
        (),
        ("-s", "--criu", "codeint/test_debian.py"),
        seconds=400,
        bound=2400,
        python="python-codeint-2.11.5",
        environment=CRIU
        | {"RINGFENCE_CODE_INTERPRETER_PACKAGES": "{code-interpreter-packages}", "RINGFENCE_MCP_GATEWAY_PACKAGES": "{mcp-gateway-packages}"},
    ),
    node(
        "desktop",
        # Over HTTPS, because the older client finds a sandbox by its name alone, and a stream is at no other address.
        ("--tls", "--criu", *files("desktop", "clients", "desktop")),
        "desktop",
        long_only=("-s", "--tls", "--criu", "desktop"),
        seconds=120,
        names=True,
        python="python-desktop-2.7.2",
        environment=CRIU | {"RINGFENCE_DESKTOP_PACKAGES": "{desktop-packages}", "RINGFENCE_OLD_PYTHON": "{python-desktop-1.7.4}"},
        # Of the host, it shows the stream; in the sandbox is another one.
        packages=("chromium", "libnss3-tools"),
    ),
    node(
        "gateway",
        # Over HTTPS, because the client gives no other address of the gateway.
        ("--tls", "--criu", "gateway"),
        "javascript-2.51.0",
        seconds=85,
        names=True,
        python="python-gateway",
        environment=CRIU | {"RINGFENCE_MCP_GATEWAY_PACKAGES": "{mcp-gateway-packages}"},
        packages=("git", "nodejs", "npm"),
    ),
    # One agent, because each is some hundred megabytes to unpack; the long form has all of them as well.
    Suite(
        "agents",
        "agents",
        ("--criu", "agents"),
        seconds=65,
        environment=CRIU | {"RINGFENCE_AGENTS_PACKAGES": "{agents-packages}", "RINGFENCE_MCP_GATEWAY_PACKAGES": "{mcp-gateway-packages}"},
        packages=("git", "nodejs", "npm"),
    ),
    Suite(
        "agents-all",
        "agents",
        (),
        ("--criu", "agents/test_agents.py"),
        seconds=200,
        environment=CRIU | {
            "RINGFENCE_AGENTS_PACKAGES": "{agents-packages-all}",
            "RINGFENCE_MCP_GATEWAY_PACKAGES": "{mcp-gateway-packages}",
            "RINGFENCE_CODE_INTERPRETER_PACKAGES": "{code-interpreter-packages}",
        },
        packages=("git", "nodejs", "npm"),
    ),
    # The browser, with a font; the environment has only what drives it.
    node(
        "docs",
        ("docs", "--criu"),
        "javascript-2.51.0",
        seconds=120,
        bound=1200,
        python="python-docs",
        environment={"RINGFENCE_CLI_MODULES": "{npm-cli}"} | GO | CRIU,
        packages=("chromium", "fonts-dejavu-core"),
    ),
    Suite(
        "acme",
        "acme",
        ("-s", "acme"),
        seconds=60,
        bound=600,
        environment={"RINGFENCE_PEBBLE": "{pebble}"},
        packages=("openssl",),
        names=True,
    ),
    Suite(
        "monitoring",
        "monitoring",
        ("monitoring",),
        seconds=240,
        bound=900,
        python="python-monitoring",
        environment={"RINGFENCE_PROMETHEUS": "{prometheus}", "RINGFENCE_COLLECTOR": "{collector}"},
        packages=("openssl",),
    ),
    Suite("fuzz", "fuzz", ("fuzz",), seconds=100, bound=900, environment={"RINGFENCE_SCHEMATHESIS": "{python-fuzz}"}),
    Suite("escape", "escape", (*BESIDE, "escape"), seconds=370, bound=2400, environment=CRIU, fewer=FEWER_RESPAWNS),
    Suite(
        "escape-alone",
        "escape",
        # Last of all, and in it what measures the kernel's memory, which settles for minutes after all that ran before.
        (*ALONE, *sorted(alone_files("escape"), key=lambda name: (name == "escape/test_kernel_objects.py", name))),
        seconds=1,
        bound=1800,
        environment=CRIU,
        alone=True,
    ),
    # What holds in a sandbox holds in one that was restored from disk. Forks, which are restored from disk as well, have the
    # tests of limits and of /proc and /sys in both forms.
    Suite(
        "escape-restored",
        "escape",
        ("--restored", *files("escape", "kernel", "network", "files_of_the_host", "respawn"), SHARED),
        (
            *("--restored", *BESIDE, *files("escape", "kernel", "network", "files_of_the_host", "respawn", "proc_and_sys")),
            *(LIMITS, SHARED),
        ),
        seconds=110,
        bound=1200,
        environment=CRIU,
        fewer=FEWER_RESPAWNS,
    ),
    # The tests of the list above that cannot have a neighbour. They run in the long form alone, because the restored
    # sandbox differs from a fresh one in none of what they measure.
    Suite(
        "escape-restored-alone",
        "escape",
        (),
        ("--restored", *ALONE, LIMITS),
        seconds=40,
        environment=CRIU,
        alone=True,
    ),
    # And in a fork: what depends on its ids, its groups, its agent and what it sees.
    Suite("escape-forked", "escape", FORKED, seconds=70, bound=600, environment=CRIU),
    Suite(
        "escape-forked-alone",
        "escape",
        ("--forked", *ALONE, f"{LIMITS}::test_an_fd_hog_meets_its_own_limit"),
        seconds=20,
        environment=CRIU,
        alone=True,
    ),
    # Makes a release and five systems, from mirrors: minutes.
    Suite("install-alone", "docs", (), (*ALONE, "install"), seconds=480, bound=2400, packages=("mmdebstrap", "skopeo", "binutils", "rpm", "createrepo-c", "systemd-container"), alone=True),
    Suite("fence", "fence", ("fence",), seconds=650, bound=2700, environment=CRIU | GO, packages=("npm",)),
    Suite(
        "cluster",
        "crash",
        ("cluster",),
        seconds=265,
        bound=900,
        environment=CRIU | VERSITYGW,
    ),
    # By itself, because the client keeps threads that stay in the network namespace in which they were started.
    Suite(
        "faults",
        "crash",
        ("faults",),
        seconds=90,
        bound=900,
        environment=CRIU | VERSITYGW,
        fewer=FEWER_FAULTS,
    ),
    Suite("crash", "crash", (*BESIDE, "crash"), seconds=450, bound=2400, environment=CRIU, fewer=FEWER_CYCLES),
    # What a cluster has of the host is a runtime of containers and a database.
    Suite(
        "kubernetes",
        "kubernetes",
        ("kubernetes",),
        seconds=45,
        bound=400,
        environment={"RINGFENCE_HELM": "{helm}", "RINGFENCE_JUDGE": "{chart-judge}", "RINGFENCE_CONTAINER_SYSTEM": "{container-system}"},
        packages=("runc",),
    ),
    Suite("crash-alone", "crash", (*ALONE, *alone_files("crash")), seconds=20, environment=CRIU, fewer=FEWER_CYCLES, alone=True),
)
BY_NAME = {suite.name: suite for suite in ALL}


def of_step(step: str, long: bool) -> list[Suite]:
    """The suites of a step, or of a client, that have something to do in a form."""
    steps = CLIENTS if step == "clients" else (step,)
    return [suite for suite in ALL if suite.step in steps and suite.chosen(long)]


# The suite that a file of a directory belongs to.
DIRECTORIES = {
    **{"python": "python", "blobs": "blobs", "cli": "cli", "browser": "browser", "mcp": "mcp", "signing": "signing"},
    **{"codeint": "codeint", "desktop": "desktop", "gateway": "gateway", "agents": "agents", "dashboard": "dashboard"},
    **{"docs": "docs", "acme": "acme", "fuzz": "fuzz", "escape": "escape", "fence": "fence", "crash": "crash", "go": "go"},
    **{"install": "install", "javascript": "javascript", "smoke": "smoke-2.45.1-tls", "monitoring": "monitoring", "cluster": "cluster", "faults": "faults"},
    "kubernetes": "kubernetes",
}
# Options that a suite needs whatever part of it runs.
OPTIONS = {
    "docs": ("--criu",),
    "dashboard": ("--criu",),
    "codeint": ("--tls", "--criu"),
    "desktop": ("--tls", "--criu"),
    "gateway": ("--tls", "--criu"),
    "agents": ("--criu",),
    "smoke-2.45.1-tls": ("--tls",),
}


def options(suite: str) -> tuple[str, ...]:
    """Options by which a suite runs some of its files."""
    if suite.endswith("-alone"):
        return ALONE
    return (*OPTIONS.get(suite, ()), *(BESIDE if alone_files(suite) else ()))


def of_file(test: str) -> tuple[Suite, tuple[str, ...]]:
    """The suite of a file, or of a test of it, from `conformance`; and the arguments that run it."""
    name = DIRECTORIES[test.partition("/")[0]]
    if is_alone(test):
        name = f"{name}-alone"
    return BY_NAME[name], (*options(name), test)
