"""Pausing with the processes on disk: nothing of a sandbox is left on the host, and its programs continue where they were."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from e2b import PtySize, Sandbox

from harness.beside import beside
from harness.criu import criu_config, groups, pause, processes
from harness.elapse import at_moment
from harness.inside import Background, Timers
from harness.patience import within
from harness.platform import Platform
from harness.traffic import until

# Holds what programs hold: memory, connections of its own, files with and without names, threads, children, timers, a
# watch. Checks all of it whenever it is asked to, and says so.
HOLDER = r"""
import hashlib, os, selectors, signal, socket, subprocess, sys, tempfile, threading, time
memory = bytearray(os.urandom(1 << 20)) * 60
digest = hashlib.sha256(memory).hexdigest()
nameless = tempfile.TemporaryFile()
nameless.write(b"nameless"); nameless.flush()
gone = open("/tmp/gone", "w+b"); gone.write(b"gone"); gone.flush(); os.unlink("/tmp/gone")
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
peer, _ = server.accept()
left, right = socket.socketpair()
read, write = os.pipe()
child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
ticks = []
def tick():
    while True:
        ticks.append(time.monotonic()); time.sleep(0.05)
threading.Thread(target=tick, daemon=True).start()
poll = selectors.EpollSelector()
poll.register(read, selectors.EVENT_READ)
os.chdir("/var/tmp"); os.umask(0o027)
def check(number):
    text = str(number).encode()
    client.sendall(text); assert peer.recv(100) == text
    peer.sendall(text); assert client.recv(100) == text
    left.sendall(text); assert right.recv(100) == text
    os.write(write, text); assert poll.select(5); assert os.read(read, 100) == text
    child.stdin.write(text + b"\n"); child.stdin.flush(); assert child.stdout.readline() == text + b"\n"
    nameless.seek(0); assert nameless.read() == b"nameless"
    gone.seek(0); assert gone.read() == b"gone"
    assert hashlib.sha256(memory).hexdigest() == digest
    assert os.getcwd() == "/var/tmp"
    count = len(ticks); deadline = time.time() + 10
    while len(ticks) == count: assert time.time() < deadline; time.sleep(0.01)
    assert ticks == sorted(ticks)
for line in sys.stdin:
    check(int(line))
    print("whole", line.strip(), os.getpid(), flush=True)
"""


@pytest.fixture(scope="module")
def disk(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    # With fewer cores than the host has, places differ in their processors.
    with beside(platform, tmp_path_factory.mktemp("disk"), criu_config() + "[sandbox]\ncpu_count = 1\n") as server:
        yield server


@pytest.fixture
def box(disk: Platform) -> Iterator[Sandbox]:
    box = Sandbox.create(timeout=300)
    try:
        yield box
    finally:
        box.kill()


def test_programs_continue_where_they_were(box: Sandbox) -> None:
    box.files.write("/tmp/holder.py", HOLDER)
    lines: list[str] = []
    holder = box.commands.run("python3 /tmp/holder.py", background=True, stdin=True, timeout=0)
    pid = holder.pid
    holder.disconnect()
    for cycle in range(4):
        command = box.commands.connect(pid, timeout=0)
        box.commands.send_stdin(pid, f"{cycle}\n")
        for out, err, _ in command:
            assert not err, err
            lines.append(out or "")
            if out and "whole" in out:
                break
        command.disconnect()
        assert lines[-1].split()[:2] == ["whole", str(cycle)], lines
        pause(box)
        box = Sandbox.connect(box.sandbox_id, timeout=300)
    assert len({line.split()[2] for line in lines}) == 1
    assert box.commands.kill(pid) is True


def test_on_disk_only_the_wall_clock_goes_on(box: Sandbox) -> None:
    """Timers stand still on disk; in memory all of them go on, see `test_pause.py`."""
    timers = Timers(box)
    pause(box)
    paused = time.monotonic()
    until(lambda: time.monotonic() > paused + 2.0, "timers would have less left")
    stood_s = time.monotonic() - paused
    box = Sandbox.connect(box.sandbox_id, timeout=300)
    wall_s, clocks, left, told = timers.passed(box)
    assert wall_s > stood_s - 0.1
    for name, passed in clocks.items():
        assert passed < wall_s - stood_s + 0.1, (name, stood_s, wall_s, clocks)
    # Timers are read after the clocks.
    ran_s = told["monotonic_after"] - timers.before["monotonic"]
    assert ran_s < wall_s - stood_s + 0.1, (ran_s, stood_s, wall_s)
    for name, passed in left.items():
        # Of an absolute time, CRIU keeps whole seconds.
        assert passed < ran_s + 1.1, (name, ran_s, stood_s, wall_s, clocks, left)


def test_standard_streams_can_be_opened_again(box: Sandbox) -> None:
    """The pipes that a restore makes are root's at first."""
    line = "while read word; do echo $word | tee /dev/stderr; cat /dev/stdin > /dev/stdout; done"
    handle = box.commands.run(line, background=True, stdin=True, timeout=0)
    handle.disconnect()
    pause(box)
    box = Sandbox.connect(box.sandbox_id, timeout=300)
    again = box.commands.connect(handle.pid, timeout=0)
    box.commands.send_stdin(handle.pid, "one\ntwo\n")
    box.commands.close_stdin(handle.pid)
    result = again.wait()
    assert (result.stdout, result.stderr) == ("one\ntwo\n", "one\n")


