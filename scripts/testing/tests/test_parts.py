"""What a change reaches, what is hunted, which programs cargo made, and the kept target directory."""

from __future__ import annotations

import json
import os
import tempfile
import time
import unittest
from pathlib import Path
from unittest import mock

from testing import changes, hunt, kept_target, lints
from testing.cache import Cache
from testing.options import UsageError
from testing.report import FAILED, PASSED, Outcome
from testing.rust import environment, programs
from testing.suites import BY_NAME, is_alone
from testing.tasks import CARGO, LANE, Task
from testing.timings import Timing

ROOT = Path(__file__).resolve().parents[3]


class Changes(unittest.TestCase):
    def test_every_crate_has_a_rule(self) -> None:
        for manifest in ROOT.glob("crates/*/Cargo.toml"):
            crate = manifest.parent.name
            self.assertIn(crate, changes.reach([f"crates/{crate}/src/lib.rs"]).crates)

    def test_every_rule_names_what_exists(self) -> None:
        for rule in changes.RULES:
            for crate in rule.crates:
                self.assertTrue((ROOT / "crates" / crate).is_dir(), crate)
            for run in rule.runs:
                self.assertIn(run.suite, BY_NAME)
                self.assertFalse(BY_NAME[run.suite].alone)
                for file in run.files:
                    if file.endswith(".py"):
                        self.assertTrue((ROOT / "conformance" / file).is_file(), file)
                        self.assertFalse(is_alone(file), file)

    def test_a_test_that_was_changed_runs_first(self) -> None:
        found = changes.reach(["crates/agent/src/lib.rs", "conformance/fence/test_ssh.py"])
        self.assertEqual(found.runs[0], changes.Run("fence", ("fence/test_ssh.py",), 30))
        self.assertEqual(found.crates[0], "agent")

    def test_a_file_that_is_gone_is_not_run(self) -> None:
        self.assertEqual(changes.reach(["conformance/fence/test_gone.py"], {"conformance/fence/test_gone.py": False}).runs, ())

    def test_a_file_with_both_kinds_of_tests_runs_twice(self) -> None:
        self.assertEqual([run.suite for run in changes.own_runs("conformance/python/test_sizes.py")], ["python", "python-alone"])
        self.assertEqual([run.suite for run in changes.own_runs("conformance/escape/test_process_storms.py")], ["escape-alone"])

    def test_pages_reach_no_platform(self) -> None:
        for template, suite in {"code-interpreter": "codeint", "desktop": "desktop", "mcp-gateway": "gateway", "agents": "agents"}.items():
            found = changes.reach([f"templates/{template}/Dockerfile"])
            self.assertEqual((found.crates, [run.suite for run in found.runs]), (("recipes",), [suite]))
        self.assertEqual(changes.reach(["docs/configuration.md"]), changes.Reach(("docs",), ()))
        self.assertEqual(changes.reach(["README.md"]), changes.Reach((), ()))

    def test_what_does_not_fit_is_left_and_named(self) -> None:
        runs = [changes.Run("python", ("a",), 100), changes.Run("fence", ("b",), 300), changes.Run("crash", ("c",), 50)]
        chosen, left = changes.affordable(runs, 200)
        self.assertEqual(([run.suite for run in chosen], [run.suite for run in left]), (["python", "crash"], ["fence"]))

    def test_files_of_one_suite_are_one_run_with_few_cycles(self) -> None:
        runs = [changes.crash("crash", seconds=20), changes.crash("crash", "pauses", seconds=20), changes.escape("kernel")]
        (crash, files), (_, escape) = changes.suites(runs)
        self.assertEqual(files, ("-m", "not alone", "crash/test_crash.py", "crash/test_pauses.py"))
        self.assertEqual((crash.seconds, crash.fewer["RINGFENCE_CRASH_CYCLES"]), (40, "5"))
        self.assertEqual(escape[:2], ("-m", "not alone"))

    def test_dependents_are_those_whose_manifest_names_it(self) -> None:
        found = changes.dependents(ROOT, ["agent"])
        self.assertIn("cli", found)
        self.assertNotIn("store", found)


