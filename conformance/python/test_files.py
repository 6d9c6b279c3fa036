"""Files: small, large, streamed, owned by the right user, and by signed links without a header."""

from __future__ import annotations

import hashlib
import io
import os
import time

import httpx
import pytest
from e2b import FileNotFoundException, InvalidArgumentException, Sandbox
from e2b.sandbox.filesystem.filesystem import WriteEntry

from harness.patience import within
from harness.platform import Platform

LARGE = 100 * 1024 * 1024


def test_small_files(sandbox: Sandbox) -> None:
    written = sandbox.files.write("/home/user/a.txt", "héllo\n")
    assert (written.path, written.name) == ("/home/user/a.txt", "a.txt")
    assert sandbox.files.read("/home/user/a.txt") == "héllo\n"
    assert sandbox.files.read("a.txt") == "héllo\n"
    assert sandbox.commands.run("stat -c '%U:%G %a' a.txt").stdout == "user:user 644\n"
    sandbox.files.write("a.txt", b"\x00\xff")
    assert bytes(sandbox.files.read("a.txt", format="bytes")) == b"\x00\xff"
    sandbox.files.write("empty", "")
    assert sandbox.files.read("empty") == ""


def test_directories_are_made_for_the_user(sandbox: Sandbox) -> None:
    sandbox.files.write("deep/er/file", "x")
    assert sandbox.commands.run("stat -c '%U %a' deep deep/er").stdout == "user 755\nuser 755\n"
    sandbox.files.write("/opt/mine/file", "x", user="root")
    assert sandbox.commands.run("stat -c %U /opt/mine /opt/mine/file").stdout == "root\nroot\n"


def test_several_files_at_once(sandbox: Sandbox) -> None:
    written = sandbox.files.write_files(
        [WriteEntry(path=f"/home/user/many/{n}", data=f"content {n}") for n in range(5)]
    )
    assert [item.path for item in written] == [f"/home/user/many/{n}" for n in range(5)]
    assert sandbox.commands.run("cat many/*").stdout == "".join(f"content {n}" for n in range(5))


def test_failures_name_the_path(sandbox: Sandbox) -> None:
    with pytest.raises(FileNotFoundException, match="/no/such/file"):
        sandbox.files.read("/no/such/file")
    with pytest.raises(InvalidArgumentException, match="/tmp"):
        sandbox.files.read("/tmp")
    with pytest.raises(InvalidArgumentException, match="/tmp"):
        sandbox.files.write("/tmp", "x")


