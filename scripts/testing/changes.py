"""What a change can reach: the inner loop of `scripts/test.sh --changed`, in at most five minutes once the rest is compiled.

The table goes from paths to crates and to files of suites, the nearest first. It is no proof: a change may reach more than it
says, which the default form finds. Where the nearest tests of everything changed would take too long, the rest is named and
left out.
"""

from __future__ import annotations

import fnmatch
import subprocess
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from testing.plan import Selection
from testing.suites import BY_NAME, DIRECTORIES, Suite, alone_files, is_alone, options

# Expected seconds of everything chosen, in all lanes together; with the compile of one crate this is below five minutes.
SECONDS = 360
# Of kill -9.
CYCLES = "5"


class Unknown(Exception):
    """What git cannot answer."""


@dataclass(frozen=True)
class Run:
    """Some files of a suite."""

    suite: str
    files: tuple[str, ...]
    seconds: int = 30


@dataclass(frozen=True)
class Rule:
    """What files that fit a pattern reach."""

    pattern: str
    crates: tuple[str, ...] = ()
    runs: tuple[Run, ...] = ()


def python(*names: str, seconds: int = 30) -> Run:
    return Run("python", tuple(f"python/test_{name}.py" for name in names), seconds)


def escape(*names: str, seconds: int = 40) -> Run:
    return Run("escape", tuple(f"escape/test_{name}.py" for name in names), seconds)


def fence(*names: str, seconds: int = 40) -> Run:
    return Run("fence", tuple(f"fence/test_{name}.py" for name in names), seconds)


def crash(*names: str, seconds: int = 40) -> Run:
    return Run("crash", tuple(f"crash/test_{name}.py" for name in names), seconds)


