"""What is written to disk and restored has names that the sandbox chose, and CRIU follows them with rights on the host.

A program keeps something open whose name is gone, and a link is where its directory was: to a directory of the host, in which
things of the same names are. None of them may be touched, and nothing may be created, whatever is done with the sandbox.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import subprocess
import threading
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox

from harness import hoststate
from harness.criu import criu_config
from harness.hoststate import HostState, left_over
from harness.inside import root, status
from harness.platform import Platform
from harness.traffic import program, until

KINDS = ["directory", "file", "fifo", "link", "symlink", "socket"]
# Directories of the host in which everybody may create something.
OPEN = [Path(path) for path in ("/var/tmp", "/dev/shm", "/tmp", "/run/lock")]


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    data = tmp_path_factory.mktemp("names") / "data"
    hoststate.own(data)
    before = HostState.take()
    server = Platform(data, config=criu_config())
    try:
        server.start()
        server.use()
        yield server
        assert server.terminate() == 0, server.log_tail()
        assert server.down().returncode == 0
        assert left_over(before) == {}
    finally:
        server.close()


class Decoys:
    """A directory of the host with something of each kind, which nobody but root can see, and one that is open to all."""

    def __init__(self) -> None:
        mark = uuid.uuid4().hex[:8]
        # Not below a directory that a suite of its own may hide.
        self.beside = Path(f"/var/tmp/rf-decoys-{mark}")
        self.closed, self.open = self.beside / "closed", self.beside / "open"
        for directory, mode in ((self.beside, 0o1777), (self.closed, 0o700), (self.open, 0o1777)):
            directory.mkdir()
            directory.chmod(mode)
        (self.closed / "file").write_text("secret")
        (self.closed / "file").chmod(0o600)
        (self.closed / "directory").mkdir()
        os.mkfifo(self.closed / "fifo")
        os.mknod(self.closed / "device", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        (self.closed / "link").symlink_to("file")
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(self.closed / "socket"))
        server.close()
        self.names = sorted(os.listdir(self.closed))
        self.before = self.state()

    def state(self) -> dict[str, object]:
        state: dict[str, object] = {str(self.open): sorted(os.listdir(self.open))}
        state[str(self.beside)] = sorted(os.listdir(self.beside))
        for path in [self.closed, *(self.closed / name for name in self.names)]:
            try:
                found = os.lstat(path)
                state[path.name] = (found.st_ino, found.st_mode, found.st_uid, found.st_nlink, found.st_mtime_ns, found.st_ctime_ns)
            except FileNotFoundError:
                state[path.name] = None
        return state

    def check(self) -> None:
        assert self.state() == self.before

    def remove(self) -> None:
        shutil.rmtree(self.beside, ignore_errors=True)


@pytest.fixture
def decoys() -> Iterator[Decoys]:
    made = Decoys()
    try:
        yield made
    finally:
        made.remove()


def api(method: str, path: str, **values) -> httpx.Response:
    headers = {"X-API-Key": os.environ["E2B_API_KEY"]}
    return httpx.request(method, f"{os.environ['E2B_API_URL']}{path}", headers=headers, timeout=90, **values)


def reasons(box: Sandbox, event: str = "kept_in_memory") -> list[str]:
    entries = api("GET", f"/v2/sandboxes/{box.sandbox_id}/logs").json()["logs"]
    return [entry["fields"]["reason"] for entry in entries if entry["fields"].get("event_type") == event]


def storage(box: Sandbox) -> str:
    return api("GET", f"/sandboxes/{box.sandbox_id}").json()["pauseStorage"]


def lose(box: Sandbox, kind: str, target: Path | str, names: list[str], user: str = "root") -> int:
    """Starts the program, and returns its pid."""
    box.files.write("/tmp/lost_names.py", program("lost_names.py"), user=user)
    words = " ".join([kind, "$HOME", str(target), *names])
    handle = box.commands.run(f"exec python3 /tmp/lost_names.py {words}", background=True, user=user, timeout=0)
    for out, error, _ in handle:
        assert error is None, error
        if out and "ready" in out:
            break
    return handle.pid


def lives(box: Sandbox, pid: int) -> bool:
    return status(box, f"kill -0 {pid}") == 0


@pytest.mark.parametrize("user", ["root", "user"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_link_leads_no_restore_to_the_host(platform: Platform, decoys: Decoys, kind: str, user: str) -> None:
    with Sandbox.create(timeout=300) as box:
        pids = [lose(box, kind, decoys.closed, decoys.names, user)]
        box.pause()
        decoys.check()
        assert storage(box) == "memory"
        assert "which is no directory now" in until(lambda: reasons(box), "its log says why")[0], reasons(box)
        box = box.connect(timeout=300)
        decoys.check()
        assert all(lives(box, pid) for pid in pids)
        # The same again, where nobody but the sandbox has to have rights.
        pids.append(lose(box, kind, decoys.open, ["chosen"], user))
        box.pause()
        box = box.connect(timeout=300)
        decoys.check()
        assert all(lives(box, pid) for pid in pids)


@pytest.mark.parametrize("kind", ["directory", "file", "link"])
def test_a_link_leads_no_copy_to_the_host(platform: Platform, decoys: Decoys, kind: str) -> None:
    with Sandbox.create(timeout=300) as box:
        pid = lose(box, kind, decoys.closed, decoys.names)
        answer = api("POST", f"/sandboxes/{box.sandbox_id}/fork", json={"timeout": 60})
        decoys.check()
        assert answer.status_code >= 400, answer.text
        assert "which is no directory now" in answer.text
        assert lives(box, pid)
        answer = api("POST", f"/sandboxes/{box.sandbox_id}/snapshots", json={"name": f"lost-{kind}"})
        assert answer.status_code == 201, answer.text
        decoys.check()
        snapshot = answer.json()["snapshotID"]
        try:
            with Sandbox.create(snapshot, timeout=60) as child:
                decoys.check()
                # It has the files, and none of the processes.
                assert status(child, f"test -L /root/{kind}-file") == 0
                assert status(child, "pgrep -f lost_names") == 1
        finally:
            assert Sandbox.delete_snapshot(snapshot)
        assert lives(box, pid)


@contextmanager
def files_of(box: Sandbox, platform: Platform, tmp_path: Path) -> Iterator[Path]:
    """The files that a paused sandbox has written, for the host's root to change."""
    (kept,) = (platform.data_dir / "kept").glob(f"{box.sandbox_id}.*")
    disk = platform.data_dir / "disks" / f"{kept.name.split('.')[1]}.img"
    mount = tmp_path / "disk"
    mount.mkdir()
    subprocess.run(["mount", "-o", "loop", disk, mount], check=True)
    try:
        yield mount / "root" / "upper"
    finally:
        subprocess.run(["umount", mount], check=True)
        mount.rmdir()


