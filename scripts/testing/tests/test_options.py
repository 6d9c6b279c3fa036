"""The command line, in Python and in the script before it."""

from __future__ import annotations

import re
import subprocess
import tempfile
import unittest
from pathlib import Path

from testing.options import CLIENTS, FLAGS, STEPS, VALUES, UsageError, default_lanes, parse

SCRIPT = Path(__file__).resolve().parents[2] / "test.sh"


class Parsing(unittest.TestCase):
    def test_without_words_everything_is_asked_for(self) -> None:
        found = parse([])
        self.assertEqual((found.steps, found.long, found.hunt, found.binary), ((), False, 0, None))

    def test_each_run_has_a_seed_of_its_own(self) -> None:
        self.assertGreater(len({parse([]).seed for _ in range(20)}), 1)
        self.assertEqual(parse(["--seed", "7"]).seed, 7)
        self.assertEqual(parse(["--seed=7"]).seed, 7)
        self.assertTrue(parse(["--seed=0"]).seed_was_given)

    def test_steps_keep_their_order_and_count_once(self) -> None:
        self.assertEqual(parse(["fence", "lint", "fence"]).steps, ("fence", "lint"))
        self.assertEqual(parse(["javascript"]).steps, ("javascript",))

    def test_a_hunt_has_a_number_and_a_name(self) -> None:
        self.assertEqual((parse(["--hunt", "30"]).hunt, parse(["--hunt", "30"]).hunted), (30, None))
        self.assertEqual(parse(["--hunt", "3", "crash/test_pauses.py"]).hunted, "crash/test_pauses.py")

    def test_what_makes_no_sense_is_refused(self) -> None:
        for words in (
            ["frobnicate"],
            ["--frobnicate"],
            ["--long=yes"],
            ["--seed"],
            ["--seed", "x"],
            ["--seed", "-1"],
            ["--hunt", "0"],
            ["--lanes", "0"],
            ["--hunt", "2", "a", "b"],
            ["--changed", "lint"],
            ["--changed", "--long"],
            ["guest"],
        ):
            with self.subTest(words=words), self.assertRaises(UsageError):
                parse(words)

    def test_lanes_follow_the_processors(self) -> None:
        self.assertEqual([default_lanes(cores) for cores in (1, 2, 3, 16)], [2, 3, 4, 4])


class Script(unittest.TestCase):
    """The shell script knows the words, so that it can refuse others where Python is not installed yet."""

    def test_it_knows_the_same_steps(self) -> None:
        (listed,) = re.findall(r'^steps="(.*)"$', SCRIPT.read_text(), re.MULTILINE)
        self.assertEqual(sorted(listed.split()), sorted((*STEPS, *CLIENTS)))

    def test_its_help_names_every_word(self) -> None:
        said = subprocess.run([SCRIPT, "--help"], capture_output=True, text=True, check=True).stdout
        for word in (*FLAGS, *VALUES, *STEPS, *CLIENTS):
            self.assertIn(word, said)

    def test_unknown_words_are_refused_before_anything_is_done(self) -> None:
        for words in (["lint", "frobnicate"], ["--frobnicate"], ["--hunt"], ["--seed=x"]):
            with self.subTest(words=words):
                ran = subprocess.run([SCRIPT, *words], capture_output=True, text=True, check=False)
                self.assertEqual((ran.returncode, ran.stdout), (2, ""))
                self.assertIn("--help", ran.stderr)


