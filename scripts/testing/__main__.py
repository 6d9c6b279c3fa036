"""The entry of `scripts/test.sh`: `python3 -m testing check|run WORD...`.

`check` refuses what cannot be understood, before anything is installed; `run` does the rest.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from testing import changes, hunt, plan, report
from testing.assets import Assets
from testing.cache import Cache, default_root
from testing.display import Display
from testing.kept_target import VARIABLE, KeptTarget, forget, is_suspect, own_names
from testing.options import Options, UsageError, parse
from testing.pace import Pace
from testing.plan import Place, Selection
from testing.report import FAILED, LEFT, PASSED, Outcome
from testing.runner import Runner, exit_code
from testing.suites import FEWER_CYCLES
from testing.tasks import CARGO, LANE, PREPARE, Task
from testing.timings import Budgets

ROOT = Path(__file__).resolve().parents[2]
# Seconds that `scripts/test.sh` took to install packages.
INSTALL = "TEST_INSTALL_SECONDS"


def selected(options: Options) -> tuple[Selection, list[str]]:
    """What runs, and what to say about the choice."""
    if options.changed:
        return changes.select(ROOT)
    if options.hunt:
        return hunt.select(options.hunted, options.long), []
    return plan.select(options), []


def place_of(commit: str = "") -> Place:
    target = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target").absolute()
    return Place(ROOT, ROOT / "target" / "test-run", target, Assets(ROOT, Cache(default_root())), commit)


def room(lanes: int) -> dict[str, int]:
    return {PREPARE: 2, CARGO: 1, LANE: lanes}


def hold_entries(place: Place, held: list[int]) -> Callable[[Task], None]:
    """Keeps what was provided from being replaced by another run until this one ends."""

    def passed(task: Task) -> None:
        if task.step == "prepare":
            held.append(place.assets.cache.lock(place.assets.directory(task.name.removeprefix("prepare ")), exclusive=False))

    return passed


def run(options: Options) -> int:
    display = Display()
    place = place_of(plan.commit_of(ROOT))
    environment = plan.clean(os.environ)
    install_s = float(environment.pop(INSTALL, "0"))
    if options.seed_was_given or "RINGFENCE_CRASH_SEED" not in environment:
        environment["RINGFENCE_CRASH_SEED"] = str(options.seed)
    seed = int(environment["RINGFENCE_CRASH_SEED"])
    if options.binary and not os.access(options.binary, os.X_OK):
        print(f"{options.binary} is not an executable file", file=sys.stderr)
        return 1
    checkout = lock_checkout()
    if checkout is None:
        print("another run of scripts/test.sh uses this checkout", file=sys.stderr)
        return 1
    shutil.rmtree(place.run, ignore_errors=True)
    place.run.mkdir(parents=True)

    selection, said = selected(options)
    kept = None
    if environment.get(VARIABLE) == "kept" and "CARGO_TARGET_DIR" not in environment:
        try:
            kept = KeptTarget(ROOT, place.assets.cache)
            place = replace(place, target=kept.path)
            environment["CARGO_TARGET_DIR"] = str(kept.path)
            forgotten = forget(kept.path, *own_names(ROOT))
            said.append(f"dependencies are kept in {kept.path}, without {forgotten} artifacts of crates of the repository")
        except BlockingIOError:
            said.append("another run has the kept target directory: that of the checkout is used")
    tasks = plan.tasks(options, selection, place)
    form = "long" if options.long else "changed" if options.changed else "default"
    number = changes.CYCLES if options.changed else FEWER_CYCLES["RINGFENCE_CRASH_CYCLES"]
    cycles = "all cycles" if options.long else f"{number} cycles of kill -9"
    display.text("\n".join([f"{form} form, {options.lanes} lanes, {cycles}, seed {seed} (again: --seed {seed})", *said]))
    held: list[int] = []
    begun = time.monotonic()
    try:
        if options.hunt:
            return hunted(options, tasks, place, environment, display, seed)
        passed = hold_entries(place, held)
        runner = Runner(tasks, room(options.lanes), place.run, environment, display, passed, options.keep_going, Pace())
        outcomes = runner.go()
        if kept and is_suspect(outcomes, bool(runner.signals)):
            kept.discard()
        conclude(options, outcomes, runner, display, install_s, time.monotonic() - begun + install_s, seed, environment)
        code = exit_code(runner, outcomes)
        if code == 0:
            keep = [place.assets.directory(task.name.removeprefix("prepare ")) for task in tasks if task.step == "prepare"]
            with suppress(OSError):
                place.assets.cache.prune([*keep, place.target])
        return code
    finally:
        for descriptor in held:
            os.close(descriptor)
        os.close(checkout)


def lock_checkout() -> int | None:
    """The lock of this checkout, or nothing while another run has it."""
    (ROOT / "target").mkdir(exist_ok=True)
    descriptor = os.open(ROOT / "target" / "test-run.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def conclude(
    options: Options,
    outcomes: Sequence[Outcome],
    runner: Runner,
    display: Display,
    install_s: float,
    total_s: float,
    seed: int,
    environment: dict[str, str],
) -> None:
    """Everything that is said at the end, what explains a failure last."""
    failed = [outcome for outcome in outcomes if outcome.status == FAILED]
    for outcome in outcomes:
        if outcome.log and (options.verbose or outcome in failed):
            display.text(f"\n== output of {outcome.task.name}\n{report.read_log(outcome.log)}")
    lines = ["", "== closing lines", *report.closing_lines(outcomes)]
    lines += ["", "== times", *report.times(outcomes, install_s, total_s)]
    lines += ["", *report.slowest_tests(outcomes, Budgets.load())]
    if runner.leftovers:
        lines += ["", "ended by this script, because it was left:", *(f"  {command}" for command in runner.leftovers[:10])]
    for outcome in failed[:1]:
        lines += ["", "== what explains it", *report.failure(outcome, seed, report.command_again(outcome.task, environment))]
    lines += [f"also failed: {outcome.task.name}: {outcome.why}; {outcome.log}" for outcome in failed[1:]]
    counts = {status: sum(outcome.status == status for outcome in outcomes) for status in (PASSED, FAILED, LEFT)}
    if counts[PASSED] == len(outcomes):
        lines += ["", f"== all passed in {total_s:.0f} s"]
    else:
        why = runner.ending or "something failed"
        lines += ["", f"== NOT passed ({why}): {counts[PASSED]} tasks passed, {counts[FAILED]} failed, {counts[LEFT]} were not begun"]
    display.text("\n".join(lines))


def hunted(options: Options, tasks: Sequence[Task], place: Place, environment: dict[str, str], display: Display, seed: int) -> int:
    """Repeats what was chosen, and prints rates."""
    once, repeats = hunt.repeated(tasks, options.hunt, seed)
    first = Runner(once, room(options.lanes), place.run, environment, display)
    outcomes = first.go()
    if exit_code(first, outcomes):
        conclude(options, outcomes, first, display, 0, 0, seed, environment)
        return exit_code(first, outcomes)
    found: list[Outcome] = []
    interrupted = False
    loaded = {**environment, **plan.own_python(place)}
    beside = [task for task in repeats if not task.alone]
    alone = [task for task in repeats if task.alone]
    for chosen, under_load in ((beside, True), (alone, False)):
        if chosen and not interrupted:
            # One at a time: the load is known, and a failure has one cause less.
            runner = Runner(chosen, room(1), place.run, environment, display, goes_on=True)
            if under_load:
                with hunt.load(loaded):
                    found += runner.go()
            else:
                found += runner.go()
            interrupted = bool(runner.signals)
    ran = [outcome for outcome in found if outcome.status != LEFT]
    display.text("\n".join([*hunt.explain(ran, seed), "== rates", *hunt.table(ran)]))
    if interrupted:
        return 130
    return 1 if any(outcome.status == FAILED for outcome in ran) else 0


def main(words: list[str]) -> int:
    mode, *rest = words
    try:
        options = parse(rest)
        if mode == "check" and options.hunt:
            hunt.select(options.hunted, options.long)
    except UsageError as error:
        print(f"{error}\nsee scripts/test.sh --help", file=sys.stderr)
        return 2
    if mode == "check":
        return 0
    try:
        return act(options)
    except changes.Unknown as error:
        print(f"--changed: {error}", file=sys.stderr)
        return 1


def act(options: Options) -> int:
    """Does what the options say."""
    if options.plan:
        selection, said = selected(options)
        place = place_of()
        found = plan.tasks(options, selection, place)
        print("\n".join([*said, plan.describe(found, options.lanes, plan.packages(selection, place))]))
        return 0
    return run(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