def checkpoint_of(box: Sandbox, platform: Platform) -> Path:
    (checkpoint,) = (platform.data_dir / "kept").glob(f"{box.sandbox_id}.*/image")
    return checkpoint


def is_refused(box: Sandbox, why: str) -> None:
    answer = api("POST", f"/sandboxes/{box.sandbox_id}/connect", json={"timeout": 300})
    assert answer.status_code >= 400, answer.text
    assert why in answer.text, answer.text
    assert storage(box) == "disk"


@pytest.mark.parametrize(("user", "home"), [("root", "root"), ("user", "home/user")])
@pytest.mark.parametrize("kind", KINDS)
def test_a_link_that_comes_after_the_checkpoint(
    platform: Platform, decoys: Decoys, tmp_path: Path, kind: str, user: str, home: str
) -> None:
    """The disk of a paused sandbox is changed: the checkpoint is looked at again, with the files that it is restored with."""
    with Sandbox.create(timeout=300) as box:
        pid = lose(box, kind, "-", decoys.names, user)
        box.pause()
        assert storage(box) == "disk", reasons(box)
        with files_of(box, platform, tmp_path) as upper:
            place = upper / home / f"{kind}-file"
            place.rename(upper / home / "aside")
            place.symlink_to(decoys.closed)
        is_refused(box, "which is no directory now")
        decoys.check()
        with files_of(box, platform, tmp_path) as upper:
            place = upper / home / f"{kind}-file"
            place.unlink()
            (upper / home / "aside").rename(place)
        # Nothing was lost by the refusal.
        box = box.connect(timeout=300)
        decoys.check()
        assert lives(box, pid)
        # And nothing that CRIU made for it is left.
        assert root(box, f"find /{home} -name 'link_remap*' -o -name '*.ghost' -o -path '/{home}/{kind}-*/*'") == ""


def test_a_checkpoint_that_was_changed(platform: Platform, decoys: Decoys) -> None:
    """Whoever can write checkpoints is the host's root; CRIU has nothing of the host all the same."""
    with Sandbox.create(timeout=300) as box:
        pid = lose(box, "file", "-", ["file"])
        root(box, f"ln -s {decoys.closed} /root/file-link")
        box.pause()
        assert storage(box) == "disk", reasons(box)
        checkpoint = checkpoint_of(box, platform)
        files, sums = checkpoint / "files.img", json.loads((checkpoint / "sums.json").read_text())
        before = files.read_bytes()
        changed = before.replace(b"/root/file-file/file", b"/root/file-link/file")
        assert changed != before
        for content in (changed, before):
            files.write_bytes(content)
            sums["files.img"] = {"bytes": len(content), "crc32": zlib.crc32(content)}
            (checkpoint / "sums.json").write_text(json.dumps(sums))
            if content == changed:
                is_refused(box, "which is no directory now")
            decoys.check()
        box = box.connect(timeout=300)
        decoys.check()
        assert lives(box, pid)


