"""A host whose disk runs full, by sandboxes or by something else: neighbours keep what they synced, and the platform works.

The data directory is on a separate file system of 3 GiB, so that no other disk is filled. Sandboxes have disks of
10 GiB there, as by default: three times the host's, each.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from e2b import CommandExitException, Sandbox
from e2b.exceptions import ServiceBusyException

from harness import hoststate
from harness.criu import criu_config
from harness.elapse import slowly
from harness.hoststate import HostState, left_over
from harness.platform import Platform
from harness.traffic import until

DISK_MB = 3072
FLOOR_MB = 1024
MIB = 1 << 20

# Takes as much as it gets, as fast as it can, with several writers that do not take a refusal for an answer: each ends
# when it was given nothing for two seconds. Prints how many bytes it got and why it ended.
HOG = """
import errno, os, sys, threading, time
got, why = [0] * 4, [None] * 4
def fill(n):
    fd = os.open(f"/home/user/hog{n}", os.O_CREAT | os.O_WRONLY)
    block = os.urandom(1 << 20)
    given = time.monotonic()
    while time.monotonic() < given + 2:
        try:
            got[n] += os.write(fd, block)
            given = time.monotonic()
        except OSError as error:
            why[n] = errno.errorcode[error.errno]
            time.sleep(0.02)
