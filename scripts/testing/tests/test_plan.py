"""What each form runs: nothing of the suites is lost, whichever way it is cut."""

from __future__ import annotations

import fnmatch
import os
import re
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from testing import plan, suites
from testing.assets import BY_NAME as ASSETS
from testing.assets import Assets
from testing.cache import Cache
from testing.options import CLIENTS, STEPS, Options, parse
from testing.plan import COMPILE, PACKAGES, PROGRAM, RELEASE, Place
from testing.schedule import next_tasks
from testing.suites import ALL
from testing.tasks import CARGO, LANE, PREPARE, Task
from testing.timings import Budgets

ROOT = Path(__file__).resolve().parents[3]
CONFORMANCE = ROOT / "conformance"


def place() -> Place:
    return Place(ROOT, Path("/run"), Path("/target"), Assets(ROOT, Cache(Path("/cache"))), "0123")


def tasks(*words: str) -> dict[str, Task]:
    options: Options = parse(words)
    return {task.name: task for task in plan.tasks(options, plan.select(options), place())}


def covered(arguments: tuple[str, ...]) -> set[str]:
    """The files that arguments of pytest run at least some of."""
    found = set()
    for argument in arguments:
        path = argument.partition("::")[0]
        if (CONFORMANCE / path).is_dir():
            found |= {str(file.relative_to(CONFORMANCE)) for file in (CONFORMANCE / path).glob("test_*.py")}
        elif path.endswith(".py") and not argument.startswith("-"):
            found.add(path)
    return found - {argument.removeprefix("--ignore=") for argument in arguments if argument.startswith("--ignore=")}