def test_a_terminal_keeps_its_shell(box: Sandbox) -> None:
    shell = box.pty.create(PtySize(rows=24, cols=80), timeout=0)
    box.pty.send_stdin(shell.pid, b"cd /usr; X=kept; sleep 1000 &\n")
    for cycle in range(3):
        pause(box)
        box = Sandbox.connect(box.sandbox_id, timeout=300)
        terminal = box.pty.connect(shell.pid, timeout=0) if hasattr(box.pty, "connect") else None
        box.pty.send_stdin(shell.pid, f"echo $X-$PWD-$(jobs -r | wc -l) >/tmp/seen{cycle}\n".encode())
        until(lambda: box.files.exists(f"/tmp/seen{cycle}") and box.files.read(f"/tmp/seen{cycle}") != "", "the shell answers")
        assert box.files.read(f"/tmp/seen{cycle}") == "kept-/usr-1\n"
        if terminal:
            terminal.disconnect()
    assert box.pty.kill(shell.pid) is True


def test_it_continues_with_the_ids_of_the_place_that_it_gets(box: Sandbox) -> None:
    """The ids that the sandbox had before may be another sandbox's by then."""

    def ids(of: Sandbox) -> set[int]:
        maps = {Path(f"/proc/{pid}/{kind}_map").read_text() for pid in processes(of) for kind in ("uid", "gid")}
        assert len(maps) == 1, maps
        return {int(number) for number in maps.pop().split()}

    box.commands.run("touch /tmp/before; sudo touch /root/before")
    first = ids(box)
    pause(box)
    others: list[Sandbox] = []
    try:
        while not any(ids(other) == first for other in others):
            assert len(others) < 8, "nobody gets what the paused one had"
            others.append(Sandbox.create())
        box = Sandbox.connect(box.sandbox_id, timeout=300)
        assert all(ids(box).isdisjoint(ids(other) - {0, 65536}) for other in others)
        for user in ("root", "user"):
            box.files.write(f"/tmp/{user}", user, user=user)
            owned = "~/after /tmp/before /root/before /tmp/$(id -un)"
            seen = box.commands.run(f"rm -f ~/.profile; touch ~/after; sudo stat -c %U {owned}", user=user).stdout
            assert seen.split() == [user, "user", "root", user]
        pause(box)
    finally:
        for other in others:
            other.kill()
    # In a place that it had not before, once more.
    box = Sandbox.connect(box.sandbox_id, timeout=300)
    assert box.commands.run("stat -c %U /tmp/root /tmp/user ~/after").stdout.split() == ["root", "user", "user"]


def test_it_keeps_its_processors_in_any_place(box: Sandbox) -> None:
    """Programs have read which ones there are, and may be restored where others begin."""
    look = "cat /sys/devices/system/cpu/online; nproc; grep ^processor /proc/cpuinfo; taskset -pc $(pgrep -o sleep) | sed 's/.*: //'"
    box.commands.run("exec sleep 1000", background=True, timeout=0)
    until(lambda: box.commands.run("pgrep -xc sleep || true").stdout == "1\n", "it runs")
    first = box.commands.run(look).stdout
    assert first.split()[1] == "1"
    others: list[Sandbox] = []
    try:
        for _ in range(3):
            pause(box)
            others.append(Sandbox.create(timeout=300))
            box = Sandbox.connect(box.sandbox_id, timeout=300)
            assert box.commands.run(look).stdout == first
        alone = "cat /sys/devices/system/cpu/online"
        if os.cpu_count() > 1:
            assert len({other.commands.run(alone).stdout for other in others}) > 1
    finally:
        for other in others:
            other.kill()


