"""Holds connections to echo servers open and says what becomes of them, a line of JSON for each event.

    python3 hold.py ADDRESS...    one connection to port 7 of each; every 50 ms a message and its echo
    python3 hold.py --new ADDRESS  a new connection every 50 ms

A line has `to`, `event` (open, ok, or an error) and the time `at`. Of new connections, only changes are reported, with
the number of attempts since the last change, and how long the longest of them took.
"""

import errno
import json
import socket
import sys
import threading
import time

lock = threading.Lock()


def say(to, event, **more):
    with lock:
        print(json.dumps({"to": to, "event": event, "at": time.time(), **more}), flush=True)


def connected(to):
    stream = socket.socket(socket.AF_INET6 if ":" in to else socket.AF_INET, socket.SOCK_STREAM)
    stream.settimeout(5)
    stream.connect((to, 7))
    return stream


def echoed(stream):
    stream.sendall(b"x")
    if not stream.recv(1):
        raise OSError(errno.ESHUTDOWN, "closed")


def name(error):
    return "silent" if isinstance(error, TimeoutError) else errno.errorcode.get(error.errno, str(error))


def hold(to):
    try:
        with connected(to) as stream:
            echoed(stream)
            say(to, "open")
            while True:
                echoed(stream)
                time.sleep(0.05)
    except OSError as error:
        say(to, name(error))


def renew(to):
    last, attempts, longest = None, 0, 0.0
    while True:
        begun = time.monotonic()
        try:
            with connected(to) as stream:
                echoed(stream)
            event = "ok"
        except OSError as error:
            event = name(error)
        if event != last:
            say(to, event, attempts=attempts, longest=longest)
            last, attempts, longest = event, 0, 0.0
        attempts, longest = attempts + 1, max(longest, time.monotonic() - begun)
        time.sleep(0.05)


if sys.argv[1] == "--new":
    renew(sys.argv[2])
else:
    for address in sys.argv[1:]:
        threading.Thread(target=hold, args=(address,)).start()
