"""Snapshots of running sandboxes: what is in them, who can use them, and that the sandbox does not notice."""

from __future__ import annotations

import inspect
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from e2b import NotFoundException, PtySize, Sandbox, SandboxException

from harness.platform import Platform
from harness.traffic import until

WITH_MODE = "mode" in inspect.signature(Sandbox._cls_create_snapshot).parameters


@pytest.fixture
def made() -> Iterator[list[str]]:
    """Ids of snapshots, which are deleted afterwards, once their sandboxes have ended."""
    made: list[str] = []
    yield made
    for snapshot in reversed(made):
        Sandbox.delete_snapshot(snapshot)


@pytest.fixture
def api(platform: Platform) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=platform.url, headers={"X-API-Key": platform.credentials()["E2B_API_KEY"]}, timeout=60) as client:
        yield client


def disks(platform: Platform) -> set[str]:
    """Names, not their number: a disk of an earlier test may vanish meanwhile."""
    return {path.name for path in Path(platform.data_dir, "disks").glob("*.img")}


def test_a_child_has_the_files_and_the_sandbox_runs_on(platform: Platform, sandbox: Sandbox, made: list[str]) -> None:
    sandbox.commands.run(
        "echo kept > f; ln -s f link; mkdir -p d/e; head -c 3000000 /dev/urandom > big; sha256sum big > sum;"
        " sudo sh -c 'echo root > /etc/of-root; chmod 600 /etc/of-root; rm /etc/hostname; echo x > /usr/local/bin/x; chmod 755 /usr/local/bin/x'"
    )
    counter = sandbox.commands.run("i=0; while :; do i=$((i+1)); echo $i; sleep 0.01; done", background=True, timeout=0)
    shell = sandbox.pty.create(size=PtySize(80, 24), timeout=0)
    before = disks(platform)
    snapshot = sandbox.create_snapshot()
    made.append(snapshot.snapshot_id)
    assert snapshot.names == [] and snapshot.snapshot_id.endswith(":default")
    assert disks(platform) <= before, "the copy of the disk is gone"

    # The same processes go on.
    seen: list[str] = []
    for out, _, _ in counter:
        seen += (out or "").split()
        if len(seen) > 2 and int(seen[-1]) > int(seen[0]) + 5:
            break
    assert {shell.pid, counter.pid} <= {process.pid for process in sandbox.commands.list()}
    assert sandbox.get_info().state.value == "running"
    counter.kill()
    shell.kill()

    sandbox.files.write("f", "changed since")
    with Sandbox.create(snapshot.snapshot_id, timeout=60, envs={"OWN": "1"}) as child:
        info, parent = child.get_info(), sandbox.get_info()
        assert info.template_id == snapshot.snapshot_id.split(":")[0]
        assert (info.cpu_count, info.memory_mb) == (parent.cpu_count, parent.memory_mb)
        told = child.commands.run(
            "cat f link; sha256sum --check --quiet sum; ls -d d/e; sudo cat /etc/of-root; stat -c %a /etc/of-root /usr/local/bin/x; echo $OWN"
        )
        assert told.stdout.split() == ["kept", "kept", "d/e", "root", "600", "755", "1"]
        assert "sleep" not in child.commands.run("ps -e -o comm").stdout.split()
        child.files.write("f", "of the child")
        with Sandbox.create(snapshot.snapshot_id, timeout=60) as other:
            assert other.files.read("f") == "kept\n"
    assert sandbox.files.read("f") == "changed since"


def test_nothing_of_the_identity_is_in_it(platform: Platform, api: httpx.Client, made: list[str]) -> None:
    secret = uuid.uuid4().hex
    with Sandbox.create(timeout=60, envs={"SECRET": secret}, metadata={"of": secret}) as box:
        box.commands.run("echo $SECRET | wc -c; true")
        answer = api.post(f"/sandboxes/{box.sandbox_id}/snapshots", json={})
        assert answer.status_code == 201 and set(answer.json()) == {"snapshotID", "names"}
        made.append(answer.json()["snapshotID"])
        token = box._envd_access_token
    with Sandbox.create(made[0], timeout=60) as child:
        assert child.commands.run("echo ${SECRET-none}").stdout == "none\n"
        found = child.commands.run(
            "sudo grep -rlE \"$TOKEN|$HIDDEN|$ID\" / --exclude-dir=proc --exclude-dir=sys --exclude-dir=dev --exclude-dir=usr 2>/dev/null || true",
            envs={"TOKEN": token or "none", "HIDDEN": secret, "ID": box.sandbox_id},
        )
        assert found.stdout == ""


def test_a_program_that_writes_is_caught_at_one_moment(sandbox: Sandbox, made: list[str]) -> None:
    """A database recovers what it had committed, and two files that are written in turn are never the wrong way round."""
    program = """
import sqlite3, os
base = sqlite3.connect("/home/user/base.db", isolation_level=None)
base.execute("PRAGMA journal_mode = WAL"); base.execute("CREATE TABLE t (n INTEGER)")
n = 0
while True:
    n += 1
    base.execute("BEGIN"); base.executemany("INSERT INTO t VALUES (?)", [(n,)] * 10); base.execute("COMMIT")
    with open("/home/user/n.new", "w") as f: f.write(str(n))
    os.rename("/home/user/n.new", "/home/user/n")
"""
    sandbox.files.write("program.py", program)
    running = sandbox.commands.run("python3 program.py", background=True)
    until(lambda: sandbox.files.exists("n") and int(sandbox.files.read("n")) > 3, "it has written")
    for _ in range(3):
        before = int(sandbox.files.read("n"))
        snapshot = sandbox.create_snapshot(name=f"s{uuid.uuid4().hex[:10]}")
        made.append(snapshot.snapshot_id)
        with Sandbox.create(snapshot.snapshot_id, timeout=60) as child:
            check = (
                "import sqlite3; b = sqlite3.connect('base.db'); n = int(open('n').read());"
                " (count, most), = b.execute('SELECT COUNT(*), MAX(n) FROM t');"
                " (whole,), = b.execute('PRAGMA integrity_check'); print(count == most * 10, n <= most <= n + 1, whole, n)"
            )
            told = child.commands.run(f'python3 -c "{check}"').stdout.split()
            assert told[:3] == ["True", "True", "ok"] and int(told[3]) >= before, told
    running.kill()


