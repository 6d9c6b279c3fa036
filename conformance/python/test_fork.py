"""Forks: sandboxes that go on from where another one is, each by itself, while that one goes on too."""

from __future__ import annotations

import concurrent.futures
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from e2b import CommandExitException, Sandbox

from harness.beside import beside
from harness.criu import criu_config, groups, processes
from harness.inside import boot_id
from harness.patience import within
from harness.platform import Platform
from harness.traffic import until

# Counts in memory, adds what it is told, and says how far it has come.
COUNTER = r"""
import hashlib, os, random, socket, sys
memory = bytearray(os.urandom(1 << 20)) * 20
digest = hashlib.sha256(memory).hexdigest()
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
peer, _ = server.accept()
gone = open("/tmp/gone", "w+b"); gone.write(b"gone"); gone.flush(); os.unlink("/tmp/gone")
named = open("/tmp/first-name", "w+b"); named.write(b"named"); named.flush()
os.link("/tmp/first-name", "/tmp/other-name"); os.unlink("/tmp/first-name")
sum = 0
print("ready", flush=True)
for line in sys.stdin:
    sum += int(line)
    client.sendall(line.encode()); assert peer.recv(100) == line.encode()
    for file, content in ((gone, b"gone"), (named, b"named")):
        file.seek(0); assert file.read() == content
    assert hashlib.sha256(memory).hexdigest() == digest
    print("sum", sum, os.getpid(), flush=True)
"""


