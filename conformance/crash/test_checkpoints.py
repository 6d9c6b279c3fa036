"""Checkpoints that are damaged, and programs that are killed while they write or read one: no sandbox is lost."""

from __future__ import annotations

import json
import os
import signal
import threading
import zlib
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox

from harness.criu import criu_config
from harness.elapse import as_told, at_moment
from harness.platform import Platform
from harness.traffic import until

pytestmark = pytest.mark.parametrize("crashing", [criu_config], indirect=True, ids=["criu"])

# Enough memory that writing it takes a while, and files and a directory that have no names any more.
HOLDER = """
import hashlib, os, time
os.makedirs("/tmp/none/below")
files = [open(path, "w+") for path in ("/tmp/file", "/tmp/none/below/file")]
for file in files: file.write("nameless"); file.flush(); os.unlink(file.name)
os.chdir("/tmp/none/below")
os.rmdir("/tmp/none/below"); os.rmdir("/tmp/none")
def read(file): file.seek(0); return file.read()
memory = bytearray(os.urandom(1 << 20)) * 300
want = hashlib.sha256(memory).hexdigest()
count = 0
while True:
    whole = hashlib.sha256(memory).hexdigest() == want and [read(file) for file in files] == ["nameless"] * 2
    with open("/tmp/new", "w") as file: file.write(f"{count} {os.getpid()} {whole}")
    os.replace("/tmp/new", "/tmp/seen")
    count += 1
    time.sleep(0.05)
"""


class Holder:
    """A sandbox with a program that says that its memory is whole."""

    def __init__(self, server: Platform) -> None:
        self.box = Sandbox.create(timeout=3000)
        self.api = httpx.Client(
            base_url=server.url, headers={"X-API-Key": server.credentials()["E2B_API_KEY"]}, timeout=120
        )
        self.path = f"/sandboxes/{self.box.sandbox_id}"
        self.box.files.write("/tmp/holder.py", HOLDER)
        self.box.commands.run("python3 /tmp/holder.py", background=True, timeout=0)
        until(lambda: self.box.files.exists("/tmp/seen"), "it holds its memory")
        self.count, self.pid = self.seen()

    def seen(self) -> tuple[int, int]:
        count, pid, whole = self.box.files.read("/tmp/seen").split()
        assert whole == "True"
        assert [entry.name for entry in self.box.files.list("/tmp", depth=3) if "ghost" in entry.name] == []
        return int(count), int(pid)

    def detail(self) -> dict:
        return self.api.get(self.path).json()

    def goes_on(self) -> None:
        """Checks that the program goes on: the same process, with all of its memory."""
        until(lambda: self.seen()[0] > self.count, "it goes on")
        self.count, pid = self.seen()
        assert pid == self.pid

    def pause(self) -> str:
        """Pauses the sandbox, and returns where its processes are kept."""
        answer = self.api.post(f"{self.path}/pause")
        assert answer.status_code == 204, answer.text
        return self.detail()["pauseStorage"]

    def connect(self) -> httpx.Response:
        """Connects, as soon as that is tried again after an attempt that failed."""
        while True:
            answer = self.api.post(f"{self.path}/connect", json={"timeout": 3000})
            if answer.status_code != 503 or answer.json().get("error_code") != "sandbox_resume_delayed":
                return answer
            as_told(answer)


def checkpoint_of(server: Platform, holder: Holder) -> Path:
    (kept,) = (server.data_dir / "kept").glob(f"{holder.box.sandbox_id}.*")
    return kept / "image"


def flip(path: Path) -> None:
    """Changes one bit in the middle of a file."""
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


