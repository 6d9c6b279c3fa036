"""Programs inside find the sandbox's size, and what it uses of it, where they look for the machine's."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2b import Sandbox

from harness.beside import beside
from harness.inside import host_pids, root
from harness.patience import within
from harness.platform import Platform
from harness.traffic import until

MEMORY_MB = 640
CONFIG = f"[sandbox]\ncpu_count = 1\nmemory_mb = {MEMORY_MB}\ndisk_mb = 256\n"
CPU = "/sys/devices/system/cpu"


@pytest.fixture(scope="module")
def small(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """A platform whose sandboxes have one core, beside the session's, whose credentials return afterwards."""
    with beside(platform, tmp_path_factory.mktemp("small"), CONFIG) as server:
        yield server


@pytest.fixture
def one(small: Platform) -> Iterator[Sandbox]:
    with Sandbox.create(timeout=120) as box:
        yield box


def numbers(text: str) -> set[int]:
    """Processors of a list as the kernel writes it."""
    found: set[int] = set()
    for run in text.strip().split(","):
        first, _, last = run.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def test_processors_agree_everywhere(one: Sandbox) -> None:
    for user in ("root", "user"):
        lists = one.commands.run(f"cat {CPU}/online {CPU}/present {CPU}/possible", user=user).stdout.split()
        (own,) = numbers(lists[0])
        assert [numbers(text) for text in lists] == [{own}] * 3
        for command in ("nproc", "nproc --all", "getconf _NPROCESSORS_ONLN", "getconf _NPROCESSORS_CONF"):
            assert one.commands.run(command, user=user).stdout == "1\n", command
    assert root(one, f"ls -d {CPU}/cpu[0-9]*").split() == [f"{CPU}/cpu{own}"]
    assert root(one, f"cat {CPU}/cpu{own}/topology/core_id").strip().isdigit()
    info = root(one, "cat /proc/cpuinfo")
    assert [line.split()[-1] for line in info.splitlines() if line.startswith("processor")] == [str(own)]
    assert info.count("\nflags") == 1
    counts = "import os; print(os.cpu_count(), len(os.sched_getaffinity(0)))"
    assert root(one, f'python3 -c "{counts}"').split() == ["1", "1"]
    for path in (f"{CPU}/online", "/proc/cpuinfo"):
        assert root(one, f"echo 0-7 2>/dev/null > {path} && echo written || true") == ""


def test_sandboxes_of_one_core_spread_over_the_processors(small: Platform) -> None:
    boxes = [Sandbox.create(timeout=120) for _ in range(4)]
    try:
        own = [numbers(root(box, f"cat {CPU}/online")) for box in boxes]
        assert all(len(numbers) == 1 for numbers in own)
        uses = [sum(number in numbers for numbers in own) for number in os.sched_getaffinity(0)]
        assert max(uses) - min(uses) <= 1, own
    finally:
        for box in boxes:
            box.kill()


def test_a_new_spawner_keeps_to_the_processors(one: Sandbox) -> None:
    before = root(one, "taskset -cp $$ | cut -d: -f2")
    one.commands.run("python3 -c 'import os; os.kill(-1, 9)'", user="root", timeout=20, background=True)
    deadline = time.monotonic() + within(30)
    while True:
        try:
            assert root(one, "taskset -cp $$ | cut -d: -f2") == before
            return
        except Exception:  # noqa: BLE001 - until the spawner is back
            if time.monotonic() > deadline:
                raise


