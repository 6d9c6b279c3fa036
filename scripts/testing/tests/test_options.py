"""The command line, in Python and in the script before it."""

from __future__ import annotations

import re
import subprocess
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
    """It knows the words, so that it can refuse others where Python is not installed yet."""

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


if __name__ == "__main__":
    unittest.main()
