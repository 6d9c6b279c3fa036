"""Snapshots with memory: sandboxes that go on from one moment of another one, which may have ended long before."""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox

from harness.beside import beside
from harness.criu import criu_config, groups, processes
from harness.inside import boot_id
from harness.patience import within
from harness.platform import Platform
from harness.traffic import until
from python.test_fork import api, ask, start_counter


@pytest.fixture(scope="module")
def keeping(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    with beside(platform, tmp_path_factory.mktemp("memory"), criu_config()) as server:
        yield server


@pytest.fixture
def box(keeping: Platform) -> Iterator[Sandbox]:
    keeping.use()
    box = Sandbox.create(timeout=300, metadata={"of": "the parent"}, envs={"OWN": "of the parent"})
    try:
        yield box
    finally:
        box.kill()


@pytest.fixture
def made() -> Iterator[list[str]]:
    """Ids of snapshots, which are deleted afterwards."""
    made: list[str] = []
    yield made
    for snapshot in made:
        Sandbox.delete_snapshot(snapshot)


def memories(server: Platform) -> list[Path]:
    return list(Path(server.data_dir, "memories").iterdir())


def disks(server: Platform) -> int:
    return len(list(Path(server.data_dir, "disks").glob("*.img")))


def log(server: Platform, box: Sandbox, event: str) -> list[dict[str, str]]:
    with api(server) as client:
        entries = client.get(f"/v2/sandboxes/{box.sandbox_id}/logs").json()["logs"]
    return [entry["fields"] for entry in entries if entry["fields"].get("event_type") == event]


def test_two_go_on_by_themselves(keeping: Platform, box: Sandbox, made: list[str]) -> None:
    pid = start_counter(box)
    (_, inside) = ask(box, pid, 1)
    box.files.write("/home/user/shared", "from the parent")
    snapshot = box.create_snapshot().snapshot_id
    made.append(snapshot)
    assert log(keeping, box, "snapshot_created")[0]["kept"] == "processes"
    assert ask(box, pid, 100) == ["101", inside]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        pair = list(pool.map(lambda name: Sandbox.create(snapshot, timeout=200, envs={"OWN": name}, metadata={"of": name}), ("a", "b")))
    try:
        # The same process with the same memory, and each its own from now on.
        assert ask(pair[0], pid, 10) == ["11", inside]
        assert ask(pair[1], pid, 20) == ["21", inside]
        assert ask(box, pid, 1) == ["102", inside]
        everyone = [box, *pair]
        details = [one.get_info() for one in everyone]
        assert len({one.sandbox_id for one in details}) == 3
        assert [one.metadata["of"] for one in details] == ["the parent", "a", "b"]
        assert details[1].template_id == details[2].template_id == snapshot.split(":")[0]
        told = [one.commands.run("echo $OWN $E2B_SANDBOX_ID $(cat /run/e2b/.E2B_SANDBOX_ID)").stdout.strip() for one in everyone]
        assert told == [f"{own} {one.sandbox_id} {one.sandbox_id}" for own, one in zip(("of the parent", "a", "b"), everyone, strict=True)]
        given = [json.loads(one.commands.run("cat /run/ringfence/sandbox.json").stdout) for one in everyone]
        assert [one["envVars"]["OWN"] for one in given] == ["of the parent", "a", "b"]
        assert [one["metadata"]["of"] for one in given] == ["the parent", "a", "b"]
        assert len({one.commands.run("head -c 16 /dev/urandom | base64").stdout for one in everyone}) == 3
        boots = [boot_id(one) for one in everyone]
        assert len(set(boots)) == 3
        assert len({one._envd_access_token for one in everyone}) == 3
        for one in pair:
            answer = httpx.get(
                f"{keeping.url}/files",
                params={"path": "/etc/hostname", "username": "user"},
                headers={
                    "E2b-Sandbox-Id": one.sandbox_id,
                    "E2b-Sandbox-Port": "49983",
                    "X-Access-Token": box._envd_access_token,
                },
                timeout=within(30),
            )
            assert answer.status_code == 401, answer.text
            assert one.files.read("/tmp/other-name") == "named"
            assert one.commands.run("ls -a /tmp /home/user | grep -c link_remap || true").stdout == "0\n"
        ranges = {Path(f"/proc/{processes(one)[0]}/uid_map").read_text().split()[1] for one in everyone}
        assert len(ranges) == 3
        # After the end of the first, and after a pause, a snapshot and a fork of what came from it.
        box.kill()
        pair[0].files.write("/home/user/shared", "changed")
        pair[0].commands.run("rm /tmp/other-name")
        assert pair[0].pause() is True
        pair[0] = Sandbox.connect(pair[0].sandbox_id, timeout=200)
        assert ask(pair[0], pid, 1) == ["12", inside]
        assert boot_id(pair[0]) == boots[1]
        (child,) = pair[0].fork(timeout=200)
        assert isinstance(child, Sandbox), child
        pair.append(child)
        assert ask(child, pid, 1) == ["13", inside]
        again = pair[0].create_snapshot().snapshot_id
        made.append(again)
        assert len(memories(keeping)) == 2
        grandchild = Sandbox.create(again, timeout=200)
        pair.append(grandchild)
        assert ask(grandchild, pid, 1) == ["13", inside]
        assert grandchild.files.read("/home/user/shared") == "changed"
        # Without memory it has the same files, and what was removed does not come back.
        for memory in memories(keeping):
            (memory / "image/sums.json").write_text("{")
        files = Sandbox.create(again, timeout=200)
        pair.append(files)
        assert files.files.read("/home/user/shared") == "changed"
        assert not files.files.exists("/tmp/other-name")
        assert "python3" not in files.commands.run("ps -e -o comm").stdout
        (fields,) = log(keeping, files, "memory_not_restored")
        assert "damaged" in fields["reason"]
    finally:
        for one in pair:
            one.kill()
    for snapshot in list(made):
        assert Sandbox.delete_snapshot(snapshot) is True
        made.remove(snapshot)
    until(lambda: memories(keeping) == [] and disks(keeping) == 0, "their space is free")
    until(lambda: all(processes(one) == [] and groups(one) == [] for one in pair), "nothing is left of them")


def test_what_cannot_be_kept(keeping: Platform, box: Sandbox, made: list[str]) -> None:
    """The snapshot has the files, and says why."""
    box.files.write("/home/user/file", "content")
    box.commands.run("sudo touch /dev/mqueue/queue")
    with api(keeping) as client:
        for body, kept in (({"memory": False}, "filesystem"), ({"memory": True}, "filesystem"), ({}, "filesystem")):
            answer = client.post(f"/sandboxes/{box.sandbox_id}/snapshots", json=body)
            assert answer.status_code == 201, answer.text
            made.append(answer.json()["snapshotID"])
            (fields,) = [of for of in log(keeping, box, "snapshot_created") if made[-1].startswith(of["template"])]
            assert fields["kept"] == kept
            assert ("mqueue" in fields.get("reason", "")) == (body != {"memory": False})
        assert memories(keeping) == []
        assert box.commands.run("sudo rm /dev/mqueue/queue; echo here").stdout == "here\n"
        template = made[-1].split(":")[0]
        build = client.get(f"/templates/{template}").json()["builds"][0]["buildID"]
        (entry,) = client.get(f"/templates/{template}/builds/{build}/logs").json()["logs"]
        assert "mqueue" in entry["message"] and entry["level"] == "warn"
        child = Sandbox.create(made[-1], timeout=60)
        assert child.files.read("/home/user/file") == "content"
        assert log(keeping, child, "memory_not_restored") == []
        child.kill()
        # Again with memory, under a name whose tag moves: the older build keeps its memory until the template is deleted.
        for count in (1, 2):
            assert client.post(f"/sandboxes/{box.sandbox_id}/snapshots", json={"name": "moved"}).status_code == 201
            assert len(memories(keeping)) == count
        assert client.delete("/templates/moved").status_code == 204
    until(lambda: memories(keeping) == [], "its space is free")


def test_policies_are_those_of_the_request(keeping: Platform, box: Sandbox, made: list[str]) -> None:
    """A program that was running cannot reach more than its sandbox may."""
    box.files.write("/tmp/dial.py", DIAL)
    box.commands.run("python3 /tmp/dial.py", background=True, timeout=0)
    until(lambda: box.files.exists("/tmp/dialed"), "it runs")
    made.append(box.create_snapshot().snapshot_id)
    with Sandbox.create(made[0], timeout=60, allow_internet_access=False) as child:
        before = child.files.read("/tmp/dialed")
        until(lambda: child.files.read("/tmp/dialed") != before, "it goes on")
        until(lambda: log(keeping, child, "egress_denied") != [], "what it dials is refused")
        assert log(keeping, child, "egress_ended") == log(keeping, child, "egress_failed") == []
    assert log(keeping, box, "egress_denied") == []


DIAL = """
import os, socket, time
count = 0
while True:
    try:
        socket.create_connection(("1.1.1.1", 443), 2).close()
        reached = "yes"
    except OSError:
        reached = "no"
    count += 1
    with open("/tmp/dialed.new", "w") as file: file.write(f"{count} {reached}")
    os.replace("/tmp/dialed.new", "/tmp/dialed")
    time.sleep(0.05)
"""
