"""What /proc, /sys and the mount table tell: nothing of the host, nothing of a neighbour, nothing to write to."""

from __future__ import annotations

import os

from e2b import Sandbox

from harness.inside import Marked, ending_spawner, host_pids, probe, root, starts
from harness.platform import Platform
from harness.traffic import until


def test_only_its_own_processes(sandbox: Sandbox, neighbour: Sandbox, platform: Platform) -> None:
    theirs = Marked(neighbour)
    assert theirs.host_pid
    lines = root(sandbox, "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline; echo; done 2>/dev/null")
    for foreign in (theirs.mark, "pytest", str(platform.data_dir), " up --data-dir"):
        assert foreign not in lines
    count = int(root(sandbox, "ls -d /proc/[0-9]* | wc -l"))
    assert count < 15
    assert root(sandbox, "cat /proc/1/comm").strip()
    # A number that is a process on the host and none inside.
    outer = theirs.host_pid
    assert root(sandbox, f"test -e /proc/{outer} && echo there; kill -0 {outer} 2>&1 || true").strip() != "there"


def test_a_signal_to_everybody_stays_inside(sandbox: Sandbox, neighbour: Sandbox) -> None:
    mine, theirs = Marked(sandbox), Marked(neighbour)
    # Before it has its mark, it would seem to be gone already.
    assert mine.host_pid
    with ending_spawner():
        sandbox.commands.run("python3 -c 'import os; os.kill(-1, 9)'; true", user="root", timeout=20, background=True)
    until(lambda: not host_pids(mine.mark), "its own processes are gone")
    assert theirs.host_pid
    assert root(neighbour, "echo fine") == "fine\n"
    # Whatever starts processes was killed too; the agent must have found a new one.
    until(lambda: starts(sandbox), "the host has replaced the spawner")
    assert root(sandbox, "echo again") == "again\n"


def test_masked_files_of_proc(sandbox: Sandbox) -> None:
    files = [
        "/proc/kcore",
        "/proc/keys",
        "/proc/key-users",
        "/proc/kmsg",
        "/proc/kallsyms",
        "/proc/latency_stats",
        "/proc/pressure",
        "/proc/sched_debug",
        "/proc/schedstat",
        "/proc/softirqs",
        "/proc/sysrq-trigger",
        "/proc/timer_list",
        "/proc/vmallocinfo",
        "/proc/acpi",
        "/proc/scsi",
    ]
    readable = {path: seen for path, seen in probe(sandbox, "content", *files).items() if isinstance(seen, int) and seen}
    # The kernel shows addresses of symbols only to its owner; names without addresses are public knowledge.
    if readable.pop("/proc/kallsyms", None):
        addresses = root(sandbox, "head -n 2000 /proc/kallsyms | cut -d' ' -f1 | sort -u").split()
        assert {int(address, 16) for address in addresses} == {0}
    assert readable == {}


def test_nothing_of_proc_and_sys_is_writable(sandbox: Sandbox) -> None:
    paths = root(
        sandbox,
        "for f in $(find /proc/sys /sys -type f 2>/dev/null) /proc/sysrq-trigger /proc/irq/*/smp_affinity /proc/mtrr"
        # What is masked is /dev/null, which swallows what is written to it.
        " /proc/fs/*/* /proc/bus/* /proc/acpi/* /proc/asound/*;"
        " do if test ! -c $f && (: >> $f) 2>/dev/null; then echo $f; fi; done",
        timeout=120,
    ).split()
    assert paths == []
    important = [
        "/proc/sys/kernel/core_pattern",
        "/proc/sys/kernel/modprobe",
        "/proc/sys/kernel/hostname",
        "/proc/sys/kernel/pid_max",
        "/proc/sys/kernel/ns_last_pid",
        "/proc/sys/vm/drop_caches",
        "/proc/sys/vm/overcommit_memory",
        "/proc/sys/net/ipv4/ip_forward",
        "/proc/sys/net/ipv4/ip_unprivileged_port_start",
        "/proc/sys/fs/binfmt_misc/register",
        "/proc/sysrq-trigger",
        "/sys/kernel/uevent_helper",
        "/sys/power/state",
    ]
    assert "ok" not in probe(sandbox, "writable", *important).values()


def test_sys_shows_no_hardware_and_no_neighbour(sandbox: Sandbox, neighbour: Sandbox) -> None:
    shown = probe(sandbox, "content", *(f"/sys/{name}" for name in ("block", "firmware", "kernel", "module")))
    assert {path: seen for path, seen in shown.items() if seen not in (0, "ENOENT", "EACCES", "EPERM")} == {}
    # Nothing is there but the place where programs look for cgroups.
    assert root(sandbox, "ls -A /sys/fs").split() == ["cgroup"]
    found = root(sandbox, "find / -name backing_file -not -path '/proc/*' 2>/dev/null || true")
    assert found == ""
    assert root(sandbox, "ls /sys/devices/virtual/block /sys/class/block 2>/dev/null || true") == ""
    assert set(root(sandbox, "ls /sys/class/net 2>/dev/null || true").split()) <= {"lo", "eth0"}


