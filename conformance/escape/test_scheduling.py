"""How long a process keeps a processor from its neighbours is not the process's to choose."""

from __future__ import annotations

import errno
import json
import time

import pytest
from e2b import Sandbox

from harness.inside import Background, root, status

# The longest slice that the kernel knows, 0.1 s, for the calling process: size, policy, flags, nice, priority, runtime,
# deadline, period.
LONG = (
    "import ctypes,os,struct\n"
    "libc=ctypes.CDLL(None,use_errno=True)\n"
    "attributes=struct.pack('IIQiIQQQ',48,0,0,0,0,100_000_000,0,0)\n"
    "done=libc.syscall(314,0,attributes,0)\n"
    "print(ctypes.get_errno() if done else 0,flush=True)\n"
)
SPIN = "for _ in range(4):\n  if os.fork()==0:\n    while True: pass\nos.wait()\n"
COMMANDS = 100


@pytest.mark.parametrize("user", ["root", "user"])
def test_slices_cannot_be_made_longer(sandbox: Sandbox, user: str) -> None:
    sandbox.files.write("/tmp/long.py", LONG)
    assert int(sandbox.commands.run("python3 /tmp/long.py", user=user).stdout) == errno.ENOSYS
    # What programs set by the older calls still works.
    assert status(sandbox, "chrt --batch 0 true && chrt --idle 0 nice -n 5 true", user=user) == 0


@pytest.mark.alone("it measures how long commands take beside a hog")
def test_a_neighbour_is_not_stalled_by_long_slices(sandbox: Sandbox, neighbour: Sandbox) -> None:
    def slowest() -> float:
        took = []
        for _ in range(COMMANDS):
            begun = time.monotonic()
            assert neighbour.commands.run("true").exit_code == 0
            took.append((time.monotonic() - begun) * 1000)
        return sorted(took)[-2]

    idle = slowest()
    Background(sandbox, LONG + SPIN, "root")
    loaded = slowest()
    print(f"slowest but one of {COMMANDS}: idle {idle:.1f}, loaded {loaded:.1f} ms")
    assert loaded < 10 * max(idle, 50.0)
    assert root(sandbox, "echo answers") == "answers\n"


ATTRIBUTES = """
import ctypes, json, struct
libc = ctypes.CDLL(None, use_errno=True)
def of(pid):
    a = ctypes.create_string_buffer(48)
    assert libc.syscall(315, pid, a, 48, 0) == 0, ctypes.get_errno()
    _, policy, flags, nice, _, slice_ns = struct.unpack_from("=IIQiIQ", a)
    return {"policy": policy, "flags": flags, "nice": nice, "slice_ns": slice_ns}
print(json.dumps({"agent": of(1), "self": of(0)}))
"""


@pytest.mark.parametrize("user", ["root", "user"])
def test_only_the_platforms_own_processes_have_short_slices(sandbox: Sandbox, user: str) -> None:
    """The agent answers beside a neighbour that computes; what it starts has the default priority and slices."""
    sandbox.files.write("/tmp/attributes.py", ATTRIBUTES)
    got = json.loads(sandbox.commands.run("python3 /tmp/attributes.py", user=user).stdout)
    assert (got["self"]["policy"], got["self"]["flags"], got["self"]["nice"]) == (0, 0, 0)
    assert got["agent"]["nice"] == 0
    # Since Linux 6.12, on which slices have a length each.
    if got["self"]["slice_ns"]:
        assert got["agent"]["slice_ns"] == 100_000
        assert got["self"]["slice_ns"] > 1_000_000