def test_a_file_of_100_mb_comes_back_byte_for_byte(sandbox: Sandbox) -> None:
    block = os.urandom(1024 * 1024)
    data = b"".join(n.to_bytes(8, "big") + block[8:] for n in range(LARGE // len(block)))
    digest = hashlib.sha256(data).hexdigest()
    begun = time.monotonic()
    sandbox.files.write("large", data)
    wrote = time.monotonic()
    assert sandbox.commands.run("sha256sum large").stdout.split()[0] == digest
    read_begun = time.monotonic()
    assert bytes(sandbox.files.read("large", format="bytes")) == data
    print(f"100 MiB: write {wrote - begun:.2f} s, read {time.monotonic() - read_begun:.2f} s")


def test_a_streamed_file_of_100_mb(sandbox: Sandbox) -> None:
    data = os.urandom(LARGE)
    sandbox.files.write("large", io.BytesIO(data))
    digest = hashlib.sha256()
    for chunk in sandbox.files.read("large", format="stream"):
        digest.update(chunk)
    assert digest.digest() == hashlib.sha256(data).digest()


def test_compressed_both_ways(sandbox: Sandbox) -> None:
    text = "the same line again\n" * 100000
    sandbox.files.write("zipped", text, gzip=True)
    assert sandbox.commands.run("wc -c < zipped").stdout.strip() == str(len(text))
    assert sandbox.files.read("zipped", gzip=True) == text


def test_signed_links_need_no_header(sandbox: Sandbox) -> None:
    upload = sandbox.upload_url("link.txt")
    assert httpx.post(upload, files={"file": ("link.txt", b"by link")}, timeout=within(30)).status_code == 200
    assert sandbox.files.read("link.txt") == "by link"
    answer = httpx.get(sandbox.download_url("link.txt"), timeout=within(30))
    assert (answer.status_code, answer.content) == (200, b"by link")
    answer = httpx.get(sandbox.download_url("link.txt", use_signature_expiration=60), timeout=within(30))
    assert (answer.status_code, answer.content) == (200, b"by link")
    answer = httpx.get(sandbox.download_url("/etc/shadow", user="root"), timeout=within(30))
    assert answer.status_code == 200


def test_the_head_of_a_signed_link(sandbox: Sandbox) -> None:
    """As programs ask for the size of a download: what GET answers, without the body."""
    sandbox.files.write("link.bin", os.urandom(3 << 20))
    link = sandbox.download_url("link.bin")
    plain = {"Accept-Encoding": "identity"}
    head, got = httpx.head(link, headers=plain, timeout=within(30)), httpx.get(link, headers=plain, timeout=within(30))
    assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", str(3 << 20))
    names = ("content-length", "content-type", "content-disposition", "last-modified", "accept-ranges")
    assert [head.headers[name] for name in names] == [got.headers[name] for name in names]
    sandbox.files.write("empty", "")
    assert httpx.head(sandbox.download_url("empty"), headers=plain, timeout=within(30)).headers["content-length"] == "0"
    part = httpx.head(link, headers={"Range": "bytes=0-9", **plain}, timeout=within(30))
    assert (part.status_code, part.headers["content-length"]) == (206, "10")
    assert httpx.head(sandbox.download_url("missing"), timeout=within(30)).status_code == 404
    for wrong in (sandbox.download_url("link.bin", use_signature_expiration=-10), sandbox.upload_url("link.bin")):
        assert httpx.head(wrong, timeout=within(30)).status_code == 401, wrong


def test_links_that_do_not_fit_are_refused(sandbox: Sandbox, platform: Platform) -> None:
    sandbox.files.write("link.txt", "secret")
    expired = sandbox.download_url("link.txt", use_signature_expiration=-10)
    assert httpx.get(expired, timeout=within(30)).status_code == 401
    read = sandbox.download_url("link.txt")
    for wrong in (
        read.replace("link.txt", "other.txt"),
        read.replace("signature=v1_", "signature=v1_A"),
        read + "&username=root",
    ):
        assert httpx.get(wrong, timeout=within(30)).status_code == 401, wrong
    assert httpx.post(read, files={"file": ("link.txt", b"x")}, timeout=within(30)).status_code == 401
    unsigned = httpx.get(
        f"{platform.url}/files?path=link.txt",
        headers={"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "49983"},
        timeout=within(30),
    )
    assert unsigned.status_code == 401


def test_links_of_two_sandboxes_do_not_mix(sandbox: Sandbox, neighbour: Sandbox) -> None:
    sandbox.files.write("who", "one")
    neighbour.files.write("who", "two")
    assert httpx.get(sandbox.download_url("who"), timeout=within(30)).text == "one"
    assert httpx.get(neighbour.download_url("who"), timeout=within(30)).text == "two"


def test_ranges(sandbox: Sandbox) -> None:
    sandbox.files.write("digits", "0123456789")
    answer = httpx.get(sandbox.download_url("digits"), headers={"Range": "bytes=2-4"}, timeout=within(30))
    assert (answer.status_code, answer.text) == (206, "234")


def test_a_full_disk_says_so(sandbox: Sandbox) -> None:
    from e2b import NotEnoughSpaceException

    # Reserved rather than written, so that the test costs no time.
    sandbox.commands.run("fallocate -l $(( $(stat -f -c '%a * %S' /) - (20 << 20) )) filler")
    with pytest.raises(NotEnoughSpaceException):
        sandbox.files.write("large", b"x" * (64 << 20))
    sandbox.commands.run("rm -f filler large")
    sandbox.files.write("small", "fits again")