# Without the one on Debian, which is a suite for itself.
CODEINT = tuple(f"codeint/test_{name}.py" for name in ("cells", "clients", "contexts", "kept_ready", "life", "results"))
SMOKE = Run("smoke-2.45.1-tls", ("smoke/test_python.py",), 15)
# Every rule that fits counts, in this order; runs of one suite are one run.
RULES = (
    Rule("crates/agent/*", ("agent",), (python("commands", "files", "pty", seconds=25), escape("kernel", "agent_survives"))),
    Rule(
        "crates/runtime/*",
        ("runtime",),
        (python("lifecycle", "pause_on_disk"), escape("kernel", "files_of_the_host", "proc_and_sys"), crash("checkpoints", seconds=60)),
    ),
    Rule("crates/runtime/src/base*", ("runtime",), (crash("root_on_overlay", seconds=90),)),
    Rule("crates/runtime/src/mapped.rs", ("runtime",), (crash("root_on_overlay", seconds=90),)),
    Rule("crates/node/*", ("node",), (python("lifecycle", "pause", "fork"), crash("crash", "pauses", seconds=60))),
    Rule("crates/proxy/*", ("proxy",), (fence("table", "egress_proxy", "resolver", "injection", seconds=80),)),
    Rule("crates/server/*", ("server",), (python("rest", "auth", "lifecycle", seconds=30), SMOKE)),
    Rule("crates/store/*", ("store",), (python("operator", "rest"), crash("builds", seconds=40))),
    Rule("crates/image/*", ("image",), (python("template_builds", "dockerfiles", seconds=50), fence("images"))),
    Rule("crates/formats/*", ("formats", "agent", "image"), (python("template_builds", seconds=25),)),
    Rule("crates/registry/*", ("registry", "image", "cli"), (python("template_registry"), fence("images"))),
    Rule("crates/dockerfile/*", ("dockerfile",), (python("dockerfiles", seconds=30),)),
    Rule("crates/recipes/*", ("recipes", "cli"), (Run("agents", ("agents/test_agents.py",), 65),)),
    # They are part of the program.
    Rule("templates/*", ("recipes",)),
    Rule("templates/code-interpreter/*", (), (Run("codeint", CODEINT, 130),)),
    Rule("templates/desktop/*", (), (Run("desktop", ("desktop/test_clients.py", "desktop/test_desktop.py"), 120),)),
    Rule("templates/mcp-gateway/*", (), (Run("gateway", ("gateway",), 85),)),
    Rule("templates/agents/*", (), (Run("agents", ("agents/test_agents.py",), 65),)),
    Rule("crates/blobs/*", ("blobs",), (Run("blobs", ("blobs",), 40),)),
    Rule("crates/docs/*", ("docs",), (Run("mcp", ("mcp",), 20),)),
    Rule("crates/cli/*", ("cli",), (python("operator", "operator_sandboxes", "operator_inside", "top", seconds=90), SMOKE)),
    Rule("crates/protocol/*", ("protocol",), (SMOKE, python("commands", "lifecycle", seconds=30))),
    Rule("crates/model/*", ("model",), (SMOKE, python("rest", seconds=15))),
    Rule("crates/link/*", ("link", "server"), (Run("cluster", ("cluster",), 60),)),
    Rule("crates/server/src/nodes*", ("server",), (Run("cluster", ("cluster",), 60),)),
    Rule("crates/server/src/parcels.rs", ("server",), (Run("cluster", ("cluster/test_copies.py",), 60),)),
    Rule("crates/runtime/src/*parcel*", ("runtime",), (Run("cluster", ("cluster/test_copies.py",), 60),)),
    Rule("crates/server/src/sessions.rs", ("server",), (Run("cluster", ("cluster",), 60),)),
    Rule("crates/server/src/others*", ("server",), (Run("cluster", ("cluster",), 150),)),
    Rule("crates/server/src/listen/forward.rs", ("server",), (Run("cluster", ("cluster",), 150),)),
    Rule("crates/server/src/sandboxes/moving.rs", ("server",), (Run("cluster", ("cluster/test_copies.py",), 60), Run("faults", ("faults",), 60))),
    Rule("crates/measure/*", ("measure",)),
    Rule("crates/testkit/*", ("testkit",)),
    Rule("crates/xtask/*", ("xtask",)),
    # The rules of the repository are tests of `xtask`.
    Rule("crates/*", ("xtask",)),
    Rule("docs/*", ("docs",)),
    Rule("api/*", ("server",)),
    Rule("packaging/*", ("cli",)),
    Rule("packaging/helm/*", (), (Run("kubernetes", ("kubernetes",), 45),)),
    Rule("packaging/image/*", (), (Run("kubernetes", ("kubernetes",), 45),)),
    Rule("Cargo.*", ("xtask",), (SMOKE,)),
    Rule("crates/*/Cargo.toml", ("xtask",), (SMOKE,)),
    Rule(".cargo/*", (), (SMOKE,)),
    Rule("conformance/harness/*", (), (SMOKE, python("commands", seconds=10))),
    Rule("conformance/conftest.py", (), (SMOKE, python("commands", seconds=10))),
    Rule("conformance/programs/*", (), (escape("kernel", "proc_and_sys", seconds=20), fence("table", seconds=20))),
    Rule("conformance/fence/egress_table.py", (), (fence("table", seconds=20),)),
)
@dataclass(frozen=True)
class Reach:
    """What some changed files reach."""

    crates: tuple[str, ...]
    runs: tuple[Run, ...]


def reach(files: Iterable[str], exists: Mapping[str, bool] | None = None) -> Reach:
    """The crates and runs that changed files reach, the nearest first."""
    changed = sorted(set(files))
    crates: dict[str, None] = {}
    runs: dict[Run, None] = {}
    # Tests that were changed come first: they are what is worked at.
    for file in changed:
        if exists is None or exists.get(file, True):
            runs.update(dict.fromkeys(own_runs(file)))
    for rule in RULES:
        if any(fnmatch.fnmatchcase(file, rule.pattern) for file in changed):
            crates.update(dict.fromkeys(rule.crates))
            runs.update(dict.fromkeys(rule.runs))
    return Reach(tuple(crates), tuple(runs))