def test_it_survives_restarts_of_the_platform(disk: Platform, box: Sandbox) -> None:
    program = (
        "import os, time\n"
        "for i in range(1 << 40):\n"
        "    with open('/tmp/n.new', 'w') as new: new.write(str(i))\n"
        "    os.replace('/tmp/n.new', '/tmp/n'); time.sleep(0.01)\n"
    )
    box.files.write("/tmp/count.py", program)
    box.commands.run("python3 /tmp/count.py", background=True, timeout=0)
    until(lambda: box.files.exists("/tmp/n"), "it counts")
    pause(box)
    assert disk.terminate() == 0
    disk.start()
    disk.kill()
    disk.start()
    assert processes(box) == []
    box = Sandbox.connect(box.sandbox_id, timeout=300)
    first = int(box.files.read("/tmp/n"))
    until(lambda: int(box.files.read("/tmp/n") or 0) > first, "it counts on")
    # The next time it is killed while it is paused.
    pause(box)
    box.kill()
    kept = disk.data_dir / "kept"
    until(lambda: not any(entry.name.startswith(box.sandbox_id) for entry in kept.iterdir()), "its checkpoint is removed")


def test_what_cannot_be_written_stays_in_memory(box: Sandbox) -> None:
    box.commands.run("sudo touch /dev/mqueue/queue")
    assert box.pause() is True
    assert processes(box) != []
    box = Sandbox.connect(box.sandbox_id, timeout=300)
    assert box.commands.run("echo here").stdout == "here\n"
    box.commands.run("sudo rm /dev/mqueue/queue")
    pause(box)
    box = Sandbox.connect(box.sandbox_id, timeout=300)
    assert box.commands.run("echo here").stdout == "here\n"


# Waits for its child as after vfork (clone with CLONE_VFORK), but the child never executes a program.
IN_VFORK = "import ctypes, time; ctypes.CDLL(None).syscall(56, 0x4000 | 17, 0, 0, 0, 0); time.sleep(1000)"


def test_a_process_that_stays_in_vfork_is_kept_in_memory(box: Sandbox) -> None:
    command = box.commands.run(f"exec python3 -c '{IN_VFORK}'", background=True, timeout=0)
    until(lambda: "D" in box.commands.run(f"cut -d' ' -f3 /proc/{command.pid}/stat").stdout, "it waits for its child")
    assert box.pause() is True
    assert processes(box) != []
    box = Sandbox.connect(box.sandbox_id, timeout=300)
    box.commands.run(f"pkill -9 -P {command.pid}; true")
    until(lambda: "S" in box.commands.run(f"cut -d' ' -f3 /proc/{command.pid}/stat").stdout, "it goes on")
    pause(box)
    box = Sandbox.connect(box.sandbox_id, timeout=300)
    assert box.commands.kill(command.pid) is True


# A thread that stops sharing the working directory, or the open files, of its process.
LONE_THREAD = """
import ctypes, os, threading, time
def lone():
    assert ctypes.CDLL(None).unshare({flag}) == 0
    os.chdir("/usr")
    print("ready")
    time.sleep(1000)
threading.Thread(target=lone).start()
"""


@pytest.mark.parametrize("flag", [0x200, 0x400])
def test_a_thread_by_itself_is_kept_in_memory(box: Sandbox, flag: int) -> None:
    """Restored, it would have those of the process, and not notice."""
    program = Background(box, LONE_THREAD.format(flag=flag))
    assert box.pause() is True
    assert processes(box) != []
    box = Sandbox.connect(box.sandbox_id, timeout=300)
    assert box.commands.kill(program.handle.pid) is True
    pause(box)
    box = Sandbox.connect(box.sandbox_id, timeout=300)
    assert box.commands.run("echo here").stdout == "here\n"


def test_programs_that_start_others_all_the_time(box: Sandbox) -> None:
    box.commands.run("echo 0 >/tmp/n; while :; do echo $(($(cat /tmp/n) + 1)) >/tmp/m; mv /tmp/m /tmp/n; done", background=True, timeout=0)
    counted = 0
    for _ in range(10):
        until(lambda: box.files.exists("/tmp/n") and int(box.files.read("/tmp/n") or 0) > counted, "it counts on")
        counted = int(box.files.read("/tmp/n"))
        pause(box)
        box = Sandbox.connect(box.sandbox_id, timeout=300)


def test_what_criu_knows_about_the_kernel_is_found_once_and_may_be_lost(disk: Platform, box: Sandbox) -> None:
    cache = disk.data_dir / "criu.kdat"
    until(cache.exists, "the platform has it after its start")
    for content in (None, b"", b"damaged" * 130):
        if content is None:
            cache.unlink()
        else:
            cache.write_bytes(content)
        pause(box)
        box = Sandbox.connect(box.sandbox_id, timeout=300)
        # What a run finds out itself is not kept for others.
        assert (cache.read_bytes() if cache.exists() else None) == content
        assert box.commands.run("echo here").stdout == "here\n"


# Writes the time, its pid, and whether its memory is whole.
STEADY = r"""
import hashlib, os, time
memory = bytearray(os.urandom(1 << 20)) * 50
want = hashlib.sha256(memory).hexdigest()
while True:
    with open("/tmp/new", "w") as file: file.write(f"{time.time()} {os.getpid()} {hashlib.sha256(memory).hexdigest() == want}")
    os.replace("/tmp/new", "/tmp/seen")
"""