def test_a_directory_that_is_made_again_is_kept(platform: Platform) -> None:
    """A shell is in a directory that was removed and made again, as builds do: the new one and what is in it stay."""
    with Sandbox.create(timeout=300) as box:
        pid = lose(box, "directory", "-", ["build"])
        root(box, "mkdir -p /root/directory-build/build && echo kept > /root/directory-build/build/file")
        box.pause()
        assert storage(box) == "memory"
        assert "was made again" in until(lambda: reasons(box), "its log says why")[0], reasons(box)
        box = box.connect(timeout=300)
        assert lives(box, pid)
        assert root(box, "cat /root/directory-build/build/file") == "kept\n"


def test_nothing_of_the_host_is_in_the_root_of_criu(platform: Platform) -> None:
    """What a run of CRIU sees: looked at from the host, while it writes a checkpoint."""
    seen: dict[str, tuple[set[str], str]] = {}
    rounds = 10
    with Sandbox.create(timeout=300) as box:
        # Enough to be seen while it is written.
        code = "import os, time; x = os.urandom(300 << 20); print('ready', flush=True); time.sleep(1000)"
        box.files.write("/tmp/much.py", code)
        handle = box.commands.run("exec python3 /tmp/much.py", background=True, timeout=0)
        next(iter(handle))
        while len(seen) < 2:
            for action in ("pause", "connect"):
                found = look_at_criu(getattr(box, action), platform)
                seen |= {action: found} if found else {}
                assert action == "connect" or storage(box) == "disk", reasons(box)
            rounds -= 1
            assert rounds, f"CRIU was seen during {[*seen]} alone"
    wanted = {"dev", "etc", "proc", "ringfence", "ringfence/image", "ringfence/work", "run", "sys", "tmp"}
    programs = {"bin", "lib", "lib64", "usr", "sbin", Path(os.environ["RINGFENCE_CRIU"]).parts[1]}
    for action, (names, capabilities) in seen.items():
        own = {"freezer"} if action == "pause" else {"root", "mounts", "figures", "ids"}
        assert names <= wanted | programs | {f"ringfence/{name}" for name in own}, (action, names)
        # CHOWN, FOWNER, SYS_PTRACE, SYS_MODULE, SYS_RAWIO, MKNOD, LINUX_IMMUTABLE and more.
        for forbidden in (0, 3, 9, 16, 17, 19, 22, 27):
            assert not int(capabilities, 16) >> forbidden & 1, (action, capabilities)
    assert not int(seen["connect"][1], 16) & 0b110, "no right over files of the host at a restore"


def test_criu_may_be_installed_anywhere(tmp_path: Path) -> None:
    """Below directories in which sandboxes, checkpoints and caches are in the root of CRIU, or others of the host."""
    real = Path(os.environ["RINGFENCE_CRIU"])
    for place in ("/root", "/tmp", "/run", "/mnt", "/image"):
        home = Path(place) / f"rf-criu-{uuid.uuid4().hex[:8]}"
        made = [path for path in (Path(place), home) if not path.exists()]
        home.mkdir(parents=True)
        try:
            shutil.copy2(real, home / "criu")
            data = tmp_path / home.name
            hoststate.own(data)
            server = Platform(data, config=f'[pause]\ncriu = "{home}/criu"\n')
            try:
                server.start()
                server.use()
                with Sandbox.create(timeout=60) as box:
                    pid = lose(box, "file", "-", ["file"], "user")
                    box.pause()
                    assert storage(box) == "disk", (place, reasons(box))
                    box = box.connect(timeout=60)
                    assert lives(box, pid), place
                assert server.terminate() == 0, server.log_tail()
                assert server.down().returncode == 0
            finally:
                server.close()
        finally:
            shutil.rmtree(home)
            for path in reversed(made[:-1]):
                path.rmdir()


def look_at_criu(action: Callable[[], object], platform: Platform) -> tuple[set[str], str] | None:
    """The top of the root of a run of CRIU, and its effective capabilities."""
    work = threading.Thread(target=action)
    work.start()
    found = None
    while work.is_alive():
        found = found or find_criu(platform)
    work.join()
    return found


def find_criu(platform: Platform) -> tuple[set[str], str] | None:
    for pid in below(platform.process.pid):
        process = Path(f"/proc/{pid}")
        try:
            if (process / "cmdline").read_bytes().split(b"\0")[:2] == [b"criu", b"swrk"]:
                lines = (process / "status").read_text().splitlines()
                (capabilities,) = (line.split()[1] for line in lines if line.startswith("CapEff"))
                names = {str(path.relative_to(process / "root")) for path in (process / "root").glob("ringfence/*")}
                return {*os.listdir(process / "root"), *names}, capabilities
        except OSError:
            continue
    return None


def below(pid: int) -> Iterator[int]:
    """All processes that a process has started, and these have started."""
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield int(child)
                yield from below(int(child))
