"""What the agent does for a client is charged to the sandbox: it counts in its limits and in its metrics, and is bounded.

Clients reach the agent with the sandbox's token, and code inside reaches it, too; neither may make it use memory or
CPU time that is not charged. Figures are read on the host: the groups of a sandbox below the platform's tree.
"""

from __future__ import annotations

import glob
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from platform import machine

import httpx
import pytest
from e2b import Sandbox
from e2b.exceptions import SandboxException

from harness.inside import Background, attack_spawner, root, starts, status
from harness.platform import Platform
from harness.traffic import until

MB = 1 << 20
MEMORY_MB = 1024
# What a sandbox may have beyond its limits, for its agent.
MARGIN_MB = 64
MARGIN_CORES = 0.2


def groups(sandbox: Sandbox, controller: str, *names: str) -> list[Path]:
    """Outermost control groups of a sandbox that have one of these files, as paths of that file."""
    found = []
    for mount in (f"/sys/fs/cgroup/{controller}", "/sys/fs/cgroup"):
        for name in names:
            found += glob.glob(f"{mount}/ringfence-*/{sandbox.sandbox_id}.*/{name}")
        if found:
            return [Path(path) for path in found]
    raise AssertionError(f"no group of {sandbox.sandbox_id} counts {controller}")


def charged_mb(sandbox: Sandbox) -> float:
    """Memory that the kernel charges to the sandbox, agent included."""
    files = groups(sandbox, "memory", "memory.usage_in_bytes", "memory.current")
    return sum(int(file.read_text()) for file in files) / MB


def peak_mb(sandbox: Sandbox) -> float:
    """The most memory that was ever charged."""
    files = groups(sandbox, "memory", "memory.max_usage_in_bytes", "memory.peak")
    return sum(int(file.read_text()) for file in files) / MB


def cpu_seconds(sandbox: Sandbox) -> float:
    """Processor time of everything in the sandbox since its start, agent included."""
    texts = [file.read_text() for file in groups(sandbox, "unified", "cpu.stat")]
    return sum(int(dict(line.split() for line in text.splitlines())["usage_usec"]) for text in texts) / 1e6


def agent(sandbox: Sandbox) -> list[str]:
    """The agent's pid on the host: another one is another sandbox."""
    for mount in ("/sys/fs/cgroup/unified", "/sys/fs/cgroup"):
        for group in (f"{sandbox.sandbox_id}.*/agent", f"{sandbox.sandbox_id}.*"):
            if found := glob.glob(f"{mount}/ringfence-*/{group}/cgroup.procs"):
                return Path(found[0]).read_text().split()
    raise AssertionError("the agent has no group")


def cores_allowed(pid: str) -> float:
    """The processor limit that holds for a process of the host: the narrowest of its group and those above."""
    limits = [float("inf")]
    for line in open(f"/proc/{pid}/cgroup"):
        _, controllers, path = line.strip().split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        for mount in (f"/sys/fs/cgroup/{controllers}", "/sys/fs/cgroup/cpu", "/sys/fs/cgroup"):
            for group in [Path(mount + path), *Path(mount + path).parents][: path.count("/") + 1]:
                try:
                    quota = (group / "cpu.cfs_quota_us").read_text(), (group / "cpu.cfs_period_us").read_text()
                except OSError:
                    try:
                        quota = tuple((group / "cpu.max").read_text().split())
                    except OSError:
                        continue
                if quota[0].strip() not in ("-1", "max"):
                    limits.append(int(quota[0]) / int(quota[1]))
    return min(limits)


class Control:
    """Requests to the agent as an SDK makes them, without one."""

    def __init__(self, platform: Platform, sandbox: Sandbox) -> None:
        self.platform = platform
        self.headers = {
            "Host": sandbox.get_host(49983),
            "X-Access-Token": str(sandbox._envd_access_token),
            "Authorization": "Basic cm9vdDo=",
        }

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.platform.url, headers=self.headers, timeout=120)

    def unfinished(self, path: str, length: int, sent: int) -> socket.socket:
        """A request whose body stops on the way."""
        connection = socket.create_connection(("127.0.0.1", self.platform.port))
        head = {**self.headers, "Content-Type": "application/json", "Content-Length": str(length)}
        lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
        connection.sendall(f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + b"{" + b" " * (sent - 1))
        return connection


@pytest.fixture
def control(platform: Platform, sandbox: Sandbox) -> Control:
    return Control(platform, sandbox)


@pytest.fixture(autouse=True)
def host_and_neighbour_keep_theirs(sandbox: Sandbox, neighbour: Sandbox) -> Iterator[None]:
    """Whatever a test does: the agent is the same and answers, nothing goes beyond the margin, and the neighbour lives."""
    before = agent(sandbox)
    assert before
    yield
    assert agent(sandbox) == before
    assert peak_mb(sandbox) <= MEMORY_MB + MARGIN_MB
    until(lambda: starts(sandbox), "the sandbox works", within_s=60)
    assert root(neighbour, "echo untouched") == "untouched\n"


