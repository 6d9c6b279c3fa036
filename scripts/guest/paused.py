"""Checks of what is kept of paused and forked sandboxes, on a host with cgroup v2 only and across a loss of its power."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from pathlib import Path

from guest import (
    CGROUP,
    DATA_DIR,
    LIMITS,
    PATIENCE_S,
    Plain,
    Sandbox,
    api,
    check,
    expect,
    failed,
    passed,
    run,
    until,
)

# What the checks after the restart have to know.
KEPT = Path("/opt/guest/kept.json")
SWAP = Path("/opt/guest/swap")
SIZE_MB = 24
# Has memory, a counter that goes on, an open file without a name, and says what it finds to whoever connects.
HOLDER = f"""
import json, os, socket, tempfile, threading, time, zlib
own = bytearray(os.urandom(1 << 20)) * {SIZE_MB}
nameless = tempfile.TemporaryFile()
nameless.write(b"nameless"); nameless.flush()
server = socket.create_server(("127.0.0.1", 7000))
count = 0
def tick():
    global count
    while True:
        count += 1; time.sleep(0.05)
threading.Thread(target=tick, daemon=True).start()
while True:
    peer, _ = server.accept()
    nameless.seek(0)
    peer.sendall(json.dumps(dict(pid=os.getpid(), sum=zlib.crc32(own), file=nameless.read().decode(), count=count,
        monotonic=time.monotonic(), wall=time.time())).encode())
    peer.close()
