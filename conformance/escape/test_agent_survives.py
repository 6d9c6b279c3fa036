"""Process 1, the agent: no call that acts on another process ends it, slows it down or takes its hearing."""

from __future__ import annotations

import pytest
from e2b import Sandbox

from harness.inside import root, status

# Each would succeed on a process of the caller's own user; the agent runs as the sandbox's root.
ACTS = {
    "open files": "prlimit --pid 1 --nofile=0:0",
    "file size": "prlimit --pid 1 --fsize=0:0",
    "processor time": "prlimit --pid 1 --cpu=1:1",
    "address space": "prlimit --pid 1 --as=4096:4096",
    "memory files": "prlimit --pid 1 --data=4096:4096",
    "threads": "prlimit --pid 1 --nproc=0:0",
    "stack": "prlimit --pid 1 --stack=0:0",
    "queued signals": "prlimit --pid 1 --sigpending=0:0",
    "nice": "renice -n 19 -p 1",
    "nice of a group": "renice -n 19 -g 1",
    "idle class": "chrt --idle --pid 0 1",
    "batch class": "chrt --batch --pid 0 1",
    "disk priority": "ionice --class 3 --pid 1",
    "disk priority of a group": "ionice --class 3 --pgid 1",
    "first to be killed": "echo 1000 > /proc/1/oom_score_adj",
    "first to be killed, in old words": "echo 15 > /proc/1/oom_adj",
    "first to be killed, as a thread": "echo 1000 > /proc/1/task/1/oom_score_adj",
    "group of the scheduler": "echo 19 > /proc/1/autogroup",
    "slack of timers": "echo 4000000000 > /proc/1/timerslack_ns",
    "accessed bits": "echo 1 > /proc/1/clear_refs",
    "what a core has": "echo 0 > /proc/1/coredump_filter",
}


@pytest.mark.parametrize("user", ["root", "user"])
def test_nothing_that_acts_on_another_process_reaches_the_agent(sandbox: Sandbox, user: str) -> None:
    reached = [name for name, act in ACTS.items() if status(sandbox, act, user=user, timeout=20) == 0]
    assert reached == []
    assert root(sandbox, "echo heard") == "heard\n"
    sandbox.files.write("/home/user/large", "x" * 2_000_000)
    assert len(sandbox.files.read("/home/user/large")) == 2_000_000


@pytest.mark.parametrize("user", ["root", "user"])
def test_processes_of_the_workload_set_each_others_limits_and_priorities(sandbox: Sandbox, user: str) -> None:
    script = (
        "set -e; sleep 60 & p=$!; prlimit --pid $p --nofile=100:100; renice -n 5 -p $p > /dev/null; ionice -c 3 -p $p;"
        " chrt --idle --pid 0 $p; taskset -p 1 $p > /dev/null; grep -c '100  *100' /proc/$p/limits; kill $p"
    )
    assert sandbox.commands.run(script, user=user).stdout == "1\n"


def test_priorities_of_all_of_a_users_processes_stay(sandbox: Sandbox) -> None:
    status(sandbox, "renice -n 19 -u root; ionice -c 3 -u 0")
    nice = root(sandbox, "ps -o ni= -p 1 || cut -d' ' -f19 /proc/1/stat").strip()
    assert nice == "0"
    assert root(sandbox, "ionice -p 1").strip() in ("none: prio 0", "none: prio 4")


def test_what_the_workload_starts_is_killed_before_what_starts_it(sandbox: Sandbox) -> None:
    script = "until grep -qx 500 /proc/$$/oom_score_adj; do :; done; cat /proc/self/oom_score_adj"
    for user in ("root", "user"):
        assert sandbox.commands.run(script, user=user, timeout=20).stdout == "500\n"