@pytest.fixture(scope="module")
def forking(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    with beside(platform, tmp_path_factory.mktemp("fork"), criu_config()) as server:
        yield server


@pytest.fixture
def box(forking: Platform) -> Iterator[Sandbox]:
    forking.use()
    box = Sandbox.create(timeout=300, metadata={"of": "the parent"}, envs={"OWN": "value"})
    try:
        yield box
    finally:
        box.kill()


def api(server: Platform) -> httpx.Client:
    return httpx.Client(base_url=server.url, headers={"X-API-Key": server.credentials()["E2B_API_KEY"]}, timeout=120)


def fork(box: Sandbox, count: int = 1, timeout: int = 120) -> list[Sandbox]:
    children = box.fork(timeout=timeout, count=count, request_timeout=within(120))
    failed = [child for child in children if isinstance(child, Exception)]
    assert failed == [] and len(children) == count
    return children


def end(boxes: list[Sandbox]) -> None:
    for box in boxes:
        box.kill()


def ask(box: Sandbox, pid: int, number: int) -> list[str]:
    """Has the counter of a sandbox add a number."""
    command = box.commands.connect(pid, timeout=0)
    box.commands.send_stdin(pid, f"{number}\n")
    for out, err, _ in command:
        assert not err, err
        if out and out.startswith("sum"):
            command.disconnect()
            return out.split()[1:]
    raise AssertionError("the counter has ended")


def start_counter(box: Sandbox) -> int:
    box.files.write("/tmp/counter.py", COUNTER)
    counter = box.commands.run("exec python3 /tmp/counter.py", background=True, stdin=True, timeout=0)
    for out, err, _ in counter:
        assert not err, err
        if out and "ready" in out:
            break
    counter.disconnect()
    return counter.pid


def disks(server: Platform) -> set[str]:
    """Names, not their number: a disk of an earlier test may vanish meanwhile."""
    return {path.name for path in (server.data_dir / "disks").glob("*.img")}


def test_memory_and_files_go_on_by_themselves(box: Sandbox) -> None:
    pid = start_counter(box)
    (_, inside) = ask(box, pid, 1)
    box.files.write("/home/user/shared", "from the parent")
    children = fork(box)
    try:
        (child,) = children
        # The same process with the same memory, and each its own from now on.
        assert ask(child, pid, 10) == ["11", inside]
        assert ask(box, pid, 100) == ["101", inside]
        assert ask(child, pid, 10) == ["21", inside]
        assert child.files.read("/home/user/shared") == "from the parent"
        child.files.write("/home/user/shared", "from the child")
        box.files.write("/home/user/later", "later")
        assert box.files.read("/home/user/shared") == "from the parent"
        assert not child.files.exists("/home/user/later")
        assert box.files.read("/tmp/other-name") == child.files.read("/tmp/other-name") == "named"
        # No names of deleted files are left by what has written and read them.
        for one in (box, child):
            assert one.commands.run("ls -a /tmp /home/user | grep -c link_remap || true").stdout == "0\n"
            assert "MemTotal" in one.files.read("/proc/meminfo")
        # The end of one is not the end of the other.
        child.kill()
        assert ask(box, pid, 1) == ["102", inside]
        grandchild = fork(box)[0]
        children.append(grandchild)
        box.kill()
        assert ask(grandchild, pid, 1) == ["103", inside]
        again = fork(grandchild)[0]
        children.append(again)
        assert ask(again, pid, 1) == ["104", inside]
    finally:
        end(children)


def test_five_with_memory(forking: Platform, box: Sandbox) -> None:
    pid = start_counter(box)
    before = disks(forking)
    children = fork(box, 5)
    try:
        assert len({child.sandbox_id for child in children} | {box.sandbox_id}) == 6
        with concurrent.futures.ThreadPoolExecutor() as pool:
            sums = list(pool.map(lambda pair: ask(pair[1], pid, pair[0])[0], enumerate(children, 1)))
        assert sums == ["1", "2", "3", "4", "5"]
        assert ask(box, pid, 0)[0] == "0"
        assert len(disks(forking) - before) == 5
    finally:
        end(children)
    until(lambda: disks(forking) <= before, "their disks are removed")
    until(lambda: all(processes(child) == [] and groups(child) == [] for child in children), "nothing is left of them")
    kept = {entry.name.split(".")[0] for entry in (forking.data_dir / "kept").iterdir()}
    assert kept.isdisjoint(child.sandbox_id for child in children)


def test_each_has_an_identity_of_its_own(forking: Platform, box: Sandbox) -> None:
    children = fork(box, 2)
    everyone = [box, *children]
    try:
        with api(forking) as client:
            details = [client.get(f"/sandboxes/{one.sandbox_id}").json() for one in everyone]
        assert len({detail["sandboxID"] for detail in details}) == 3
        assert len({detail["envdAccessToken"] for detail in details}) == 3
        for detail in details:
            assert detail["metadata"] == {"of": "the parent"} and detail["templateID"] == details[0]["templateID"]
            assert detail["state"] == "running"
        inside = "echo $E2B_SANDBOX_ID $OWN $(cat /run/e2b/.E2B_SANDBOX_ID); cat /run/ringfence/sandbox.json"
        for one in everyone:
            variables, given = one.commands.run(inside).stdout.splitlines()
            assert variables == f"{one.sandbox_id} value {one.sandbox_id}"
            # What programs read that go on with their environment.
            want = {"sandboxID": one.sandbox_id, "templateID": details[0]["templateID"], "envVars": {"OWN": "value"}}
            assert json.loads(given) == {**want, "metadata": {"of": "the parent"}}
        # The random numbers of the kernel are not copied.
        random = "head -c 16 /dev/urandom | base64; cat /proc/sys/kernel/random/uuid"
        assert len({one.commands.run(random).stdout for one in everyone}) == 3
        for one in everyone:
            asked = time.time()
            assert asked - 1 <= float(one.commands.run("date +%s.%N").stdout) <= time.time() + 1
        # Nobody's token opens another one's agent.
        for one in everyone:
            for other in everyone:
                if one is other:
                    continue
                answer = httpx.get(
                    f"{forking.url}/files",
                    params={"path": "/etc/hostname", "username": "user"},
                    headers={
                        "E2b-Sandbox-Id": one.sandbox_id,
                        "E2b-Sandbox-Port": "49983",
                        "X-Access-Token": other._envd_access_token,
                    },
                    timeout=within(30),
                )
                assert answer.status_code == 401, answer.text
        # Ids of the host: each has a range of its own.
        ranges = []
        for one in everyone:
            maps = {Path(f"/proc/{pid}/{kind}_map").read_text() for pid in processes(one) for kind in ("uid", "gid")}
            assert len(maps) == 1, maps
            ranges.append(int(maps.pop().split()[1]))
        assert len(set(ranges)) == 3
        owners = [{Path(f"/proc/{pid}").stat().st_uid // 65536 * 65536 for pid in processes(one)} for one in everyone]
        for first, second in ((0, 1), (0, 2), (1, 2)):
            assert owners[first].isdisjoint(owners[second] - {0})
    finally:
        end(children)


def test_a_boot_id_is_that_of_one_run(box: Sandbox) -> None:
    """A boot id stays the same for processes as long as they go on: it is not that of the host, and a copy gets
    another one."""
    first = boot_id(box)
    assert first != Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    for user in ("user", "root"):
        with pytest.raises(CommandExitException):
            box.commands.run("echo x >/proc/sys/kernel/random/boot_id", user=user)
    for _ in range(2):
        assert box.pause() is True
        box = Sandbox.connect(box.sandbox_id, timeout=200)
        assert boot_id(box) == first
    children = fork(box, 2)
    try:
        own = [boot_id(child) for child in children]
        assert len({first, *own}) == 3
        assert boot_id(box) == first
        # A copy is a run like any other.
        assert children[0].pause() is True
        child = Sandbox.connect(children[0].sandbox_id, timeout=200)
        assert boot_id(child) == own[0]
        assert child.pause(mode="filesystem") is True
        child = Sandbox.connect(child.sandbox_id, timeout=200)
        assert boot_id(child) not in (first, *own)
    finally:
        end(children)


def test_connections_of_the_parent_stay(box: Sandbox) -> None:
    """A command's stream goes on, and so does a connection into the sandbox; in the child both have ended."""
    script = "i=0; while :; do i=$((i+1)); echo $i; sleep 0.05; done"
    stream = box.commands.run(script, background=True, timeout=0)
    lines = iter(stream)
    next(lines)
    children = fork(box, 2)
    try:
        seen = [int(number) for out, _, _ in (next(lines) for _ in range(20)) for number in (out or "").split()]
        assert seen == list(range(seen[0], seen[0] + len(seen)))
        for one in (box, *children):
            assert one.commands.run("echo here").stdout == "here\n"
        # The program goes on in the children as well, where nobody reads it.
        for child in children:
            connected = child.commands.connect(stream.pid, timeout=0)
            out, _, _ = next(iter(connected))
            assert int((out or "").split()[0]) > 0
            connected.disconnect()
    finally:
        end(children)


def test_requests_meanwhile_are_answered(forking: Platform, box: Sandbox) -> None:
    """Whoever connects while a sandbox is copied waits until it goes on."""
    box.commands.run("head -c 100M /dev/urandom > /dev/shm/memory")
    box.commands.run("python3 -m http.server 7000 --directory /etc/skel", background=True, timeout=0)
    headers = {"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": "7000"}

    def get() -> int:
        return httpx.get(forking.url, headers=headers, timeout=within(120)).status_code

    until(lambda: get() == 200, "it serves")
    has_ended = threading.Event()

    def ask() -> Counter[int]:
        seen: Counter[int] = Counter()
        while not has_ended.is_set():
            seen[get()] += 1
        return seen

    with concurrent.futures.ThreadPoolExecutor() as pool:
        asking = [pool.submit(ask) for _ in range(2)]
        try:
            for _ in range(3):
                end(fork(box))
        finally:
            has_ended.set()
        seen = sum((one.result() for one in asking), Counter())
    assert set(seen) == {200}, seen


def test_what_cannot_be_forked(forking: Platform, box: Sandbox) -> None:
    with api(forking) as client:
        path = f"/sandboxes/{box.sandbox_id}/fork"

        def status(body: dict[str, object], at: str = path) -> int:
            return client.post(at, json=body).status_code

        for body in ({"timeout": 0}, {"timeout": -1}, {"timeout": 10**9}, {"count": 0}, {"count": 101}, {"count": "1"}):
            assert status(body) == 400, body
        assert status({}, "/sandboxes/inobody/fork") == 404
        before = disks(forking)
        box.commands.run("sudo touch /dev/mqueue/queue")
        answer = client.post(path, json={"count": 2})
        assert answer.status_code == 409, answer.text
        assert "mqueue" in answer.json()["message"]
        assert disks(forking) <= before
        assert box.commands.run("sudo rm /dev/mqueue/queue; echo here").stdout == "here\n"
        assert "MemTotal" in box.files.read("/proc/meminfo")
        answer = client.post(path)
        assert answer.status_code == 201, answer.text
        (entry,) = answer.json()
        child = entry["sandbox"]["sandboxID"]
        # The default of the timeout.
        left = client.get(f"/sandboxes/{child}").json()["endAt"] > client.get(f"/sandboxes/{box.sandbox_id}").json()["endAt"]
        assert not left
        assert client.delete(f"/sandboxes/{child}").status_code == 204
        assert box.pause() is True
        assert status({}) == 409
        Sandbox.connect(box.sandbox_id, timeout=300)
        assert status({"timeout": 20}) == 201


def test_without_criu(platform: Platform) -> None:
    platform.use()
    with Sandbox.create(timeout=60) as box, api(platform) as client:
        answer = client.post(f"/sandboxes/{box.sandbox_id}/fork", json={})
        assert answer.status_code == 501, answer.text
        assert "CRIU" in answer.json()["message"]
        assert box.commands.run("echo here").stdout == "here\n"


# Sends a line again and again on its only connection, and says when that ends.
STREAM = r"""
import socket, time
server = socket.create_server(("", 7000))
open("/tmp/listening", "w").close()
peer, _ = server.accept()
peer.recv(65536)
peer.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
number = 0
try:
    while True:
        number += 1
        line = f"{number}\n".encode()
        peer.sendall(b"%x\r\n%s\r\n" % (len(line), line))
        time.sleep(0.02)
except OSError as error:
    open("/tmp/ended", "w").write(type(error).__name__)
"""
# Waits on a connection for what never comes, and says when it ends.
WAIT = r"""
import socket
server = socket.create_server(("", 7001))
open("/tmp/waiting", "w").close()
peer, _ = server.accept()
peer.recv(65536)
open("/tmp/accepted", "w").close()
try: peer.recv(1)
except OSError as error: open("/tmp/reset", "w").write(type(error).__name__)
"""


def test_connections_from_outside_are_those_of_the_parent(forking: Platform, box: Sandbox) -> None:
    for name, program, sign in (("stream", STREAM, "listening"), ("wait", WAIT, "waiting")):
        box.files.write(f"/tmp/{name}.py", program)
        box.commands.run(f"python3 /tmp/{name}.py", background=True, timeout=0)
        until(lambda sign=sign: box.files.exists(f"/tmp/{sign}"), "it listens")

    def headers(port: int) -> dict[str, str]:
        return {"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": str(port)}

    with concurrent.futures.ThreadPoolExecutor() as pool, httpx.Client(base_url=forking.url, timeout=within(300)) as client:
        waiting = pool.submit(client.get, "/", headers=headers(7001))
        until(lambda: box.files.exists("/tmp/accepted"), "it has accepted")
        with client.stream("GET", "/", headers=headers(7000)) as stream:
            lines = stream.iter_lines()
            first = int(next(lines))
            children = fork(box, 2)
            try:
                assert [int(next(lines)) for _ in range(100)] == list(range(first + 1, first + 101))
                for child in children:
                    until(lambda child=child: child.files.exists("/tmp/ended"), "its stream ends")
                    until(lambda child=child: child.files.exists("/tmp/reset"), "what waits is told")
                assert not box.files.exists("/tmp/ended") and not box.files.exists("/tmp/reset")
                assert not waiting.done()
            finally:
                end(children)
                box.kill()
        waiting.exception(timeout=30)
