"""Counters and budgets that the kernel has one of for the whole host: no sandbox takes a part that others miss."""

from __future__ import annotations

import json
import os
import pty
from pathlib import Path

import pytest
from e2b import Sandbox

from harness.inside import Background, root

PRELUDE = """
import ctypes, errno, json, mmap, os, socket, struct
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    ctypes.set_errno(0)
    words = [a if isinstance(a, (bytes, ctypes.Array)) else ctypes.c_long(a) for a in arguments]
    result = libc.syscall(ctypes.c_long(number), *words)
    return result if result != -1 else errno.errorcode[ctypes.get_errno()]
"""


def inside(sandbox: Sandbox, code: str, user: str):
    """What a program prints as JSON, run inside with all the descriptors it may have."""
    sandbox.files.write("/tmp/attempt.py", PRELUDE + code, user="root")
    command = "ulimit -n $(ulimit -Hn); exec python3 /tmp/attempt.py"
    return json.loads(sandbox.commands.run(command, user=user, timeout=120).stdout)


def held_inside(sandbox: Sandbox, code: str, user: str):
    """What a program prints as JSON that keeps running, and with it what it took."""
    return json.loads(Background(sandbox, PRELUDE + code + "\nimport time\ntime.sleep(86400)\n", user).said)


def number(path: str) -> int:
    return int(Path(path).read_text().split()[0])


TERMINALS = """
taken = []
try:
    while len(taken) < 4000:
        taken.append(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY))
except OSError as error:
    print(json.dumps([len(taken), errno.errorcode[error.errno]]))
else:
    print(json.dumps([len(taken), None]))
"""


@pytest.mark.alone("it reads the number of terminals of the whole host")
@pytest.mark.parametrize("user", ["root", "user"])
def test_terminals(sandbox: Sandbox, neighbour: Sandbox, user: str) -> None:
    before = number("/proc/sys/kernel/pty/nr")
    taken, reason = held_inside(sandbox, TERMINALS, user)
    assert taken >= 64
    assert reason == "ENOSPC"
    assert number("/proc/sys/kernel/pty/nr") - before < 256
    for end in pty.openpty():
        os.close(end)
    assert inside(neighbour, TERMINALS.replace("4000", "16"), user) == [16, None]
    assert root(sandbox, "echo alive") == "alive\n"


@pytest.mark.alone("it reads a counter of the whole host")
@pytest.mark.parametrize("user", ["root", "user"])
def test_asynchronous_io(sandbox: Sandbox, user: str) -> None:
    code = """
context = ctypes.create_string_buffer(8)
print(json.dumps([call(206, 1024, context), call(209, 0, 1, context), call(333, 0, 0, 0, 0, 0, 0)]))
"""
    before = number("/proc/sys/fs/aio-nr")
    assert inside(sandbox, code, user) == ["ENOSYS"] * 3
    assert number("/proc/sys/fs/aio-nr") == before


@pytest.mark.parametrize("user", ["root", "user"])
def test_huge_pages(sandbox: Sandbox, user: str) -> None:
    code = """
private = 0x22
print(json.dumps({
    "ordinary": isinstance(call(9, 0, 1 << 21, 3, private, -1, 0), int),
    "mmap": call(9, 0, 1 << 21, 3, private | 0x40000, -1, 0),
    "2 MiB": call(9, 0, 1 << 21, 3, private | 0x40000 | 21 << 26, -1, 0),
    "memfd": call(319, b"x", 4),
    "shm": call(29, 0, 1 << 21, 0o5600),
}))
"""
    assert inside(sandbox, code, user) == {
        "ordinary": True,
        "mmap": "ENOMEM",
        "2 MiB": "ENOMEM",
        "memfd": "ENOMEM",
        "shm": "ENOMEM",
    }


@pytest.mark.parametrize("user", ["root", "user"])
def test_machine_code_of_packet_filters(sandbox: Sandbox, user: str) -> None:
    """Its budget, `net.core.bpf_jit_limit`, is what the filter of every new sandbox comes out of."""
    code = """
allow = struct.pack("HBBI", 6, 0, 0, 0x7fff0000)
code = ctypes.create_string_buffer(allow)
program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 1, ctypes.addressof(code)))
kinds = {"unix": socket.AF_UNIX, "udp": socket.AF_INET, "netlink": socket.AF_NETLINK}
made = {name: socket.socket(family, socket.SOCK_DGRAM) for name, family in kinds.items()}
outcome = {}
for name, sock in made.items():
    for option in (26, 50, 51, 52):
        outcome[f"{name} {option}"] = call(54, sock.fileno(), 1, option, program, 16)
call(157, 38, 1, 0, 0, 0)
outcome["seccomp"] = call(317, 1, 0, program)
outcome["prctl"] = call(157, 22, 2, program, 0, 0)
print(json.dumps(outcome))
"""
    outcome = inside(sandbox, code, user)
    assert outcome.pop("seccomp") == "EINVAL"
    assert outcome.pop("prctl") == "EINVAL"
    assert set(outcome.values()) == {"EPERM"}, outcome


def test_modules_are_not_loaded_for_a_socket(sandbox: Sandbox) -> None:
    """The kernel loads a module when a protocol is requested, also without privileges."""
    code = """
asked = [(family, kind, protocol) for family in (2, 10) for kind in (1, 2) for protocol in (33, 115, 132, 256)]
print(json.dumps([call(41, *each) for each in asked]))
"""
    modules = Path("/sys/module")
    before = {each.name for each in modules.iterdir()}
    assert set(inside(sandbox, code, "user")) == {"EPROTONOSUPPORT"}
    after = {each.name for each in modules.iterdir()}
    assert not {"sctp", "dccp", "l2tp_ip", "smc"} & (after - before)


LIMITS_OF_ALL = {
    # File of /proc/sys, and the largest part of it that one sandbox may take.
    "fs/aio-nr": ("fs/aio-max-nr", 0),
    "kernel/pty/nr": ("kernel/pty/max", 256),
}


@pytest.mark.alone("it reads the number of terminals of the whole host")
def test_nothing_of_a_hog_is_left_when_it_ends(platform) -> None:
    before = {name: number(f"/proc/sys/{name}") for name in LIMITS_OF_ALL}
    box = Sandbox.create(timeout=120)
    try:
        held_inside(box, TERMINALS, "root")
        for name, (_, part) in LIMITS_OF_ALL.items():
            assert number(f"/proc/sys/{name}") - before[name] <= part
    finally:
        box.kill()
    assert number("/proc/sys/kernel/pty/nr") <= before["kernel/pty/nr"] + 2


def test_the_kernels_configuration_is_not_told(sandbox: Sandbox) -> None:
    for name in ("config.gz", "bootconfig", "allocinfo"):
        assert root(sandbox, f"head -c 16 /proc/{name} 2> /dev/null | wc -c").strip() == "0", name
