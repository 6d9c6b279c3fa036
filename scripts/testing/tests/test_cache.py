"""Entries of the cache: empty, old, broken, and used by two runs."""

from __future__ import annotations

import os
import tempfile
import threading
import time
import unittest
from pathlib import Path

from testing.cache import KEPT_DAYS, MARKER, Broken, Cache, is_whole, key


class Keys(unittest.TestCase):
    def test_every_pin_counts_and_parts_do_not_flow_together(self) -> None:
        self.assertEqual(key("a", b"b"), key("a", "b"))
        self.assertEqual(len({key("ab"), key("a", "b"), key("", "ab"), key("ab", "")}), 4)


class Entries(unittest.TestCase):
    def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.cache = Cache(Path(directory.name) / "cache")
        self.path = self.cache.path("thing", "0123")
        self.made: list[Path] = []

    def make(self, into: Path) -> None:
        self.made.append(into)
        (into / "bin").mkdir(parents=True)
        (into / "bin" / "thing").write_text("content")

    def provide(self, in_place: bool = False) -> bool:
        return self.cache.provide(self.path, self.make, lambda at: (at / "bin" / "thing").read_text() == "content", in_place)

    def names(self) -> list[str]:
        return sorted(path.name for path in self.cache.root.iterdir())

    def test_an_empty_cache_is_filled_once(self) -> None:
        self.assertEqual([self.provide(), self.provide()], [True, False])
        self.assertEqual(len(self.made), 1)
        self.assertNotEqual(self.made, [self.path])
        self.assertEqual(self.names(), ["locks", self.path.name])

    def test_what_holds_its_path_is_made_in_its_place(self) -> None:
        self.provide(in_place=True)
        self.assertEqual(self.made, [self.path])

    def test_a_broken_entry_is_made_again(self) -> None:
        def cut() -> None:
            (self.path / "bin" / "thing").write_text("cont")

        def remove() -> None:
            (self.path / "bin" / "thing").unlink()

        def add() -> None:
            (self.path / "other").write_text("")

        def unmark() -> None:
            (self.path / MARKER).unlink()

        def garble() -> None:
            (self.path / MARKER).write_text("{")

        for spoil in (cut, remove, add, unmark, garble):
            with self.subTest(spoil.__name__):
                self.provide()
                spoil()
                self.assertTrue(self.provide())
                self.assertTrue(is_whole(self.path))
                self.assertFalse(self.provide())

    def test_content_of_the_same_size_is_tried(self) -> None:
        self.provide()
        (self.path / "bin" / "thing").write_text("CONTENT")
        self.assertTrue(is_whole(self.path))
        self.assertTrue(self.provide())
        self.assertEqual((self.path / "bin" / "thing").read_text(), "content")

    def test_what_use_writes_does_not_break_it(self) -> None:
        self.provide()
        (self.path / "__pycache__").mkdir()
        (self.path / "__pycache__" / "x.pyc").write_text("")
        self.assertFalse(self.provide())

    def test_a_recipe_that_fails_leaves_nothing(self) -> None:
        def fail(into: Path) -> None:
            self.make(into)
            raise OSError("no network")

        for in_place in (False, True):
            with self.subTest(in_place=in_place), self.assertRaises(OSError):
                self.cache.provide(self.path, fail, lambda _: True, in_place)
            self.assertEqual(self.names(), ["locks"])

    def test_what_was_made_and_does_not_serve_is_no_entry(self) -> None:
        with self.assertRaises(Broken):
            self.cache.provide(self.path, self.make, lambda _: False)
        self.assertFalse(self.path.exists())

    def test_two_runs_make_it_once(self) -> None:
        begun, may_end = threading.Event(), threading.Event()

        def slow(into: Path) -> None:
            begun.set()
            self.assertTrue(may_end.wait(30))
            self.make(into)

        serves = lambda at: (at / "bin" / "thing").exists()  # noqa: E731
        results: list[bool] = []
        first = threading.Thread(target=lambda: results.append(self.cache.provide(self.path, slow, serves)))
        first.start()
        self.assertTrue(begun.wait(30))
        second = threading.Thread(target=lambda: results.append(self.cache.provide(self.path, self.make, serves)))
        second.start()
        may_end.set()
        first.join(30)
        second.join(30)
        self.assertEqual(sorted(results), [False, True])
        self.assertEqual(len(self.made), 1)

    def test_what_is_used_is_not_replaced(self) -> None:
        self.provide()
        held = self.cache.lock(self.path, exclusive=False)
        try:
            with self.assertRaises(BlockingIOError):
                self.cache.lock(self.path, exclusive=True, wait=False)
        finally:
            os.close(held)

    def test_old_entries_are_removed_unless_they_are_used(self) -> None:
        later = time.time() + (KEPT_DAYS + 1) * 86400
        self.provide()
        self.assertEqual(self.cache.prune([], time.time()), [])
        self.assertEqual(self.cache.prune([self.path], later), [])
        held = self.cache.lock(self.path, exclusive=False)
        self.assertEqual(self.cache.prune([], later), [])
        os.close(held)
        self.assertEqual(self.cache.prune([], later), [self.path.name])
        self.assertEqual(Cache(self.cache.root / "missing").prune([], later), [])


if __name__ == "__main__":
    unittest.main()