class Suites(unittest.TestCase):
    def test_every_file_of_every_suite_runs_in_both_forms(self) -> None:
        there = {str(file.relative_to(CONFORMANCE)) for file in CONFORMANCE.glob("*/test_*.py")}
        for long in (False, True):
            run = {file for suite in ALL if not suite.alone for file in covered(suite.chosen(long))}
            self.assertEqual(there - run - suites.LONG_ONLY, set(), f"long: {long}")

    def test_a_suite_names_files_that_exist(self) -> None:
        for suite in ALL:
            for long in (False, True):
                for argument in suite.chosen(long):
                    path = argument.removeprefix("--ignore=").partition("::")[0]
                    if path.endswith(".py"):
                        self.assertTrue((CONFORMANCE / path).is_file(), f"{suite.name}: {argument}")
                    if "::" in argument:
                        self.assert_test(argument)

    def assert_test(self, name: str) -> None:
        file, _, test = name.partition("::")
        self.assertRegex((CONFORMANCE / file).read_text(), rf"(?m)^def {test.partition('[')[0]}\(", name)

    def test_what_has_the_marker_is_found(self) -> None:
        marked = {"a.py": "pytestmark = pytest.mark.alone('r')", "b.py": "pytestmark = [x, pytest.mark.alone('r')]"}
        marked["c.py"] = "@pytest.mark.x\n@pytest.mark.alone('r')\ndef test_one(): pass\n@pytest.mark.x\ndef test_two(): pass"
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "escape").mkdir()
            for name, text in marked.items():
                (Path(directory) / "escape" / f"test_{name}").write_text(text)
            with mock.patch.object(suites, "CONFORMANCE", Path(directory)):
                found = suites.alone.__wrapped__()
        self.assertEqual(found, {"escape/test_a.py", "escape/test_b.py", "escape/test_c.py::test_one"})
        # Nothing that uses the marker in another way is overlooked.
        uses = sum(file.read_text().count("mark.alone") for file in CONFORMANCE.glob("*/test_*.py"))
        self.assertEqual(len(suites.alone()), uses)

    def test_what_runs_alone_runs_in_both_forms(self) -> None:
        """A whole suite leaves the test out by its marker, so another one has to have it."""
        for long in (False, True):
            run = {file for suite in ALL if suite.alone for file in covered(suite.chosen(long))}
            not_here = frozenset() if long else suites.LONG_ONLY
            self.assertEqual({name.partition("::")[0] for name in suites.alone()} - run - not_here, set())

    def test_what_runs_beside_others_leaves_out_what_must_not(self) -> None:
        files = {name.partition("::")[0] for name in suites.alone()}
        for suite in ALL:
            for long in (False, True):
                arguments = suite.chosen(long)
                whole = covered(tuple(argument for argument in arguments if "::" not in argument))
                if suite.alone and arguments:
                    self.assertEqual(arguments[arguments.index("-m") + 1], "alone", suite.name)
                elif files & whole or any(suites.is_alone(argument) for argument in arguments):
                    self.assertIn("not alone", arguments, suite.name)

    def test_what_forks_and_restored_sandboxes_run_alone_runs(self) -> None:
        """A test that was named and has the marker must be in the suite beside."""
        for name, other in (("escape-forked", "escape-forked-alone"), ("escape-restored", "escape-restored-alone")):
            for long in (False, True):
                named = {test for test in suites.BY_NAME[name].chosen(long) if test.endswith(".py") or "::" in test}
                lost = {test for test in suites.alone() if test in named or test.partition("::")[0] in named}
                run = suites.BY_NAME[other].chosen(long)
                self.assertEqual({test for test in lost if test not in run and test.partition("::")[0] not in run}, set(), name)

    def test_the_long_form_has_every_suite_and_all_cycles(self) -> None:
        found = tasks("--long")
        self.assertEqual({suite.name for suite in ALL} - set(found), set())
        self.assertNotIn("RINGFENCE_CRASH_CYCLES", found["crash"].environment)

    def test_cycles_of_the_default_form_are_those_that_tests_read(self) -> None:
        read = set(re.findall(r"RINGFENCE_[A-Z]+_CYCLES", "".join(file.read_text() for file in CONFORMANCE.glob("cr*/*.py"))))
        self.assertEqual(read, set(suites.FEWER_CYCLES))
        faults = re.findall(r"RINGFENCE_[A-Z]+_CYCLES", (CONFORMANCE / "faults" / "test_faults.py").read_text())
        self.assertEqual(set(faults), set(suites.FEWER_FAULTS))
        self.assertEqual(tasks("crash")["crash"].environment["RINGFENCE_CRASH_CYCLES"], "60")
        with mock.patch.dict(os.environ, RINGFENCE_CRASH_CYCLES="500"):
            self.assertEqual(tasks("crash")["crash"].environment["RINGFENCE_CRASH_CYCLES"], "500")

    def test_every_asset_of_a_suite_is_one(self) -> None:
        for suite in ALL:
            self.assertEqual(set(suite.needs()) - set(ASSETS), set(), suite.name)

    def test_names_of_suites_steps_and_clients_agree(self) -> None:
        for suite in ALL:
            self.assertIn(suite.step, (*STEPS, *CLIENTS), suite.name)
        for step in ("sdk", "blobs", "clients", "fuzz", "escape", "fence", "crash", *CLIENTS):
            self.assertTrue(suites.of_step(step, long=False), step)

    def test_files_have_a_suite(self) -> None:
        directories = {file.parent.name for file in CONFORMANCE.glob("*/test_*.py")}
        self.assertEqual(directories - set(suites.DIRECTORIES), set())
        self.assertEqual(suites.of_file("escape/test_process_storms.py")[0].name, "escape-alone")
        self.assertEqual(suites.of_file("fence/test_ssh.py"), (suites.BY_NAME["fence"], ("fence/test_ssh.py",)))

    def test_budgets_fit_tests_that_exist(self) -> None:
        files = [str(file.relative_to(CONFORMANCE)) for file in CONFORMANCE.glob("*/test_*.py")]
        for pattern, _ in Budgets.load().patterns:
            path = pattern.partition("::")[0]
            is_crate = "/" not in path and (ROOT / "crates" / path).is_dir()
            self.assertTrue(is_crate or any(fnmatch.fnmatchcase(file, path) for file in files), pattern)


