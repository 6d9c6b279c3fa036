"""What pins an asset, and what is provided for what."""

from __future__ import annotations

import re
import unittest
from pathlib import Path
from unittest import mock

from testing.assets import ALL, BY_NAME, Assets, serves_version
from testing.cache import Cache

ROOT = Path(__file__).resolve().parents[3]


class Table(unittest.TestCase):
    def setUp(self) -> None:
        self.assets = Assets(ROOT, Cache(Path("/cache")))

    def test_every_recipe_is_a_function_and_every_file_is_there(self) -> None:
        common = (ROOT / "scripts" / "common.sh").read_text()
        for asset in ALL:
            with self.subTest(asset.name):
                self.assertRegex(common, re.compile(rf"^{asset.recipe[0]}\(\)", re.MULTILINE))
                for file in asset.files:
                    self.assertTrue((ROOT / file).is_file(), file)
                for variable in asset.variables:
                    self.assertTrue(self.assets.variable(variable))

    def test_keys_differ_and_are_stable(self) -> None:
        found = {asset.name: self.assets.key(asset) for asset in ALL}
        self.assertEqual(len(set(found.values())), len(ALL))
        self.assertEqual(found, {asset.name: self.assets.key(asset) for asset in ALL})

    def test_a_version_is_part_of_the_key(self) -> None:
        before = self.assets.key(BY_NAME["versitygw"])
        with mock.patch.object(Assets, "variable", return_value="v0"):
            self.assertNotEqual(self.assets.key(BY_NAME["versitygw"]), before)

    def test_what_holds_its_path_has_it_in_the_key(self) -> None:
        elsewhere = Assets(ROOT, Cache(Path("/elsewhere")))
        for name, is_bound in (("python-2.63.0", True), ("criu", True), ("npm-cli", False)):
            with self.subTest(name):
                self.assertEqual(elsewhere.key(BY_NAME[name]) != self.assets.key(BY_NAME[name]), is_bound)

    def test_what_others_use_comes_before_them(self) -> None:
        with mock.patch.object(Assets, "instead", return_value=None):
            self.assertEqual(self.assets.wanted(["versitygw", "pebble", "go"]), ["go", "versitygw", "pebble"])
            self.assertEqual(self.assets.packages(["versitygw"]), {"golang-go"})

    def test_what_the_system_has_is_neither_provided_nor_installed(self) -> None:
        with mock.patch.object(Assets, "instead", side_effect=lambda name: Path("/usr/bin/go") if name == "go" else None):
            self.assertEqual(self.assets.wanted(["versitygw"]), ["versitygw"])
            self.assertEqual(self.assets.packages(["versitygw"]), set())
            self.assertEqual(self.assets.value("go"), "/usr/bin/go")

    def test_versions_that_serve(self) -> None:
        for name, version, serves in (
            ("criu", (4, 1, 9), False),
            ("criu", (4, 2, 0), True),
            ("go", (1, 21, 9), False),
            ("go", (1, 22, 0), True),
            ("node", (18, 20, 0), False),
            ("node", (20, 18, 0), False),
            ("node", (20, 18, 1), True),
            ("node", (21, 7, 0), False),
            ("node", (22, 8, 0), False),
            ("node", (22, 9, 0), True),
            ("node", (24, 0, 0), True),
        ):
            with self.subTest(name=name, version=version):
                self.assertEqual(serves_version(name, version), serves)


if __name__ == "__main__":
    unittest.main()