def own_runs(file: str) -> list[Run]:
    """The runs of one file of a suite."""
    parts = Path(file).parts
    if len(parts) < 3 or parts[0] != "conformance" or parts[1] not in DIRECTORIES:
        return []
    suite = DIRECTORIES[parts[1]]
    inside = "/".join(parts[1:])
    if fnmatch.fnmatchcase(parts[-1], "test_*.py"):
        if is_alone(inside):
            return [Run(f"{suite}-alone", (inside,), 60)]
        some_alone = inside in alone_files(parts[1])
        return [Run(suite, (inside,), 30), *([Run(f"{suite}-alone", (inside,), 30)] if some_alone else [])]
    # Another file of a client's directory belongs to its one suite.
    if parts[1] in ("javascript", "go", "browser", "mcp", "signing", "codeint", "desktop", "gateway", "agents", "dashboard", "cli", "fuzz", "docs", "kubernetes"):
        return [Run(suite, (parts[1],), 100)]
    return []


def affordable(runs: Sequence[Run], seconds: int = SECONDS) -> tuple[list[Run], list[Run]]:
    """The runs that fit into some seconds, in their order, and those that do not."""
    chosen, left = [], []
    for run in runs:
        if run.seconds <= seconds:
            chosen.append(run)
            seconds -= run.seconds
        else:
            left.append(run)
    return chosen, left


def suites(runs: Sequence[Run]) -> tuple[tuple[Suite, tuple[str, ...]], ...]:
    """The runs as suites: files of one suite are one run."""
    found: dict[str, dict[str, None]] = {}
    seconds: dict[str, int] = {}
    for run in runs:
        found.setdefault(run.suite, {}).update(dict.fromkeys(run.files))
        seconds[run.suite] = seconds.get(run.suite, 0) + run.seconds
    return tuple((quicker(BY_NAME[name], seconds[name]), (*options(name), *files)) for name, files in found.items())


def quicker(suite: Suite, seconds: int) -> Suite:
    """A suite with few cycles."""
    fewer = dict.fromkeys(suite.fewer, CYCLES)
    return replace(suite, seconds=seconds, fewer=fewer)


def dependents(root: Path, crates: Iterable[str]) -> list[str]:
    """The crates whose own manifest names one of these: their tests see a change of its interface."""
    found = []
    for manifest in sorted(root.glob("crates/*/Cargo.toml")):
        table = tomllib.loads(manifest.read_text())
        used = {**table.get("dependencies", {}), **table.get("dev-dependencies", {}), **table.get("build-dependencies", {})}
        if set(used) & set(crates):
            found.append(manifest.parent.name)
    return found


def changed_files(root: Path) -> tuple[str, list[str]]:
    """What is compared with, and the files that differ from it: commits since `main`, or since the last commit on it, and what
    is not committed.
    """

    def git(*words: str) -> str:
        ran = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
        if ran.returncode:
            raise Unknown(f"git {words[0]}: {ran.stderr.strip()}")
        return ran.stdout

    base = "HEAD"
    for branch in ("main", "origin/main"):
        try:
            base = git("merge-base", "HEAD", branch).strip()
            break
        except Unknown:
            continue
    files = git("diff", "--name-only", "-z", base).split("\0")
    files += git("ls-files", "--others", "--exclude-standard", "-z").split("\0")
    return base[:12], sorted({file for file in files if file})


def select(root: Path) -> tuple[Selection, list[str]]:
    """What to run for the change of this checkout, and what to say about it."""
    base, files = changed_files(root)
    if not files:
        return Selection(), [f"nothing differs from {base}"]
    found = reach(files, {file: (root / file).exists() for file in files})
    chosen, left = affordable(found.runs)
    crates = list(dict.fromkeys([*found.crates, *dependents(root, found.crates)]))
    said = [f"{len(files)} files differ from {base}", f"crates: {' '.join(crates) or 'none'}"]
    said += [f"left for the default form: {run.suite}: {' '.join(run.files)}" for run in left]
    is_rust = bool(found.crates)
    return Selection(lint=True, unit=is_rust, crates=tuple(crates), suites=suites(chosen)), said
