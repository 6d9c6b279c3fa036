"""Sandboxes that create processes and threads without end: they are slowed down, and those that only create many are not."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox
from e2b.exceptions import SandboxException, SandboxUnreachableException, TimeoutException

from harness.beside import beside
from harness.elapse import nothing_for
from harness.inside import Background, root
from harness.patience import within
from harness.platform import Platform
from harness.traffic import until

pytestmark = pytest.mark.alone("its storms of processes slow the whole host down, and are told from honest work by their pace")

IGNORED = "import os,signal,_thread\nsignal.signal(signal.SIGCHLD,signal.SIG_IGN)\nprint('begun',flush=True)\n"
# Nothing waits for what was created, so it piles up.
STORMS = {
    "processes": IGNORED + "for _ in range(4): os.fork()\nwhile True:\n  try:\n    if os.fork()==0: os._exit(0)\n  except OSError: pass",
    "threads": IGNORED + "for _ in range(2): os.fork()\nwhile True:\n  try: _thread.start_new_thread(lambda: None, ())\n  except RuntimeError: pass",
}
LOW = "[sandbox]\nprocesses_per_second = 500\n"
# What a configure script does, and what a build or a test suite does on several cores.
HONEST = {
    "script": "for i in $(seq 2000); do x=$(echo $i | tr 1 2); done",
    "build": "seq 300 | xargs -P 8 -n 1 sh -c 'test -n \"$0\" && head -c 2000000 /dev/zero | sha256sum > /dev/null'",
}


def events(server: Platform, sandbox_id: str) -> list[str]:
    headers = {"X-API-Key": os.environ["E2B_API_KEY"]}
    answer = httpx.get(f"{server.url}/v2/sandboxes/{sandbox_id}/logs", params={"limit": 1000}, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return [entry["fields"].get("event_type", "") for entry in answer.json()["logs"]]


def quota_us(sandbox: Sandbox) -> int:
    """Processor time of the workload in each tenth of a second, as the kernel has it."""
    name = f"ringfence-*/{sandbox.sandbox_id}.*/work"
    files = [
        *Path("/sys/fs/cgroup").glob(f"cpu*/{name}/cpu.cfs_quota_us"),
        *Path("/sys/fs/cgroup").glob(f"{name}/cpu.max"),
    ]
    # `cpu` and `cpu,cpuacct` may be the same mount.
    return int(files[0].read_text().split()[0])


def answers(sandbox: Sandbox) -> bool:
    """Whether a command runs. One that is not started within seconds, because the storm leaves it no time, is refused, and
    so is one that comes while the storm has all processes of the sandbox; one that has started waits for hundreds of
    processes each time."""
    try:
        return root(sandbox, "echo answered") == "answered\n"
    except (SandboxUnreachableException, TimeoutException):
        return False
    except SandboxException as refused:
        assert "fork: process limit of the sandbox reached" in str(refused), refused
        return False


def end_storm(sandbox: Sandbox) -> None:
    """From outside: inside, no process can be created to do it."""
    groups = [*Path("/sys/fs/cgroup").glob(f"unified/ringfence-*/{sandbox.sandbox_id}.*/work/cgroup.procs")]
    groups += Path("/sys/fs/cgroup").glob(f"ringfence-*/{sandbox.sandbox_id}.*/work/cgroup.procs")

    def storming() -> list[int]:
        found = []
        for pid in groups[0].read_text().split():
            try:
                if b"/tmp/background-" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(int(pid))
            except OSError:
                continue
        return found

    def ended() -> bool:
        for pid in storming():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        return not storming()

    until(ended, "the storm is over", within_s=60)


@pytest.mark.parametrize("kind", list(HONEST))
def test_what_waits_for_its_processes_is_not_slowed(platform: Platform, sandbox: Sandbox, kind: str) -> None:
    begun = time.monotonic()
    root(sandbox, HONEST[kind], timeout=120)
    print(f"{kind}: {time.monotonic() - begun:.1f} s")
    assert "cpu_throttled" not in events(platform, sandbox.sandbox_id)


@pytest.fixture(scope="module")
def watched(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """A platform with a limit that a storm is far beyond on any machine."""
    with beside(platform, tmp_path_factory.mktemp("watched"), LOW) as server:
        yield server


@pytest.fixture
def stormy(watched: Platform) -> Iterator[Sandbox]:
    watched.use()
    box = Sandbox.create(timeout=600)
    try:
        yield box
    finally:
        box.kill()


@pytest.mark.parametrize("user", ["root", "user"])
@pytest.mark.parametrize("kind", list(STORMS))
def test_a_storm_is_slowed_and_let_go_once_it_is_over(watched: Platform, stormy: Sandbox, kind: str, user: str) -> None:
    full = quota_us(stormy)
    storm = Background(stormy, STORMS[kind], user)
    until(lambda: "cpu_throttled" in events(watched, stormy.sandbox_id), "it is limited", within_s=30)
    assert quota_us(stormy) < full
    # The agent is not limited, and commands run, if slowly.
    until(lambda: answers(stormy), "a command runs", within_s=180)
    end_storm(stormy)
    until(lambda: "cpu_resumed" in events(watched, stormy.sandbox_id), "it is let go", within_s=90)
    assert quota_us(stormy) == full
    del storm


def test_a_slowed_sandbox_ends_at_once(watched: Platform, stormy: Sandbox) -> None:
    Background(stormy, STORMS["processes"], "user")
    until(lambda: "cpu_throttled" in events(watched, stormy.sandbox_id), "it is limited", within_s=30)
    begun = time.monotonic()
    assert stormy.kill()
    assert time.monotonic() - begun < within(10)


def test_a_limit_ends_with_the_next_start(platform: Platform, tmp_path: Path) -> None:
    with beside(platform, tmp_path, LOW) as server:
        box = Sandbox.create(timeout=300)
        full = quota_us(box)
        storm = Background(box, STORMS["threads"], "user")
        until(lambda: quota_us(box) < full, "it is limited", within_s=30)
        assert server.process
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        assert quota_us(box) < full, "no platform, no change"
        end_storm(box)
        server.start()
        server.use()
        assert quota_us(box) == full
        # What has ended still counts until it is reaped.
        until(lambda: answers(box), "a command runs")
        del storm


def test_an_operator_can_switch_it_off(platform: Platform, tmp_path: Path) -> None:
    with beside(platform, tmp_path, config="[sandbox]\nprocesses_per_second = 0\n") as server:
        box = Sandbox.create(timeout=300)
        full = quota_us(box)
        Background(box, STORMS["threads"], "user")
        # Long enough to be limited several times.
        nothing_for(5)
        assert quota_us(box) == full
        assert "cpu_throttled" not in events(server, box.sandbox_id)
        assert box.kill()
