"""Checks Ringfence inside the guest that `run.sh` boots, from the outside of the platform: its command line, its API,
the agent's Connect protocol, and what the kernel says about limits. Standard library only.

Usage: check.py plain|systemd. Prints one line per check and a closing line `N passed, N failed`, in the end; before
that the machine restarts once, and prints `restarting`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

from harness import hoststate
import paused
from guest import (
    BINARY,
    CGROUP,
    CPUS,
    DATA_DIR,
    DISK_MB,
    LIMITS,
    MEMORY_MB,
    MODPROBE,
    NEXT_PACKAGE,
    PATIENCE_S,
    PIDS,
    Plain,
    Sandbox,
    Systemd,
    api,
    check,
    expect,
    failed,
    healthy,
    host_pid,
    passed,
    request,
    run,
    started_at,
    until,
)

ONLY_PAUSED = Path("/opt/guest/only-paused")


def without_modules() -> None:
    """What the platform says on a kernel that loads no module by itself, step by step until it has all it needs."""
    helper = MODPROBE.read_text()
    MODPROBE.write_text("/nonexistent")
    # What `modprobe` is a link to; also hides it from the platform.
    kmod = "/usr/bin/kmod"

    @check("without a loop module, doctor and up say what is missing")
    def _() -> None:
        report = run(BINARY, "doctor", code=1)
        expect("modprobe loop" in report, report)
        expect("modprobe loop" in run(BINARY, "up", code=1), "up does not say it")

    run("modprobe", "loop")
    run("modprobe", "overlay")

    run("mount", "--bind", "/bin/false", kmod)

    @check("without a module for eth0, up says what is missing")
    def _() -> str:
        report = run(BINARY, "doctor", code=None)
        process = subprocess.Popen([BINARY, "up"], env=os.environ | LIMITS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        until(lambda: healthy() or process.poll() is not None, "the platform is ready or gone")
        if process.poll() is None:
            process.terminate()
        said = process.communicate(timeout=PATIENCE_S)[0].decode()
        expect(process.returncode == 1 and "modprobe dummy" in said, f"up: {said}\ndoctor: {report}")
        return said.strip()

    run("umount", kmod)
    MODPROBE.write_text(helper)


def in_a_container() -> None:
    """A cgroup namespace whose root is an ordinary group with processes in it, as in a privileged container."""
    box = CGROUP / "box"
    ready = "umount /sys/fs/cgroup && mount -t cgroup2 cgroup2 /sys/fs/cgroup; "

    def inside(script: str) -> str:
        enter = "echo $$ > /sys/fs/cgroup/box/cgroup.procs; exec unshare --cgroup --mount bash -c "
        return run("bash", "-c", f'{enter} "$1"', "bash", ready + script, code=None)

    def empty() -> None:
        for group in sorted(box.glob("**/"), reverse=True):
            until(lambda group=group: not (group / "cgroup.procs").read_text().strip(), f"{group} is empty", 10)
            group.rmdir()

    box.mkdir()
    (CGROUP / "cgroup.subtree_control").write_text("+memory +pids +cpu")

    @check("in a container, doctor and up say why there are no limits, and the fix they name works")
    def _() -> str:
        report = inside("ringfence doctor")
        said = inside("ringfence up --data-dir /tmp/box")
        fix = re.search(r"fix: this is a container: in it, (.*)", report)
        expect(fix and fix.group(1) in said, f"doctor: {report}\nup: {said}")
        fixed = inside(f"{fix.group(1)}; ringfence doctor; timeout -s TERM 20 ringfence up --data-dir /tmp/box & sleep 10; ringfence down --data-dir /tmp/box; wait")
        expect("works on this host" in fixed and "is ready" in fixed, fixed)
        return fix.group(1)

    empty()


def the_package(platform: Systemd, before: hoststate.HostState) -> None:
    """An upgrade, a removal and a purge, with a sandbox that runs."""
    kept: list[Sandbox] = []

    @check("the platform stays down after `down`, and starts again")
    def _() -> None:
        time.sleep(5)
        expect(not healthy(), "systemd brought it back")
        platform.start()
        kept.append(Sandbox())
        kept[0].start("exec -a package-marker sleep 3600")

    if not kept:
        return
    at = started_at(host_pid("package-marker"))

    @check("enabled, it starts with the machine, and an upgrade leaves that so")
    def _() -> None:
        expect(run("systemctl", "is-enabled", "ringfence", code=None).strip() == "disabled", "it was enabled already")
        run("systemctl", "enable", "--now", "ringfence")
        expect(run("systemctl", "is-enabled", "ringfence").strip() == "enabled", "it is not enabled")
        wanted = run("systemctl", "show", "--property=Wants", "--value", "multi-user.target").split()
        expect("ringfence.service" in wanted, wanted)

    @check("an upgrade restarts the platform, and the sandbox lives on")
    def _() -> None:
        pid = platform.main_pid()
        had = run("dpkg-query", "-W", "-f", "${Version}", "ringfence")
        run("dpkg", "--install", NEXT_PACKAGE)
        expect(run("dpkg-query", "-W", "-f", "${Version}", "ringfence") == f"{had}+next", "the next version is not installed")
        expect(run("systemctl", "is-enabled", "ringfence").strip() == "enabled", "it is no longer enabled")
        expect(platform.main_pid() not in (pid, "0"), "it was not restarted")
        until(healthy, "the platform is ready")
        expect(started_at(host_pid("package-marker")) == at, "the process ended")
        expect(kept[0].run("echo alive") == "alive\n", "the agent does not answer")

    @check("a removal leaves the sandbox and the data")
    def _() -> None:
        run("dpkg", "--remove", "ringfence")
        expect(not healthy() and not Path(BINARY).exists(), "it is still there")
        expect(not list(Path("/etc/systemd/system").glob("*.wants/ringfence.service")), "it is still enabled")
        expect(started_at(host_pid("package-marker")) == at, "the process ended")
        expect((DATA_DIR / "ringfence.db").exists(), "the database is gone")

    @check("a purge leaves nothing")
    def _() -> None:
        run("dpkg", "--purge", "ringfence")
        left = [path for path in (DATA_DIR, Path("/var/lib/ringfence.removed"), Path("/etc/ringfence")) if path.exists()]
        expect(not left, left)
        extra = hoststate.left_over(before)
        expect(not extra, extra)


def checks(platform: Plain | Systemd, kind: str) -> None:
    before = hoststate.HostState.take()
    if kind == "plain":
        without_modules()
    else:
        check("the package installs, and starts nothing")(platform.install)

    @check("doctor finds this machine fit")
    def _() -> str:
        report = run(BINARY, "doctor")
        expect(f"version 2 at {CGROUP}" in report, report)
        return "\n" + re.sub("^", "       ", report.strip(), flags=re.M)

    @check("up is ready")
    def _() -> None:
        platform.start()

    made: list[Sandbox] = []

    @check("create")
    def _() -> None:
        made.append(Sandbox())

    if not made:
        print(platform.log(), flush=True)
        return
    sandbox = made[0]

    @check("a command's output comes back")
    def _() -> str:
        text = sandbox.run("echo out; echo err >&2; uname -r; id -un; pwd")
        expect(text.startswith("out\n") and "err\n" in text and text.endswith("user\n/home/user\n"), text)
        sandbox.run("exit 3", code=3)
        return re.search(r"\d+\.\d+\S*", text).group()

    @check("ids of the sandbox are mapped to a range of its own")
    def _() -> str:
        inside, outside, count = map(int, sandbox.run("cat /proc/self/uid_map").split())
        expect((inside, count) == (0, 65536) and outside >= 0x2000_0000, (inside, outside, count))
        expect(sandbox.run("id -u", "root") == "0\n", "root is not 0 inside")
        sandbox.start("exec -a mapped-marker sleep 3600")
        status = Path(f"/proc/{host_pid('mapped-marker')}/status").read_text()
        expect(f"Uid:\t{outside + 1000}\t" in status, status)
        return f"0 is {outside}"

    @check("files keep the owners that the sandbox sees, and sudo works")
    def _() -> None:
        text = sandbox.run("touch /home/user/mine; sudo touch /usr/bin/roots; stat -c '%u %n' /home/user/mine /usr/bin/roots /usr/bin/sudo; sudo id -u")
        expect(text == "1000 /home/user/mine\n0 /usr/bin/roots\n0 /usr/bin/sudo\n0\n", text)
        expect(not Path("/usr/bin/roots").exists(), "a file of the sandbox is on the host")

    @check("both overlays have index and nfs_export on")
    def _() -> None:
        lines = [line for line in sandbox.run("cat /proc/self/mountinfo").splitlines() if " - overlay " in line]
        expect(len(lines) == 2, lines)
        for line in lines:
            options = re.split("[ ,]", line)
            expect({"rw", "index=on", "nfs_export=on"} <= set(options), line)
            expect("ringfence" not in line and sandbox.id not in line, line)

    @check("eth0 and lo are up")
    def _() -> str:
        text = sandbox.run("ip -d -o addr; cat /sys/class/net/eth0/flags /sys/class/net/eth0/address")
        expect("10.0.0.2/32" in text and "127.0.0.1/8" in text, text)
        kind = sandbox.run("ip -d link show eth0", "root")
        return next((word for word in ("dummy", "ifb", "bridge") if word in kind), kind)

    @check("the work cgroup has the limits")
    def _() -> None:
        wanted = {
            "memory.max": str(MEMORY_MB << 20),
            "pids.max": str(PIDS),
            "cpu.max": f"{CPUS * 100_000} 100000",
        }
        if (sandbox.group("work") / "memory.swap.max").exists():
            wanted["memory.swap.max"] = "0"
        expect({file: sandbox.value(file) for file in wanted} == wanted, {file: sandbox.value(file) for file in wanted})
        # The group around workload and agent has a margin for the agent.
        whole = sandbox.group("work").parent
        expect(whole == sandbox.group("agent").parent, whole)
        for file in ("memory.max", "pids.max", "cpu.max"):
            limit, margin = ((group / file).read_text().split()[0] for group in (sandbox.group("work"), whole))
            expect(int(limit) < int(margin) < 2 * int(limit), f"{file}: {limit} in the work cgroup, {margin} around it")

    @check("workload and agent are in their groups, and the sandbox sees no tree")
    def _() -> str:
        pid = sandbox.start("exec -a grouped-marker sleep 3600")
        expect(str(host_pid("grouped-marker")) in sandbox.value("cgroup.procs").split(), "not in the work cgroup")
        agents = (sandbox.group("agent") / "cgroup.procs").read_text().split()
        expect(len(agents) == 1, agents)
        expect(agents[0] not in sandbox.value("cgroup.procs").split(), "the agent is in the work cgroup")
        text = sandbox.run(f"cat /proc/{pid}/cgroup; grep ' - cgroup' /proc/self/mountinfo")
        expect("ringfence-" not in text and sandbox.id not in text and "0::/\n" in text, text)
        expect(sandbox.run("find /sys/fs/cgroup -mindepth 1 -type d") == "", "groups below its own are visible")
        expect(str(pid) in sandbox.run("cat /sys/fs/cgroup/cgroup.procs").split(), "not in the group that it sees")
        refused = sandbox.run("echo 0 2>/dev/null > /sys/fs/cgroup/cgroup.procs || echo refused", "root")
        expect(refused == "refused\n", refused)
        return text.strip().replace("\n", " ")

    @check("the sandbox sees its own size")
    def _() -> str:
        expect(sandbox.run("cat /sys/fs/cgroup/memory.max") == f"{MEMORY_MB << 20}\n", "memory.max")
        expect(sandbox.run("nproc") == f"{CPUS}\n", sandbox.run("nproc"))
        total = sandbox.run("grep MemTotal /proc/meminfo").split()
        expect(total[1:] == [str(MEMORY_MB << 10), "kB"], total)
        used = "b = bytearray(64 << 20); print(*(l.split()[1] for l in open('/proc/meminfo') if 'Available' in l))"
        free = int(sandbox.run("grep MemAvailable /proc/meminfo").split()[1]) - int(sandbox.run(f'python3 -c "{used}"'))
        expect(60 << 10 < free < 100 << 10, free)
        up, began = (sandbox.run(text) for text in ("cat /proc/uptime", "ps -o etimes= -p 1"))
        expect(float(up.split()[0]) < 900 and int(began) < 900, up + began)
        return sandbox.run("cat /proc/loadavg; head -n 2 /proc/stat; cat /proc/uptime").strip().replace("\n", " | ")

    @check("memory limit: 2 GiB are refused, the agent answers after")
    def _() -> str:
        killed = sandbox.counter("memory.events", "oom_kill")
        code = "b = bytearray()\nwhile len(b) < 2 << 30: b += b'x' * (16 << 20)\nprint('sur' + 'vived')"
        text = sandbox.run(f'python3 -c "{code}"; echo status $?', code=None)
        expect("survived" not in text, text)
        expect(sandbox.counter("memory.events", "oom_kill") > killed, sandbox.value("memory.events"))
        expect(sandbox.run("echo alive") == "alive\n", "the agent does not answer")
        return text.strip().split("\n")[-1]

    @check("process limit: a fork bomb is bounded, the agent answers after")
    def _() -> str:
        held = sandbox.counter("pids.events", "max")
        code = (
            "import os, time\n"
            "n = 0\n"
            "try:\n"
            "    while n < 1000:\n"
            "        if os.fork() == 0: time.sleep(600); os._exit(0)\n"
            "        n += 1\n"
            "except OSError as e: print('forked', n, e.errno, flush=True)\n"
        )
        bomb: list[str] = []
        thread = threading.Thread(target=lambda: bomb.append(sandbox.run(f'python3 -c "{code}" & wait', code=None)))
        thread.start()
        until(lambda: sandbox.counter("pids.events", "max") > held, "the limit is met")
        current = int(sandbox.value("pids.current"))
        expect(current <= PIDS, f"{current} processes")
        expect(sandbox.call("List", {}).get("processes"), "the agent does not answer at the limit")
        run("sh", "-c", f"pgrep -f 'time.sleep' | xargs -r kill -9", code=None)
        thread.join(PATIENCE_S)
        until(lambda: int(sandbox.value("pids.current")) < PIDS // 2, "the bomb is over")
        expect(sandbox.run("echo alive") == "alive\n", "no command runs after")
        return f"{current} processes at the limit; {''.join(bomb).strip()}"

    @check("cpu limit: two busy loops are throttled")
    def _() -> str:
        before_ = sandbox.counter("cpu.stat", "nr_throttled")
        # For as long as it takes: where others take the host's processors, both together may get less than the limit for a while.
        for _ in range(CPUS + 1):
            sandbox.start("while :; do :; done")
        until(lambda: sandbox.counter("cpu.stat", "nr_throttled") > before_, "the loops are throttled")
        sandbox.run("pkill -f 'while :; do :[;] done'", code=None)
        return f"{sandbox.counter('cpu.stat', 'nr_throttled') - before_} periods throttled"

    @check("disk limit: the image is full at its size, and holds again after")
    def _() -> str:
        text = sandbox.run(f"dd if=/dev/zero of=/home/user/fill bs=1M count={2 * DISK_MB} 2>&1; stat -c %s /home/user/fill", code=None)
        expect("No space left on device" in text, text)
        size = int(text.strip().split("\n")[-1])
        expect(DISK_MB // 2 << 20 < size < DISK_MB << 20, size)
        expect(sandbox.run("rm /home/user/fill && echo x > /home/user/x && cat /home/user/x") == "x\n", "not writable after")
        return f"{size >> 20} of {DISK_MB} MiB"

    @check("without unprivileged user namespaces, sandboxes start all the same")
    def _() -> str:
        switch = Path("/proc/sys/kernel/unprivileged_userns_clone")
        if not switch.exists():
            return "this kernel has no such switch"
        switch.write_text("0")
        try:
            other = Sandbox()
            expect(other.run("echo here") == "here\n", "no output")
            other.delete()
        finally:
            switch.write_text("1")
        return ""

    @check("four sandboxes side by side")
    def _() -> None:
        others: list[Sandbox] = []
        wrong: list[str] = []

        def one() -> None:
            try:
                other = Sandbox()
                others.append(other)
                expect(other.run("echo $E2B_SANDBOX_ID").strip() == other.id, "another id")
            except Exception as error:  # noqa: BLE001: reported by the main thread
                wrong.append(repr(error))

        threads = [threading.Thread(target=one) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        expect(not wrong and len(others) == 4, wrong)
        for other in others:
            other.delete()

    @check("kill -9 of the platform: the next start adopts the sandbox and its processes")
    def _() -> None:
        sandbox.run("echo kept > /home/user/kept")
        inner = sandbox.start("exec -a kept-marker sleep 3600")
        outer = host_pid("kept-marker")
        at = started_at(outer)
        platform.kill()
        expect(started_at(outer) == at, "the process ended with the platform")
        platform.start()
        expect([entry["sandboxID"] for entry in api("GET", "/sandboxes", 200)] == [sandbox.id], "not listed")
        expect(started_at(outer) == at, "the process did not survive the start")
        pids = [int(entry["pid"]) for entry in sandbox.call("List", {})["processes"]]
        expect(inner in pids, f"{inner} is not in {pids}")
        expect(sandbox.run("cat /home/user/kept") == "kept\n", "the file is gone")
        expect(sandbox.value("memory.max") == str(MEMORY_MB << 20), "the limit is gone")

    if kind == "systemd":

        @check("stop and start by systemd: the sandbox lives on")
        def _() -> None:
            at = started_at(host_pid("kept-marker"))
            run("systemctl", "restart", "ringfence")
            until(healthy, "the platform is ready")
            expect(started_at(host_pid("kept-marker")) == at, "the process ended")
            expect(sandbox.run("echo alive") == "alive\n", "the agent does not answer")

        @check("so it does with systemd's default kill mode")
        def _() -> None:
            drop_in = Path("/run/systemd/system/ringfence.service.d/kill.conf")
            drop_in.parent.mkdir(parents=True)
            drop_in.write_text("[Service]\nKillMode=control-group\n")
            run("systemctl", "daemon-reload")
            at = started_at(host_pid("kept-marker"))
            run("systemctl", "restart", "ringfence")
            until(healthy, "the platform is ready")
            expect(started_at(host_pid("kept-marker")) == at, "the process ended")
            expect(sandbox.run("echo alive") == "alive\n", "the agent does not answer")
            drop_in.unlink()
            run("systemctl", "daemon-reload")

        @check("a delegated unit changes nothing: sandboxes have their limits, outside of it")
        def _() -> str:
            drop_in = Path("/run/systemd/system/ringfence.service.d/delegate.conf")
            drop_in.parent.mkdir(parents=True, exist_ok=True)
            drop_in.write_text("[Service]\nDelegate=yes\n")
            run("systemctl", "daemon-reload")
            run("systemctl", "restart", "ringfence")
            until(healthy, "the platform is ready")
            expect(run("systemctl", "show", "--property=Delegate", "--value", "ringfence").strip() == "yes", "it is not delegated")
            other = Sandbox()
            expect(other.value("cpu.max") == f"{CPUS * 100_000} 100000", other.value("cpu.max"))
            expect("ringfence.service" not in str(other.group("work")), other.group("work"))
            own = run("systemctl", "show", "--property=ControlGroup", "--value", "ringfence").strip()
            inside = (CGROUP / own.lstrip("/") / "cgroup.procs").read_text().split()
            expect(platform.main_pid() in inside, inside)
            other.delete()
            drop_in.unlink()
            run("systemctl", "daemon-reload")
            run("systemctl", "restart", "ringfence")
            until(healthy, "the platform is ready")
            expect(sandbox.run("echo alive") == "alive\n", "the agent does not answer")
            return own

        @check("systemd's own housekeeping leaves the limits alone")
        def _() -> str:
            # Both make systemd write the controllers of the root group anew, without cpu where no unit asks for it.
            run("systemctl", "daemon-reload")
            run("systemctl", "daemon-reexec")
            run("systemd-run", "--wait", "-p", "CPUWeight=50", "true")
            run("systemd-run", "--wait", "true")
            for file in ("memory.max", "pids.max", "cpu.max"):
                expect("max" != sandbox.value(file).split()[0], file)
            other = Sandbox()
            expect(other.value("cpu.max") == f"{CPUS * 100_000} 100000", other.value("cpu.max"))
            other.delete()
            return (CGROUP / "cgroup.subtree_control").read_text().strip()

    @check("delete leaves no cgroup, loop device or image")
    def _() -> None:
        sandbox.delete()
        left = lambda: (  # noqa: E731: read again until it is empty
            list(CGROUP.glob(f"ringfence-*/{sandbox.id}*")),
            hoststate.loop_devices(),
            list((DATA_DIR / "disks").glob("*.img")),
        )
        until(lambda: not any(left()), f"left over: {left()}", 30)
        status, _text = request("POST", "/process.Process/List", b"{}", sandbox.headers("root", "application/json"))
        expect(status == 502, f"a gone sandbox answers {status}")

    @check("down leaves nothing: cgroups, loop devices, processes, mounts, namespaces")
    def _() -> None:
        for _ in range(2):
            Sandbox()
        run(BINARY, "down")
        if kind == "plain":
            platform.process.wait(PATIENCE_S)
        extra = hoststate.left_over(before)
        expect(not extra, extra)

    if kind == "plain":
        in_a_container()
    else:
        the_package(platform, before)

    if failed:
        print(platform.log()[-6000:], flush=True)


def the_kernel() -> None:
    @check("the kernel has nothing to complain about")
    def _() -> None:
        lines = run("dmesg").splitlines()
        bad = [line for line in lines if re.search(r"BUG:|WARNING: CPU|Oops|general protection|overlayfs:.*(fall|conflict|undefined)", line)]
        expect(not bad, "\n".join(bad))


def main() -> None:
    kind = sys.argv[1]
    print(f"{os.uname().release}, {kind}: {Path('/proc/1/comm').read_text().strip()} is process 1", flush=True)
    platform: Plain | Systemd = Systemd() if kind == "systemd" else Plain()
    try:
        if paused.KEPT.exists():
            paused.after_the_restart(platform)
            the_kernel()
        else:
            if not ONLY_PAUSED.exists():
                checks(platform, kind)
            the_kernel()
            if kind == "plain":
                paused.until_the_restart(platform)
    except BaseException:
        failed.append("the checks themselves")
        raise
    finally:
        print(f"{len(passed)} passed, {len(failed)} failed", flush=True)


main()
