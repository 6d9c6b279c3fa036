"""Memory that the kernel does not charge: a sandbox cannot exhaust host memory through its sockets."""

from __future__ import annotations

import os
import socket
import time
import uuid

import httpx
import pytest
from e2b import Sandbox

from harness.inside import Background, host_pids, root
from harness.platform import Platform
from harness.traffic import program, until

# The attack ends itself here, so that a host that does not hold it lives.
ATTACK_MIB = 2600
# What a sandbox may have held when it was ended: what is allowed, and what it can take between two measurements and
# during one; a fast machine fills a gigabyte per second.
HELD_MIB = 2000
KINDS = {
    "user": ("netlink", "errors", "timestamps", "corked", "unaccepted"),
    "root": ("netlink", "raw"),
}


def start(sandbox: Sandbox, kind: str, user: str, *options: str, mib: int = ATTACK_MIB) -> None:
    sandbox.files.write("/tmp/sockets.py", program("sockets.py"), user="root")
    command = " ".join(["exec python3 /tmp/sockets.py", kind, str(mib), *options])
    sandbox.commands.run(command, background=True, user=user, timeout=0)


def logged(platform: Platform, sandbox_id: str) -> list[dict]:
    """What the sandbox's log says about the memory of its sockets."""
    headers = {"X-API-Key": os.environ["E2B_API_KEY"]}
    answer = httpx.get(f"{platform.url}/v2/sandboxes/{sandbox_id}/logs", params={"limit": 1000}, headers=headers)
    entries = answer.json()["logs"]
    return [entry for entry in entries if entry.get("fields", {}).get("event_type") == "socket_memory"]


@pytest.mark.parametrize("options", [(), ("raise",)], ids=["default buffers", "largest buffers"])
@pytest.mark.parametrize(("user", "kind"), [(user, kind) for user, kinds in KINDS.items() for kind in kinds])
def test_uncharged_socket_memory_is_limited(
    platform: Platform, neighbour: Sandbox, user: str, kind: str, options: tuple[str, ...]
) -> None:
    box = Sandbox.create(timeout=300)
    try:
        start(box, kind, user, *options)
        until(lambda: not box.is_running(), "the sandbox is ended", within_s=60)
        until(lambda: bool(logged(platform, box.sandbox_id)), "its log says why", within_s=10)
        held = int(logged(platform, box.sandbox_id)[0]["fields"]["held_bytes"])
        assert held >> 20 < HELD_MIB
        assert root(neighbour, "echo untouched") == "untouched\n"
    finally:
        box.kill()


HONEST = """
import resource, socket, time
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
keep = []
listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
for _ in range(400):
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    for end in (client, server):
        end.setblocking(False)
        try:
            while end.send(bytes(65536)): pass
        except BlockingIOError: pass
    keep += [client, server]
for _ in range(200):
    end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    end.bind(("127.0.0.1", 0))
    end.setblocking(False)
    for _ in range(50): end.sendto(bytes(2000), end.getsockname())
    keep.append(end)
print("full", flush=True)
while True:
    socket.getaddrinfo("localhost", 80)
    time.sleep(0.01)
"""


def test_a_server_with_full_buffers_is_not_terminated(platform: Platform, neighbour: Sandbox) -> None:
    """What is charged is not held against a sandbox, even while another one is caught."""
    assert Background(neighbour, HONEST).said == "full\n"
    box = Sandbox.create(timeout=300)
    try:
        start(box, "netlink", "user")
        until(lambda: not box.is_running(), "the other one is ended", within_s=60)
    finally:
        box.kill()
    time.sleep(1)
    assert neighbour.is_running()
    assert logged(platform, neighbour.sandbox_id) == []
    assert root(neighbour, "echo untouched") == "untouched\n"


def test_what_was_taken_while_no_platform_ran_is_found(platform: Platform) -> None:
    box = Sandbox.create(timeout=300)
    # More than the platform allows, and less than the agent does.
    start(box, "errors", "user", mib=100)
    platform.kill()
    time.sleep(2)
    platform.start()
    platform.use()
    until(lambda: not box.is_running(), "the sandbox is ended", within_s=60)


def test_what_is_taken_while_no_platform_runs_is_given_back(platform: Platform) -> None:
    """The agent checks while no platform runs; the sandbox and its files are kept."""
    for kind, user in (("netlink", "user"), ("errors", "user"), ("raw", "root")):
        box = Sandbox.create(timeout=300)
        box.files.write("/tmp/sockets.py", program("sockets.py"), user="root")
        box.files.write("/home/user/kept", "content")
        mark = f"rf-{uuid.uuid4().hex[:10]}"
        attack = f"exec -a {mark} python3 /tmp/sockets.py {kind} {ATTACK_MIB}"
        box.commands.run(f"until [ -e /tmp/go ]; do sleep 0.1; done; {attack}", background=True, user=user, timeout=0)
        box.commands.run("(sleep 3; touch /tmp/go) >/dev/null 2>&1 &", user="root")
        platform.kill()
        try:
            until(lambda: bool(host_pids(mark)), "the attack runs", within_s=20)
            until(lambda: not host_pids(mark), "the attack is ended", within_s=60)
        finally:
            platform.start()
            platform.use()
        assert box.is_running()
        assert box.files.read("/home/user/kept") == "content"
        until(lambda: box.commands.run("echo works").stdout == "works\n", "commands run again")
        until(lambda: bool(logged(platform, box.sandbox_id)), "its log says why", within_s=10)
        assert int(logged(platform, box.sandbox_id)[0]["fields"]["held_bytes"]) >> 20 < HELD_MIB
        assert box.kill()


STUCK = """
import socket, time
listener = socket.create_server(("0.0.0.0", 8000), backlog=128)
keep = []
print("listens", flush=True)
while True:
    keep.append(listener.accept())
"""


def test_clients_that_give_up_on_a_stuck_server_do_not_end_its_sandbox(platform: Platform, neighbour: Sandbox) -> None:
    """What the platform could not deliver to a server inside is not the sandbox's."""
    assert Background(neighbour, STUCK).said == "listens\n"
    head = f"POST / HTTP/1.1\r\nHost: {neighbour.get_host(8000)}\r\nContent-Length: 100000000\r\n\r\n".encode()
    for _ in range(40):
        with socket.create_connection(("127.0.0.1", platform.port)) as client:
            client.settimeout(0.05)
            client.sendall(head)
            try:
                for _ in range(100):
                    client.send(bytes(1 << 20))
            except (TimeoutError, ConnectionError):
                pass
    box = Sandbox.create(timeout=300)
    try:
        start(box, "netlink", "user")
        until(lambda: not box.is_running(), "a hog elsewhere is ended", within_s=60)
    finally:
        box.kill()
    time.sleep(1)
    assert neighbour.is_running()
    assert logged(platform, neighbour.sandbox_id) == []
