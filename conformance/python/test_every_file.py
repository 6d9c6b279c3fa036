"""Every method of `files` and of watches with every parameter, and signed links, through both APIs."""

from __future__ import annotations

import asyncio
import io
from datetime import datetime, timezone
from typing import Any

import httpx
import pytest
from e2b import (
    AuthenticationException,
    FileNotFoundException,
    FilesystemEvent,
    FilesystemEventType,
    FileType,
    InvalidArgumentException,
    SandboxException,
)

from harness.patience import within
from harness.surface import CLASSES, FLAVOURS, Box, both, methods, untried

TEXT = "héllo 🦀\n" * 1000


async def collected(stream: Any) -> bytes:
    if hasattr(stream, "__aiter__"):
        return b"".join([bytes(chunk) async for chunk in stream])
    return await asyncio.to_thread(lambda: b"".join(bytes(chunk) for chunk in stream))


def takes_iterables(box: Box) -> bool:
    return "Iterable" in str(parameters_of(box, "write")["data"].annotation)


def parameters_of(box: Box, method: str) -> Any:
    return methods(CLASSES["files"][box.flavour])[method].parameters


@both
async def test_every_form_of_content(box: Box) -> None:
    data = TEXT.encode()

    async def pieces() -> Any:
        for at in range(0, len(data), 4096):
            yield data[at : at + 4096]

    forms: dict[str, Any] = {"text": TEXT, "bytes": data, "file": io.BytesIO(data), "text file": io.StringIO(TEXT)}
    if takes_iterables(box):
        forms["pieces"] = pieces() if box.is_async else (data[at : at + 4096] for at in range(0, len(data), 4096))
    for name, form in forms.items():
        written = await box.files.write(name, form)
        assert (written.path, written.name, written.type) == (f"/home/user/{name}", name, FileType.FILE)
        assert await box.files.read(name) == TEXT
        assert await box.files.read(name, format="text", user="user", request_timeout=30, gzip=True) == TEXT
        assert bytes(await box.files.read(name, format="bytes")) == data
        stream = await box.files.read(name, format="stream", stream_idle_timeout=30)
        assert await collected(stream) == data


@both
async def test_every_way_of_writing(box: Box) -> None:
    for octets, gzip in ((True, True), (True, False), (False, False)):
        name = f"/opt/way-{octets}-{gzip}"
        written = await box.files.write(
            name,
            TEXT,
            user="root",
            request_timeout=30,
            gzip=gzip,
            use_octet_stream=octets,
            metadata={"origin": "suite", "way": name.strip("/").replace("/", "-")},
        )
        assert written.metadata == {"origin": "suite", "way": f"opt-way-{octets}-{gzip}"}
        assert (await box.files.get_info(name)).metadata == written.metadata
        assert await box.files.read(name, user="root") == TEXT
        assert await box.shell(f"stat -c '%U %a' {name}") == "root 644\n"
        many = await box.files.write_files(
            [{"path": f"/opt/many/{octets}-{gzip}-{n}", "data": f"content {n}"} for n in range(5)],
            user="root",
            request_timeout=30,
            gzip=gzip,
            use_octet_stream=octets,
            metadata={"origin": "several"},
        )
        assert [item.path for item in many] == [f"/opt/many/{octets}-{gzip}-{n}" for n in range(5)]
        assert [item.metadata for item in many] == [{"origin": "several"}] * 5
        assert await box.shell(f"cat /opt/many/{octets}-{gzip}-*") == "".join(f"content {n}" for n in range(5))
    assert await box.files.write_files([]) == []
    await box.files.write("over", "a long first content")
    await box.files.write("over", "short")
    assert await box.files.read("over") == "short"
    assert (await box.files.get_info("over")).metadata is None


@both
async def test_failures_say_what_failed(box: Box) -> None:
    with pytest.raises(FileNotFoundException, match="/no/such/file"):
        await box.files.read("/no/such/file")
    for call in (box.files.read, box.files.get_info, box.files.list, box.files.exists, box.files.make_dir):
        with pytest.raises(AuthenticationException):
            await call("/tmp", user="nobody-here")
    with pytest.raises(InvalidArgumentException, match="/tmp"):
        await box.files.write("/tmp", "x")
    for call in (box.files.get_info, box.files.list):
        with pytest.raises(FileNotFoundException):
            await call("/no/such")
    with pytest.raises(FileNotFoundException):
        await box.files.rename("/no/such", "/tmp/there")
    await box.files.write("file", "x")
    for call in (box.files.list, box.files.make_dir):
        with pytest.raises(InvalidArgumentException):
            await call("file")


@both
async def test_directories(box: Box) -> None:
    options = {"user": "root", "request_timeout": 30}
    assert await box.files.make_dir("/opt/top/sub/deep", **options) is True
    assert await box.files.make_dir("/opt/top/sub/deep") is False
    await box.shell("cd /opt/top && touch b a sub/1 sub/deep/2 && ln -s a link", user="root")

    async def names(**named: Any) -> list[str]:
        return [entry.path.removeprefix("/opt/top/") for entry in await box.files.list("/opt/top", **named)]

    assert await names() == ["a", "b", "link", "sub"]
    assert await names(depth=2, **options) == ["a", "b", "link", "sub", "sub/1", "sub/deep"]
    assert await names(depth=9) == ["a", "b", "link", "sub", "sub/1", "sub/deep", "sub/deep/2"]

    assert await box.files.exists("/opt/top/a", **options) is True
    assert await box.files.exists("/opt/top/none") is False
    moved = await box.files.rename("/opt/top/sub/deep", "/opt/top/new/place", **options)
    assert (moved.path, moved.name, moved.type, moved.owner) == ("/opt/top/new/place", "place", FileType.DIR, "root")
    assert await box.files.exists("/opt/top/sub/deep") is False
    await box.files.remove("/opt/top", **options)
    assert await box.files.exists("/opt/top") is False
    await box.files.remove("/opt/top")