def test_a_resume_cancels_a_pause_that_still_writes(disk: Platform, box: Sandbox) -> None:
    box.files.write("/tmp/steady.py", STEADY)
    box.commands.run("python3 /tmp/steady.py", background=True, timeout=0)
    box.commands.run("cat /dev/zero | gzip >/dev/null", background=True, timeout=0)
    until(lambda: box.files.exists("/tmp/seen"), "it has its memory")
    pid = box.files.read("/tmp/seen").split()[1]
    key = {"X-API-Key": disk.credentials()["E2B_API_KEY"]}
    url = f"{disk.url}/sandboxes/{box.sandbox_id}"
    api = httpx.Client(headers=key, timeout=60)
    statuses = []
    for attempt in range(24):
        before = api.get(url).json()
        answers: list[httpx.Response] = []
        pausing = threading.Thread(target=lambda: answers.append(api.post(f"{url}/pause")))
        pausing.start()
        at_moment(0.01 * (attempt % 12))
        path, body = [("/connect", {"timeout": 200}), ("/resume", {"timeout": 200})][attempt % 2]
        resumed = httpx.post(f"{url}{path}", headers=key, json=body, timeout=60)
        pausing.join()
        (paused,) = answers
        statuses.append(paused.status_code)
        if paused.status_code == 409:
            assert "resumed it meanwhile" in paused.json()["message"]
            # What comes before the pause finds that it runs.
            assert resumed.status_code in (200, 201) or (path, resumed.status_code) == ("/resume", 409), resumed.text
            # It was never paused.
            assert api.get(url).json()["startedAt"] == before["startedAt"]
        else:
            assert paused.status_code == 204, paused.text
            api.post(f"{url}/connect", json={"timeout": 200})
        since = time.time()
        until(lambda since=since: float(box.files.read("/tmp/seen").split()[0]) > since, "it goes on")
        assert box.files.read("/tmp/seen").split()[1:] == [pid, "True"]
        assert box.commands.run("echo here").stdout == "here\n"
    assert statuses.count(409) >= 6, statuses
    # It can be paused as if nothing had happened.
    pause(box)
    box = Sandbox.connect(box.sandbox_id, timeout=300)
    until(lambda: box.files.read("/tmp/seen").split()[1:] == [pid, "True"], "it goes on")


def test_a_pause_is_not_cancelled_where_a_resume_means_more(disk: Platform, box: Sandbox) -> None:
    """One that gives up the processes, or changes what happens at the deadline, waits and is done in full."""
    key = {"X-API-Key": disk.credentials()["E2B_API_KEY"]}
    url = f"{disk.url}/sandboxes/{box.sandbox_id}"
    for path, body in [("connect", {"timeout": 200, "memory": False}), ("resume", {"timeout": 200, "autoPause": True})]:
        before = httpx.get(url, headers=key, timeout=within(30)).json()["startedAt"]
        answers: list[httpx.Response] = []
        pausing = threading.Thread(target=lambda: answers.append(httpx.post(f"{url}/pause", headers=key, timeout=60)))
        pausing.start()
        until(lambda: httpx.get(url, headers=key, timeout=within(30)).json()["state"] == "paused", "the pause has begun")
        resumed = httpx.post(f"{url}/{path}", headers=key, json=body, timeout=60)
        pausing.join()
        assert (answers[0].status_code, resumed.status_code) == (204, 201), (answers[0].text, resumed.text)
        assert httpx.get(url, headers=key, timeout=within(30)).json()["startedAt"] > before


def test_the_end_of_the_platform_writes_everything(platform: Platform, tmp_path: Path) -> None:
    """With `pause.at_shutdown`, nothing is left that the end of the host would end."""
    with beside(platform, tmp_path, criu_config() + "at_shutdown = true\n") as server:
        boxes = [Sandbox.create(timeout=300) for _ in range(3)]
        written, refused, waiting = boxes
        for box in boxes:
            box.commands.run("cp /bin/sleep /tmp/still-there && exec /tmp/still-there 1000", background=True, timeout=0)
            until(lambda box=box: box.commands.run("pgrep -c still-there || true").stdout == "1\n", "it runs")
        for box in (refused, waiting):
            box.commands.run("sudo touch /dev/mqueue/queue")
        assert waiting.pause() is True
        assert processes(waiting) != []
        assert server.terminate() == 0
        assert all(processes(box) == [] and groups(box) == [] for box in boxes)
        server.start()
        for box, running in ((written, "1\n"), (refused, "0\n"), (waiting, "0\n")):
            assert box.get_info().state == "paused"
            box = Sandbox.connect(box.sandbox_id, timeout=300)
            assert box.commands.run("pgrep -c still-there || true").stdout == running
            assert box.files.exists("/tmp/still-there")
            box.kill()