def test_no_mount_names_a_sandbox_or_a_cgroup(sandbox: Sandbox, neighbour: Sandbox, platform: Platform) -> None:
    text = root(sandbox, "cat /proc/self/mountinfo /proc/self/mounts /proc/1/mountinfo 2>/dev/null || true")
    assert " / " in text
    for name in (sandbox.sandbox_id, neighbour.sandbox_id):
        assert name not in text
    # Of cgroups, only its own groups are mounted, as if there were nothing above them, and nothing can be changed there.
    groups = [line.split() for line in root(sandbox, "grep ' - cgroup' /proc/self/mountinfo").splitlines()]
    assert groups and all(mount[3] == "/" and "ro" in mount[5].split(",") for mount in groups)
    assert "ringfence-" not in text
    for word in ("debugfs", "tracefs", "securityfs", "bpf", "fusectl", "configfs", "pstore", "efivarfs", "binfmt_misc"):
        assert f" {word} " not in text


def test_no_neighbour_is_named_anywhere(sandbox: Sandbox, neighbour: Sandbox) -> None:
    everywhere = (
        "cat /proc/*/cgroup /proc/*/mountinfo /proc/*/environ /proc/*/cmdline /proc/partitions /proc/diskstats"
        " /proc/swaps /proc/locks /proc/net/unix /proc/net/tcp /proc/sysvipc/* 2>/dev/null"
        # The brackets keep the search from finding itself.
        f" | tr '\\0' '\\n' | grep -c '[{neighbour.sandbox_id[0]}]{neighbour.sandbox_id[1:]}' || true"
    )
    assert root(sandbox, everywhere) == "0\n"
    assert root(sandbox, f"find / -xdev -name '*{neighbour.sandbox_id}*' 2>/dev/null | wc -l") == "0\n"


def test_of_cgroups_only_its_own_is_visible_and_nothing_writable(sandbox: Sandbox, neighbour: Sandbox) -> None:
    theirs = Marked(neighbour)
    assert theirs.host_pid
    for user in ("root", "user"):
        shown = sandbox.commands.run("cat /proc/self/cgroup", user=user).stdout
        assert {line.split(":", 2)[2] for line in shown.splitlines()} == {"/"}
    # No group below or beside, of whatever hierarchy, and in the lists of processes only its own.
    procs = root(sandbox, "find /sys/fs/cgroup -name cgroup.procs").split()
    assert procs
    mounts = root(sandbox, "awk '/ - cgroup/ {print $5}' /proc/self/mountinfo").split()
    assert sorted(os.path.dirname(path) for path in procs) == sorted(mounts)
    # Processes of others would be there as 0.
    own = set(root(sandbox, "ls /proc | grep '^[0-9]' ; seq 1 400").split())
    assert set(root(sandbox, "find /sys/fs/cgroup -name cgroup.procs -exec cat {} +").split()) <= own
    everything = root(
        sandbox,
        "find /sys/fs/cgroup -type f -not -name memory.pressure_level -not -name cgroup.event_control"
        " -exec cat {} + 2>/dev/null || true",
    )
    assert neighbour.sandbox_id not in everything and sandbox.sandbox_id not in everything
    assert root(sandbox, "find /sys/fs/cgroup -name release_agent | wc -l") == "0\n"
    attempts = (
        "for f in $(find /sys/fs/cgroup -type f); do (echo 0 > $f) 2>/dev/null && echo $f; done;"
        " for d in $(find /sys/fs/cgroup -type d); do mkdir $d/made 2>/dev/null && echo $d;"
        " mount -o remount,rw $d 2>/dev/null && echo $d; umount $d 2>/dev/null && echo $d; done; true"
    )
    assert root(sandbox, attempts, timeout=120) == ""
    assert root(sandbox, "find / -name cgroup.procs -not -path '/proc/*' -not -path '/sys/fs/cgroup/*' 2>/dev/null | wc -l") == "0\n"


def test_the_workload_is_limited_and_the_agent_is_not_in_its_group(sandbox: Sandbox) -> None:
    inside = Marked(sandbox)
    work = open(f"/proc/{inside.host_pid}/cgroup").read()
    agent = open(f"/proc/{agent_pid(inside.host_pid)}/cgroup").read()
    assert work != agent
    assert sandbox.sandbox_id in work and sandbox.sandbox_id in agent


def agent_pid(host_pid: int) -> int:
    """Process 1 of the pid namespace of a process, as the host numbers it."""
    wanted = os.readlink(f"/proc/{host_pid}/ns/pid")
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            if os.readlink(f"/proc/{name}/ns/pid") != wanted:
                continue
            numbers = [line for line in open(f"/proc/{name}/status") if line.startswith("NSpid:")][0].split()
        except OSError:
            continue
        if numbers[-1] == "1":
            return int(name)
    raise AssertionError("the pid namespace has no process 1")


def test_ids_of_two_sandboxes_and_of_the_host_are_apart(sandbox: Sandbox, neighbour: Sandbox) -> None:
    """Root and user of one sandbox have no rights on the host and in the other sandbox."""
    ids = []
    for box in (sandbox, neighbour):
        roots, users = Marked(box, "root"), Marked(box, "user")
        for marked in (roots, users):
            ids.append(int([line for line in open(f"/proc/{marked.host_pid}/status") if line.startswith("Uid:")][0].split()[1]))
    assert len(set(ids)) == 4
    assert all(number >= 65536 for number in ids)
    ranges = [number // 65536 for number in ids]
    assert ranges[0] == ranges[1] != ranges[2] == ranges[3]
