"""Repositories that sandboxes get when they are created, from a code host of the fake internet: git's own server, over
TLS, which answers to a token only."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2b import Sandbox

from harness.code_host import HOST, TOKEN, CodeHost, git
from harness.elapse import at_moment
from harness.internet import Internet
from harness.patience import within
from harness.platform import Platform
from harness.traffic import until

OTHER_TOKEN = "ghp_second0123456789abcdef"
Create = Callable[..., Sandbox]


@pytest.fixture(scope="module")
def host(internet: Internet) -> CodeHost:
    return CodeHost(internet)


@pytest.fixture(autouse=True)
def token_is_accepted(host: CodeHost) -> Iterator[None]:
    yield
    host.accept(TOKEN)


def post(body: dict[str, Any], **headers: str) -> httpx.Response:
    return httpx.post(
        f"{os.environ['E2B_API_URL']}/sandboxes",
        json={"templateID": "base", "timeout": 300, "secure": True, **body},
        headers={"X-API-Key": os.environ["E2B_API_KEY"], **headers},
        timeout=90,
    )


def resource(name: str, path: str, token: str = TOKEN, **more: str) -> dict[str, str]:
    url = f"https://{HOST}/{name}"
    return {"type": "code_host_repository", "url": url, "mount_path": path, "authorization_token": token, **more}


@pytest.fixture
def make(platform: Platform) -> Iterator[Create]:
    """Makes sandboxes with resources, which end with the test."""
    with ExitStack() as stack:

        def create(*resources: dict[str, str], **more: Any) -> Sandbox:
            answer = post({"resources": resources, **more})
            assert answer.status_code == 201, answer.text
            box = Sandbox.connect(answer.json()["sandboxID"])
            stack.callback(box.kill)
            return box

        yield create


def run(box: Sandbox, command: str) -> str:
    return box.commands.run(command, timeout=60).stdout


def test_a_working_tree_stands_at_its_path(make: Create, host: CodeHost) -> None:
    work = host.make("octocat/hello")
    git(work, "branch", "feature")
    git(work, "push", "-q", str(work.with_suffix(".git")), "feature")
    box = make(resource("octocat/hello", "/home/user/hello"), resource("octocat/hello", "/srv/a b/hello"))
    for path in ("/home/user/hello", "'/srv/a b/hello'"):
        assert run(box, f"cd {path} && cat README.md && ./run.sh && git status --porcelain") == "# octocat/hello\nran\n"
        assert run(box, f"cd {path} && git branch --show-current && git log --format=%s") == "main\nfirst\n"
        assert run(box, f"cd {path} && git branch -r && git tag").split() == [
            "origin/HEAD",
            "->",
            "origin/main",
            "origin/feature",
            "origin/main",
            "v1",
        ]
        assert run(box, f"stat -c %U {path} {path}/.git/config") == "user\nuser\n"
        assert run(box, f"cd {path} && git remote get-url origin") == f"https://{HOST}/octocat/hello.git\n"
        assert run(box, f"cd {path} && git rev-parse --abbrev-ref main@{{upstream}}") == "origin/main\n"
    assert run(box, "ls -A /tmp | grep -c repository || true") == "0\n"


def test_fetch_and_push_work_inside_without_the_token(make: Create, host: CodeHost) -> None:
    work = host.make("octocat/pushed")
    box = make(resource("octocat/pushed", "/home/user/pushed"))
    host.commit(work, "second")
    inside = "cd /home/user/pushed && git -c user.name=b -c user.email=b@example.com"
    assert run(box, f"{inside} pull -q && git log -1 --format=%s") == "second\n"
    run(box, f"{inside} commit -q --allow-empty -m third && git push -q origin main")
    assert git(work.with_suffix(".git"), "log", "-1", "--format=%s", "main") == "third\n"
    # It is nowhere inside: in no file, environment or command line.
    places = "/home /tmp /etc /var /run /root /proc/[0-9]*/environ /proc/[0-9]*/cmdline"
    # The command lines of the search do not have what is searched for.
    search = f"sudo grep -rsl '[{TOKEN[0]}]{TOKEN[1:]}' {places} || true"
    assert run(box, search) == ""
    box.files.write("/tmp/canary", TOKEN)
    assert run(box, search) == "/tmp/canary\n"
    # In a Basic header neither.
    assert "eC1hY2Nlc3MtdG9rZW4" not in run(box, "cd /home/user/pushed && cat .git/config && GIT_TRACE_CURL=1 git ls-remote 2>&1")


def test_a_new_token_reaches_a_running_sandbox(make: Create, host: CodeHost, platform: Platform) -> None:
    host.make("octocat/rotated")
    box = make(resource("octocat/rotated", "/home/user/rotated"))
    inside = "cd /home/user/rotated && git -c http.lowSpeedTime=10 ls-remote -q origin HEAD"
    assert run(box, f"{inside} | wc -l") == "1\n"
    host.accept(OTHER_TOKEN)
    assert "Username" in run(box, f"GIT_TERMINAL_PROMPT=0 sh -c '{inside}' 2>&1 || true")
    answer = httpx.put(
        f"{os.environ['E2B_API_URL']}/sandboxes/{box.sandbox_id}/github-token",
        json={"authorization_token": OTHER_TOKEN},
        headers={"X-API-Key": os.environ["E2B_API_KEY"]},
        timeout=60,
    )
    assert answer.status_code == 204, answer.text
    assert run(box, f"{inside} | wc -l") == "1\n"
    platform.terminate()
    platform.start()
    assert run(box, f"{inside} | wc -l") == "1\n"


def test_copies_are_used_only_with_an_accepted_token(make: Create, host: CodeHost) -> None:
    work = host.make("octocat/copied")
    since = len(host.requests())
    make(resource("octocat/copied", "/work/one"))
    first = len(host.fetches(since))
    since = len(host.requests())
    box = make(resource("Octocat/copied.git", "/work/two", url=f"git@{HOST}:octocat/copied.git"))
    # References only: everything else was in the copy.
    assert len(host.fetches(since)) < first
    assert run(box, "git -C /work/two log --format=%s && git -C /work/two fsck 2>&1") == "first\n"
    # What is new is fetched.
    host.commit(work, "second")
    box = make(resource("octocat/copied", "/work/three"))
    assert run(box, "git -C /work/three log --format=%s && cat /work/three/README.md") == "second\nfirst\nsecond\n"
    answer = post({"resources": [resource("octocat/copied", "/work", "wrong")]})
    assert (answer.status_code, "refused authorization_token" in answer.text) == (400, True), answer.text


def test_a_copy_of_nothing_and_of_another_branch(make: Create, host: CodeHost) -> None:
    host.make("octocat/trunk", branch="release/1.x")
    box = make(resource("octocat/trunk", "/work/trunk"))
    assert run(box, "git -C /work/trunk branch --show-current") == "release/1.x\n"
    subprocess.run(["git", "init", "-q", "--bare", host.root / "octocat/empty.git"], check=True)
    box = make(resource("octocat/empty", "/work/empty"))
    assert run(box, "cd /work/empty && git status --porcelain && git remote") == "origin\n"


def test_a_closed_network_stays_closed(make: Create, host: CodeHost) -> None:
    host.make("octocat/closed")
    box = make(resource("octocat/closed", "/work/closed"), allow_internet_access=False)
    assert run(box, "cat /work/closed/README.md") == "# octocat/closed\n"
    assert run(box, f"curl -sS -m 10 https://{HOST}/ || echo closed").endswith("closed\n")


@pytest.mark.parametrize(
    ("resources", "why"),
    [
        ([resource("octocat/none", "/w")], "does not exist, or authorization_token gives no access"),
        ([resource("octocat/wrong", "/w", "wrong")], "refused authorization_token"),
        ([resource("a/b", "/w", url="https://gitlab.example.com/a/b")], "github.com"),
        ([resource("a/b", "/w", url="https://x:y@github.com/a/b")], "must not contain credentials"),
        ([resource("a/b", "/w", url="http://github.com/a/b")], "must be https"),
        ([resource("a/b", "w")], "absolute path"),
        ([resource("a/b", "/proc/x")], "belongs to the system"),
        ([resource("a/b", "/w"), resource("a/c", "/w/")], "mount_path"),
        ([resource("a/b", "/w"), resource("a/c", "/w/in")], "mount_path"),
        ([resource("a/b", "/w"), resource("a/c", "/v", OTHER_TOKEN)], "same authorization_token"),
        ([resource("a/b", "/w", type="kodo")], "code_host_repository"),
        ([resource("a/b", "/w", "")], "authorization_token"),
        ([resource("a/b", f"/{number}") for number in range(21)], "maximum number of items is 20"),
        ([resource("octocat/hello", "/etc")], "not empty"),
        ([resource("octocat/hello", "/etc/passwd")], "cannot be created"),
    ],
)
def test_refusals(platform: Platform, host: CodeHost, resources: list[dict[str, str]], why: str) -> None:
    for name in ("octocat/wrong", "octocat/hello"):
        if not (host.root / f"{name}.git").exists():
            host.make(name)
    answer = post({"resources": resources})
    assert (answer.status_code, why in answer.json()["message"]) == (400, True), answer.text
    assert TOKEN not in answer.text
    assert Sandbox.list().next_items() == []


def test_an_explicit_injection_of_the_code_host_is_refused(platform: Platform, host: CodeHost) -> None:
    for kind in ("github", "code_host"):
        answer = post({"resources": [resource("octocat/hello", "/w")], "injections": [{"type": kind, "token": "x"}]})
        assert answer.status_code == 400 and "injections" in answer.json()["message"], answer.text


def test_a_clone_that_takes_too_long(internet: Internet, platform: Platform, host: CodeHost) -> None:
    host.make("octocat/slow")
    assert platform.config_path
    config = platform.config_path.read_text()
    platform.terminate()
    platform.config_path.write_text(f"{config}[repositories]\nclone_timeout_s = 3\n")
    try:
        platform.start()
        for headers, hint in (({}, False), ({"Idempotency-Key": "clone-1"}, True)):
            begun = time.monotonic()
            answer = post({"resources": [resource("octocat/slow", "/w")]}, **headers)
            assert answer.status_code == 408, answer.text
            assert 3 <= time.monotonic() - begun < within(15)
            assert ("same Idempotency-Key" in answer.json()["message"]) == hint
            assert Sandbox.list().next_items() == []
    finally:
        platform.terminate()
        platform.config_path.write_text(config)
        platform.start()


def test_variables_of_the_client_lead_git_nowhere_else(make: Create, host: CodeHost) -> None:
    host.make("octocat/env")
    evil = {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "url.https://www.example.com/.insteadOf",
        "GIT_CONFIG_VALUE_0": f"https://{HOST}/",
        "GIT_TEMPLATE_DIR": "/tmp",
        "GIT_SSL_NO_VERIFY": "1",
    }
    box = make(resource("octocat/env", "/work/env"), envVars=evil)
    assert run(box, "cat /work/env/README.md") == "# octocat/env\n"


def test_simultaneous_requests_share_one_fetch(host: CodeHost, platform: Platform) -> None:
    work = host.make("octocat/shared")
    (work / "large").write_bytes(os.urandom(8 << 20))
    git(work, "add", ".")
    host.commit(work, "large")
    since = len(host.requests())
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda n: post({"resources": [resource("octocat/shared", f"/work/{n}")]}), range(4)))
    assert [answer.status_code for answer in answers] == [201] * 4, [answer.text for answer in answers]
    alone = len(host.fetches(since))
    for answer in answers:
        Sandbox.kill(answer.json()["sandboxID"])
    # Each asks for references, with one such request; one of them fetches, with two more.
    assert alone == 4 + 2, host.fetches(since)


# How often the platform is killed, and the moments.
KILLS = int(os.environ.get("RINGFENCE_REPOSITORY_CYCLES", "6"))
SEED = int(os.environ.get("RINGFENCE_CRASH_SEED", str(time.time_ns() % 1_000_000)))


def copies(platform: Platform) -> set[Path]:
    return set((platform.data_dir / "repositories").iterdir())


def content_of(copy: Path, directory: Path) -> bytes:
    """The large file of a copy, of which every object is checked."""
    directory.mkdir()
    git(directory, "init", "-q", "--bare")
    git(directory, "fetch", "-q", str(copy), "refs/*:refs/*")
    git(directory, "fsck", "--full", "--strict")
    show = ["git", "-C", directory, "show", git(directory, "rev-parse", "--glob=refs/*").split()[0] + ":large"]
    return subprocess.run(show, check=True, capture_output=True).stdout


def test_kill_9_while_copies_are_written(host: CodeHost, platform: Platform, tmp_path: Path) -> None:
    """Each request makes the first copy of its repository. What is there after a kill is complete or gone."""
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    took = [0.0]
    at_kill = 0
    for cycle in range(KILLS + 1):
        name = f"octocat/crash{cycle}"
        work = host.make(name)
        (work / "large").write_bytes(chance.randbytes(8 << 20))
        git(work, "add", ".")
        git(work, "tag", "-d", "v1")
        host.commit(work, "large")
        large = (work / "large").read_bytes()
        before = copies(platform)

        def create() -> httpx.Response:
            return post({"resources": [resource(name, "/work/it")]})

        # The first cycle shows how long it takes.
        if cycle:
            with ThreadPoolExecutor() as pool:
                asked = pool.submit(create)
                at_moment(chance.uniform(0.2, 1.2) * took[0])
                platform.kill()
                # It has its answer or loses its connection.
                failure = asked.exception()
            platform.start()
            assert isinstance(failure, httpx.TransportError) or asked.result().status_code == 201
            made = copies(platform) - before
            assert [path for path in made if path.suffix != ".bundle"] == [], f"cycle {cycle}"
            for path in made:
                assert content_of(path, tmp_path / f"{cycle}-kill") == large, f"cycle {cycle}"
            at_kill += len(made)
            # One that got no answer is not there, or runs until its deadline.
            for box in Sandbox.list().next_items():
                Sandbox.kill(box.sandbox_id)
        begun = time.monotonic()
        answer = create()
        assert answer.status_code == 201, answer.text
        took[0] = took[0] or time.monotonic() - begun
        box = Sandbox.connect(answer.json()["sandboxID"])
        seen = run(box, "sha256sum < /work/it/large && git -C /work/it status --porcelain").split()
        box.kill()
        assert seen == [hashlib.sha256(large).hexdigest(), "-"], f"cycle {cycle}"
        (made,) = until_made(platform, before)
        assert content_of(made, tmp_path / f"{cycle}") == large, f"cycle {cycle}"
    print(f"a create request takes {took[0]:.2f} s; {at_kill} of {KILLS} copies were complete at the kill")


def until_made(platform: Platform, before: set[Path]) -> set[Path]:
    """The new copies, once they are written."""
    until(lambda: any(path.suffix == ".bundle" for path in copies(platform) - before), "there is a copy")
    return copies(platform) - before
