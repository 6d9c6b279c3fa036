"""Makes connections and sends packets from inside a sandbox, and prints what became of each as JSON.

    python3 outgoing.py < ATTEMPTS

ATTEMPTS is a list of objects; `do` names one of the functions below, the rest are its arguments. The answer is a list in
the same order. `result` is `ok`, the name of an errno, `closed` (an end of the stream without data), `silent` (nothing
within the timeout) or another error; `seconds` is how long it took.
"""

import errno
import json
import os
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

TIMEOUT_S = 8
AT_ONCE = 12
TYPES = {"A": 1, "TXT": 16, "AAAA": 28, "ANY": 255}


class Closed(Exception):
    pass


def received(stream):
    data = stream.recv(65536)
    if not data:
        raise Closed
    return data


def connected(to, port, source=None):
    family = socket.AF_INET6 if ":" in to else socket.AF_INET
    stream = socket.socket(family, socket.SOCK_STREAM)
    stream.settimeout(TIMEOUT_S)
    if source:
        stream.bind((source, 0))
    stream.connect((to, port))
    return stream


def tcp(to, port=7, send="hello", source=None):
    """Sends a text and receives an answer. Without a text, only receives."""
    with connected(to, port, source) as stream:
        if send:
            stream.sendall(send.encode())
        return {"data": received(stream).decode(errors="replace")}


def udp(to, port=7, send="hello", times=1, wait_s=TIMEOUT_S):
    """As `tcp`, in packets. `wait_s` is for attempts that may get no answer."""
    family = socket.AF_INET6 if ":" in to else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as packets:
        packets.settimeout(wait_s)
        packets.connect((to, port))
        for _ in range(times):
            packets.send(send.encode())
        return {"data": packets.recv(65536).decode(errors="replace")}


def request(stream, host, path):
    head = f"GET {path} HTTP/1.1\r\n" + ("" if host is None else f"Host: {host}\r\n") + "Connection: close\r\n\r\n"
    stream.sendall(head.encode())
    data = received(stream)
    while more := stream.recv(65536):
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    seen = {"status": int(head.split()[1])}
    try:
        seen.update(json.loads(body))
    except ValueError:
        seen["body"] = body.decode(errors="replace")
    return seen


def http(to, port=80, host=None, path="/"):
    """A request to an address, with any Host or without one."""
    with connected(to, port) as stream:
        return request(stream, host, path)


def tls(to, port=443, name=None, host=None, path="/", verify=False):
    """A request over TLS to an address, with any server name or without one."""
    context = ssl.create_default_context(cafile="/tmp/authority.pem" if verify else None)
    if not verify:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with connected(to, port) as stream, context.wrap_socket(stream, server_hostname=name) as session:
        return request(session, host or name, path)


def client_hello(name, extension=None):
    """The first bytes of a TLS connection, with one more extension of a type."""
    context = ssl.create_default_context()
    outgoing = ssl.MemoryBIO()
    session = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name)
    try:
        session.do_handshake()
    except ssl.SSLWantReadError:
        pass
    hello = bytearray(outgoing.read())
    if extension is not None:
        content = os.urandom(200)
        hello += struct.pack("!HH", extension, len(content)) + content
        # Record, handshake message, and the list of extensions, which comes after version, random, session and suites.
        at = 9 + 2 + 32
        at += 1 + hello[at]
        at += 2 + int.from_bytes(hello[at : at + 2], "big")
        at += 1 + hello[at]
        hello[at : at + 2] = struct.pack("!H", len(hello) - at - 2)
        hello[3:5] = struct.pack("!H", len(hello) - 5)
        hello[6:9] = (len(hello) - 9).to_bytes(3, "big")
    return bytes(hello)


def hello(to, port=443, name="", extension=None, cut=0, pause=0.0):
    """Sends a client hello, perhaps in pieces of a size, and says what kind of TLS record comes back."""
    data = client_hello(name, extension)
    with connected(to, port) as stream:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(data), cut or len(data)):
            stream.sendall(data[start : start + (cut or len(data))])
            time.sleep(pause)
        return {"record": received(stream)[0]}


