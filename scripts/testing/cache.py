"""Directories that are made once and kept between runs: right also when the cache is empty, old, broken, or used by two runs.

An entry is a directory whose name holds a hash of everything that pins its content, so another version is another entry. It
is complete when its marker is there, which is written last and counts its files; and it is used only when its content
still agrees with the marker. Entries that have to be made in their final place (their files hold absolute paths) are
made there under the lock; all others are made beside it and renamed.

A run holds a shared lock on what it uses and an exclusive one on what it makes, so an entry is never replaced or removed
under a test.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

MARKER = ".complete.json"
# Written by programs that are used, not by what makes the entry.
IGNORED = {"__pycache__", ".cache"}
KEPT_DAYS = 30


def default_root() -> Path:
    """Where entries are, unless RINGFENCE_TEST_CACHE names another directory."""
    named = os.environ.get("RINGFENCE_TEST_CACHE")
    return Path(named).absolute() if named else Path.home() / ".cache" / "ringfence-tests"


def key(*pins: str | bytes) -> str:
    """A hash of what pins the content of an entry. The length of each part counts, so that parts cannot flow together."""
    found = hashlib.sha256()
    for pin in pins:
        data = pin.encode() if isinstance(pin, str) else pin
        found.update(f"{len(data)}:".encode() + data)
    return found.hexdigest()[:16]


def contents(directory: Path) -> dict[str, int | str]:
    """How many files a directory has, and a digest of their paths and sizes."""
    listed = []
    for where, names, files in os.walk(directory):
        names[:] = sorted(name for name in names if name not in IGNORED)
        for name in files:
            path = os.path.join(where, name)
            inside = os.path.relpath(path, directory)
            if inside != MARKER:
                status = os.lstat(path)
                listed.append(f"{inside} {status.st_size}")
    digest = hashlib.sha256("\n".join(sorted(listed)).encode()).hexdigest()
    return {"files": len(listed), "digest": digest}


class Broken(Exception):
    """An entry that was made and does not serve."""


class Cache:
    """All entries below one directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, name: str, digest: str) -> Path:
        """Where an entry is, whether or not it was made."""
        return self.root / f"{name}-{digest}"

    @contextmanager
    def locked(self, path: Path, exclusive: bool) -> Iterator[None]:
        """Holds the lock of an entry."""
        descriptor = self.lock(path, exclusive)
        try:
            yield
        finally:
            os.close(descriptor)

    def lock(self, path: Path, exclusive: bool, wait: bool = True) -> int:
        """Takes the lock of an entry, which is held until the returned descriptor is closed. Without `wait`, raises
        BlockingIOError while another run has it.
        """
        locks = self.root / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(locks / f"{path.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        try:
            fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def provide(self, path: Path, make: Callable[[Path], None], serves: Callable[[Path], bool], in_place: bool = False) -> bool:
        """Makes an entry unless it is there and good. Returns whether it was made now.

        `serves` tries what is in the entry, beyond what the marker can tell.
        """
        with self.locked(path, exclusive=False):
            if is_whole(path) and serves(path):
                note_use(path)
                return False
        with self.locked(path, exclusive=True):
            # Another run may have made it meanwhile.
            if is_whole(path) and serves(path):
                note_use(path)
                return False
            remove(path)
            where = path if in_place else path.with_name(f"{path.name}.{os.getpid()}.new")
            remove(where)
            try:
                make(where)
                if not serves(where):
                    raise Broken(f"{where} was made and does not serve")
                finish(where)
                if where != path:
                    where.rename(path)
            except BaseException:
                remove(where)
                raise
            return True

    def prune(self, keep: Iterable[Path], now: float | None = None) -> list[str]:
        """Removes entries that nothing used for a month, and what runs that were killed left behind."""
        limit = (now or time.time()) - KEPT_DAYS * 86400
        kept = {path.name for path in keep}
        removed = []
        for path in sorted(self.root.iterdir()) if self.root.exists() else []:
            if path.name in kept or path.name == "locks" or not path.is_dir():
                continue
            marker = path / MARKER
            used = (marker if marker.exists() else path).stat().st_mtime
            if used < limit:
                try:
                    descriptor = self.lock(path, exclusive=True, wait=False)
                except BlockingIOError:
                    continue
                try:
                    remove(path)
                    removed.append(path.name)
                finally:
                    os.close(descriptor)
        return removed


def is_whole(path: Path) -> bool:
    """Whether an entry is as it was when it was made."""
    try:
        noted = json.loads((path / MARKER).read_text())
    except (OSError, ValueError):
        return False
    return bool(noted == contents(path))


def finish(path: Path) -> None:
    """Writes the marker, last and at once."""
    marker = path / MARKER
    new = marker.with_suffix(".new")
    noted = contents(path)
    new.write_text(json.dumps(noted))
    new.rename(marker)


def note_use(path: Path) -> None:
    """Keeps an entry from being removed for its age."""
    os.utime(path / MARKER)


def remove(path: Path) -> None:
    """Removes a directory, if there is one."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
