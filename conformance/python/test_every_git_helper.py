"""Every method of `git` with every parameter, through both APIs, on repositories and a server inside the sandbox."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from e2b import CommandExitException, GitAuthException, GitUpstreamException, InvalidArgumentException

from harness.surface import CLASSES, FLAVOURS, Box, both, untried
from harness.traffic import program

# What every method takes besides its own parameters. The directory makes relative paths mean something else.
COMMON: dict[str, Any] = {
    "envs": {"GIT_TERMINAL_PROMPT": "0", "GIT_COMMITTER_DATE": "2030-01-02T03:04:05Z"},
    "user": "user",
    "cwd": "/home/user/base",
    "timeout": 60,
    "request_timeout": 60,
}
ANN = {"author_name": "Ann", "author_email": "ann@example.com"}
SERVER = "http://localhost:8418"
LOGIN = {"username": "ann", "password": "s3cret"}


async def prepared(box: Box) -> None:
    """A directory to work in, with a repository `work` of one commit."""
    await box.shell("mkdir base")
    await box.git.init("work", initial_branch="main", **COMMON)
    await box.git.configure_user("Ann", "ann@example.com", **COMMON)
    await change(box, "a.txt", "one")


async def change(box: Box, name: str, content: str, repository: str = "work") -> None:
    """Commits a file with some content."""
    await box.files.write(f"base/{repository}/{name}", content)
    await box.git.add(repository, **COMMON)
    await box.git.commit(repository, f"{name}: {content}", **ANN, **COMMON)


async def served(box: Box) -> None:
    """A server with an empty repository `far.git` that wants a password."""
    await box.shell("mkdir -p srv && git init -q --bare srv/far.git && git -C srv/far.git config http.receivepack true")
    await box.files.write("git_server.py", program("git_server.py"))
    arguments = f"8418 /home/user/srv {LOGIN['username']} {LOGIN['password']}"
    await box.commands.run(f"exec python3 git_server.py {arguments}", background=True, timeout=0)

    async def listening() -> bool:
        return ":8418 " in await box.shell("ss -ltnH")

    await box.until(listening, "the git server listens")


async def subjects(box: Box, repository: str, revision: str = "HEAD") -> list[str]:
    return (await box.shell(f"git -C base/{repository} log --format=%s {revision}")).splitlines()


@both
async def test_init_add_commit_and_status(box: Box) -> None:
    await box.shell("mkdir base")
    await box.git.init("bare.git", bare=True, initial_branch="trunk", **COMMON)
    assert await box.shell("git -C base/bare.git rev-parse --is-bare-repository; cat base/bare.git/HEAD") == (
        "true\nref: refs/heads/trunk\n"
    )
    await box.git.init("work", initial_branch="main", **COMMON)
    for name in ("a", "b", "c"):
        await box.files.write(f"base/work/{name}", name)
    status = await box.git.status("work", **COMMON)
    assert (status.current_branch, status.has_untracked, status.untracked_count) == ("main", True, 3)
    await box.git.add("work", files=["a"], all=False, **COMMON)
    status = await box.git.status("work", **COMMON)
    assert {item.name: item.status for item in status.file_status} == {"a": "added", "b": "untracked", "c": "untracked"}
    assert (status.has_staged, status.staged_count) == (True, 1)
    await box.git.add("work", **COMMON)
    await box.git.commit("work", "all of it", **ANN, **COMMON)
    assert (await box.git.status("work", **COMMON)).is_clean
    with pytest.raises(CommandExitException):
        await box.git.commit("work", "nothing", **ANN, **COMMON)
    await box.git.commit("work", "nothing", allow_empty=True, **ANN, **COMMON)
    assert await subjects(box, "work") == ["nothing", "all of it"]
    made = await box.shell("git -C base/work log -1 --format='%an <%ae> %ct'")
    assert made == f"Ann <ann@example.com> {datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC).timestamp():.0f}\n"
    with pytest.raises(CommandExitException) as failed:
        await box.git.status("nowhere", **COMMON)
    assert failed.value.exit_code == 128


@both
async def test_branches(box: Box) -> None:
    await prepared(box)
    await box.git.create_branch("work", "side", **COMMON)
    await change(box, "b.txt", "aside")
    branches = await box.git.branches("work", **COMMON)
    assert (sorted(branches.branches), branches.current_branch) == (["main", "side"], "side")
    await box.git.checkout_branch("work", "main", **COMMON)
    assert await box.files.exists("base/work/b.txt") is False
    with pytest.raises(CommandExitException, match="not fully merged"):
        await box.git.delete_branch("work", "side", **COMMON)
    await box.git.delete_branch("work", "side", force=True, **COMMON)
    assert (await box.git.branches("work", **COMMON)).branches == ["main"]
    await box.shell("git -C base/work checkout -q --detach")
    assert (await box.git.status("work", **COMMON)).detached


@both
async def test_reset_and_restore(box: Box) -> None:
    await prepared(box)
    await change(box, "a.txt", "two")
    await box.git.reset("work", mode="soft", target="HEAD~1", **COMMON)
    assert await subjects(box, "work") == ["a.txt: one"]
    assert (await box.git.status("work", **COMMON)).staged_count == 1
    await box.git.reset("work", paths=["a.txt"], **COMMON)
    status = await box.git.status("work", **COMMON)
    assert (status.staged_count, status.unstaged_count) == (0, 1)
    await box.git.reset("work", mode="hard", **COMMON)
    assert await box.files.read("base/work/a.txt") == "one"
    with pytest.raises(InvalidArgumentException):
        await box.git.reset("work", mode="none")

    await change(box, "a.txt", "three")
    await box.files.write("base/work/a.txt", "changed")
    await box.git.add("work", **COMMON)
    await box.git.restore("work", ["a.txt"], staged=True, **COMMON)
    assert (await box.git.status("work", **COMMON)).staged_count == 0
    assert await box.files.read("base/work/a.txt") == "changed"
    await box.git.restore("work", ["a.txt"], **COMMON)
    assert await box.files.read("base/work/a.txt") == "three"
    await box.git.restore("work", ["a.txt"], worktree=True, source="HEAD~1", **COMMON)
    assert await box.files.read("base/work/a.txt") == "one"


@both
async def test_configuration(box: Box) -> None:
    await prepared(box)
    await box.git.set_config("pull.rebase", "true", scope="local", path="work", **COMMON)
    assert await box.git.get_config("pull.rebase", scope="local", path="work", **COMMON) == "true"
    assert await box.git.get_config("pull.rebase", **COMMON) is None
    await box.git.set_config("core.editor", "it's a \"test\"", **COMMON)
    assert await box.git.get_config("core.editor", **COMMON) == "it's a \"test\""
    await box.git.configure_user("Bob", "bob@example.com", scope="local", path="work", **COMMON)
    assert await box.git.get_config("user.name", scope="local", path="work", **COMMON) == "Bob"
    assert await box.git.get_config("user.email", scope="global", **COMMON) == "ann@example.com"
    with pytest.raises(InvalidArgumentException):
        await box.git.configure_user("", "")


@both
async def test_remotes(box: Box) -> None:
    await prepared(box)
    await box.git.init("far.git", bare=True, **COMMON)
    far = "/home/user/base/far.git"
    await box.git.remote_add("work", "origin", "/nowhere", **COMMON)
    with pytest.raises(CommandExitException):
        await box.git.remote_add("work", "origin", far, **COMMON)
    await box.git.push("work", remote=far, branch="main", set_upstream=False, **COMMON)
    await box.git.remote_add("work", "origin", far, fetch=True, overwrite=True, **COMMON)
    assert await box.git.remote_get("work", "origin", **COMMON) == far
    assert await box.git.remote_get("work", "none", **COMMON) is None
    assert await subjects(box, "work", "origin/main") == ["a.txt: one"]
    with pytest.raises(GitUpstreamException):
        await box.git.pull("work", **COMMON)
    with pytest.raises(GitUpstreamException):
        await box.git.push("work", set_upstream=False, **COMMON)
    await box.git.push("work", remote="origin", branch="main", set_upstream=True, **COMMON)
    status = await box.git.status("work", **COMMON)
    assert (status.upstream, status.ahead, status.behind) == ("origin/main", 0, 0)

    await change(box, "a.txt", "two")
    assert (await box.git.status("work", **COMMON)).ahead == 1
    await box.git.push("work", **COMMON)
    await box.git.clone(f"file://{far}", path="copy", branch="main", depth=1, **COMMON)
    assert await subjects(box, "copy") == ["a.txt: two"]
    await change(box, "a.txt", "three", repository="copy")
    await box.git.push("copy", **COMMON)
    await box.git.pull("work", remote="origin", branch="main", **COMMON)
    assert await box.files.read("base/work/a.txt") == "three"


@both
async def test_a_server_that_wants_a_password(box: Box) -> None:
    await prepared(box)
    await served(box)
    url = f"{SERVER}/far.git"
    await box.git.remote_add("work", "origin", url, **COMMON)
    with pytest.raises(GitAuthException):
        await box.git.push("work", remote="origin", branch="main", **COMMON)
    with pytest.raises(InvalidArgumentException):
        await box.git.push("work", password="alone")
    await box.git.push("work", remote="origin", branch="main", **LOGIN, **COMMON)

    with pytest.raises(GitAuthException):
        await box.git.clone(url, path="copy", **COMMON)
    with pytest.raises(GitAuthException):
        await box.git.clone(url, path="copy", username="ann", password="wrong", **COMMON)
    await box.git.clone(url, path="copy", branch="main", **LOGIN, **COMMON)
    assert await box.git.remote_get("copy", "origin", **COMMON) == url
    await change(box, "a.txt", "two", repository="copy")
    await box.git.push("copy", **LOGIN, **COMMON)
    await box.git.pull("work", remote="origin", branch="main", **LOGIN, **COMMON)
    assert await box.files.read("base/work/a.txt") == "two"
    assert LOGIN["password"] not in await box.shell("cat base/*/.git/config")

    await box.git.clone(url, path="keeps", branch="main", dangerously_store_credentials=True, **LOGIN, **COMMON)
    assert LOGIN["password"] in await box.shell("cat base/keeps/.git/config")
    with pytest.raises(GitAuthException):
        await box.git.pull("copy", **COMMON)
    await box.git.dangerously_authenticate(**LOGIN, host="localhost:8418", protocol="http", **COMMON)
    await box.git.pull("copy", **COMMON)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_nothing_is_left_untried(flavour: str) -> None:
    """Judges what the tests above have called."""
    assert untried(CLASSES["git"][flavour]) == {}