threads = [threading.Thread(target=fill, args=(n,)) for n in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(sum(got), *sorted(set(why)), flush=True)
"""

# Writes files and syncs each until it is stopped, or until one fails; prints their number and the error.
NEIGHBOUR = """
import hashlib, os, time
os.makedirs("/home/user/kept", exist_ok=True)
done, error = 0, None
with open("/home/user/sums", "w") as sums:
    while not os.path.exists("/tmp/stop") and done < 40:
        data = os.urandom(2 << 20)
        try:
            with open(f"/home/user/kept/{done}", "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as failed:
            error = failed
            break
        sums.write(f"{hashlib.sha256(data).hexdigest()} {done}\\n")
        done += 1
        time.sleep(0.05)
    sums.flush()
    os.fsync(sums.fileno())
print(done, error, flush=True)
"""

# Names for as many files as there will be, while there is room for names; the files come later.
NAMES = """
import os
os.makedirs("/home/user/names")
os.chdir("/home/user/names")
for k in range(4):
    open(f"../link{k}", "w").close()
    for n in range(55000):
        os.link(f"../link{k}", f"{k * 55000 + n}")
os.sync()
"""

# Makes an empty file behind each name: no block that a file system counts, but the host's for the inodes.
INODES = """
import os
os.chdir("/home/user/names")
for n in range(220000):
    os.unlink(str(n))
    os.close(os.open(str(n), os.O_CREAT | os.O_WRONLY))
    if n % 20000 == 0:
        os.sync()
os.sync()
"""

# Compares every file with its sum, as the disk has them and not as memory does.
VERIFY = """
import hashlib, os
os.sync()
bad = []
for line in open("/home/user/sums"):
    want, name = line.split()
    fd = os.open(f"/home/user/kept/{name}", os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        data = b""
        while chunk := os.read(fd, 1 << 20):
            data += chunk
        if hashlib.sha256(data).hexdigest() != want:
            bad.append(name)
    except OSError as failed:
        bad.append(f"{name}: {failed}")
    os.close(fd)
print(bad)
"""


@contextmanager
def small_host(config: str = "") -> Iterator[tuple[Platform, Path]]:
    """A platform whose data directory is alone on a file system of 3 GiB, and where that is mounted."""
    with tempfile.TemporaryDirectory(prefix="rf-") as directory, ExitStack() as stack:
        image, mount = Path(directory) / "host.img", Path(directory) / "host"
        mount.mkdir()
        with open(image, "wb") as file:
            file.truncate(DISK_MB * MIB)
        subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=0", image], check=True)
        subprocess.run(["mount", "-o", "loop", image, mount], check=True)
        stack.callback(subprocess.run, ["umount", mount], check=True)
        hoststate.own(mount / "data")
        before = HostState.take()
        server = Platform(mount / "data", config=config)
        try:
            server.start()
            server.use()
            yield server, mount
            assert server.terminate() == 0, server.log_tail(12)
            assert server.down().returncode == 0
            assert left_over(before) == {}
        except BaseException as error:
            # It is gone with its disk.
            error.add_note(f"log of the platform on {mount}\n{server.log_tail()}")
            raise
        finally:
            server.close()


def available(mount: Path) -> int:
    found = os.statvfs(mount)
    return found.f_bavail * found.f_frsize


@contextmanager
def filled(mount: Path) -> Iterator[None]:
    """While this lasts, something else on the host has taken every byte."""
    filler = mount / "filler"
    with open(filler, "wb", buffering=0) as file:
        step = 64 * MIB
        while step >= 4096:
            try:
                os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), step)
            except OSError:
                step //= 2
        # What is too small for an extent of its own is taken block by block.
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
    try:
        yield
    finally:
        filler.unlink()


def program(sandbox: Sandbox, code: str, name: str) -> str:
    sandbox.files.write(f"/tmp/{name}.py", code)
    return f"python3 /tmp/{name}.py"


def log_of(server: Platform, sandbox: Sandbox) -> list[str]:
    """The kinds of entries of a sandbox's log."""
    answer = httpx.get(
        f"{server.url}/v2/sandboxes/{sandbox.sandbox_id}/logs",
        headers={"X-API-Key": server.credentials()["E2B_API_KEY"]},
        timeout=30,
    )
    assert answer.status_code == 200, answer.text
    return [entry["fields"].get("event_type", "") for entry in answer.json()["logs"]]


def control_plane_works(server: Platform, spare: list[Sandbox], short: Sandbox) -> None:
    """Keys are made and revoked, deadlines move and pass, and sandboxes end."""
    api = httpx.Client(base_url=server.url, headers={"X-API-Key": server.credentials()["E2B_API_KEY"]}, timeout=30)
    made = server.run("key", "create", "--team", "default")
    assert made.returncode == 0, made.stderr
    key = api.post("/api-keys", json={"name": "made on a full disk"})
    assert key.status_code == 201, key.text
    theirs = {"X-API-Key": key.json()["key"]}
    assert httpx.get(f"{server.url}/v2/sandboxes", headers=theirs, timeout=30).status_code == 200
    revoked = api.delete(f"/api-keys/{key.json()['id']}")
    assert revoked.status_code == 204, revoked.text
    assert httpx.get(f"{server.url}/v2/sandboxes", headers=theirs, timeout=30).status_code == 401
    short.set_timeout(1)
    until(lambda: not short.is_running(), "a deadline ends its sandbox", within_s=30)
    for one in spare:
        answer = api.delete(f"/sandboxes/{one.sandbox_id}")
        assert answer.status_code == 204, answer.text
        assert not one.is_running()


def in_background(sandbox: Sandbox, command: str) -> Callable[[], str]:
    """Starts a command; what it returns waits for the end and gives its output."""
    handle = sandbox.commands.run(command, background=True, timeout=0)
    return lambda: handle.wait().stdout


def test_hogs_are_stopped_and_neighbours_keep_what_they_synced() -> None:
    with small_host() as (server, mount):
        neighbours = [Sandbox.create(timeout=600) for _ in range(2)]
        hogs = [Sandbox.create(timeout=600) for _ in range(2)]
        others = [Sandbox.create(timeout=600) for _ in range(3)]
        writing = [in_background(one, program(one, NEIGHBOUR, "neighbour")) for one in neighbours]
        filling = [in_background(one, program(one, HOG, "hog")) for one in hogs]
        taken = []
        for ended in filling:
            got, *why = ended().split()
            assert why == ["ENOSPC"], why
            assert int(got) > 100 * MIB
            taken.append(int(got))
        # At once: what they have grown by is forgotten with time, and they go on.
        for one in hogs:
            until(lambda: "disk_stopped" in log_of(server, one), "its log says why")
            # Its data can be read and overwritten, and `df` is correct.
            write = "dd if=/dev/zero of=/home/user/hog0 bs=1M count=8 conv=notrunc,fsync && cmp -n 8388608 /home/user/hog0 /dev/zero"
            one.commands.run(write, timeout=600)
            assert one.commands.run("df --output=avail -k / | tail -1", timeout=600).stdout.strip() == "0"
        assert available(mount) > FLOOR_MB * MIB // 2, available(mount) // MIB
        for ended in writing:
            assert ended() == "40 None\n"
        control_plane_works(server, others[:2], others[2])
        # There is still space for others, because no sandbox may take more than what is left.
        Sandbox.create(timeout=60).kill()
        for one in neighbours:
            assert one.commands.run(program(one, VERIFY, "verify"), timeout=120).stdout == "[]\n"
            assert "disk_stopped" not in log_of(server, one)
        said = [line for line in server.log().splitlines() if "nearly full" in line]
        assert said and all(any(one.sandbox_id in line for one in hogs) for line in said), said
        # With one of them gone, there is room for the other: at least as much as it has grown by, so it goes on when half of that
        # is forgotten, after a minute. They seldom get the same.
        larger = taken.index(max(taken))
        hogs.pop(larger).kill()
        (other,) = hogs
        until(lambda: "disk_resumed" in log_of(server, other), f"the other goes on: {taken}", within_s=120)
        other.commands.run("head -c 20M /dev/urandom > /home/user/more && sync", timeout=600)
        for one in [*neighbours, other]:
            one.kill()


def test_the_platform_works_on_a_disk_that_something_else_filled() -> None:
    with small_host() as (server, mount):
        neighbour, other, spare, short = (Sandbox.create(timeout=600) for _ in range(4))
        neighbour.commands.run("touch /tmp/later")
        wrote = in_background(neighbour, program(neighbour, NEIGHBOUR, "neighbour"))
        assert wrote() == "40 None\n"
        with filled(mount):
            assert available(mount) < MIB
            until(lambda: "disk_stopped" in log_of(server, other), "sandboxes are stopped", within_s=30)
            # Refused when it is written, not lost when it is synced.
            with pytest.raises(CommandExitException) as refused:
                other.commands.run("head -c 5M /dev/urandom > /home/user/new")
            assert "No space left" in refused.value.stderr
            control_plane_works(server, [spare], short)
            with pytest.raises(ServiceBusyException) as no_room:
                Sandbox.create(timeout=60)
            assert "503" in str(no_room.value)
            assert neighbour.commands.run("echo alive").stdout == "alive\n"
            assert neighbour.commands.run(program_in_memory(VERIFY), timeout=120).stdout == "[]\n"
        until(lambda: "disk_resumed" in log_of(server, other), "there is room again", within_s=60)
        other.commands.run("head -c 5M /dev/urandom > /home/user/new && sync", timeout=600)
        Sandbox.create(timeout=60).kill()
        assert neighbour.commands.run(program(neighbour, VERIFY, "verify"), timeout=120).stdout == "[]\n"
        for one in (neighbour, other):
            one.kill()


def test_a_stopped_sandbox_that_takes_space_all_the_same_is_ended() -> None:
    with small_host("[capacity]\ndisk_floor_mb = 64\n") as (server, mount):
        hostile, neighbour = Sandbox.create(timeout=600), Sandbox.create(timeout=600)
        hostile.commands.run(program(hostile, NAMES, "names"), timeout=300)
        hostile.files.write("/tmp/inodes.py", INODES)
        with open(mount / "filler", "wb") as filler:
            os.posix_fallocate(filler.fileno(), 0, available(mount) - 66 * MIB)
            until(lambda: "disk_stopped" in log_of(server, hostile), "it is stopped", within_s=60)
            with pytest.raises(Exception):
                hostile.commands.run("python3 /tmp/inodes.py", timeout=300)
            until(lambda: not hostile.is_running(), "it is ended")
            until(lambda: "disk_ended" in log_of(server, hostile), "its log says why")
            # It took what it could of the floor, and not what the host needs.
            assert available(mount) > 24 * MIB
            assert neighbour.commands.run("echo untouched").stdout == "untouched\n"
            os.unlink(mount / "filler")
        neighbour.kill()


def program_in_memory(code: str) -> str:
    return f"python3 - <<'END'\n{code}\nEND\n"


def test_a_disk_that_was_taken_as_a_whole_needs_nothing_of_the_host() -> None:
    with small_host("[sandbox]\ndisk_mb = 512\ndisk_reserve = \"full\"\n") as (server, mount):
        before = available(mount)
        one = Sandbox.create(timeout=600)
        assert before - available(mount) >= 512 * MIB
        with filled(mount):
            data = 300
            # A sync writes what the whole host has still to write.
            written = f"head -c {data}M /dev/urandom > /home/user/data && sync && sha256sum /home/user/data > /home/user/sum"
            one.commands.run(written, timeout=600)
            # Freed and taken again, from the image's own blocks.
            one.commands.run(f"rm /home/user/data && sync && head -c {data}M /dev/urandom > /home/user/data && sync", timeout=600)
            one.commands.run("sha256sum /home/user/data > /home/user/sum && sync", timeout=600)
            verify = (
                "import os\nfd = os.open('/home/user/data', os.O_RDONLY)\n"
                "os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)\n"
            )
            one.commands.run(program_in_memory(verify))
            one.commands.run("sha256sum -c /home/user/sum", timeout=600)
            assert "disk_stopped" not in log_of(server, one)
        # Room is counted by whole disks: above the floor there is some for three of them, one of which is there.
        made = []
        with pytest.raises(ServiceBusyException) as no_room:
            for _ in range(6):
                made.append(Sandbox.create(timeout=600))
                slowly(0.3)
        assert "503" in str(no_room.value)
        assert 1 <= len(made) <= 3, len(made)
        assert available(mount) >= FLOOR_MB * MIB
        for sandbox in [one, *made]:
            sandbox.kill()
        until(lambda: available(mount) > before - 64 * MIB, "the blocks are the host's again", within_s=30)


# Holds memory, and says whether it is whole. It tries again when it may not write: after the host's disk was full, writes are
# refused until the platform looks for space the next time, a second later at most.
HOLDER = """
import contextlib, hashlib, os, time
memory = bytearray(os.urandom(1 << 20)) * 300
want = hashlib.sha256(memory).hexdigest()
while True:
    with contextlib.suppress(OSError):
        with open("/tmp/new", "w") as file: file.write(f"{time.time()} {hashlib.sha256(memory).hexdigest() == want}")
        os.replace("/tmp/new", "/tmp/seen")
    time.sleep(0.05)
"""


def test_a_pause_without_space_for_the_memory_keeps_it() -> None:
    """The space is missing before the memory is written, or goes while it is written."""
    with small_host(criu_config()) as (server, mount):
        api = httpx.Client(
            base_url=server.url, headers={"X-API-Key": server.credentials()["E2B_API_KEY"]}, timeout=120
        )
        box = Sandbox.create(timeout=600)
        path = f"/sandboxes/{box.sandbox_id}"
        box.files.write("/tmp/holder.py", HOLDER)
        box.commands.run("python3 /tmp/holder.py", background=True, timeout=0)
        until(lambda: box.files.exists("/tmp/seen"), "it holds its memory")

        def pause() -> str:
            answer = api.post(f"{path}/pause")
            assert answer.status_code == 204, answer.text
            return api.get(path).json()["pauseStorage"]

        def goes_on() -> None:
            answer = api.post(f"{path}/connect", json={"timeout": 600})
            assert answer.status_code == 201, answer.text
            last = box.files.read("/tmp/seen").split()[0]
            until(
                lambda: box.files.read("/tmp/seen").split()[0] > last,
                lambda: f"it goes on: {api.get(f'/v2{path}/logs').text}",
            )
            assert box.files.read("/tmp/seen").split()[1] == "True"

        filler = mount / "filler"
        with open(filler, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, available(mount) - FLOOR_MB * MIB - 100 * MIB)
        assert pause() == "memory"

        def says_why() -> bool:
            log = api.get(f"/v2{path}/logs").text
            return "kept_in_memory" in log and "MiB are free for checkpoints" in log

        until(says_why, "its log says why")
        goes_on()
        filler.unlink()
        assert pause() == "disk"
        goes_on()

        def fill() -> None:
            until(lambda: any((server.data_dir / "kept").glob("*/image.new/pages-*.img")), "it is written")
            with filled(mount):
                over.wait(30)

        over = threading.Event()
        filling = threading.Thread(target=fill)
        filling.start()
        try:
            assert pause() in ("memory", "disk")
        finally:
            over.set()
            filling.join()
        goes_on()
        box.kill()