def test_the_machine_is_as_old_as_the_sandbox(small: Platform) -> None:
    begun = time.time()
    with Sandbox.create(timeout=120) as box:
        text = root(
            box,
            "cut -d' ' -f1 /proc/uptime; grep btime /proc/stat | cut -d' ' -f2; ps -o lstart= -p 1; ps -o etimes= -p 1;"
            " uptime -s; python3 -c 'import time; print(time.clock_gettime(time.CLOCK_BOOTTIME), time.monotonic())'",
        )
        age = time.time() - begun
        up, boot, started, elapsed, since, clocks = text.splitlines()
        assert 0 <= float(up) <= age + 1
        assert abs(int(boot) - begun) <= age + 2
        assert 0 <= int(elapsed) <= age + 2
        assert all(0 <= float(clock) <= age + 1 for clock in clocks.split())
        for date in (started, since):
            assert abs(float(root(box, f"date -d '{date}' +%s")) - begun) <= age + 2
        # A process that starts later is younger than the machine, by what lies between.
        handle = box.commands.run("sleep 60", background=True, user="root")
        assert int(root(box, f"ps -o etimes= -p {handle.pid}")) <= time.time() - begun
        handle.kill()



def meminfo(box: Sandbox) -> dict[str, int]:
    """`/proc/meminfo` in MiB."""
    text = root(box, "cat /proc/meminfo")
    return {line.split(":")[0]: int(line.split()[1]) >> 10 for line in text.splitlines()}


def taker(box: Sandbox, mib: int):
    """A program that takes memory and keeps it, once it has."""
    code = f"import sys, time; b = bytearray({mib} << 20); b[::4096] = bytes([1]) * len(b[::4096]); print('has', flush=True); time.sleep(600)"
    handle = box.commands.run(f'python3 -c "{code}"', background=True, timeout=0)
    for out, _, _ in handle:
        if out and "has" in out:
            return handle
    raise AssertionError("the program ended")


def test_memory_that_a_program_takes_is_gone_and_comes_back(one: Sandbox, small: Platform) -> None:
    before = meminfo(one)
    assert before["MemTotal"] == MEMORY_MB
    assert before["SwapTotal"] == before["Buffers"] == 0
    assert MEMORY_MB // 2 < before["MemFree"] <= before["MemAvailable"] <= MEMORY_MB
    with Sandbox.create(timeout=120) as other:
        handle = taker(one, 300)
        after = meminfo(one)
        for name in ("MemFree", "MemAvailable"):
            assert 295 <= before[name] - after[name] <= 340, (name, before, after)
        assert 295 <= after["AnonPages"] - before["AnonPages"] <= 320
        total, used, free, shared, cache, available = (
            int(word) for word in root(one, "free -m | grep Mem").split()[1:]
        )
        assert total == MEMORY_MB and 295 <= used <= 345 and free + cache + used <= MEMORY_MB + 2
        # The neighbour has all of its own.
        assert meminfo(other)["MemAvailable"] >= before["MemAvailable"] - 20
        handle.kill()
        until(lambda: meminfo(one)["MemAvailable"] >= before["MemAvailable"] - 20, "the memory is back")
    # Files in memory are taken, files on the disk can be dropped.
    root(one, "head -c 100M /dev/zero > /dev/shm/taken")
    held = meminfo(one)
    assert before["MemAvailable"] - held["MemAvailable"] >= 95
    assert held["Shmem"] >= 95 and held["Cached"] >= 95
    root(one, "rm /dev/shm/taken; head -c 100M /dev/zero > /tmp/file; sync /tmp/file; cat /tmp/file > /dev/null")
    cached = meminfo(one)
    assert cached["Cached"] >= 95 and before["MemAvailable"] - cached["MemAvailable"] <= 20


def cpu_lines(box: Sandbox) -> list[list[int]]:
    lines = [line.split() for line in root(box, "cat /proc/stat").splitlines() if line.startswith("cpu")]
    return [[int(word) for word in line[1:]] for line in lines]


