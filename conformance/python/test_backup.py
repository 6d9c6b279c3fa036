"""`ringfence backup`: copied while the platform runs, restored to an empty data directory, and started there."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox, SandboxException, Template

from harness.beside import beside
from harness.criu import criu_config
from harness.patience import within
from harness.platform import Platform
from harness.traffic import until
from python.test_fork import api, ask, start_counter


def config() -> str:
    return criu_config() + "[sandbox]\ncpu_count = 1\n"


@dataclass
class Made:
    """A backup, and what it has."""

    path: Path
    output: str
    key: str
    snapshot: str
    counter: int
    inside: str
    with_processes: str
    files_only: str
    running: str


def pause_files_only(server: Platform, box: Sandbox) -> None:
    with api(server) as client:
        assert client.post(f"/sandboxes/{box.sandbox_id}/pause", json={"memory": False}).status_code == 204


@pytest.fixture(scope="module")
def made(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The backup of a platform that is gone afterwards."""
    directory = tmp_path_factory.mktemp("backed-up")
    path = directory / "backup"
    with beside(platform, directory, config()) as server:
        template = Template().from_template("base").run_cmd("echo built > ~/built; ln ~/built ~/linked")
        Template.build(template, "kept")
        running = Sandbox.create("kept", timeout=300)
        counter = start_counter(running)
        (_, inside) = ask(running, counter, 5)
        snapshot = running.create_snapshot().snapshot_id
        with_processes = Sandbox.create("kept", timeout=300)
        assert start_counter(with_processes)
        with_processes.files.write("note", "with processes")
        assert with_processes.pause() is True
        files_only = Sandbox.create(timeout=300, envs={"OWN": "kept"})
        files_only.files.write("note", "files only")
        pause_files_only(server, files_only)
        output = server.run("backup", "create", str(path), "--config", str(server.config_path))
        assert output.returncode == 0, output.stderr
        # It goes on, and a backup of it is never written over another one.
        assert ask(running, counter, 1) == ["6", inside]
        again = server.run("backup", "create", str(path))
        assert again.returncode == 1 and "exists already" in again.stderr
        # Nothing is restored to a directory that is in use.
        over = server.run("backup", "restore", str(path))
        assert over.returncode == 1 and "in use by another ringfence" in over.stderr, over.stderr
        return Made(
            path,
            output.stdout,
            server.credentials()["E2B_API_KEY"],
            snapshot,
            counter,
            inside,
            with_processes.sandbox_id,
            files_only.sandbox_id,
            running.sandbox_id,
        )