def question(name, kind):
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.rstrip(".").split(".") if label)
    return os.urandom(2) + b"\x01\x00\x00\x01" + bytes(6) + labels + b"\0" + struct.pack("!HH", TYPES[kind], 1)


def skip_name(data, at):
    while data[at]:
        if data[at] >= 0xC0:
            return at + 2
        at += 1 + data[at]
    return at + 1


def answers(data):
    """Code of the response, and the addresses in it."""
    count, found, at = struct.unpack("!H", data[6:8])[0], [], 12
    at = skip_name(data, at) + 4
    for _ in range(count):
        at = skip_name(data, at)
        kind, _, _, size = struct.unpack("!HHIH", data[at : at + 10])
        content = data[at + 10 : at + 10 + size]
        if kind in (1, 28):
            found.append(socket.inet_ntop(socket.AF_INET if kind == 1 else socket.AF_INET6, content))
        at += 10 + size
    return {"code": data[3] & 15, "truncated": bool(data[2] & 2), "addresses": found}


def dns(name, server="10.0.0.1", port=53, type="A", over="udp"):
    """A query to a server."""
    query = question(name, type)
    if over == "tcp":
        with connected(server, port) as stream:
            stream.sendall(struct.pack("!H", len(query)) + query)
            reader = stream.makefile("rb")
            size = reader.read(2)
            if len(size) < 2:
                raise Closed
            return answers(reader.read(struct.unpack("!H", size)[0]))
    family = socket.AF_INET6 if ":" in server else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as packets:
        packets.settimeout(5)
        packets.connect((server, port))
        packets.send(query)
        data = packets.recv(65536)
        if data[:2] != query[:2]:
            raise OSError(errno.EPROTO, "another id")
        return answers(data)


def resolve(name):
    """As programs resolve names."""
    try:
        return {"addresses": sorted({entry[4][0] for entry in socket.getaddrinfo(name, 80, type=socket.SOCK_STREAM)})}
    except socket.gaierror as error:
        return {"result": {-2: "unknown", -3: "again", -4: "failed", -5: "unknown"}.get(error.errno, str(error.errno))}


def run(command):
    """A program."""
    ran = subprocess.run(command, shell=True, capture_output=True, timeout=TIMEOUT_S * 2, text=True)
    seen = {"result": "ok" if ran.returncode == 0 else f"exit {ran.returncode}", "stderr": ran.stderr[-500:]}
    try:
        return {**seen, **json.loads(ran.stdout)}
    except (ValueError, TypeError):
        return {**seen, "stdout": ran.stdout[-2000:]}


def many(to, port=7, count=10, hold_s=0.0):
    """Opens connections, all of them at the same time, and counts the outcomes."""
    outcomes, held, lock = {}, [], threading.Lock()

    def one(number):
        try:
            stream = connected(to, port)
            stream.sendall(b"x")
            received(stream)
            with lock:
                held.append(stream)
            outcome = "ok"
        except Exception as error:
            outcome = outcome_of(error)
        with lock:
            outcomes[outcome] = outcomes.get(outcome, 0) + 1

    with ThreadPoolExecutor(64) as pool:
        list(pool.map(one, range(count)))
    time.sleep(hold_s)
    for stream in held:
        stream.close()
    return {"outcomes": outcomes}


def outcome_of(error):
    if isinstance(error, Closed):
        return "closed"
    if isinstance(error, (socket.timeout, subprocess.TimeoutExpired)):
        return "silent"
    if isinstance(error, ssl.SSLEOFError):
        return "closed"
    if isinstance(error, OSError) and error.errno and not isinstance(error, ssl.SSLError):
        return errno.errorcode.get(error.errno, str(error.errno))
    return f"{type(error).__name__}: {error}"


def attempt(arguments):
    arguments = dict(arguments)
    action = globals()[arguments.pop("do")]
    begun = time.monotonic()
    try:
        seen = {"result": "ok", **action(**arguments)}
    except Exception as error:
        seen = {"result": outcome_of(error)}
    return {**seen, "seconds": round(time.monotonic() - begun, 2)}


if __name__ == "__main__":
    with ThreadPoolExecutor(AT_ONCE) as pool:
        print(json.dumps(list(pool.map(attempt, json.load(sys.stdin)))))