def criu_of(server: Platform) -> list[int]:
    """Pids of CRIU below a platform."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and (process / "comm").read_text() == "criu\n":
                # It has a root of its own, in which it sees the checkpoint.
                if any((process / "root/ringfence/image").samefile(found) for found in server.data_dir.glob("kept/*/image*")):
                    found.append(int(process.name))
        except OSError:
            continue
    return found


def is_in_its_first_moments(server: Platform, pid: int) -> bool:
    """Whether CRIU may be about to replace code of a process that it writes: killed then, it can leave that damaged. Not any
    more when it writes the memory of the process that has the most, which takes most of the time."""
    if b"restore" in Path(f"/proc/{pid}/cmdline").read_bytes():
        return False
    pages = server.data_dir.glob("kept/*/image.new/pages-*.img")
    return not any(path.stat().st_size > 16 << 20 for path in pages)


def kill_criu(server: Platform, during: Callable[[], object], after_s: float) -> int:
    """Kills CRIU while it works for what is done, this long after its first moments. Returns how often."""
    done = threading.Event()
    killed = []

    def kill() -> None:
        while not done.is_set():
            if found := criu_of(server):
                try:
                    until(lambda: not any(is_in_its_first_moments(server, pid) for pid in found), "CRIU has begun", every_s=0.001)
                except OSError:
                    continue
                at_moment(after_s)
                for pid in found:
                    try:
                        os.kill(pid, signal.SIGKILL)
                        killed.append(pid)
                    except ProcessLookupError:
                        continue
                return

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        during()
    finally:
        done.set()
        killer.join()
    return len(killed)


def test_a_damaged_checkpoint_is_refused(crashing: Platform) -> None:
    holder = Holder(crashing)
    assert holder.pause() == "disk"
    checkpoint = checkpoint_of(crashing, holder)
    pages = max(checkpoint.glob("pages-*.img"), key=lambda path: path.stat().st_size)
    assert pages.stat().st_size > 300 << 20

    flip(pages)
    for _ in range(2):
        answer = holder.connect()
        assert answer.status_code == 503, answer.text
        detail = holder.detail()
        assert detail["state"] == "paused"
        assert f"the checksum of {pages.name} is wrong" in detail["resumeError"]
    flip(pages)
    core = next(checkpoint.glob("core-*.img"))
    content = core.read_bytes()
    core.write_bytes(content[:-1])
    assert holder.connect().status_code == 503
    assert core.name in holder.detail()["resumeError"]
    core.write_bytes(content)
    assert holder.connect().status_code == 201
    holder.goes_on()
    assert "resumeError" not in holder.detail()
    # Without its processes it starts anew.
    assert holder.pause() == "disk"
    next(checkpoint.glob("core-*.img")).unlink()
    assert holder.connect().status_code == 503
    answer = holder.api.post(f"{holder.path}/connect", json={"timeout": 3000, "memory": False})
    assert answer.status_code == 201, answer.text
    assert holder.box.files.exists("/tmp/seen")
    holder.box.kill()


def test_a_damaged_program_of_the_agent_is_refused(crashing: Platform) -> None:
    """The program runs in every sandbox that is restored, and is not in their checkpoints. The next pause of another one
    repairs it."""
    holder = Holder(crashing)
    assert holder.pause() == "disk"
    program = json.loads((checkpoint_of(crashing, holder) / "about.json").read_text())["agent"]
    flip(crashing.data_dir / "agents" / program)
    crashing.kill()
    crashing.start()
    crashing.use()
    for _ in range(2):
        answer = holder.connect()
        assert answer.status_code == 503, answer.text
        detail = holder.detail()
        assert detail["state"] == "paused"
        assert f"the program of its agent is damaged: agents/{program}" in detail["resumeError"]
    with Sandbox.create(timeout=300) as other:
        assert other.pause() is True
        assert holder.connect().status_code == 201
    holder.goes_on()
    holder.box.kill()


def test_a_checkpoint_of_a_host_with_more_is_refused(crashing: Platform) -> None:
    """Another processor, or an older CRIU: as if the disk had been put into another machine."""
    holder = Holder(crashing)
    assert holder.pause() == "disk"
    checkpoint = checkpoint_of(crashing, holder)
    about, sums = checkpoint / "about.json", checkpoint / "sums.json"
    written, whole = about.read_bytes(), sums.read_bytes()

    def written_with(**changed: object) -> None:
        about.write_text(json.dumps(json.loads(written) | changed))
        content = about.read_bytes()
        sum_of_it = {"bytes": len(content), "crc32": zlib.crc32(content)}
        sums.write_text(json.dumps(json.loads(whole) | {about.name: sum_of_it}))

    sets = json.loads(written)["processor"]
    for changed, reason in [
        ({"processor": [*sets, "avx4096"]}, "instructions that the processor of this host does not have (avx4096)"),
        ({"criu": "99.1"}, "written by CRIU 99.1"),
    ]:
        written_with(**changed)
        answer = holder.connect()
        assert answer.status_code == 503, answer.text
        assert reason in holder.detail()["resumeError"]
    # What an older one wrote, on a host with less, is restored.
    written_with(processor=sets[1:], criu="4.0", kernel="5.10.0")
    assert holder.connect().status_code == 201
    holder.goes_on()
    holder.box.kill()


def test_criu_is_killed(crashing: Platform) -> None:
    holder = Holder(crashing)
    killed = 0
    for after_s in (0.0, 0.02, 0.05, 0.1, 0.2):
        killed += kill_criu(crashing, holder.pause, after_s)
        if holder.detail()["pauseStorage"] == "disk":
            # It was killed too late, or not at all.
            killed += kill_criu(crashing, holder.connect, after_s)
        if holder.detail()["state"] == "paused":
            assert holder.connect().status_code == 201
        holder.goes_on()
        # What a pause gives up is there again.
        assert "MemTotal" in holder.box.files.read("/proc/meminfo")
    assert killed > 0
    assert holder.pause() == "disk"
    for after_s in (0.0, 0.05, 0.1):
        answers = []
        kill_criu(crashing, lambda: answers.append(holder.connect().status_code), after_s)
        assert answers[0] in (201, 503)
        if answers[0] == 503:
            assert holder.detail()["resumeError"]
            assert holder.connect().status_code == 201
        holder.goes_on()
        assert holder.pause() == "disk"
    holder.box.kill()


def test_it_goes_on_without_the_platform(crashing: Platform) -> None:
    """A platform that is killed within a pause leaves nothing stopped, although nobody starts another one."""
    holder = Holder(crashing)

    def time_used() -> int:
        used = 0
        for process in Path("/proc").iterdir():
            try:
                if process.name.isdigit() and f"/{holder.box.sandbox_id}." in (process / "cgroup").read_text():
                    used += int((process / "schedstat").read_text().split()[0])
            except (OSError, IndexError):
                continue
        return used

    for _ in range(3):
        pausing = threading.Thread(target=until_killed, args=[holder.pause])
        pausing.start()
        kept = crashing.data_dir / "kept"
        until(lambda: any(kept.glob(f"{holder.box.sandbox_id}.*/image.new")), "it is written")
        crashing.kill()
        pausing.join()
        before = time_used()
        until(lambda: time_used() > before, "its processes run without a platform")
        crashing.start()
        crashing.use()
        assert holder.detail()["state"] == "running"
        holder.goes_on()
        assert "MemTotal" in holder.box.files.read("/proc/meminfo")
    assert not checkpoint_of(crashing, holder).with_name("image.new").exists()
    holder.box.kill()


def until_killed(call: Callable[[], object]) -> None:
    try:
        call()
    except httpx.TransportError:
        pass