@pytest.fixture(scope="module")
def restored(platform: Platform, made: Made, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """A platform on another data directory, to which it was restored."""
    directory = tmp_path_factory.mktemp("restored")
    output = Platform(directory / "data").run("backup", "restore", str(made.path))
    assert output.returncode == 0, output.stderr
    with beside(platform, directory, config()) as server:
        yield server


def test_a_backup_says_what_it_has_and_what_not(made: Made, platform: Platform) -> None:
    assert f"not in the backup: sandbox {made.running}, which runs" in made.output
    manifest = json.loads((made.path / "manifest.json").read_text())
    assert manifest["format"] == 1 and manifest["has_master_key"] and manifest["missing"] == []
    assert sorted(manifest["sandboxes"]) == sorted([made.with_processes, made.files_only])
    assert manifest["layers"]
    for path in [made.path, *made.path.rglob("*")]:
        # Keys are in it, and what programs had in memory.
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    disks = list(made.path.glob("data/disks/*.img"))
    # Two paused sandboxes and the snapshot.
    assert len(disks) == 3
    for disk in disks:
        assert disk.stat().st_blocks * 512 < disk.stat().st_size / 4, disk
    checked = platform.run("backup", "check", str(made.path))
    assert checked.returncode == 0, checked.stderr


def test_templates_snapshots_and_paused_sandboxes_start_from_it(made: Made, restored: Platform) -> None:
    restored.use()
    assert restored.credentials()["E2B_API_KEY"] == made.key
    # What ran is gone, and what was paused is not.
    assert {box.sandbox_id for box in Sandbox.list().next_items()} == {made.with_processes, made.files_only}
    with Sandbox.create("kept", timeout=120) as box:
        assert box.commands.run("cat ~/linked; stat -c %h ~/built").stdout == "built\n2\n"
    with Sandbox.create(made.snapshot, timeout=120) as box:
        # With the processes that it had.
        assert ask(box, made.counter, 1) == ["6", made.inside]
    with Sandbox.connect(made.with_processes, timeout=120) as box:
        assert box.files.read("note") == "with processes"
        assert any("counter.py" in " ".join([one.cmd, *one.args]) for one in box.commands.list())
    with Sandbox.connect(made.files_only, timeout=120) as box:
        assert box.files.read("note") == "files only"
        assert box.commands.run("echo $OWN").stdout == "kept\n"
    # Steps whose layers only the cache had run again.
    Template.build(Template().from_template("kept").run_cmd("cat ~/built > ~/copy"), "child")
    with Sandbox.create("child", timeout=120) as box:
        assert box.files.read("copy") == "built\n"


def test_a_template_without_its_layer_says_so(restored: Platform) -> None:
    restored.use()
    build = Template.build(Template().from_template("base").run_cmd("date +%N > ~/unique"), "lost")
    layers = restored.data_dir / "layers"
    newest = max(layers.iterdir(), key=lambda layer: layer.stat().st_mtime_ns)
    shutil.rmtree(newest)
    with pytest.raises(SandboxException, match=f"layer {newest.name} of the template is no longer on the host"):
        Sandbox.create("lost", timeout=60)
    with api(restored) as client:
        listed = {row["aliases"][0]: row["buildStatus"] for row in client.get("/templates").json() if row["aliases"]}
        assert listed["lost"] == "error" and listed["kept"] == "ready"
        shown = client.get("/templates/lost").json()
        assert [row["status"] for row in shown["builds"]] == ["error"]
        status = client.get(f"/templates/{build.template_id}/builds/{build.build_id}/status").json()
        assert status["status"] == "error" and newest.name in status["reason"]["message"]
    refused = restored.run("backup", "create", str(restored.data_dir.parent / "backup"))
    assert refused.returncode == 1 and newest.name in refused.stderr
    assert not list(restored.data_dir.parent.glob("backup*"))
    lenient = restored.run("backup", "create", str(restored.data_dir.parent / "backup"), "--skip-missing")
    assert lenient.returncode == 0 and f"not in the backup: layer {newest.name}" in lenient.stdout, lenient.stderr
    assert Template.exists("lost")
    with httpx.Client(base_url=restored.url, headers={"X-API-Key": restored.credentials()["E2B_API_KEY"]}, timeout=within(30)) as client:
        assert client.delete("/templates/lost").status_code == 204


def test_nothing_is_removed_while_a_backup_is_made(made: Made, restored: Platform) -> None:
    restored.use()
    memories = restored.data_dir / "memories"
    assert len(list(memories.iterdir())) == 1
    transport = httpx.HTTPTransport(uds=str(restored.data_dir / "operator.sock"))
    with (
        httpx.Client(transport=transport, base_url="http://operator", timeout=60) as client,
        client.stream("POST", "/backup") as hold,
    ):
        assert hold.status_code == 200
        signs = hold.iter_raw()
        assert next(signs) == b"\n"
        refused = restored.run("gc")
        assert refused.returncode == 1 and "a backup is being made" in refused.stderr
        assert Sandbox.delete_snapshot(made.snapshot) is True
        assert len(list(memories.iterdir())) == 1
    # The client is gone, which is noticed with the next sign of life.
    until(lambda: not list(memories.iterdir()), "the memory of the snapshot is removed")
    assert restored.run("gc").returncode == 0


@pytest.mark.parametrize("damage", ["content", "layer", "missing", "partial", "format"])
def test_a_damaged_backup_is_never_restored(made: Made, platform: Platform, tmp_path: Path, damage: str) -> None:
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-a", "--sparse=always", made.path, copy], check=True)
    (disk, *_) = copy.glob("data/disks/*.img")
    (layer, *_) = copy.glob("layers/*")
    match damage:
        case "content":
            with open(disk, "r+b") as file:
                file.seek(1024)
                file.write(b"x")
            want = disk.name
        case "layer":
            layer.write_bytes(layer.read_bytes()[:-10])
            want = layer.name.split(".")[0]
        case "missing":
            disk.unlink()
            want = disk.name
        case "partial":
            (copy / "manifest.json").unlink()
            want = "not a complete backup"
        case _:
            manifest = json.loads((copy / "manifest.json").read_text())
            (copy / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
            want = "has format 99"
    target = Platform(tmp_path / "data")
    refused = target.run("backup", "restore", str(copy))
    assert refused.returncode == 1 and want in refused.stderr, refused.stderr
    assert not target.data_dir.exists()
    assert platform.run("backup", "check", str(copy)).returncode == 1


def test_a_restore_needs_a_new_directory(made: Made, tmp_path: Path) -> None:
    target = Platform(tmp_path / "data")
    (target.data_dir).mkdir()
    (target.data_dir / "letter").write_text("dear")
    refused = target.run("backup", "restore", str(made.path))
    assert refused.returncode == 1 and "is not empty" in refused.stderr
    assert [path.name for path in target.data_dir.iterdir()] == ["letter"]
    # One that was interrupted is not started.
    (target.data_dir / "letter").rename(target.data_dir / "restore.unfinished")
    for words in (("up",), ("backup", "restore", str(made.path))):
        refused = target.run(*words)
        assert refused.returncode == 1 and "a restore that was interrupted" in refused.stderr, refused.stderr
