"""kill -9 between the answer of a delete and the end of what follows it.

A delete is answered when no process of the sandbox is left. Its mounts, disk, groups and ids are taken down after that, and a
platform that dies meanwhile leaves some of it. Its next start has to remove all of that, and nothing else: a sandbox that lives on
keeps its processes and files, and one that is created meanwhile is as any other.
"""

from __future__ import annotations

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor

from e2b import Sandbox, SandboxQuery

from harness.elapse import at_moment
from harness.hoststate import HostState, left_over, steady
from harness.inside import Marked, host_pids, root
from harness.platform import Platform

SEED = int(os.environ.get("RINGFENCE_CRASH_SEED", str(time.time_ns() % 1_000_000)))
DELETED = 6
# Cycles in which the kill came while something was left, and how many are tried for them.
HITS, CYCLES = 4, 40
# What takes the kernel time to take down: files in memory, and files of a disk that were not written out.
FILL = "head -c 48M /dev/urandom > /dev/shm/secret; head -c 16M /dev/urandom > /root/secret"
SUMS = "cat /dev/shm/secret /root/secret | sha256sum"


def filled() -> tuple[Sandbox, Marked]:
    box = Sandbox.create(timeout=3600)
    root(box, FILL)
    return box, Marked(box)


def test_what_a_delete_left_is_removed_by_the_next_start(crashing: Platform) -> None:
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    os.environ["E2B_CONNECTION_RETRIES"] = "0"
    keeper, kept = filled()
    sums, process = root(keeper, SUMS), kept.host_pid
    with Sandbox.create() as first:
        first.commands.run("true")
    before = steady(crashing.data_dir)

    hits, cycle = 0, 0
    while hits < HITS:
        cycle += 1
        assert cycle <= CYCLES, f"only {hits} kills came while something was left"
        with ThreadPoolExecutor(DELETED) as pool:
            made = list(pool.map(lambda _: filled(), range(DELETED)))
            assert all(pool.map(lambda one: one[0].kill(), made))
        at_moment(chance.uniform(0, 0.01))
        crashing.kill()
        hits += bool(before.added(HostState.take(crashing.data_dir)))
        for box, marked in made:
            assert not host_pids(marked.mark), f"a process of {box.sandbox_id} runs although its delete was answered"
        crashing.start()
        # At once, so that they are given what is free by now.
        with ThreadPoolExecutor(DELETED) as pool:
            new = list(pool.map(lambda _: Sandbox.create(timeout=3600), range(DELETED)))
            for found in pool.map(lambda box: root(box, "ls -A /dev/shm /root; touch /root/mine /dev/shm/mine"), new):
                assert "secret" not in found and "mine" not in found
        listed = {item.sandbox_id for item in Sandbox.list(SandboxQuery(), limit=100).next_items()}
        assert listed == {keeper.sandbox_id, *(box.sandbox_id for box in new)}
        assert kept.host_pid == process and root(keeper, SUMS) == sums
        for box in new:
            assert root(box, "ls /root/mine /dev/shm/mine").count("mine") == 2
            assert box.kill()
        assert left_over(before, crashing.data_dir) == {}, f"in cycle {cycle}; again with RINGFENCE_CRASH_SEED={SEED}"
    print(f"{hits} of {cycle} kills came while something of a deleted sandbox was left; nothing stayed")