class Hunts(unittest.TestCase):
    def test_names(self) -> None:
        for name, suites in (
            ("crash", ["crash"]),
            ("javascript", ["javascript"]),
            ("fence/test_ssh.py", ["fence"]),
            ("escape/test_process_storms.py", ["escape-alone"]),
            ("python-tls:test_rest", ["python-tls"]),
            ("escape-restored-alone", ["escape-restored-alone"]),
        ):
            with self.subTest(name):
                self.assertEqual([suite.name for suite, _ in hunt.select(name, long=False).suites], suites)
        self.assertEqual(hunt.select("python-tls:test_rest", long=False).suites[0][1][-2:], ("-k", "test_rest"))
        self.assertEqual(hunt.select("unit:server", long=False).crates, ("server",))
        self.assertTrue(hunt.select(None, long=False).unit)
        for name in ("nothing", "nothing/test_x.py", "nothing:x"):
            with self.assertRaises(UsageError):
                hunt.select(name, long=False)

    def test_repeats_have_results_and_seeds_of_their_own(self) -> None:
        suite = Task("crash", "crash", ("pytest", "/run/crash.timings"), timings=Path("/run/crash.timings"), needs=frozenset({"compile"}))
        once, repeats = hunt.repeated([Task("compile", "build", ("cargo",), CARGO), suite], 3, 40)
        self.assertEqual([task.name for task in once], ["compile"])
        self.assertEqual([task.name for task in repeats], ["crash#1", "crash#2", "crash#3"])
        self.assertEqual([task.environment["RINGFENCE_CRASH_SEED"] for task in repeats], ["40", "41", "42"])
        self.assertEqual(len({task.timings for task in repeats}), 3)
        for task in repeats:
            self.assertEqual((task.place, task.needs), (LANE, frozenset()))
            self.assertEqual(task.command[1], str(task.timings))
            self.assertEqual(task.environment["CONFORMANCE_TIMINGS"], str(task.timings))

    def test_rates(self) -> None:
        def outcome(number: int, status: str, *results: str) -> Outcome:
            timings = tuple(Timing("crash", f"t{at}", result, 1.0) for at, result in enumerate(results))
            return Outcome(Task(f"crash#{number}", "crash", ("true",)), status, timings=timings)

        found = hunt.rates([outcome(1, PASSED, "passed", "passed"), outcome(2, FAILED, "failed", "passed"), outcome(3, FAILED, "passed")])
        self.assertEqual(found["crash: t0"], hunt.Rate(3, 1))
        self.assertEqual(found["crash: t1"], hunt.Rate(2, 0))
        # One ended without any test that failed.
        self.assertEqual(found["crash: (what is outside of its tests)"], hunt.Rate(3, 1))
        said = hunt.table([outcome(1, FAILED, "failed"), outcome(2, PASSED, "passed"), outcome(3, PASSED, "passed")])
        self.assertIn("1 of    3 failed   33.3%  crash: t0", "\n".join(said))

    def test_the_load_ends(self) -> None:
        with mock.patch.dict(os.environ, PYTHONPATH=str(ROOT / "scripts")), mock.patch("subprocess.Popen") as begun:
            with hunt.load({}):
                self.assertEqual(begun.call_count, 3)
            self.assertEqual(begun.return_value.kill.call_count, 3)


def message(package: str, kind: str, name: str, executable: str | None, test: bool = True) -> str:
    return json.dumps(
        {
            "reason": "compiler-artifact",
            "package_id": f"path+file:///repo/crates/{package}#1.2.3-rc.1",
            "manifest_path": f"/repo/crates/{package}/Cargo.toml",
            "target": {"kind": [kind], "name": name},
            "profile": {"test": test},
            "executable": executable,
        }
    )


class Programs(unittest.TestCase):
    MESSAGES = (
        "not json",
        message("model", "lib", "model", "/t/model-1"),
        message("runtime", "test", "linux", "/t/linux-1"),
        message("cli", "bin", "ringfence", "/t/ringfence", test=False),
        message("cli", "bin", "ringfence", "/t/ringfence-1"),
        message("model", "lib", "model", None),
        json.dumps({"reason": "build-finished", "success": True}),
    )

    def test_test_programs_are_found_the_longest_first(self) -> None:
        self.assertEqual([program.name for program in programs(self.MESSAGES)], ["runtime::linux", "cli::ringfence", "model"])
        self.assertEqual([program.name for program in programs(self.MESSAGES, ["cli"])], ["cli::ringfence"])

    def test_they_run_as_cargo_runs_them(self) -> None:
        program = programs(self.MESSAGES)[0]
        found = environment(program)
        self.assertEqual(program.directory, Path("/repo/crates/runtime"))
        self.assertEqual((found["CARGO_MANIFEST_DIR"], found["CARGO_PKG_VERSION"]), ("/repo/crates/runtime", "1.2.3-rc.1"))
        self.assertEqual([found[f"CARGO_PKG_VERSION_{part}"] for part in ("MAJOR", "MINOR", "PATCH")], ["1", "2", "3"])


class Lints(unittest.TestCase):
    def test_what_clippy_has_said_counts_once(self) -> None:
        def message(level: str, text: str) -> str:
            return json.dumps({"reason": "compiler-message", "message": {"level": level, "rendered": text}})

        said = [
            *("   Compiling agent", json.dumps({"reason": "compiler-artifact", "fresh": True}), message("warning", "large future")),
            *(message("note", "a note"), message("warning", "large future"), message("error", "no such name")),
        ]
        self.assertEqual(lints.found(said), ["large future", "no such name"])
        self.assertEqual(lints.found(said[:2]), [])