@both
async def test_what_is_known_of_an_entry(box: Box) -> None:
    await box.files.write("a.txt", "content")
    await box.shell("chmod 4750 a.txt && ln -s a.txt link && mkdir dir")
    info = await box.files.get_info("a.txt", user="user", request_timeout=30)
    assert (info.name, info.path, info.type, info.size) == ("a.txt", "/home/user/a.txt", FileType.FILE, 7)
    assert (info.permissions, info.owner, info.group) == ("urwxr-x---", "user", "user")
    assert info.mode & 0o777 == 0o750
    assert abs((info.modified_time.replace(tzinfo=timezone.utc) - datetime.now(timezone.utc)).total_seconds()) < 60
    assert info.symlink_target is None
    link = await box.files.get_info("link")
    assert (link.path, link.symlink_target) == ("/home/user/link", "/home/user/a.txt")
    assert (await box.files.get_info("~/dir")).type == FileType.DIR
    assert (await box.files.get_info("/tmp")).permissions == "dtrwxrwxrwx"


class Watch:
    """A watch of either API: one is polled for events, the other calls back."""

    def __init__(self, box: Box) -> None:
        self.box = box
        self.events: list[FilesystemEvent] = []
        self.ended: list[Exception | None] = []
        self.handle: Any = None

    async def start(self, path: str, **options: Any) -> Watch:
        if self.box.is_async:
            options |= {"on_event": self.events.append, "on_exit": self.ended.append, "timeout": 60}
        self.handle = await self.box.files.watch_dir(path, **options)
        return self

    async def heard(self, kind: FilesystemEventType, name: str) -> FilesystemEvent:
        async def there() -> FilesystemEvent | None:
            if not self.box.is_async:
                self.events += await self.handle.get_new_events(request_timeout=30)
            return next((event for event in self.events if (event.type, event.name) == (kind, name)), None)

        return await self.box.until(there, f"{kind} {name} is heard")

    async def stop(self) -> None:
        await (self.handle.stop() if self.box.is_async else self.handle.stop(request_timeout=30))


@both
async def test_a_watch_hears_every_kind_of_change(box: Box) -> None:
    await box.files.make_dir("dir")
    watch = await Watch(box).start("dir", user="user", request_timeout=30)
    await box.files.write("dir/new", "x")
    await watch.heard(FilesystemEventType.CREATE, "new")
    assert (await watch.heard(FilesystemEventType.WRITE, "new")).entry is None
    await box.shell("chmod 600 dir/new")
    await watch.heard(FilesystemEventType.CHMOD, "new")
    await box.files.rename("dir/new", "dir/other")
    await watch.heard(FilesystemEventType.RENAME, "new")
    await watch.heard(FilesystemEventType.CREATE, "other")
    await box.files.remove("dir/other")
    await watch.heard(FilesystemEventType.REMOVE, "other")
    await box.files.write("dir/sub/unheard", "x")
    await watch.heard(FilesystemEventType.CREATE, "sub")
    await watch.stop()
    count = len(watch.events)
    await box.files.write("dir/late", "x")
    assert len(watch.events) == count
    assert not [event for event in watch.events if "unheard" in event.name]
    if box.is_async:
        assert watch.ended == [None]
    else:
        with pytest.raises(SandboxException, match="stopped"):
            await watch.handle.get_new_events()


@both
async def test_a_recursive_watch_with_entries(box: Box) -> None:
    await box.files.make_dir("dir/old")
    watch = await Watch(box).start("dir", recursive=True, include_entry=True, allow_network_mounts=True)
    await box.files.write("dir/old/file", "x")
    created = await watch.heard(FilesystemEventType.CREATE, "old/file")
    assert created.entry and (created.entry.path, created.entry.type) == ("/home/user/dir/old/file", FileType.FILE)
    await box.files.make_dir("dir/new")
    await watch.heard(FilesystemEventType.CREATE, "new")
    await box.files.write("dir/new/file", "x")
    await watch.heard(FilesystemEventType.WRITE, "new/file")
    await box.files.remove("dir/new/file")
    assert (await watch.heard(FilesystemEventType.REMOVE, "new/file")).entry is None
    await watch.stop()


@both
async def test_what_cannot_be_watched(box: Box) -> None:
    await box.files.write("file", "x")
    with pytest.raises(FileNotFoundException):
        await Watch(box).start("/no/such")
    with pytest.raises(InvalidArgumentException):
        await Watch(box).start("file")


@both
async def test_signed_links(box: Box) -> None:
    upload = await box.upload_url("link.txt", user="user", use_signature_expiration=60)
    async with httpx.AsyncClient(timeout=within(30)) as client:
        posted = await client.post(upload, files={"file": ("link.txt", b"by link")})
        assert posted.status_code == 200, posted.text
        assert await box.files.read("/home/user/link.txt") == "by link"
        for options in ({}, {"user": "root"}, {"use_signature_expiration": 60}):
            got = await client.get(await box.download_url("/home/user/link.txt", **options))
            assert (got.status_code, got.text) == (200, "by link"), options
        expired = await client.get(await box.download_url("link.txt", use_signature_expiration=-10))
        assert expired.status_code == 401
        other = (await box.download_url("link.txt")).replace("link.txt", "other")
        assert (await client.get(other)).status_code == 401


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("kind", ["files", "watch handle"])
def test_nothing_is_left_untried(kind: str, flavour: str) -> None:
    """Judges what the tests above have called."""
    assert untried(CLASSES[kind][flavour]) == {}