def test_an_upload_into_memory_counts(sandbox: Sandbox) -> None:
    before = charged_mb(sandbox)
    sandbox.files.write("/dev/shm/upload", bytes(400 * MB), request_timeout=120)
    assert charged_mb(sandbox) - before >= 390

    def told() -> bool:
        samples = sandbox.get_metrics()
        assert all(sample.mem_used <= sample.mem_total == MEMORY_MB * MB for sample in samples)
        return bool(samples) and samples[-1].mem_used >= 390 * MB

    until(told, "the metrics count it")
    root(sandbox, "rm /dev/shm/upload")
    assert charged_mb(sandbox) - before < 100


def test_what_is_uploaded_and_what_runs_share_one_limit(sandbox: Sandbox) -> None:
    hold = "x=[bytearray(b'x')*(1<<20) for _ in range(900)]; print('held',flush=True); import time; time.sleep(600)"
    hog = Background(sandbox, hold, "root")
    assert hog.said == "held\n"
    assert charged_mb(sandbox) >= 900
    # 1,300 MiB are more than limit and margin: the kernel ends the program, and the agent goes on.
    sandbox.files.write("/dev/shm/upload", bytes(400 * MB), request_timeout=120)
    until(lambda: status(sandbox, f"kill -0 {hog.handle.pid}") != 0, "the kernel has ended it")
    assert root(sandbox, "stat -c %s /dev/shm/upload").strip() == str(400 * MB)
    # What lies there leaves that much less for programs.
    assert status(sandbox, 'exec python3 -c "bytearray(750<<20)"') in (-1, 137)
    assert status(sandbox, 'exec python3 -c "bytearray(300<<20)"') == 0


def test_names_in_memory_are_counted_and_bounded(sandbox: Sandbox, control: Control) -> None:
    """Directories hold no content, so the size of their file system does not count them."""
    before = charged_mb(sandbox)
    made = 0
    refused = None
    with control.client() as client:
        for number in range(200):
            # Each level is a directory of its own.
            path = f"/dev/shm/{number}" + "/d" * 999
            answer = client.post("/filesystem.Filesystem/MakeDir", json={"path": path})
            if answer.status_code != 200:
                refused = answer
                break
            made += 1000
    assert refused is not None, f"{made} directories were made"
    assert made <= 40_000
    assert refused.status_code in (507, 429, 500), refused.text
    assert "no space" in refused.text.lower() or "inodes" in refused.text.lower() or "full" in refused.text.lower()
    assert charged_mb(sandbox) - before >= made / 2000, "they are the sandbox's memory"
    root(sandbox, "cd /dev/shm && rm -rf ./*")


def test_files_without_owner_processes_are_limited_too(sandbox: Sandbox) -> None:
    """Segments of System V shared memory stay when the process that made them is gone, and no kill frees them."""
    take = (
        "import ctypes\nlibc=ctypes.CDLL(None,use_errno=True)\nlibc.shmat.restype=ctypes.c_void_p\nn=0\n"
        "while n<2000:\n s=libc.shmget(0,1<<20,0o1600)\n if s<0: break\n"
        " ctypes.memset(libc.shmat(s,None,0),1,1<<20); n+=1\nprint(n)"
    )
    sandbox.files.write("/tmp/take.py", take)
    assert 0 < int(root(sandbox, "python3 /tmp/take.py")) <= MEMORY_MB // 4
    with pytest.raises(SandboxException):
        sandbox.files.write("/dev/shm/upload", bytes(600 * MB), request_timeout=120)
    root(sandbox, "rm -f /dev/shm/upload; ipcrm --all=shm")


def test_messages_on_their_way_count(sandbox: Sandbox, control: Control) -> None:
    before = charged_mb(sandbox)
    with ExitStack() as stack:
        for _ in range(3):
            # The agent takes 16 MiB at most for one.
            body = control.unfinished("/filesystem.Filesystem/MakeDir", length=15 * MB, sent=14 * MB)
            stack.enter_context(closing(body))
        until(lambda: charged_mb(sandbox) - before >= 40, "they are the sandbox's memory")
    until(lambda: charged_mb(sandbox) - before < 40, "they are let go of")


FAKE_SPAWNER = """
import os, select, socket, time
held, got, taken, end = [], 0, 0, time.monotonic() + 12
while time.monotonic() < end:
    for pid in filter(str.isdigit, os.listdir('/proc')):
        try:
            line = open(f'/proc/{pid}/cmdline', 'rb').read().split(b'\\0')
            if line[1:2] == [b'spawner']:
                os.kill(int(pid), 9)
                taken += 1
        except OSError:
            pass
    fake = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Where the queue is full, it waits.
    fake.settimeout(0.2)
    try:
        fake.connect('\\0ringfence/spawner')
    except OSError:
        continue
    # Data that can be read is a request; a closed connection reads as its end.
    readable, _, _ = select.select([fake], [], [], 0.2)
    if readable and fake.recv(1, socket.MSG_PEEK):
        got += 1
        held.append(fake)
print(taken, got, flush=True)
"""