@pytest.mark.alone("it measures processor time")
def test_processor_time_is_the_sandboxes_own(one: Sandbox, small: Platform) -> None:
    with Sandbox.create(timeout=120) as other:
        names = [line.split()[0] for line in root(one, "cat /proc/stat").splitlines()]
        assert names[:2] == ["cpu", f"cpu{root(one, f'cat {CPU}/online').strip()}"] and names[2] == "intr"
        before, theirs = cpu_lines(one), cpu_lines(other)
        assert before[0] == before[1]
        root(one, "timeout 3 sh -c 'while :; do :; done' || true")
        after = cpu_lines(one)
        busy, idle = after[0][0] + after[0][2] - before[0][0] - before[0][2], after[0][3] - before[0][3]
        # Three seconds of one core in ticks of a hundredth; on a busy machine it gets less.
        assert 30 <= busy <= 360 and idle >= 0, (before, after)
        spent = [b - a for a, b in zip(theirs[0], cpu_lines(other)[0])]
        assert spent[0] + spent[2] < 100 and spent[3] > 0, spent
        up, idle_time = (float(word) for word in root(one, "cat /proc/uptime").split())
        assert 0 <= idle_time <= up + 0.1
        assert root(one, "uptime").count("load average") == 1
        top = root(one, "top -bn1 | head -5")
        assert re.search(rf"MiB Mem : +{MEMORY_MB}\.0 total", top), top
        assert len(root(one, "vmstat 1 2").splitlines()[-1].split()) >= 17


@pytest.mark.alone("it measures the load of sandboxes, which wait for a processor where others use it")
def test_load_is_that_of_the_sandbox(one: Sandbox, small: Platform) -> None:
    with Sandbox.create(timeout=120) as other:
        spin = "for i in 1 2 3 4; do (while :; do :; done) & done; sleep 600"
        handle = one.commands.run(spin, background=True, timeout=0)

        def loads(box: Sandbox) -> tuple[float, int]:
            one_minute, _, _, tasks, _ = root(box, "cat /proc/loadavg").split()
            return float(one_minute), int(tasks.split("/")[0])

        assert loads(other)[0] <= 1
        until(lambda: loads(one)[0] > 0.3, "the load rises", 60)
        assert loads(one)[1] >= 4
        assert loads(other)[0] < 0.3 and loads(other)[1] <= 2
        handle.kill()


REREAD = """
import json, os
out = {}
for name in ("stat", "meminfo", "uptime", "loadavg", "vmstat"):
    fd = os.open(f"/proc/{name}", os.O_RDONLY)
    whole = os.read(fd, 65536)
    assert os.read(fd, 65536) == b""
    again = os.pread(fd, 65536, 0)
    os.lseek(fd, 0, os.SEEK_SET)
    # Byte for byte, while others read: a text is of one moment.
    bytewise = b""
    while byte := os.read(fd, 1):
        bytewise += byte
        if len(bytewise) % 50 == 0:
            open(f"/proc/{name}", "rb").read()
    out[name] = [text.decode() for text in (whole, again, bytewise)]
    assert os.fstat(fd).st_size == 0
    os.close(fd)
print(json.dumps(out))
"""


def test_a_descriptor_is_read_again_and_a_text_is_of_one_moment(one: Sandbox) -> None:
    one.files.write("/tmp/reread.py", REREAD)
    for name, texts in json.loads(root(one, "python3 /tmp/reread.py")).items():
        shapes = {re.sub(r"[\d.]+", "#", re.sub(r" +", " ", text)) for text in texts}
        assert len(shapes) == 1, (name, texts)
        assert all(text.endswith("\n") for text in texts)


def test_tools_that_look_at_every_file_system_find_nothing_odd(one: Sandbox) -> None:
    shown = one.commands.run("df -P && stat -f -c %T /proc/meminfo && cp /proc/stat /tmp/copy && df /proc/uptime").stdout
    assert not re.search(r"/proc/(meminfo|stat|uptime|loadavg|vmstat)\n", shown.split("fuse")[0]), shown
    assert root(one, "test -s /tmp/copy && test -r /proc/meminfo && ! test -w /proc/meminfo && echo fine") == "fine\n"


