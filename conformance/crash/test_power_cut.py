"""A power cut: what was answered about keys is there afterwards.

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

from harness import hoststate
from harness.platform import Platform


def attach(stack: ExitStack, image: Path, mount: Path) -> None:
    mount.mkdir()
    subprocess.run(["mount", "-o", "loop", image, mount], check=True)
    stack.callback(subprocess.run, ["umount", mount], check=True)


def test_keys_survive_a_power_cut(tmp_path: Path) -> None:
    with ExitStack() as stack:
        image = tmp_path / "disk.img"
        with open(image, "wb") as file:
            file.truncate(2048 << 20)
        # Blocks that a file system writes only now and then, so that none of them come along by chance.
        subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", image], check=True)
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