def test_only_the_host_can_provide_a_spawner(sandbox: Sandbox, control: Control) -> None:
    """What the agent takes for its spawner is handed the streams of every process, and makes the agent hold what it
    does not read."""
    sandbox.files.write("/tmp/fake.py", FAKE_SPAWNER, user="root")
    fake = attack_spawner(sandbox, "python3 /tmp/fake.py")
    large = {"process": {"cmd": "true", "envs": {f"V{n}": "x" * 100_000 for n in range(10)}}}
    message = httpx.Request("POST", "http://x", json=large).content
    done = threading.Event()

    def ask() -> None:
        with control.client() as client:
            while not done.is_set():
                try:
                    body = b"\0" + len(message).to_bytes(4) + message
                    head = {"Content-Type": "application/connect+json"}
                    client.post("/process.Process/Start", content=body, headers=head, timeout=20)
                except httpx.HTTPError:
                    pass

    asking = [threading.Thread(target=ask) for _ in range(4)]
    for thread in asking:
        thread.start()
    try:
        taken, got = map(int, fake.wait().stdout.split())
    finally:
        done.set()
        for thread in asking:
            thread.join()
    assert taken >= 1, "a spawner was killed, so its place was free"
    assert got == 0, f"{got} requests were sent to another process"


def busy(work: list[Callable[[httpx.Client], object]], control: Control, seconds: float) -> None:
    """Has the agent do all of this at once and again and again."""
    end = time.monotonic() + seconds
    failures: list[BaseException] = []

    def repeat(one: Callable[[httpx.Client], object]) -> None:
        try:
            with control.client() as client:
                while time.monotonic() < end:
                    one(client)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=repeat, args=(one,)) for one in work for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def compressed(client: httpx.Client) -> None:
    with client.stream("GET", "/files?path=/home/user/text.txt", headers={"Accept-Encoding": "gzip"}) as answer:
        # Not compressed when enough of them are.
        assert answer.status_code == 200
        for _ in answer.iter_raw():
            pass


def listed(client: httpx.Client) -> None:
    answer = client.post("/filesystem.Filesystem/ListDir", json={"path": "/home/user/many", "depth": 1})
    assert answer.status_code == 200, answer.text


def measured(client: httpx.Client) -> None:
    assert client.get("/metrics").status_code in (200, 500)


@pytest.fixture
def one_core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    own = Platform(tmp_path_factory.mktemp("core") / "data", config="[sandbox]\ncpu_count = 1\ndisk_mb = 768\n")
    try:
        own.start()
        own.use()
        yield own
    finally:
        own.close()


@pytest.mark.alone("it measures processor time")
def test_the_agents_work_shares_the_processor_limit(one_core: Platform, platform: Platform) -> None:
    """Compressing downloads, listing directories, reading metrics: all within the sandbox's one core and its margin, and
    told to readers of the metrics."""
    try:
        with Sandbox.create(timeout=120) as box:
            control = Control(one_core, box)
            assert cores_allowed(agent(box)[0]) == pytest.approx(1 + MARGIN_CORES)
            root(box, "head -c 60M /dev/urandom | base64 > /home/user/text.txt")
            root(box, "mkdir /home/user/many && cd /home/user/many && seq 3000 | xargs touch")

            def cores() -> float:
                began, since = cpu_seconds(box), time.monotonic()
                busy([compressed, listed, measured], control, 8)
                return (cpu_seconds(box) - began) / (time.monotonic() - since)

            agents = cores()
            # A sample tells the five seconds before it, and not all of them need lie in the eight.
            until(lambda: max(told.cpu_used_pct for told in box.get_metrics()) >= 50 * agents, "the metrics tell of it")
            for _ in range(2):
                box.commands.run("while :; do :; done", background=True, user="root", timeout=0)
            together = cores()
            print(f"agent alone {agents:.2f}, with a busy workload {together:.2f} cores of 1")
            assert agents > 0.1, "nothing was measured"
            # A period's quota more or less at either end.
            assert max(agents, together) <= 1 + MARGIN_CORES + 0.1
            assert root(box, "echo alive") == "alive\n"
    finally:
        platform.use()


def test_the_program_of_an_agent_can_be_mapped_by_huge_pages(sandbox: Sandbox) -> None:
    """Otherwise each start of one takes hundreds of page faults, and each idle one has page tables for all of the program.
    Whether there are any depends on how fragmented the memory of the host is."""
    if machine() != "x86_64" or not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("there are no huge pages of this size")
    (pid,) = agent(sandbox)
    program = "/run/ringfence/agent"
    mounts = [line.split() for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
    (options,) = [fields[-1].split(",") for fields in mounts if fields[4] == program]
    assert "huge=within_size" in options, options
    maps = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if line.endswith(program)]
    (code,) = [fields for fields in maps if "x" in fields[1]]
    start, offset = int(code[0].partition("-")[0], 16), int(code[2], 16)
    assert (start - offset) % (2 * MB) == 0, code