class EveryScript(unittest.TestCase):
    """What is mistyped is answered at once: by a script that finds no programs to install or build anything with."""

    SCRIPTS = SCRIPT.parent

    def run_without_programs(self, script: str, *words: str) -> subprocess.CompletedProcess[str]:
        with tempfile.TemporaryDirectory() as programs:
            for name in ("bash", "dirname", "sed", "tr", "env"):
                (Path(programs) / name).symlink_to(f"/usr/bin/{name}")
            command = [self.SCRIPTS / script, *words]
            return subprocess.run(command, capture_output=True, text=True, check=False, env={"PATH": programs})

    def scripts(self) -> list[str]:
        found = [path.relative_to(self.SCRIPTS).as_posix() for path in self.SCRIPTS.rglob("*.sh")]
        return sorted(script for script in found if script != "common.sh")

    def test_help_needs_nothing(self) -> None:
        self.assertGreaterEqual(len(self.scripts()), 7)
        for script in self.scripts():
            for word in ("--help", "-h"):
                with self.subTest(script=script, word=word):
                    ran = self.run_without_programs(script, word)
                    self.assertEqual((ran.returncode, ran.stderr), (0, ""))
                    self.assertIn("Usage: ", ran.stdout)
                    self.assertNotIn("#", ran.stdout.replace("#!", ""))

    def test_what_makes_no_sense_is_refused_first(self) -> None:
        for script in self.scripts():
            with self.subTest(script=script):
                ran = self.run_without_programs(script, "--no-such-option")
                self.assertEqual((ran.returncode, ran.stdout), (2, ""), ran.stderr)
                self.assertIn("--help", ran.stderr)
        for script, words in {
            "run.sh": (["serve"], ["--listen"], ["--data-dir", "--tls"], ["--tls", "x"]),
            "conformance-clients.sh": (["jvascript"],),
            "bench-pause.sh": (["idel"],),
            "bench-templates.sh": (["desktops"],),
            "bench-import.sh": (["many"], ["0"], ["1", "2"]),
            "release.sh": (["a", "b"], ["--without"], ["--without", "deb"]),
            "guest/run.sh": (["-k", "5.10"], ["x"]),
        }.items():
            for wrong in words:
                with self.subTest(script=script, words=wrong):
                    ran = self.run_without_programs(script, *wrong)
                    self.assertEqual((ran.returncode, ran.stdout), (2, ""), ran.stderr)


class Packages(unittest.TestCase):
    """What `common.sh` does with the programs of Debian, which are replaced here."""

    def bash(self, script: str, **programs: str) -> subprocess.CompletedProcess[str]:
        functions = "".join(f"{name.replace('_', '-')}() {{ {body}; }}\n" for name, body in programs.items())
        whole = f"set -euo pipefail\nroot={SCRIPT.parents[1]}\n. {SCRIPT.parent}/common.sh\n{functions}{script}\n"
        return subprocess.run(["bash", "-c", whole], capture_output=True, text=True, check=False)

    def test_packages_are_installed_quietly(self) -> None:
        ran = self.bash("need_packages a b", apt_get="echo unpacking; echo notes >&2", dpkg_query="echo missing")
        self.assertEqual((ran.returncode, ran.stdout, ran.stderr), (0, "\n== installing a b\n", ""))

    def test_a_failure_is_shown_with_what_helps(self) -> None:
        ran = self.bash("need_packages a", apt_get="echo no route; return 100", dpkg_query="echo missing")
        self.assertNotEqual(ran.returncode, 0)
        self.assertIn("no route", ran.stderr)
        self.assertIn("http_proxy", ran.stderr)
        installing = 'if [ "$1" = install ]; then echo broken; return 100; fi'
        ran = self.bash("need_packages a", apt_get=installing, dpkg_query="echo missing")
        self.assertNotEqual(ran.returncode, 0)
        self.assertIn("broken", ran.stderr)
        self.assertNotIn("http_proxy", ran.stderr)

    def test_a_package_of_criu_is_compared_with_its_pin(self) -> None:
        pin = "criu_version=4.2-1 criu_hashes='amd64:aa,arm64:bb'\ncriu_is_pinned criu.deb"

        def tried(version: str, architecture: str, content: str) -> subprocess.CompletedProcess[str]:
            field = f'if [ "$3" = Version ]; then echo {version}; else echo {architecture}; fi'
            return self.bash(pin, dpkg_deb=field, sha256sum=f"echo {content}  criu.deb")

        for architecture, content in (("amd64", "aa"), ("arm64", "bb")):
            ran = tried("4.2-1", architecture, content)
            self.assertEqual((ran.returncode, ran.stdout, ran.stderr), (0, "", ""))
        ran = tried("4.2-1", "amd64", "bb")
        self.assertNotEqual(ran.returncode, 0)
        self.assertIn("not used", ran.stderr)
        for version, architecture in (("4.3-1", "amd64"), ("4.2-1", "riscv64")):
            ran = tried(version, architecture, "aa")
            self.assertEqual(ran.returncode, 0)
            self.assertIn(f"CRIU {version} for {architecture} (sha256 aa) is not the one", ran.stdout)


if __name__ == "__main__":
    unittest.main()