class Tasks(unittest.TestCase):
    def test_the_default_form_compiles_once_and_releases_nothing(self) -> None:
        found = tasks()
        self.assertNotIn(RELEASE, found)
        self.assertEqual(found["python"].environment["RINGFENCE_BIN"], "/target/x86_64-unknown-linux-gnu/ci/ringfence")
        for name in ("compile", "python", "escape-alone"):
            self.assertIn(PROGRAM, found[name].needs)
        for name in ("unit", "clippy", "doc"):
            self.assertIn(COMPILE, found[name].needs)
        self.assertNotIn(COMPILE, found["python"].needs, "suites do not wait for the tests of the crates")

    def test_what_go_compiles_gives_way_to_the_program(self) -> None:
        found = tasks()
        compiled = [found[f"prepare {name}"] for name in ("versitygw", "helm", "chart-judge", "collector", "pebble")]
        self.assertTrue(all(task.nice > found[PROGRAM].nice for task in compiled))
        self.assertLess(max(task.seconds for task in compiled), found["prepare python-2.63.0"].seconds, "the first suites wait for that")

    def test_every_call_of_cargo_has_the_same_commit(self) -> None:
        """A call with another commit would compile the program again while suites drive it."""
        commits = {task.environment.get("RINGFENCE_COMMIT") for task in tasks("--long").values() if task.place == CARGO}
        self.assertEqual(commits, {"0123"})

    def test_what_is_compiled_anyway_is_compiled_by_clippy(self) -> None:
        wrapper = "RUSTC_WORKSPACE_WRAPPER"
        found = tasks()
        wrapped = {task.environment.get(wrapper, "") for task in found.values() if task.place == CARGO}
        self.assertEqual({Path(path).name for path in wrapped}, {"clippy-driver"}, "one without it would compile everything again")
        self.assertEqual(found["clippy"].command[1:], ("-m", "testing.lints"))
        # The released program is not what clippy makes.
        self.assertNotIn(wrapper, tasks("--long")[RELEASE].environment)
        alone = tasks("lint")["clippy"]
        self.assertNotIn(wrapper, alone.environment)
        self.assertEqual(alone.command[:2], ("cargo", "clippy"))
        self.assertNotIn(wrapper, tasks("sdk")[PROGRAM].environment)

    def test_the_long_form_drives_the_release(self) -> None:
        found = tasks("--long")
        self.assertEqual(found["python"].environment["RINGFENCE_BIN"], "/target/x86_64-unknown-linux-gnu/release/ringfence")
        self.assertIn(RELEASE, found["python"].needs)
        self.assertIn(COMPILE, found["unit"].needs)
        self.assertEqual(sum(name.startswith("guest-") for name in found), 4)

    def test_a_given_program_is_driven_and_none_is_built(self) -> None:
        found = tasks("--long", "--binary", "/some/ringfence", "clients")
        self.assertEqual(found["go"].environment["RINGFENCE_BIN"], "/some/ringfence")
        self.assertEqual([task.name for task in found.values() if task.place == CARGO], [])

    def test_a_step_brings_what_it_needs_and_no_more(self) -> None:
        self.assertEqual(set(tasks("lint")), {"format", "runner", "clippy"})
        with mock.patch.object(Assets, "instead", return_value=None):
            self.assertEqual(set(tasks("fuzz")), {"packages", "program", "fuzz", "prepare python-2.63.0", "prepare python-fuzz"})
            self.assertIn("prepare go", tasks("blobs")["prepare versitygw"].needs)

    def test_packages_come_before_everything_that_uses_the_system(self) -> None:
        for words in ((), ("--long",), ("--long", "--binary", "/x", "clients")):
            for task in tasks(*words).values():
                compiles = task.place == CARGO or task.step == "lint"
                if task.name != PACKAGES and not compiles:
                    self.assertIn(PACKAGES, task.needs, task.name)
        self.assertNotIn(PACKAGES, tasks("lint", "build"))

    def test_every_package_is_known_before(self) -> None:
        options = parse(["clients", "fence"])
        with mock.patch("shutil.which", return_value=None), mock.patch.object(Assets, "instead", return_value=None):
            found = plan.packages(plan.select(options), place())
        self.assertLessEqual({"chromium", "libnss3-tools", "npm", "golang-go", "patchelf", "openssl"}, found)

    def test_every_plan_runs_to_its_end(self) -> None:
        """Tasks that take no time, by the schedule of the runner: each begins once, and those alone have no neighbour."""
        for words in ((), ("--long",), ("lint", "unit"), ("--long", "--binary", "/x", "clients")):
            found = list(tasks(*words).values())
            done: list[str] = []
            running: list[Task] = []
            while len(done) < len(found):
                running += next_tasks(found, done, [task.name for task in running], {PREPARE: 2, CARGO: 1, LANE: 3})
                self.assertTrue(running, f"{words}: nothing can begin after {done}")
                self.assertTrue(len(running) == 1 or not any(task.alone for task in running))
                done.append(running.pop(0).name)
            self.assertEqual(len(set(done)), len(found))

    def test_the_environment_of_the_caller_configures_nothing(self) -> None:
        found = plan.clean({"E2B_API_KEY": "x", "RINGFENCE_BIN": "x", "PYTEST_ADDOPTS": "x", "PYTHONPATH": "x", "PATH": "/bin"})
        self.assertEqual(found, {"PATH": "/bin", "PYTHONDONTWRITEBYTECODE": "1"})


if __name__ == "__main__":
    unittest.main()
