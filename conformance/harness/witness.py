"""A program in a sandbox that knows when it did not run, and whether its memory is whole."""

from __future__ import annotations

from e2b import Sandbox

from harness.traffic import until

# Notes each time at which it did not run: when it ran before, when it ran again, and its pid. `time` is that of the host.
PROGRAM = r"""
import hashlib, os, sys, time
memory = bytearray(os.urandom(1 << 20)) * int(sys.argv[1])
want = hashlib.sha256(memory).hexdigest()
def is_asked():
    # A file that is being uploaded is root's for a moment, and nobody else may remove it from /tmp then.
    try: return os.stat("/tmp/check").st_uid == os.getuid()
    except FileNotFoundError: return False
last = time.time()
while True:
    now = time.time()
    if now - last > 0.003 or not os.path.exists("/tmp/stood"):
        with open("/tmp/stood", "a") as file: print(last, now, os.getpid(), file=file)
    if is_asked():
        with open("/tmp/whole.new", "w") as file: file.write(str(hashlib.sha256(memory).hexdigest() == want))
        os.unlink("/tmp/check")
        os.replace("/tmp/whole.new", "/tmp/whole")
        now = time.time()
    last = now
    time.sleep(0.0005)
"""


def start(box: Sandbox, megabytes: int) -> str:
    """Starts the witness with this much memory, and returns its pid."""
    box.files.write("/tmp/witness.py", PROGRAM)
    box.commands.run(f"python3 /tmp/witness.py {megabytes} 2>/tmp/witness.err", background=True, timeout=0)
    until(lambda: box.files.exists("/tmp/stood") and box.files.read("/tmp/stood") != "", "it has its memory")
    return box.files.read("/tmp/stood").split()[2]


def stood(box: Sandbox, pid: str, since: float, until_s: float) -> None:
    """Asserts that it runs with its memory, and did not run between two times, if these are so far apart that it would know."""
    box.files.write("/tmp/check", "")
    is_whole(box, pid)
    pauses = [line.split() for line in box.files.read("/tmp/stood").splitlines()]
    assert {of for _, _, of in pauses} == {pid}
    found = [(float(before), float(after)) for before, after, _ in pauses]
    is_known = until_s - since > 0.003
    assert not is_known or any(before <= since and after >= until_s for before, after in found), (since, until_s, found[-10:])


def is_whole(box: Sandbox, pid: str) -> None:
    """Asserts that it answers what it was asked with `/tmp/check`, and that its memory is whole."""
    try:
        until(lambda: box.files.exists("/tmp/whole"), "it goes on")
    except AssertionError as error:
        # One that has ended is not one that stands still.
        error.add_note(box.commands.run(f"cat /tmp/witness.err; grep -E '^(State|TracerPid)' /proc/{pid}/status 2>&1 || true").stdout)
        raise
    assert box.files.read("/tmp/whole") == "True"
    box.files.remove("/tmp/whole")
