"""Injection and policies hold for programs that go on after a pause to disk, in forks, and in sandboxes from a snapshot."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2b import Sandbox, Secret

from fence.test_injection import API, Injected, sent
from harness.asked import Asked
from harness.beside import beside
from harness.criu import frozen_config, pause, processes
from harness.internet import Internet
from harness.platform import Platform
from harness.search import search_kept
from harness.traffic import until

# Reads the certificates that it trusts first, and asks for each address that it reads then.
CLIENT = """
import hashlib, ssl, sys, urllib.request
context = ssl.create_default_context()
mark = hashlib.sha256(sys.argv[1].encode()).hexdigest()
for line in sys.stdin:
    try:
        with urllib.request.urlopen(line.strip(), context=context, timeout=20) as answer:
            print("status", answer.status, flush=True)
    except OSError as error:
        print("status", error, flush=True)
"""

# Waits for what never comes on a connection, sends on another one all the time, waits on one on which it has sent everything, and
# receives on one without end.
CONNECTED = """
import socket, sys, threading, time

def say(name, what):
    with open(f"/tmp/{name}", "w") as file: file.write(what)

def wait(stream, begun):
    begun.set()
    stream.recv(1)

def send(stream, begun):
    while True:
        stream.sendall(b"x")
        if not stream.recv(1): return
        begun.set()
        time.sleep(0.05)

def half(stream, begun):
    stream.shutdown(socket.SHUT_WR)
    begun.set()
    stream.recv(1)

def receive(stream, begun):
    while stream.recv(1 << 16): begun.set()

def follow(name, stream, work, begun):
    try:
        work(stream, begun)
        say(name, "closed")
    except OSError as error:
        say(name, type(error).__name__)
    finally:
        begun.set()

WORK = {"waits": (1006, wait), "sends": (7, send), "half": (1007, half), "receives": (1005, receive)}
all_begun = []
for number, address in enumerate(("93.190.0.1", "2606:4700:90::1")):
    for name in sys.argv[1:]:
        port, work = WORK[name]
        stream = socket.create_connection((address, port))
        all_begun.append(threading.Event())
        threading.Thread(target=follow, args=(f"{name}-{number}", stream, work, all_begun[-1])).start()