class KeptTargets(unittest.TestCase):
    def test_it_is_pinned_and_one_run_has_it(self) -> None:
        with tempfile.TemporaryDirectory() as directory, mock.patch("subprocess.run") as compiler:
            compiler.return_value.stdout = "rustc 1.95.0"
            cache = Cache(Path(directory))
            first = kept_target.KeptTarget(ROOT, cache)
            self.assertTrue(first.path.is_dir())
            with self.assertRaises(BlockingIOError):
                kept_target.KeptTarget(ROOT, cache)
            compiler.return_value.stdout = "rustc 1.96.0"
            second = kept_target.KeptTarget(ROOT, cache)
            self.assertNotEqual(first.path, second.path)
            second.discard()
            self.assertFalse(second.path.exists())
            for one in (first, second):
                os.close(one._lock)

    def test_only_a_compile_that_failed_by_itself_speaks_against_it(self) -> None:
        for name, status, was_interrupted, suspect in [
            ("program", FAILED, False, True),
            ("compile", FAILED, False, True),
            ("compile", FAILED, True, False),
            ("compile", PASSED, False, False),
            ("unit", FAILED, False, False),
        ]:
            outcomes = [Outcome(Task(name, "build", ("true",)), status)]
            self.assertEqual(kept_target.is_suspect(outcomes, was_interrupted), suspect, (name, status, was_interrupted))

    def test_no_crate_of_the_repository_is_taken_from_it(self) -> None:
        number, triple = "0123456789abcdef", "x86_64-unknown-linux-gnu"
        own = {
            *(f"{triple}/ci/.fingerprint/agent-{number}/x", f"{triple}/ci/deps/libagent-{number}.rlib"),
            *(f"{triple}/ci/deps/it-{number}", f"{triple}/ci/deps/ringfence_agent-{number}.d"),
            f"ci/build/agent-{number}/build-script-build",
        }
        others = {
            *(f"{triple}/ci/.fingerprint/agent-utils-{number}/x", f"{triple}/ci/deps/libserde-{number}.rlib"),
            *(f"{triple}/ci/deps/libagent_utils-{number}.rlib", f"ci/build/serde-{number}/out"),
        }
        with tempfile.TemporaryDirectory() as directory:
            target = Path(directory)
            for name in own | others:
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                (target / name).write_text("")
            kept_target.forget(target, {"agent"}, {"agent", "it", "ringfence-agent"})
            left = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
        self.assertEqual(left, others)

    def test_what_the_compiler_keeps_stays_while_it_is_used(self) -> None:
        days = kept_target.INCREMENTAL_DAYS * 86400
        with tempfile.TemporaryDirectory() as directory:
            cache = Cache(Path(directory))
            crates = {}
            for name in ("target-1", "target-2", "target-3"):
                crates[name] = cache.root / name / "x86_64-unknown-linux-gnu" / "ci" / "incremental" / "agent-1"
                crates[name].mkdir(parents=True)
            used = cache.lock(cache.root / "target-2", exclusive=True)
            with mock.patch.object(Cache, "path", return_value=cache.root / "target-1"):
                kept = kept_target.KeptTarget(ROOT, cache)
            self.assertEqual([path.exists() for path in crates.values()], [True, True, False])
            for late, is_there in ((days - 60, True), (days + 60, False)):
                kept_target.forget(kept.path, {"agent"}, {"agent"}, time.time() + late)
                self.assertEqual(crates["target-1"].exists(), is_there)
            for descriptor in (used, kept._lock):
                os.close(descriptor)

    def test_each_directory_of_sources_has_its_own(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            target = Path(directory)
            cargo = target / "x86_64-unknown-linux-gnu" / "ci"
            crate = cargo / "incremental" / "agent-1"
            crate.mkdir(parents=True)
            seen = []
            for sources in ("/one", "/two", "/one"):
                kept_target.keep_for(target, Path(sources))
                seen.append(crate.exists())
            self.assertEqual(seen, [True, False, True])
            self.assertEqual(len(list(cargo.glob("incremental-*"))), 2)
            kept_target.keep_for(target, Path("/one"), time.time() + kept_target.INCREMENTAL_DAYS * 86400 - 60)
            self.assertEqual(len(list(cargo.glob("incremental-*"))), 2)
            os.utime(next(path for path in cargo.glob("incremental-*") if path != crate.parent.resolve()), (0, 0))
            kept_target.keep_for(target, Path("/one"))
            self.assertEqual(list(cargo.glob("incremental-*")), [crate.parent.resolve()])

    def test_cargo_names_everything_of_the_repository(self) -> None:
        packages, targets = kept_target.own_names(ROOT)
        self.assertEqual(packages, {manifest.parent.name for manifest in ROOT.glob("crates/*/Cargo.toml")})
        self.assertLessEqual({"ringfence", "ringfence-agent", "it", "linux"}, targets)


if __name__ == "__main__":
    unittest.main()