def test_names_lists_and_deletions(platform: Platform, sandbox: Sandbox, api: httpx.Client, made: list[str]) -> None:
    name = f"s{uuid.uuid4().hex[:10]}"
    sandbox.files.write("f", "1")
    first = sandbox.create_snapshot(name=name)
    made.append(first.snapshot_id)
    assert first.snapshot_id.endswith(f"/{name}:default") and len(first.names) == 1
    sandbox.files.write("f", "2")
    assert Sandbox.create_snapshot(sandbox.sandbox_id, name=name).snapshot_id == first.snapshot_id
    sandbox.files.write("f", "3")
    tagged = sandbox.create_snapshot(name=f"{name}:three")
    # A name has no tag, which the id has.
    assert tagged.names == first.names and tagged.snapshot_id == f"{tagged.names[0]}:three"
    for reference, content in ((name, "2"), (first.names[0], "2"), (tagged.snapshot_id, "3")):
        with Sandbox.create(reference, timeout=60) as child:
            assert child.files.read("f") == content
            assert Sandbox.list_snapshots(sandbox_id=child.sandbox_id).next_items() == []
    unnamed = sandbox.create_snapshot()
    made.append(unnamed.snapshot_id)
    for listing in (Sandbox.list_snapshots(sandbox_id=sandbox.sandbox_id, limit=1), sandbox.list_snapshots(limit=1)):
        found = []
        while listing.has_next:
            found += [item.snapshot_id for item in listing.next_items()]
        assert found == [unnamed.snapshot_id, tagged.snapshot_id]
    everywhere = [item["snapshotID"] for item in api.get("/snapshots").json()]
    assert {unnamed.snapshot_id, tagged.snapshot_id} <= set(everywhere)
    assert name not in api.get("/templates").text + api.get("/v2/templates").text

    child = Sandbox.create(first.snapshot_id, timeout=60)
    with pytest.raises(SandboxException, match="used by sandboxes"):
        Sandbox.delete_snapshot(first.snapshot_id)
    child.kill()
    assert Sandbox.delete_snapshot(first.snapshot_id) is True
    assert Sandbox.delete_snapshot(tagged.snapshot_id) is False
    made.remove(first.snapshot_id)
    with pytest.raises(SandboxException):
        Sandbox.create(first.snapshot_id)
    # The path that clients for Node use.
    path = f"/snapshots/{quote(unnamed.snapshot_id, safe='')}"
    assert [api.delete(path).status_code for _ in range(2)] == [204, 404]
    made.remove(unnamed.snapshot_id)


def test_what_cannot_be_a_snapshot_is_refused(sandbox: Sandbox, api: httpx.Client) -> None:
    path = f"/sandboxes/{sandbox.sandbox_id}/snapshots"
    for body, status in (({"memory": "yes"}, 400), ({"name": "other-team/x"}, 400), ({"name": "base:"}, 400), ([], 400)):
        assert api.post(path, json=body).status_code == status, body
    assert api.post(path).status_code == 400
    with pytest.raises(NotFoundException):
        Sandbox.create_snapshot("i" + "0" * 20)
    sandbox.pause()
    with pytest.raises(NotFoundException):
        sandbox.create_snapshot()
    Sandbox.connect(sandbox.sandbox_id, timeout=60)
    assert sandbox.commands.run("echo alive").stdout == "alive\n"


def test_children_have_snapshots_as_well(made: list[str]) -> None:
    """A child can have a snapshot, and so can a sandbox that was started anew on its disk."""
    with Sandbox.create(timeout=60) as box:
        box.files.write("f", "1")
        Sandbox.pause(box.sandbox_id, **({"mode": "filesystem"} if WITH_MODE else {"keep_memory": False}))
        box.connect(timeout=60)
        made.append(box.create_snapshot().snapshot_id)
    for generation in range(2, 5):
        with Sandbox.create(made[-1], timeout=60) as child:
            assert child.files.read("f") == str(generation - 1)
            child.files.write("f", str(generation))
            made.append(child.create_snapshot().snapshot_id)


def test_many_at_once(platform: Platform, made: list[str]) -> None:
    """Snapshots of one sandbox exclude each other, those of several wait or are refused; all of it leaves nothing behind."""
    boxes = [Sandbox.create(timeout=120) for _ in range(3)]
    results: list[object] = []

    def take(box: Sandbox) -> None:
        try:
            results.append(box.create_snapshot().snapshot_id)
        except SandboxException as refused:
            results.append(refused)

    try:
        threads = [threading.Thread(target=take, args=(box,)) for box in boxes * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for box in boxes:
            assert box.commands.run("echo alive").stdout == "alive\n"
            box.kill()
    made += [result for result in results if isinstance(result, str)]
    refused = [str(result) for result in results if not isinstance(result, str)]
    assert len(results) == 6 and made
    assert all(text.startswith(("409", "503")) for text in refused), refused
    until(lambda: disks(platform) == set(), "every disk is gone")
