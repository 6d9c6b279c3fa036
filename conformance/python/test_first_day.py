"""First use of the SDK: operations that are not built, killed sandboxes, full disks."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from e2b import CommandExitException, NotEnoughSpaceException, NotFoundException, Sandbox, SandboxException, Template

from harness.beside import beside
from harness.patience import within
from harness.platform import Platform

SMALL_DISK_MB = 64
SMALL_MEMORY_MB = 256


def test_base_is_a_template_like_any_other(platform: Platform) -> None:
    exists = getattr(Template, "exists", None) or Template.alias_exists
    assert exists("base") is True
    assert exists("no-such-template") is False
    headers = {"X-API-Key": platform.credentials()["E2B_API_KEY"]}

    def base() -> dict[str, object]:
        found = httpx.get(f"{platform.url}/templates", headers=headers, timeout=within(30)).json()
        return next(item for item in found if "base" in item["aliases"])

    before = base()
    with Sandbox.create() as box:
        assert base()["spawnCount"] == before["spawnCount"] + 1
        assert box.get_info().template_id == before["templateID"]
    after = base()
    assert after["spawnCount"] == before["spawnCount"] + 1
    assert after["lastSpawnedAt"] != before["lastSpawnedAt"]


def test_what_is_not_built_says_so_and_not_that_the_sandbox_is_gone(platform: Platform, sandbox: Sandbox) -> None:
    headers = {"X-API-Key": platform.credentials()["E2B_API_KEY"]}
    refused = httpx.get(f"{platform.url}/volumes", headers=headers, timeout=within(30))
    assert refused.status_code == 501 and "is not built yet" in refused.json()["message"]
    with pytest.raises(NotFoundException):
        Sandbox.pause("i" + "0" * 20)
    assert sandbox.commands.run("echo alive").stdout == "alive\n"


def test_a_killed_process_is_not_listed(sandbox: Sandbox) -> None:
    for _ in range(40):
        handle = sandbox.commands.run("exec sleep 1000", background=True)
        assert sandbox.commands.kill(handle.pid) is True
        assert handle.pid not in {process.pid for process in sandbox.commands.list()}
        assert sandbox.commands.kill(handle.pid) is False


@pytest.fixture(scope="module")
def small(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """A platform of its own, whose sandboxes have little disk and memory."""
    config = f"[sandbox]\ndisk_mb = {SMALL_DISK_MB}\nmemory_mb = {SMALL_MEMORY_MB}\n"
    with beside(platform, tmp_path_factory.mktemp("small"), config) as server:
        yield server


def test_a_full_disk_says_so_whichever_way_it_is_met(small: Platform) -> None:
    with Sandbox.create() as box:
        box.files.write("there", "x")
        box.commands.run("cat /dev/zero > fill 2>/dev/null || true")
        full = "not enough disk space available: no space left on the sandbox's disk"
        with pytest.raises(NotEnoughSpaceException, match=full):
            box.files.write("there", b"\0" * (1 << 20))
        with pytest.raises(NotEnoughSpaceException, match=full):
            box.files.write("new/directory/file", b"\0" * (1 << 20))
        with pytest.raises(SandboxException, match=full):
            for number in range(1000):
                box.files.make_dir(f"directory-{number}")
        # There is space again as soon as files are deleted.
        box.files.remove("fill")
        box.files.write("new/directory/file", b"\0" * (1 << 20))


def test_a_disk_without_inodes_says_that(small: Platform) -> None:
    with Sandbox.create() as box:
        box.commands.run("mkdir many; cd many; seq 100000 | xargs touch 2>/dev/null || true", timeout=120)
        out = "not enough inodes available: the sandbox's disk holds as many files as it can"
        with pytest.raises(NotEnoughSpaceException, match=out):
            box.files.write("one-more", "x")
        with pytest.raises(SandboxException, match=out):
            box.files.make_dir("one-more-directory")
        # What is there can still be written.
        box.files.write("many/1", "x")


def test_a_command_that_died_of_memory_says_so(small: Platform) -> None:
    """In `error`, which is what a client has beside the number."""
    with Sandbox.create() as box:
        out_of_memory(box)


def out_of_memory(sandbox: Sandbox) -> None:
    take_all = "held = []\nwhile True:\n    held.append(b'x' * (16 << 20))"
    sandbox.files.write("take.py", take_all)
    for command in ("exec python3 take.py", "python3 take.py; exit $?"):
        with pytest.raises(CommandExitException) as died:
            sandbox.commands.run(command, timeout=120)
        assert died.value.error.endswith(" (out of memory)"), died.value.error
        assert died.value.exit_code in (-1, 137)
    # A command that is killed for another reason has no such message.
    with pytest.raises(CommandExitException) as killed:
        sandbox.commands.run("kill -9 $$")
    assert killed.value.error == "signal: killed"
    handle = sandbox.commands.run("exec sleep 1000", background=True)
    assert handle.kill()
    with pytest.raises(CommandExitException) as ended:
        handle.wait()
    assert ended.value.error == "signal: killed"