def test_many_readers_see_whole_texts_and_block_nothing(one: Sandbox) -> None:
    code = (
        "import sys, time\n"
        "end = time.time() + 5\n"
        "n = 0\n"
        "while time.time() < end:\n"
        "    kb = {l.split(':')[0]: int(l.split()[1]) for l in open('/proc/meminfo')}\n"
        f"    assert kb['MemTotal'] == {MEMORY_MB} * 1024 and kb['MemFree'] <= kb['MemAvailable'] <= kb['MemTotal'], kb\n"
        "    assert sum(1 for l in open('/proc/stat') if l.startswith('cpu')) == 2\n"
        "    n += 1\n"
        "print(n)\n"
    )
    one.files.write("/tmp/reader.py", code)
    outputs: list[str] = []
    flood = threading.Thread(
        target=lambda: outputs.append(
            root(one, "for i in $(seq 12); do python3 /tmp/reader.py & done; wait", timeout=100)
        )
    )
    flood.start()
    while flood.is_alive():
        assert root(one, "echo fine", timeout=30) == "fine\n"
    flood.join()
    counts = [int(word) for word in outputs[0].split()]
    assert len(counts) == 12 and all(count > 0 for count in counts)


def test_the_agent_does_not_wait_for_itself(one: Sandbox) -> None:
    """Files that the agent answers for, where it reads files itself."""
    for name in ("meminfo", "stat", "loadavg"):
        assert one.files.read(f"/proc/{name}") != ""
        assert one.files.get_info(f"/proc/{name}").size == 0
    threads = [threading.Thread(target=lambda: one.files.read("/proc/loadavg")) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    root(one, "cp /etc/passwd /tmp/passwd; cp /etc/group /tmp/group")
    # Root inside makes the list of users one of these; commands for a user fail, and nothing waits.
    root(one, "ln -sf /proc/meminfo /etc/group; ln -sf /proc/meminfo /etc/passwd")
    with pytest.raises(Exception):  # noqa: B017 - which one is not the point
        one.commands.run("true", user="user", timeout=20, request_timeout=20)
    assert one.is_running(request_timeout=20)


def test_cgroups_tell_the_limits(one: Sandbox) -> None:
    """Runtimes look for limits by /proc/self/cgroup and the mount table."""
    paths = {line.split(":")[1]: line.split(":")[2] for line in root(one, "cat /proc/self/cgroup").splitlines()}
    assert set(paths.values()) == {"/"}
    mounts = [line.split() for line in root(one, "cat /proc/self/mountinfo").splitlines()]
    cgroups = {mount[4]: mount for mount in mounts if mount[mount.index("-") + 1].startswith("cgroup")}
    assert cgroups and all(mount[3] == "/" and "ro" in mount[5].split(",") for mount in cgroups.values())
    controllers = [line.split() for line in root(one, "cat /proc/cgroups").splitlines()[1:]]
    assert all(line[2] == "1" for line in controllers)

    def number(path: str) -> int:
        return int(root(one, f"cat /sys/fs/cgroup/{path}"))

    if list(cgroups) == ["/sys/fs/cgroup"]:
        assert number("memory.max") == MEMORY_MB << 20
        quota, period = root(one, "cat /sys/fs/cgroup/cpu.max").split()
        assert int(quota) == int(period)
    else:
        assert number("memory/memory.limit_in_bytes") == MEMORY_MB << 20
        assert number("cpu/cpu.cfs_quota_us") == number("cpu/cpu.cfs_period_us")
        for name in ("memory", "cpu", "cpuacct", "cpuset", "pids", "unified"):
            assert str(root(one, f"ls /sys/fs/cgroup/{name}")), name
        before = number("cpuacct/cpuacct.usage")
        root(one, "python3 -c 'import time\nwhile time.process_time() < 0.5: pass'")
        assert number("cpuacct/cpuacct.usage") - before > 10**8


def test_runtimes_size_themselves_by_the_sandbox(one: Sandbox) -> None:
    java = one.commands.run("java -XshowSettings:system -XX:+PrintFlagsFinal -version 2>&1", timeout=120).stdout
    assert re.search(r"Effective CPU Count: 1\b", java), java
    assert re.search(rf"Memory Limit: {MEMORY_MB}\.00M", java), java
    heap = int(re.search(r"size_t MaxHeapSize\s*=\s*(\d+)", java)[1])
    assert heap <= MEMORY_MB << 19, heap
    code = "const os = require('os'); console.log(os.cpus().length, os.totalmem(), os.freemem(), os.uptime())"
    cpus, total, free, up = one.commands.run(f'node -e "{code}"', timeout=60).stdout.split()
    assert cpus == "1" and int(total) == MEMORY_MB << 20 and 0 < int(free) < int(total) and float(up) < 120
    code = "import multiprocessing as m, os; print(m.cpu_count(), os.cpu_count(), os.getloadavg()[0] < 100)"
    assert one.commands.run(f'python3 -c "{code}"').stdout.split() == ["1", "1", "True"]
    assert one.commands.run("cat > /tmp/Makefile <<'E'\nall:\n\t@echo $$(nproc)\nE\nmake -s -f /tmp/Makefile || nproc").stdout == "1\n"


def test_figures_stay_live_while_no_platform_runs(small: Platform) -> None:
    box = Sandbox.create(timeout=300)
    try:
        code = (
            "import time\n"
            "while True:\n"
            "    kb = {l.split(':')[0]: int(l.split()[1]) for l in open('/proc/meminfo')}\n"
            "    up = open('/proc/uptime').read().split()[0]\n"
            "    with open('/tmp/figures', 'a') as f: f.write(f\"{time.time()} {kb['MemAvailable'] >> 10} {up}\\n\")\n"
            "    time.sleep(0.1)\n"
        )
        box.files.write("/tmp/watch.py", code)
        box.files.write(
            "/tmp/take.py",
            "import signal, time\n"
            "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})\n"
            "open('/tmp/waits', 'w').close()\n"
            "signal.sigwait({signal.SIGUSR1})\n"
            "b = bytearray(200 << 20)\n"
            "b[::4096] = bytes([1]) * len(b[::4096])\n"
            "time.sleep(600)\n",
        )
        mark = f"rf-{uuid.uuid4().hex[:10]}"
        for name in ("watch", "take"):
            box.commands.run(f"exec -a {mark}-{name} python3 /tmp/{name}.py", background=True, timeout=0)
        until(lambda: box.files.exists("/tmp/figures") and box.files.exists("/tmp/waits"), "both programs run")
        (watch,), (take,) = host_pids(f"{mark}-watch"), host_pids(f"{mark}-take")
        small.kill()
        killed = time.time()

        def alone() -> list[tuple[float, int, float]]:
            """The figures since then, from the host; what is being written may be half a line."""
            whole = Path(f"/proc/{watch}/root/tmp/figures").read_text().rpartition("\n")[0]
            rows = [line.split() for line in whole.splitlines()]
            return [(float(at), int(mib), float(up)) for at, mib, up in rows if float(at) >= killed]

        until(lambda: len(alone()) > 0, "there are figures of before")
        os.kill(take, signal.SIGUSR1)
        until(lambda: max(mib for _, mib, _ in alone()) - min(mib for _, mib, _ in alone()) >= 195, lambda: f"the memory is seen: {alone()}")
        until(lambda: alone()[-1][2] - alone()[0][2] > 1, lambda: f"the uptime goes on: {alone()}")
        small.start()
        small.use()
        assert box.commands.run("echo here").stdout == "here\n"
    finally:
        box.kill()


def test_sysinfo(one: Sandbox) -> None:
    """The call does not support cgroup limits: uptime is that of the sandbox, memory that of the host."""
    code = (
        "import ctypes, struct\n"
        "buffer = ctypes.create_string_buffer(256)\n"
        "assert ctypes.CDLL(None).sysinfo(buffer) == 0\n"
        "print(*struct.unpack_from('l3L6L', buffer)[:5])\n"
    )
    one.files.write("/tmp/sysinfo.py", code)
    up, _, _, _, total = (int(word) for word in root(one, "python3 /tmp/sysinfo.py").split())
    assert 0 <= up < 120
    host = int(open("/proc/meminfo").readline().split()[1]) << 10
    assert abs(total - host) < 1 << 20