"""


State = dict[str, float | str]


class Holder:
    """A sandbox in which a program holds what is checked after each pause."""

    def __init__(self) -> None:
        self.sandbox = Sandbox()
        self.sandbox.start(f"exec python3 -c '{HOLDER}'")
        until(lambda: self.sandbox.run("cat </dev/tcp/127.0.0.1/7000 || true", code=None).startswith("{"), "the program listens")
        self.state = read(self.sandbox)

    def whole(self, other: Sandbox | None = None, state: State | None = None) -> str:
        """The program goes on from where it was; in a fork, where the other one was unless its own state is given."""
        found, before = read(other or self.sandbox), state or self.state
        for key in ("pid", "sum", "file"):
            expect(found[key] == before[key], f"{key}: {found[key]}, before {before[key]}")
        for key in ("count", "monotonic", "wall"):
            expect(found[key] >= before[key], f"{key}: {found[key]}, before {before[key]}")
        if other is None:
            until(lambda: read(self.sandbox)["count"] > found["count"], "it counts on", 30)
            self.state = found
        return f"{found['count']} counts"

    def pause(self, storage: str) -> float:
        begun = time.monotonic()
        api("POST", f"/sandboxes/{self.sandbox.id}/pause", 204)
        took = time.monotonic() - begun
        details = api("GET", f"/sandboxes/{self.sandbox.id}", 200)
        expect((details["state"], details["pauseStorage"]) == ("paused", storage), details)
        return took

    def connect(self) -> float:
        begun = time.monotonic()
        api("POST", f"/sandboxes/{self.sandbox.id}/connect", 201, {"timeout": 3600})
        return time.monotonic() - begun


def load_modules() -> None:
    """As the machine of a user does it at its start."""
    for module in ("loop", "overlay", "dummy"):
        run("modprobe", module)


def read(sandbox: Sandbox) -> State:
    return json.loads(sandbox.run("cat </dev/tcp/127.0.0.1/7000"))


def nothing_of(sandbox: Sandbox) -> None:
    """The host has no group, process or mount of a sandbox that is kept on disk."""
    expect(not list(CGROUP.glob(f"ringfence-*/{sandbox.id}*")), "it has groups")
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                groups = (process / "cgroup").read_text()
            except OSError:
                continue
            expect(sandbox.id not in groups, f"process {process.name}: {groups}")


def memory_alone(platform: Plain) -> None:
    """Without CRIU, memory goes to swap."""
    program, LIMITS["RINGFENCE_PAUSE_CRIU"] = LIMITS["RINGFENCE_PAUSE_CRIU"], "off"
    platform.kill()
    run("dd", "if=/dev/zero", f"of={SWAP}", "bs=1M", "count=128")
    SWAP.chmod(0o600)
    run("mkswap", str(SWAP))
    run("swapon", str(SWAP))
    platform.start()

    @check("a pause without CRIU moves memory to swap, and a resume brings it back")
    def _() -> str:
        holder = Holder()
        before = int(holder.sandbox.value("memory.current"))
        holder.pause("memory")
        until(lambda: int(holder.sandbox.value("memory.swap.current")) > SIZE_MB << 20, "memory is in swap")
        after = int(holder.sandbox.value("memory.current"))
        platform.kill()
        platform.start()
        holder.connect()
        holder.whole()
        holder.sandbox.delete()
        return f"{before >> 20} MiB before, {after >> 20} MiB while it is paused"

    run("swapoff", str(SWAP))
    SWAP.unlink()
    platform.kill()
    LIMITS["RINGFENCE_PAUSE_CRIU"] = program
    platform.start()


def until_the_restart(platform: Plain) -> None:
    """Everything up to the loss of power, which ends this script."""
    load_modules()
    platform.start()
    holder = Holder()

    @check("a pause writes the processes to disk, and they go on")
    def _() -> str:
        pauses, resumes = [], []
        for _ in range(3):
            pauses.append(holder.pause("disk"))
            nothing_of(holder.sandbox)
            resumes.append(holder.connect())
            holder.whole()
        return f"pauses {pauses} s, resumes {resumes} s"

    @check("limits hold after it")
    def _() -> None:
        for file in ("memory.max", "pids.max", "cpu.max"):
            expect("max" != holder.sandbox.value(file).split()[0], file)

    @check("two forks go on from where the sandbox is")
    def _() -> str:
        results = api("POST", f"/sandboxes/{holder.sandbox.id}/fork", 201, {"count": 2, "timeout": 600})
        expect(all("sandbox" in result for result in results), results)
        for result in results:
            child = Sandbox(result["sandbox"])
            holder.whole(child)
            expect(child.run("echo $E2B_SANDBOX_ID") == f"{child.id}\n", "another id")
            child.delete()
        return holder.whole()

    @check("kill -9 of the platform while it writes an image loses nothing")
    def _() -> str:
        states = []
        took = holder.pause("disk")
        holder.connect()
        for share in (0.1, 0.5, 0.9):
            asked = threading.Thread(target=ask_for_pause, args=(holder.sandbox,))
            asked.start()
            time.sleep(took * share)
            platform.kill()
            asked.join(PATIENCE_S)
            platform.start()
            states.append(api("GET", f"/sandboxes/{holder.sandbox.id}", 200)["state"])
            if states[-1] == "paused":
                holder.connect()
            holder.whole()
        return ", ".join(states)

    if failed:
        print(platform.log()[-6000:], flush=True)
    memory_alone(platform)

    lost = Holder()
    child = Holder.__new__(Holder)
    child.sandbox = Sandbox(api("POST", f"/sandboxes/{holder.sandbox.id}/fork", 201, {"count": 1, "timeout": 600})[0]["sandbox"])
    child.state, holder.state = read(child.sandbox), read(holder.sandbox)

    @check("the pauses before a loss of power are on disk")
    def _() -> None:
        child.pause("disk")
        holder.pause("disk")

    if failed:
        print(platform.log()[-6000:], flush=True)
    KEPT.write_text(
        json.dumps(
            {
                "holder": [holder.sandbox.id, holder.sandbox.token, holder.state],
                "child": [child.sandbox.id, child.sandbox.token, child.state],
                "lost": lost.sandbox.id,
                "passed": passed,
                "failed": failed,
            }
        )
    )
    # Of this script's own file. What the platform has answered for is on disk by itself, or is lost now.
    descriptor = os.open(KEPT, os.O_RDONLY)
    os.fsync(descriptor)
    directory = os.open(KEPT.parent, os.O_RDONLY)
    os.fsync(directory)
    print("restarting", flush=True)
    time.sleep(1)
    Path("/proc/sysrq-trigger").write_text("b")
    time.sleep(PATIENCE_S)


def ask_for_pause(sandbox: Sandbox) -> None:
    try:
        api("POST", f"/sandboxes/{sandbox.id}/pause", 204)
    except (OSError, AssertionError):
        pass  # The platform ends meanwhile.


def after_the_restart(platform: Plain) -> None:
    """The host has lost its power and starts again."""
    kept = json.loads(KEPT.read_text())
    passed.extend(kept["passed"])
    failed.extend(kept["failed"])
    load_modules()
    id_, token, state = kept["holder"]
    holder = Holder.__new__(Holder)
    holder.sandbox = Sandbox({"sandboxID": id_, "envdAccessToken": token})
    holder.state = state
    id_, token, state_of_child = kept["child"]
    child = Sandbox({"sandboxID": id_, "envdAccessToken": token})

    @check("after a loss of power, up is ready, and paused sandboxes are paused")
    def _() -> None:
        platform.start()
        listed = api("GET", "/v2/sandboxes?state=paused", 200)
        expect({entry["sandboxID"] for entry in listed} == {holder.sandbox.id, child.id}, listed)
        expect(api("GET", "/v2/sandboxes?state=running", 200) == [], "others are listed")
        api("GET", f"/sandboxes/{kept['lost']}", 404)

    @check("they go on from where they were")
    def _() -> str:
        holder.connect()
        return holder.whole()

    @check("so does a fork of before")
    def _() -> str:
        api("POST", f"/sandboxes/{child.id}/connect", 201, {"timeout": 600})
        said = holder.whole(child, state_of_child)
        child.delete()
        return said

    @check("it can be paused, resumed and forked again")
    def _() -> str:
        holder.state = read(holder.sandbox)
        holder.pause("disk")
        holder.connect()
        results = api("POST", f"/sandboxes/{holder.sandbox.id}/fork", 201, {"timeout": 600})
        holder.whole(Sandbox(results[0]["sandbox"]))
        return holder.whole()

    @check("down leaves nothing of paused and forked sandboxes")
    def _() -> None:
        holder.pause("disk")
        run("ringfence", "down")
        platform.process.wait(PATIENCE_S)
        left = [*CGROUP.glob("ringfence-*"), *(DATA_DIR / "disks").glob("*.img"), *Path("/tmp").glob(".criu*")]
        expect(not left, left)
        expect(not subprocess.run(["losetup", "-a"], capture_output=True, check=True).stdout, "loop devices are left")

    if failed:
        print(platform.log()[-6000:], flush=True)
