"""A search for a text in everything that a sandbox has, and in everything that the host keeps of it."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

CHUNK = 8 << 20
# What memory that nothing was written to reads as. Comparing with it is forty times faster than searching it for a text with zeros.
ZEROS = bytes(CHUNK)


def forms(secret: str) -> list[bytes]:
    """A secret as programs write it: as it is, in hexadecimal digits, percent-encoded, and in base64 at any place of an
    encoded text, such as the value of Basic authentication."""
    data = secret.encode()
    found = {data, data.hex().encode(), data.hex().upper().encode(), quote(secret, safe="").encode()}
    for before in range(3):
        text = b"\0" * before + data
        encoded = base64.b64encode(text)
        # Characters that are made of bits of the secret alone.
        found.add(encoded[-(-before * 8 // 6) : len(text) * 8 // 6])
        found.add(found_url := base64.urlsafe_b64encode(text)[-(-before * 8 // 6) : len(text) * 8 // 6])
        assert len(found_url) > 12
    # In UTF-16, as Java and Windows programs have texts.
    found.add(secret.encode("utf-16-le"))
    return sorted(found)


def processes(sandbox_id: str) -> list[int]:
    """Processes of a sandbox, its agent included, as the host numbers them: by the name of their cgroup."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if sandbox_id in Path(f"/proc/{name}/cgroup").read_text():
                    found.append(int(name))
            except OSError:
                continue
    assert found, f"no process of {sandbox_id} was found"
    return found


def memory(pid: int) -> Iterator[bytes]:
    """Readable memory of a process."""
    try:
        with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as content:
            for line in maps:
                begin, end, mode = re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+)", line).groups()  # type: ignore[union-attr]
                if mode[0] != "r" or line.rstrip().endswith(("[vvar]", "[vsyscall]", "[vvar_vclock]")):
                    continue
                at, end_at = int(begin, 16), int(end, 16)
                while at < end_at:
                    content.seek(at)
                    try:
                        part = content.read(min(CHUNK, end_at - at))
                    except OSError:
                        break
                    if not part:
                        break
                    yield part
                    at += len(part) if at + len(part) >= end_at else len(part) - 256
    except (FileNotFoundError, ProcessLookupError):
        return


def file(path: Path) -> Iterator[bytes]:
    """Content of a file without its holes; nothing of one that was removed meanwhile."""
    try:
        content = open(path, "rb", 0)
    except FileNotFoundError:
        return
    with content:
        size, at = os.fstat(content.fileno()).st_size, 0
        while at < size:
            try:
                at = os.lseek(content.fileno(), at, os.SEEK_DATA)
            except OSError:
                return
            part = os.pread(content.fileno(), CHUNK, at)
            if not part:
                return
            yield part
            at += len(part) if at + len(part) >= size else max(len(part) - 256, 1)


def tree(root: Path, same_device: bool = True) -> Iterator[Path]:
    """Regular files below a directory."""
    for directory, directories, names in os.walk(root):
        if same_device:
            # One that was removed meanwhile is no mount.
            directories[:] = [name for name in directories if not os.path.ismount(os.path.join(directory, name))]
        for name in names:
            path = Path(directory, name)
            if path.is_file() and not path.is_symlink():
                yield path


def kept_places(data_dir: Path, log: Path) -> Iterator[tuple[str, Iterator[bytes]]]:
    """What the host keeps: kind of place, and its content. Images of processes are data."""
    os.sync()
    for path in tree(data_dir):
        kind = "database" if ".db" in path.name or "sqlite" in path.name else "disk image" if path.stat().st_size >= 64 << 20 else "data"
        yield kind, file(path)
    yield "log", file(log)


def places(sandbox_id: str, data_dir: Path, log: Path) -> Iterator[tuple[str, Iterator[bytes]]]:
    """Everything that is searched of a running sandbox."""
    for pid in processes(sandbox_id):
        is_agent = b"ringfence" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
        yield ("agent's memory" if is_agent else "memory"), memory(pid)
        for name in ("environ", "cmdline"):
            yield name, iter([Path(f"/proc/{pid}/{name}").read_bytes()])
    inside = Path(f"/proc/{processes(sandbox_id)[0]}/root")
    for name in ("dev/shm", "tmp", "run", "etc", "home", "var", "root"):
        if (inside / name).is_dir():
            for path in tree(inside / name):
                yield "files", file(path)
    yield from kept_places(data_dir, log)


def search(secret: str, sandbox_id: str, data_dir: Path, log: Path) -> set[str]:
    """The kinds of places in which a secret is, in any form."""
    return found_in(secret, places(sandbox_id, data_dir, log))


def search_kept(secret: str, data_dir: Path, log: Path) -> set[str]:
    """Places on the host alone where a secret is found; no sandbox needs to run."""
    return found_in(secret, kept_places(data_dir, log))


def files_with(text: str, root: Path) -> list[Path]:
    """Files below a directory of the host that have a text as it is."""
    wanted = [text.encode()]
    found = []
    for path in tree(root, same_device=False):
        try:
            if any(has_any(wanted, part) for part in file(path)):
                found.append(path)
        except FileNotFoundError:
            # The platform works meanwhile.
            continue
    return found


def found_in(secret: str, places: Iterator[tuple[str, Iterator[bytes]]]) -> set[str]:
    wanted = forms(secret)
    found = set()
    for kind, content in places:
        if kind not in found and any(has_any(wanted, part) for part in content):
            found.add(kind)
    return found


def has_any(wanted: list[bytes], part: bytes) -> bool:
    """Whether one of some texts is in a part. Each is searched for by itself: a regular expression for all of them takes five times
    as long, and a search of all that a platform has is gigabytes.
    """
    return part != ZEROS[: len(part)] and any(text in part for text in wanted)
