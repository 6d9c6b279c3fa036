"""Arms timers, some of which expire soon, and says what the clocks show and how much time each timer has left, whenever a file
`/tmp/ask-N` appears: as JSON in `/tmp/told-N`.
"""

import ctypes
import json
import os
import select
import signal
import struct
import time

libc = ctypes.CDLL(None, use_errno=True)
SOON_S, LATE_S = 1.0, 3600.0
CLOCKS = {"wall": 0, "monotonic": 1, "boottime": 7}


def timerfd(clock, within_s, absolute=False):
    made = libc.timerfd_create(clock, 0)
    at = within_s + (time.clock_gettime(clock) if absolute else 0)
    value = struct.pack("qqqq", 0, 0, int(at), int(at % 1 * 1e9))
    assert libc.timerfd_settime(made, 1 if absolute else 0, value, None) == 0
    return made


def left(made):
    value = ctypes.create_string_buffer(32)
    assert libc.timerfd_gettime(made, value) == 0
    seconds, nanoseconds = struct.unpack("16xqq", value.raw)
    return seconds + nanoseconds / 1e9


signal.setitimer(signal.ITIMER_REAL, LATE_S)
late = {"monotonic": timerfd(1, LATE_S), "absolute": timerfd(1, LATE_S, True), "time of day": timerfd(0, LATE_S, True)}
soon = timerfd(1, SOON_S)
print("armed", flush=True)
for number in range(2):
    while not os.path.exists(f"/tmp/ask-{number}"):
        time.sleep(0.01)
    # Reading takes time, so the clocks that bound the others from above are read again at the end.
    told = {name: time.clock_gettime(clock) for name, clock in CLOCKS.items()}
    with open("/proc/uptime") as uptime:
        told["uptime"] = float(uptime.read().split()[0])
    told["left"] = {name: left(made) for name, made in late.items()} | {"itimer": signal.getitimer(signal.ITIMER_REAL)[0]}
    told["expired"] = bool(select.select([soon], [], [], 0)[0])
    told |= {f"{name}_after": time.clock_gettime(CLOCKS[name]) for name in ("monotonic", "wall")}
    with open(f"/tmp/told-{number}.new", "w") as file:
        json.dump(told, file)
    os.rename(f"/tmp/told-{number}.new", f"/tmp/told-{number}")
