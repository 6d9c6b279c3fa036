"""What a neighbour and the operator notice while two sandboxes and 16 anonymous connections attack.

Each attack in turn, then those on the processor, memory and network together. While it goes on, a neighbour's sandboxes
are created and deleted, and `/health` is asked. The suite asserts that everything is answered and stays below a ceiling
of ten times the idle machine's slowest creates; what is promised is less (SPECIFICATION.md) and is measured by a longer
run of the same, which prints its figures:

    RINGFENCE_ATTACK_SAMPLES=300 pytest -s escape/test_neighbours_under_attack.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import httpx
import pytest
from e2b import NotFoundException, Sandbox, SandboxException

from harness.platform import Platform
from harness.traffic import PROGRAMS, program, until

pytestmark = pytest.mark.alone("it measures what others notice of attacks on the whole host")

SAMPLES = int(os.environ.get("RINGFENCE_ATTACK_SAMPLES", "30"))
# What the longer run measures besides.
LONG = ("crowd",) if SAMPLES > 30 else ()
CEILING = 10
# Of so few samples, the slowest hundredth is a single one.
SHARE = 0.99 if SAMPLES >= 100 else 0.95
# Below this, in ms, a stall is the scheduler's and not the platform's: two cores serve attackers, clients and all.
FLOOR_MS = 50.0
# What the host may have less after an attack than before it, in MiB: other programs come and go.
HOST_LOSS_MB = 1024
# Longest that an attack goes on, in seconds.
LONGEST_S = 240.0

CPU = "import os\nfor _ in range(8):\n  if os.fork()==0:\n    while True: pass\nprint('begun',flush=True)\nos.wait()"
FORKS = (
    "import os,signal\nsignal.signal(signal.SIGCHLD,signal.SIG_IGN)\nprint('begun',flush=True)\n"
    "while True:\n  try:\n    if os.fork()==0 and os.getpid()%3: os._exit(0)\n  except OSError: pass"
)
# Never at the limit of processes: each ends at once.
SHORT_LIVED = (
    "import os,signal\nsignal.signal(signal.SIGCHLD,signal.SIG_IGN)\nprint('begun',flush=True)\n"
    "for _ in range(3): os.fork()\n"
    "while True:\n  try:\n    if os.fork()==0: os._exit(0)\n  except OSError: pass"
)
# The same with threads.
THREADS = (
    "import os,_thread\nprint('begun',flush=True)\nfor _ in range(3): os.fork()\n"
    "while True:\n  try: _thread.start_new_thread(lambda: None, ())\n  except RuntimeError: pass"
)
MEMORY = (
    "import os\nprint('begun',flush=True)\n"
    "while True:\n  pid=os.fork()\n  if pid==0:\n    held=[]\n    while True: held.append(bytearray(b'x')*(1<<20))\n"
    "  os.waitpid(pid,0)"
)
# Unread replies of the kernel, on as many sockets as possible.
NETLINK = (
    "import socket,struct,time\nprint('begun',flush=True)\nheld=[]\n"
    "dump=struct.pack('=IHHII',20,18,0x301,1,0)+bytes(4)\n"
    "while True:\n"
    "  try:\n    s=socket.socket(socket.AF_NETLINK,socket.SOCK_RAW,0)\n"
    "    try: s.setsockopt(socket.SOL_SOCKET,socket.SO_RCVBUF,1<<30)\n    except OSError: pass\n"
    "    s.setblocking(False)\n    held.append(s)\n"
    "  except OSError: time.sleep(0.01)\n"
    "  for s in held[-64:]:\n    try: s.send(dump)\n    except OSError: pass"
)
# As many sockets as there can be, which are half uncharged.
NETLINK_SOCKETS = (
    "import os,socket,time\nprint('begun',flush=True)\nheld=[]\nfor _ in range(5): os.fork()\n"
    "while True:\n  try: held.append(socket.socket(socket.AF_NETLINK,socket.SOCK_RAW,0))\n"
    "  except OSError: time.sleep(0.01)"
)
# Ends whatever starts commands and stops everything that comes up in its place. Its own process is not stopped by -1.
STOPPING = (
    "import os,signal\nprint('begun',flush=True)\n"
    "while True:\n"
    "  for name in os.listdir('/proc'):\n"
    "    if name.isdigit() and int(name) not in (1,os.getpid()):\n"
    "      try: os.kill(int(name),signal.SIGKILL if int(name)%2 else signal.SIGSTOP)\n      except OSError: pass\n"
    "  try: os.kill(-1,signal.SIGSTOP)\n  except OSError: pass"
)
INSIDE = {
    "cpu": CPU,
    "forks": FORKS,
    "short_lived": SHORT_LIVED,
    "threads": THREADS,
    "memory": MEMORY,
    "netlink": NETLINK,
    "netlink_sockets": NETLINK_SOCKETS,
    "stopping": STOPPING,
}
# All but the one that stops processes: it would stop the others' too.
TOGETHER = ("cpu", "forks", "memory", "netlink")
TOGETHER_ANONYMOUS = {"signed": 6, "heads": 5, "server": 5}
# Each with sandboxes and connections of its own: eight sandboxes and 48 connections.
CROWD = (*TOGETHER, *TOGETHER_ANONYMOUS)


@dataclass
class Seen:
    """What clients saw, in milliseconds."""

    creates: list[float]
    healths: list[float]
    faults: list[str]

    def line(self, name: str) -> str:
        both = (
            f"{what} p50 {at(times, 0.5):.1f} p99 {at(times, 0.99):.1f} max {max(times):.1f} ms (n {len(times)})"
            for what, times in (("create", self.creates), ("health", self.healths))
        )
        return f"{name:<10} " + "; ".join(both)


def at(times: list[float], share: float) -> float:
    return sorted(times)[min(int(len(times) * share), len(times) - 1)]


def look(platform: Platform, samples: int) -> Seen:
    """Creates and deletes sandboxes one after another, and asks for health meanwhile."""
    seen = Seen([], [], [])
    done = threading.Event()

    def ask_health() -> None:
        with httpx.Client(timeout=30) as client:
            while not done.is_set():
                begun = time.monotonic()
                try:
                    if (status := client.get(f"{platform.url}/health").status_code) != 200:
                        seen.faults.append(f"health answered {status}")
                except httpx.HTTPError as error:
                    seen.faults.append(f"health: {error!r}")
                seen.healths.append((time.monotonic() - begun) * 1000)
                done.wait(0.02)

    asking = threading.Thread(target=ask_health)
    asking.start()
    try:
        with httpx.Client(timeout=60, headers={"X-API-Key": os.environ["E2B_API_KEY"]}) as client:
            for _ in range(samples):
                begun = time.monotonic()
                made = client.post(f"{platform.url}/sandboxes", json={"templateID": "base", "timeout": 60})
                seen.creates.append((time.monotonic() - begun) * 1000)
                if made.status_code != 201:
                    seen.faults.append(f"create answered {made.status_code}: {made.text[:200]}")
                    continue
                gone = client.delete(f"{platform.url}/sandboxes/{made.json()['sandboxID']}")
                if gone.status_code != 204:
                    seen.faults.append(f"delete answered {gone.status_code}: {gone.text[:200]}")
    finally:
        done.set()
        asking.join()
    return seen


def was_ended(box: Sandbox) -> bool:
    try:
        box.get_info()
    except NotFoundException:
        return True
    return False


@contextmanager
def inside(*kinds: str) -> Iterator[None]:
    """The attacks from inside two sandboxes; one by root and one by an ordinary user."""
    boxes = [Sandbox.create(timeout=600) for _ in range(2)]
    try:
        for box, user in zip(boxes, ("root", "user")):
            try:
                for kind in kinds:
                    box.files.write(f"/tmp/{kind}.py", INSIDE[kind], user="root")
                    command = f"ulimit -n $(ulimit -Hn); exec python3 /tmp/{kind}.py"
                    handle = box.commands.run(command, background=True, user=user, timeout=0)
                    out, error, _ = next(iter(handle))
                    assert out == "begun\n", error
            except SandboxException:
                # The only reason: the platform has ended it already for what it did with the kinds before.
                until(lambda box=box: was_ended(box), "it is ended for what it did")
        yield
    finally:
        for box in boxes:
            # The platform may have ended it for what it did.
            box.kill()


@contextmanager
def anonymous(kind: str, platform: Platform, connections: int = 16) -> Iterator[None]:
    """The attack by connections that present nothing."""
    with ExitStack() as stack:
        name = "-"
        if kind == "server":
            box = stack.enter_context(Sandbox.create(timeout=600))
            box.files.write("/tmp/attack.py", program("endless_answers.py"))
            next(iter(box.commands.run("exec python3 /tmp/attack.py", background=True, timeout=0)))
            name = box.get_host(8000)
        load = subprocess.Popen(
            [
                *(sys.executable, PROGRAMS / "anonymous_load.py"),
                *(kind, "127.0.0.1", str(platform.port), name, str(LONGEST_S), str(connections)),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert load.stdout and load.stdout.readline() == "begun\n"
            yield
        finally:
            load.kill()
            load.wait()


@contextmanager
def together(platform: Platform) -> Iterator[None]:
    """Attacks of all kinds from two sandboxes and 16 connections. Those that make the most processes come last: they leave no
    place for others."""
    with ExitStack() as stack:
        for kind, connections in TOGETHER_ANONYMOUS.items():
            stack.enter_context(anonymous(kind, platform, connections))
        stack.enter_context(inside("cpu", "netlink", "memory", "forks"))
        yield


@contextmanager
def crowd(platform: Platform) -> Iterator[None]:
    with ExitStack() as stack:
        for kind in CROWD:
            stack.enter_context(begin(kind, platform))
        yield


def begin(kind: str, platform: Platform) -> AbstractContextManager[None]:
    if kind in INSIDE:
        return inside(kind)
    several = {"together": together, "crowd": crowd}
    return several[kind](platform) if kind in several else anonymous(kind, platform)


def host_loss_mb(before_kb: int) -> int:
    return (before_kb - available_kb()) // 1024


def available_kb() -> int:
    return next(int(line.split()[1]) for line in open("/proc/meminfo") if line.startswith("MemAvailable"))


@pytest.fixture(scope="module")
def idle(platform: Platform) -> Seen:
    seen = look(platform, max(SAMPLES, 30))
    print("\n" + seen.line("idle"))
    assert seen.faults == []
    return seen


@pytest.mark.parametrize("attack", [*INSIDE, "signed", "heads", "server", "documentation", "together", *LONG])
def test_neighbours_are_served(platform: Platform, idle: Seen, attack: str) -> None:
    before_kb = available_kb()
    lowest_kb = before_kb
    with begin(attack, platform):
        seen = look(platform, SAMPLES)
        lowest_kb = min(lowest_kb, available_kb())
    print("\n" + seen.line(attack))
    assert seen.faults == []
    for what, values, idle_values in (("create", seen.creates, idle.creates), ("health", seen.healths, idle.healths)):
        ceiling = CEILING * max(at(idle_values, SHARE), FLOOR_MS)
        assert at(values, SHARE) <= ceiling, f"{what} above {ceiling:.0f} ms: {sorted(values)[-3:]}"
    # What attackers hold while they attack is bounded by their own limits: two sandboxes of 1 GiB for each kind.
    kinds = len(TOGETHER) if attack == "crowd" else 1
    assert (before_kb - lowest_kb) // 1024 < 2 * kinds * 1024 + HOST_LOSS_MB
    until(lambda: host_loss_mb(before_kb) < HOST_LOSS_MB, "the host has its memory back", within_s=60)
    with Sandbox.create(timeout=60) as box:
        assert box.commands.run("echo fine").stdout == "fine\n"
