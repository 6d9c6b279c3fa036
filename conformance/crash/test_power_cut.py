"""A power cut: what was answered about keys is there afterwards, and so are snapshots, and sandboxes that were paused to disk.

The disk of the data directory is a file, attached as a loop device. What that file holds is what the kernel has written
to the disk; what is only in the page cache of the file system on it is what a power cut takes. So a copy of the file,
made right after an answer, is the disk as it would come back.
"""

from __future__ import annotations

import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox

from harness import hoststate
from harness.criu import criu_config, frozen_config
from harness.platform import Platform
from harness.traffic import until


def attach(stack: ExitStack, image: Path, mount: Path) -> None:
    mount.mkdir()
    subprocess.run(["mount", "-o", "loop", image, mount], check=True)
    stack.callback(subprocess.run, ["umount", mount], check=True)


def new_disk(image: Path) -> None:
    with open(image, "wb") as file:
        file.truncate(2048 << 20)
    # Blocks that a file system writes only now and then, so that none of them come along by chance.
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", image], check=True)


def test_keys_survive_a_power_cut(tmp_path: Path) -> None:
    with ExitStack() as stack:
        image = tmp_path / "disk.img"
        new_disk(image)
        attach(stack, image, tmp_path / "before")
        hoststate.own(tmp_path / "before" / "data", tmp_path / "after" / "data")
        server = Platform(tmp_path / "before" / "data")
        stack.callback(server.close)
        server.start()
        api = httpx.Client(
            base_url=server.url, headers={"X-API-Key": server.credentials()["E2B_API_KEY"]}, timeout=30
        )
        keys = [api.post("/api-keys", json={"name": f"key {n}"}).json() for n in range(2)]
        # All that happened so far is on the disk, and what happens from now on is what counts.
        subprocess.run(["sync", "-f", server.data_dir], check=True)
        assert api.delete(f"/api-keys/{keys[0]['id']}").status_code == 204
        made = api.post("/api-keys", json={"name": "the last"})
        assert made.status_code == 201
        shutil.copyfile(image, tmp_path / "cut.img")

        attach(stack, tmp_path / "cut.img", tmp_path / "after")
        again = Platform(tmp_path / "after" / "data")
        stack.callback(again.close)
        again.start()

        def status(key: str) -> int:
            return httpx.get(f"{again.url}/v2/sandboxes", headers={"X-API-Key": key}, timeout=30).status_code

        assert status(keys[0]["key"]) == 401, "a key that was revoked works again"
        assert status(keys[1]["key"]) == 200
        assert status(made.json()["key"]) == 200, "a key that was handed out is gone"
        for one in (server, again):
            assert one.terminate() == 0
            assert one.down().returncode == 0


COUNTER = "i=0; while :; do echo $((i += 1)) >/tmp/new; mv /tmp/new /tmp/count; sleep 0.05; done"


class Paused:
    """A sandbox that is paused before the power is cut."""

    def __init__(self, api: httpx.Client, box: Sandbox) -> None:
        self.api, self.box = api, box

    def count(self) -> int:
        return int(self.box.files.read("/tmp/count"))

    def detail(self) -> dict:
        return self.api.get(f"/sandboxes/{self.box.sandbox_id}").json()

    def pause(self, *, memory: bool = True) -> None:
        self.seen = self.count()
        answer = self.api.post(f"/sandboxes/{self.box.sandbox_id}/pause", json={"memory": memory})
        assert answer.status_code == 204, answer.text

    def is_on_disk(self) -> bool:
        return self.detail()["pauseStorage"] == "disk"

    def connect(self) -> None:
        assert self.detail()["state"] == "paused"
        answer = self.api.post(f"/sandboxes/{self.box.sandbox_id}/connect", json={"timeout": 3000})
        assert answer.status_code == 201, answer.text
        assert self.count() >= self.seen


@pytest.mark.parametrize("config", [criu_config, frozen_config], ids=["durable", "frozen"])
def test_what_is_paused_on_disk_survives_a_power_cut(tmp_path: Path, config) -> None:
    with ExitStack() as stack:
        image, cut = tmp_path / "disk.img", tmp_path / "cut.img"
        new_disk(image)
        disk, mount = ExitStack(), tmp_path / "disk"
        stack.callback(disk.close)
        attach(disk, image, mount)
        hoststate.own(mount / "data")
        server = Platform(mount / "data", config=config())
        stack.callback(server.close)
        server.start()
        server.use()
        api = httpx.Client(
            base_url=server.url, headers={"X-API-Key": server.credentials()["E2B_API_KEY"]}, timeout=120
        )
        # The first image of a host takes more than its own files.
        first = Paused(api, Sandbox.create(timeout=3000))
        first.box.commands.run(COUNTER, background=True, timeout=0)
        until(lambda: first.box.files.exists("/tmp/count"), "it counts")
        first.pause()
        until(first.is_on_disk, "it is on disk")
        first.connect()
        # All that happened so far is on the disk, and what happens from now on is what counts.
        subprocess.run(["sync", "-f", server.data_dir], check=True)
        # First, because the sync of a snapshot is one of every sandbox before it.
        snapshot = api.post(f"/sandboxes/{first.box.sandbox_id}/snapshots", json={})
        assert snapshot.status_code == 201, snapshot.text
        child = api.post(f"/sandboxes/{first.box.sandbox_id}/fork", json={"count": 1}).json()[0]["sandbox"]
        child = Paused(api, Sandbox.connect(child["sandboxID"], timeout=3000))
        files = Paused(api, Sandbox.create(timeout=3000, metadata={"kept": "files"}))
        files.box.files.write("/tmp/count", "7")
        closed = {"allowOut": [], "denyOut": ["0.0.0.0/0"]}
        assert api.put(f"/sandboxes/{files.box.sandbox_id}/network", json=closed).status_code == 204
        lost = Sandbox.create(timeout=3000)
        child.pause()
        first.pause()
        files.pause(memory=False)
        for one in (child, first, files):
            until(one.is_on_disk, "it is on disk")
        shutil.copyfile(image, cut)

        server.kill()
        assert server.down().returncode == 0
        disk.close()
        mount.rmdir()
        attach(disk, cut, mount)
        server.start()
        assert {entry["sandboxID"] for entry in api.get("/v2/sandboxes").json()} == {
            one.box.sandbox_id for one in (child, first, files)
        }
        assert api.get(f"/sandboxes/{lost.sandbox_id}").status_code == 404
        assert files.detail()["metadata"] == {"kept": "files"}
        assert files.detail()["network"]["denyOut"] == closed["denyOut"]
        for one in (child, first, files):
            one.connect()
        made = Paused(api, Sandbox.create(snapshot.json()["snapshotID"], timeout=3000))
        for one in (child, first, made):
            now = one.count()
            until(lambda: one.count() > now, "it goes on")
        assert server.terminate() == 0
        assert server.down().returncode == 0
