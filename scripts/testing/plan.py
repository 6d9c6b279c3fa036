"""What one run does: the tasks for what was asked for.

Three things begin at once: formatting and the tests of this runner, which fail in seconds; the compile of the program, which
uses all processors; and what has to be installed and fetched, which mostly waits. Suites begin when both of the latter are done,
side by side, while the test programs of the crates are compiled and lints are checked at low priority: suites mostly wait for
their sandboxes, and compilers do not. What cannot have a neighbour comes last.

All packages of all suites are one task, before anything that starts a platform: a platform refuses to resume what was paused
before packages of its host changed.

One compile serves the tests of the crates, the suites and the lints: the profile `ci` of Cargo.toml. Its binary has checks of
overflow and assertions, so suites find more with it than with a released one. The bytes that are released differ in
optimisation alone, which costs as much time as everything else that is compiled; the long form drives them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from testing import lints
from testing.assets import BY_NAME, Assets
from testing.options import CLIENTS, STEPS, Options
from testing.schedule import check
from testing.suites import PLACEHOLDER, Suite, of_step
from testing.tasks import CARGO, PREPARE, Task

TARGET = "x86_64-unknown-linux-gnu"
DEFAULT_STEPS = tuple(step for step in STEPS if step != "guest")
# Steps whose tests drive the binary.
DRIVING = ("sdk", "blobs", "clients", "fuzz", "escape", "fence", "crash", "kubernetes", "guest", *CLIENTS)
PACKAGES, PROGRAM, COMPILE, RELEASE = "packages", "program", "compile", "release"
# Kernels and process 1 with which the long form boots a virtual machine.
GUESTS = (("6.1", "plain"), ("6.1", "systemd"), ("6.12", "plain"), ("6.12", "systemd"))
# What `scripts/guest/run.sh` needs beside everything else.
GUEST_PACKAGES = ("qemu-system-x86", "debootstrap", "busybox-static", "e2fsprogs", "xz-utils", "patchelf", "debian-archive-keyring")


@dataclass(frozen=True)
class Place:
    """Where a run works."""

    root: Path
    # Logs and everything else that one run writes.
    run: Path
    # What cargo calls `target`.
    target: Path
    assets: Assets
    # Which commit the tree is of, as `ringfence --version` says it.
    commit: str = ""

    @property
    def conformance(self) -> Path:
        return self.root / "conformance"

    @property
    def executables(self) -> Path:
        """What cargo says about the test programs that it made."""
        return self.run / "executables.jsonl"

    def binary(self, options: Options) -> Path:
        """The program that the suites drive."""
        if options.binary:
            return options.binary
        return self.target / TARGET / ("release" if options.long else "ci") / "ringfence"


@dataclass(frozen=True)
class Selection:
    """The steps and suites that are to run, whoever chose them."""

    lint: bool = False
    unit: bool = False
    build: bool = False
    # Crates whose tests run; all of them if none is named.
    crates: tuple[str, ...] = ()
    # Suites, each with the arguments of pytest.
    suites: tuple[tuple[Suite, tuple[str, ...]], ...] = ()
    guest: bool = False

    @property
    def assets(self) -> list[str]:
        """The assets of everything chosen."""
        named = [name for suite, _ in self.suites for name in suite.needs()]
        return list(dict.fromkeys([*(("criu", "versitygw") if self.unit else ()), *named]))

    @property
    def is_tested(self) -> bool:
        """Whether anything is more than compiled."""
        return self.unit or self.guest or bool(self.suites)

    @property
    def packages(self) -> set[str]:
        """Packages of the system that suites need, without those of assets."""
        found = {package for suite, _ in self.suites for package in suite.packages}
        return found | (set(GUEST_PACKAGES) if self.guest else set())


def select(options: Options) -> Selection:
    """What the named steps are, or all."""
    steps = options.steps or (STEPS if options.long else DEFAULT_STEPS)
    chosen: dict[str, tuple[Suite, tuple[str, ...]]] = {}
    for step in steps:
        for suite in of_step(step, options.long):
            chosen[suite.name] = (suite, suite.chosen(options.long))
    return Selection(
        lint="lint" in steps, unit="unit" in steps, build="build" in steps, suites=tuple(chosen.values()), guest="guest" in steps
    )


def tasks(options: Options, selection: Selection, place: Place) -> list[Task]:
    """The tasks of a run. All of them can be listed before the first begins."""
    found: list[Task] = []
    wanted = place.assets.wanted(selection.assets)
    if selection.is_tested:
        found.append(install(selection, place))
    found += [prepare(name, wanted, place) for name in wanted]
    if selection.lint:
        found += [
            Task("format", "lint", ("cargo", "fmt", "--all", "--check"), PREPARE, seconds=1000, bound=120, cwd=place.root),
            runner_tests(place),
        ]
    driven = bool(selection.suites) or selection.guest
    programmed = not options.long and not options.binary and (driven or selection.build)
    compiled = selection.unit or selection.build
    # What is compiled anyway is compiled by clippy.
    linted = lints.environment(place.root) if selection.lint and compiled else {}
    if programmed:
        found.append(program_task(place, linted))
    if compiled:
        found.append(compile_task(place, programmed, linted))
    words: tuple[str, ...]
    released = options.long and not options.binary and (driven or selection.build)
    if released:
        # Behind the compile: both use all processors, and the tests of the crates can begin meanwhile.
        words = ("build", "--release", "-p", "cli")
        found.append(cargo(RELEASE, "build", words, place, seconds=480, bound=3600))
    if selection.unit:
        found.append(unit(options, selection, wanted, place))
        # Only where documentation has examples does this have something to do, and it waits for cargo's lock.
        words = ("test", "--workspace", "--profile", "ci", "--doc")
        doc = cargo("doc", "unit", words, place, frozenset({COMPILE}), seconds=40, bound=900, nice=10)
        found.append(with_environment(doc, linted))
    if selection.lint:
        # After the compile, which it would delay, and at low priority, because suites wait for their sandboxes and it does not.
        words = ("clippy", "--workspace", "--all-targets", "--profile", "ci", "--", "-D", "warnings")
        after = frozenset(task.name for task in found if task.place == CARGO)
        clippy = cargo("clippy", "lint", words, place, after, seconds=30, bound=3600, nice=10)
        if linted:
            clippy = replace(with_environment(clippy, linted | own_python(place)), command=python("testing.lints"))
        found.append(clippy)
    ready = frozenset({PACKAGES, *({RELEASE} if released else {PROGRAM} if programmed else ())})
    for suite, arguments in selection.suites:
        found.append(suite_task(suite, arguments, options, place, ready | needed(suite.needs(), wanted)))
    if selection.guest:
        found += [guest(kernel, init, options, place, ready) for kernel, init in GUESTS]
    check(found)
    return found


def needed(names: Iterable[str], wanted: Sequence[str]) -> frozenset[str]:
    """The tasks that provide some assets, without those that the system has."""
    return frozenset(f"prepare {name}" for name in names if name in wanted)


def python(module: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", module, *arguments)


def own_python(place: Place) -> dict[str, str]:
    """The environment of programs of this package."""
    return {"PYTHONPATH": str(place.root / "scripts")}


def install(selection: Selection, place: Place) -> Task:
    """Installs what is missing of the packages of all that will run. It is let finish: packages that are half installed would
    keep the next run from installing any.
    """
    script = 'trap "" INT; set -euo pipefail; root=$1; shift; . "$root/scripts/common.sh"; need_packages "${test_packages[@]}" "$@"'
    command = ("bash", "-c", script, "bash", str(place.root), *sorted(packages(selection, place)))
    return Task(PACKAGES, "packages", command, PREPARE, seconds=2000, bound=1800, grace=1800, cwd=place.root)


def prepare(name: str, wanted: Sequence[str], place: Place) -> Task:
    used = needed((other for _, other in BY_NAME[name].uses), wanted) | {PACKAGES}
    # What others need comes first. What is fetched is needed by the first suites, and mostly waits for the network. What is compiled
    # comes last and gives way to the program, for which all suites wait: it fills what these leave of the processors.
    is_compiled = any(other == "go" for _, other in BY_NAME[name].uses)
    seconds = {"go": 900, "criu": 700, "versitygw": 19}.get(name, 10 if is_compiled else 20)
    return Task(
        f"prepare {name}",
        "prepare",
        python("testing.prepare", name),
        PREPARE,
        used,
        seconds=seconds,
        bound=1200,
        nice=10 if is_compiled else 0,
        cwd=place.root,
        environment=own_python(place),
    )


def runner_tests(place: Place) -> Task:
    command = python("unittest", "discover", "--start-directory", "scripts/testing/tests", "--top-level-directory", "scripts")
    return Task("runner", "lint", command, PREPARE, seconds=999, bound=300, cwd=place.root, environment=own_python(place))


def program_task(place: Place, environment: Mapping[str, str]) -> Task:
    """The program, with the features that the test programs have it with, so that these need no other one: cargo only counts what
    tests depend on where tests or examples are built. There are no examples.
    """
    words = ("build", "--workspace", "--profile", "ci", "--bin", "ringfence", "--examples")
    return with_environment(cargo(PROGRAM, "build", words, place, seconds=1000, bound=3600), environment)


def compile_task(place: Place, programmed: bool, environment: Mapping[str, str]) -> Task:
    """The test programs of all crates. Suites run beside that, once there is the program."""
    words = ("test", "--workspace", "--profile", "ci", "--no-run", "--message-format=json-render-diagnostics")
    needs, nice = (frozenset({PROGRAM}), 10) if programmed else (frozenset[str](), 0)
    task = cargo(COMPILE, "build", words, place, needs, seconds=900, bound=3600, nice=nice)
    return replace(with_environment(task, environment), output=place.executables)


def with_environment(task: Task, more: Mapping[str, str]) -> Task:
    return replace(task, environment={**task.environment, **more})


def cargo(
    name: str,
    step: str,
    words: tuple[str, ...],
    place: Place,
    needs: frozenset[str] = frozenset(),
    seconds: float = 30,
    bound: float = 900,
    nice: int = 0,
) -> Task:
    """A call of cargo. The commit is the same for all of them: with another one cargo would compile the program anew, which
    suites may be driving.
    """
    environment = {"RINGFENCE_COMMIT": place.commit}
    command = ("cargo", words[0], "--locked", *words[1:])
    return Task(name, step, command, CARGO, needs, seconds=seconds, bound=bound, nice=nice, cwd=place.root, environment=environment)


def unit(options: Options, selection: Selection, wanted: Sequence[str], place: Place) -> Task:
    environment = {
        **own_python(place),
        # Where namespaces cannot be made, the agent tests must fail, not pass without having run.
        "AGENT_TESTS_MUST_RUN": "1",
        "RINGFENCE_CRIU": place.assets.value("criu"),
        "RINGFENCE_VERSITYGW": place.assets.value("versitygw"),
    }
    timings = place.run / "unit.timings"
    goes_on = ("--keep-going",) if options.keep_going or options.hunt else ()
    command = python("testing.rust", *goes_on, str(place.executables), str(place.run / "unit"), str(timings), *selection.crates)
    needs = frozenset({PACKAGES, COMPILE}) | needed(("criu", "versitygw"), wanted)
    return Task(
        "unit", "unit", command, needs=needs, seconds=350, bound=1800, cwd=place.root, environment=environment, timings=timings
    )


def suite_task(suite: Suite, arguments: Sequence[str], options: Options, place: Place, needs: frozenset[str]) -> Task:
    """One pytest run."""
    timings = place.run / f"{suite.name}.timings"
    paths = {name: place.assets.value(name) for name in suite.needs()}
    named = {variable: PLACEHOLDER.sub(lambda found: paths[found[1]], value) for variable, value in suite.environment.items()}
    environment = {"RINGFENCE_BIN": str(place.binary(options)), "CONFORMANCE_TIMINGS": str(timings), **named}
    if not options.long:
        # What the caller asks for counts more.
        environment |= {name: os.environ.get(name, value) for name, value in suite.fewer.items()}
    command = [str(Path(place.assets.directory(suite.python)) / "bin" / "pytest"), "-p", "no:cacheprovider", *arguments]
    if suite.names:
        command = [sys.executable, "harness/names.py", *command]
    return Task(
        suite.name,
        suite.step,
        tuple(command),
        needs=needs,
        # The order of the long form is that of the default, which is good enough.
        seconds=suite.seconds,
        bound=suite.bound,
        cwd=place.conformance,
        environment=environment,
        group=suite.group,
        alone=suite.alone,
        timings=timings,
    )


def guest(kernel: str, init: str, options: Options, place: Place, needs: frozenset[str]) -> Task:
    """Distribution kernels in a virtual machine, of which the processor is emulated: slow, and one at a time."""
    cache = str(place.assets.cache.root / "guest")
    return Task(
        f"guest-{kernel}-{init}",
        "guest",
        ("scripts/guest/run.sh", "-k", kernel, "-i", init, "-t", "3000"),
        needs=needs,
        seconds=60,
        bound=3600,
        cwd=place.root,
        environment={"RINGFENCE_BIN": str(place.binary(options)), "RINGFENCE_GUEST_CACHE": cache},
        group="guest",
    )


def packages(selection: Selection, place: Place) -> set[str]:
    """Every package beyond those of `scripts/common.sh` that something chosen needs."""
    found = selection.packages | place.assets.packages(selection.assets)
    # Packages of Node from its own repository bring npm, and Debian's does not.
    return found - ({"npm", "nodejs"} if shutil.which("npm") and shutil.which("node") else set())


def describe(found: Sequence[Task], lanes: int, extra: Iterable[str]) -> str:
    """The plan, for `--plan`."""
    lines = [f"packages beside those of scripts/common.sh: {' '.join(sorted(extra)) or 'none'}", ""]
    width = max((len(task.name) for task in found), default=0)
    for title, tasks_of in (
        ("beside the compile, two at a time:", [task for task in found if task.place == PREPARE]),
        ("by cargo, one at a time:", [task for task in found if task.place == CARGO]),
        (f"in {lanes} lanes, the longest first:", [task for task in found if task.place not in (PREPARE, CARGO) and not task.alone]),
        ("alone at the end:", [task for task in found if task.alone]),
    ):
        if tasks_of:
            lines.append(title)
            for task in sorted(tasks_of, key=lambda task: -task.seconds):
                after = f"  after {', '.join(sorted(task.needs))}" if task.place == CARGO and task.needs else ""
                lines.append(f"  {task.name:<{width}}  {shorten(task)}{after}")
            lines.append("")
    return "\n".join(lines)


def shorten(task: Task) -> str:
    """A command without the directories of its program."""
    if task.name == PACKAGES:
        return "installs what is missing of them"
    words = [Path(task.command[0]).name, *task.command[1:]]
    return " ".join(word.rsplit("/", 1)[-1] if word.startswith("/") else word for word in words)


def commit_of(root: Path) -> str:
    """What `scripts/common.sh` says about the commit of the tree."""
    script = 'set -euo pipefail; root=$1; . "$root/scripts/common.sh"; tree_commit'
    ran = subprocess.run(["bash", "-c", script, "bash", str(root)], capture_output=True, text=True, check=False)
    return ran.stdout.strip() if ran.returncode == 0 else ""


def clean(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of the caller without what would configure what is tested."""
    unset = ("RINGFENCE_BIN", "RINGFENCE_DATA_DIR", "RINGFENCE_LISTEN", "RINGFENCE_DOMAIN", "RINGFENCE_CONFIG", "PYTHONPATH")
    kept = {
        name: value
        for name, value in environment.items()
        if name not in unset and not name.startswith(("E2B_", "PYTEST_", "CONFORMANCE_"))
    }
    return kept | {"PYTHONDONTWRITEBYTECODE": "1"}