# What each does on its connection has begun.
for begun in all_begun: begun.wait()
print("ready", flush=True)
"""
SERVERS = "93.190.0.1", "2606:4700:90::1"
KINDS = "waits", "sends", "half", "receives"


class Client:
    """The program, which runs in one sandbox first and then in others as well."""

    def __init__(self, box: Sandbox) -> None:
        seed = uuid.uuid4().hex
        self.mark = hashlib.sha256(seed.encode()).hexdigest()
        box.files.write("/tmp/client.py", CLIENT)
        self.program = Asked(box, f"exec python3 /tmp/client.py {seed}", "status")
        # It has read the certificates when it answers, whatever that is.
        self.ask(box, some_path())

    def ask(self, box: Sandbox, path: str) -> str:
        """The answer to a request of the program in a sandbox."""
        return self.program.ask(box, f"https://{API}{path}").removeprefix("status ").strip()


@pytest.fixture
def injected(create: Callable[..., Sandbox]) -> Injected:
    return Injected(create)


def some_path() -> str:
    return f"/{uuid.uuid4().hex}"


def log_of(platform: Platform, box: Sandbox) -> str:
    headers = {"X-API-Key": platform.credentials()["E2B_API_KEY"]}
    return httpx.get(f"{platform.url}/v2/sandboxes/{box.sandbox_id}/logs", headers=headers, timeout=60).text


def assert_injected(client: Client, box: Sandbox, internet: Internet, header: str) -> None:
    """For the program of before, and for one that is started now."""
    path = some_path()
    assert client.ask(box, path) == "200"
    assert sent(internet, path) == [header]
    box.commands.run(f"curl -sS https://{API}{path}", timeout=60)
    assert sent(internet, path) == [header] * 2


def checkpoints(directory: Path) -> list[Path]:
    """Files with pages of memory."""
    return list(directory.rglob("pages-*.img"))


def test_after_a_pause_to_disk(injected: Injected, internet: Internet, platform: Platform) -> None:
    box = injected.box
    client = Client(box)
    assert_injected(client, box, internet, injected.header)
    pause(box)
    # What its memory has is found in its checkpoint, and the secret is nowhere.
    assert checkpoints(platform.data_dir / "kept")
    assert search_kept(client.mark, platform.data_dir, platform.log_path) == {"data"}
    assert search_kept(injected.secret, platform.data_dir, platform.log_path) == set()
    # What changes meanwhile holds from the first request on.
    injected.secret = f"sk-{uuid.uuid4().hex}"
    Secret.update(injected.name, injected.secret)
    box = Sandbox.connect(box.sandbox_id, timeout=300)
    assert_injected(client, box, internet, f"Bearer {injected.secret}")
    # A pause to disk after a restart of the platform.
    assert platform.terminate() == 0
    platform.start()
    pause(box)
    box = Sandbox.connect(box.sandbox_id, timeout=300)
    assert_injected(client, box, internet, f"Bearer {injected.secret}")
    box.update_network({"rules": injected.network()["rules"], "deny_out": ["0.0.0.0/0"]})
    pause(box)
    box = Sandbox.connect(box.sandbox_id, timeout=300)
    path = some_path()
    assert client.ask(box, path) != "200"
    assert sent(internet, path) == []


def test_in_forks(injected: Injected, internet: Internet, platform: Platform) -> None:
    parent = injected.box
    client = Client(parent)
    assert_injected(client, parent, internet, injected.header)
    children = parent.fork(count=2, timeout=200)
    try:
        assert not [child for child in children if isinstance(child, Exception)], children
        for box in (parent, *children):
            assert_injected(client, box, internet, injected.header)
        # Each has rules of its own from now on, and a log.
        other = f"sk-{uuid.uuid4().hex}"
        Secret.create(f"other-{injected.name}", other)
        headers = {"Authorization": f"Bearer ${{e2b.secrets.other-{injected.name}}}"}
        children[0].update_network({"rules": {API: [{"transform": {"headers": headers}}]}})
        children[1].update_network({"allow_internet_access": False})
        assert_injected(client, children[0], internet, f"Bearer {other}")
        assert_injected(client, parent, internet, injected.header)
        refused, own = some_path(), some_path()
        assert client.ask(children[1], refused) != "200"
        assert sent(internet, refused) == []
        assert client.ask(children[0], own) == "200"
        until(lambda: own in log_of(platform, children[0]), "its request is in its log")
        assert all(own not in log_of(platform, box) for box in (parent, children[1]))
        # They go on without the sandbox whose certificate they trust.
        parent.kill()
        assert_injected(client, children[0], internet, f"Bearer {other}")
    finally:
        for child in children:
            child.kill()


def test_in_sandboxes_from_a_snapshot(injected: Injected, internet: Internet, platform: Platform) -> None:
    client = Client(injected.box)
    snapshot = injected.box.create_snapshot().snapshot_id
    try:
        assert checkpoints(platform.data_dir / "memories")
        assert "data" in search_kept(client.mark, platform.data_dir, platform.log_path)
        assert search_kept(injected.secret, platform.data_dir, platform.log_path) == set()
        injected.box.kill()
        # The rules are those of the create request.
        other = f"sk-{uuid.uuid4().hex}"
        Secret.create(f"other-{injected.name}", other)
        headers = {"Authorization": f"Bearer ${{e2b.secrets.other-{injected.name}}}"}
        with Sandbox.create(snapshot, timeout=200, network={"rules": {API: [{"transform": {"headers": headers}}]}}) as box:
            assert_injected(client, box, internet, f"Bearer {other}")
        # Without rules, nothing is decrypted: the server shows a certificate that sandboxes do not trust.
        with Sandbox.create(snapshot, timeout=200) as box:
            path = some_path()
            assert "CERTIFICATE_VERIFY_FAILED" in client.ask(box, path)
            box.commands.run(f"curl -sSk https://{API}{path}", timeout=60)
            assert sent(internet, path) == [None]
    finally:
        Sandbox.delete_snapshot(snapshot)


class Connected:
    """The program, which has connections to servers outside."""

    def __init__(self, box: Sandbox, internet: Internet, kinds: tuple[str, ...] = KINDS) -> None:
        self.internet, self.since, self.kinds = internet, internet.mark(), kinds
        box.files.write("/tmp/connected.py", CONNECTED)
        handle = box.commands.run(f"exec python3 /tmp/connected.py {' '.join(kinds)}", background=True, timeout=0)
        assert next(iter(handle))[0] == "ready\n"
        handle.disconnect()
        self.count = len(kinds) * len(SERVERS)
        until(lambda: len(self.connections()) == self.count, "the servers have its connections")

    def connections(self) -> list[dict[str, Any]]:
        return [event for server in SERVERS for event in self.since(kind="tcp", server=server)]

    @staticmethod
    def outcomes(box: Sandbox) -> dict[str, str]:
        """What has become of the connections, as the program in a sandbox says."""
        lines = box.commands.run("cd /tmp; for file in *-[01]; do echo $file $(cat $file 2>/dev/null); done").stdout.splitlines()
        return dict(words for line in lines if len(words := line.split()) == 2)

    def assert_ended(self, box: Sandbox) -> None:
        """Checks that all connections have failed, and that none looks as if the server had closed it."""
        until(lambda: len(self.outcomes(box)) == self.count, "it knows of each")
        for name, outcome in self.outcomes(box).items():
            # With half of a connection gone before, the kernel has no reset to tell of.
            want = ("ConnectionAbortedError", "ConnectionResetError") if name.startswith("half") else ("ConnectionResetError",)
            assert outcome in want, (name, outcome)

    def assert_open(self, box: Sandbox) -> None:
        assert self.outcomes(box) == {}
        assert self.since(kind="end") == []


def test_connections_of_copies(create: Callable[..., Sandbox], internet: Internet) -> None:
    """Connections of a sandbox that goes on stay, and those of forks and of sandboxes from a snapshot fail."""
    box = create()
    # What arrives all the time can keep a sandbox from being copied.
    connected = Connected(box, internet, ("waits", "sends", "half"))
    children = box.fork(count=2, timeout=200)
    snapshot = box.create_snapshot().snapshot_id
    try:
        connected.assert_open(box)
        for child in children:
            assert isinstance(child, Sandbox), child
            connected.assert_ended(child)
        with Sandbox.create(snapshot, timeout=200) as child:
            connected.assert_ended(child)
        connected.assert_open(box)
        # No child has sent anything to a server of its parent's connections.
        assert len(connected.connections()) == connected.count
    finally:
        for child in children:
            if isinstance(child, Sandbox):
                child.kill()
        Sandbox.delete_snapshot(snapshot)


def test_connections_of_a_sandbox_on_disk(create: Callable[..., Sandbox], internet: Internet) -> None:
    """The servers are told at the pause, and the programs at the resume."""
    box = create()
    connected = Connected(box, internet)
    pause(box)
    assert {internet.ended(connection)["how"] for connection in connected.connections()} == {"reset"}
    box = Sandbox.connect(box.sandbox_id, timeout=300)
    connected.assert_ended(box)


def test_connections_of_a_sandbox_in_memory(create: Callable[..., Sandbox], internet: Internet) -> None:
    """Connections end as well where the processes cannot be written, and stay in memory."""
    box = create()
    connected = Connected(box, internet)
    box.commands.run("touch /dev/mqueue/queue", user="root")
    assert box.pause() is True
    assert processes(box) != []
    assert {internet.ended(connection)["how"] for connection in connected.connections()} == {"reset"}
    box = Sandbox.connect(box.sandbox_id, timeout=300)
    connected.assert_ended(box)


def test_connections_of_a_sandbox_that_is_written_later(platform: Platform, internet: Internet, tmp_path: Path) -> None:
    """Where the pause is answered before."""
    with beside(platform, tmp_path, frozen_config()) as server:
        box = Sandbox.create(timeout=300)
        connected = Connected(box, internet)
        assert box.pause() is True
        assert {internet.ended(connection)["how"] for connection in connected.connections()} == {"reset"}
        headers = {"X-API-Key": server.credentials()["E2B_API_KEY"]}
        path = f"{server.url}/sandboxes/{box.sandbox_id}"
        until(lambda: httpx.get(path, headers=headers, timeout=60).json()["pauseStorage"] == "disk", "it is on disk")
        box = Sandbox.connect(box.sandbox_id, timeout=300)
        connected.assert_ended(box)
        box.kill()
