"""The network: no way to the host or to others, and no way for the workload to its own agent's controls."""

from __future__ import annotations

import socket
import uuid
from typing import Any

import httpx
from e2b import Sandbox

from harness.inside import Background, end_spawner, probe, root, starts
from harness.patience import within
from harness.platform import Platform
from harness.traffic import until

# What takes longer looks like a hang to programs.
VISIBLE_S = 3


def host_addresses() -> list[str]:
    """Addresses of this host that are not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe_socket:
        try:
            probe_socket.connect(("192.0.2.1", 9))
            return [probe_socket.getsockname()[0]]
        except OSError:
            return []


def test_no_way_to_the_host_or_its_networks(sandbox: Sandbox, platform: Platform) -> None:
    port = platform.port
    targets = [
        "192.0.2.1:80",
        "198.51.100.7:443",
        "169.254.169.254:80",
        "10.0.0.1:22",
        "172.17.0.1:80",
        "192.168.0.1:80",
        f"127.0.0.1:{port}",
        f"::1:{port}",
        "2001:db8::1:443",
        "0.0.0.0:" + str(port),
        *(f"{address}:{port}" for address in host_addresses()),
    ]
    with socket.create_server(("0.0.0.0", 0)) as listener:
        targets += [f"{address}:{listener.getsockname()[1]}" for address in host_addresses()]
        attempts: dict[str, list[dict[str, Any]]] = {target: [] for target in targets}
        # The machine may delay one of them, so what was slow is tried again: a target that hangs does so each time.
        slow = targets
        for _ in range(3):
            for target, seen in (probe(sandbox, "outward", *slow) if slow else {}).items():
                attempts[target].append(seen)
            slow = [target for target in slow if attempts[target][-1]["seconds"] >= VISIBLE_S]
        listener.settimeout(0)
        try:
            listener.accept()
            raise AssertionError("a connection from the sandbox reached the host")
        except BlockingIOError:
            pass
    for target, seen in attempts.items():
        assert all("ok" not in (one["tcp"], one["udp"]) for one in seen), (target, seen)
        assert seen[-1]["tcp"] != "SIGALRM" and seen[-1]["seconds"] < within(VISIBLE_S), (target, seen)


def test_names_do_not_hang(sandbox: Sandbox) -> None:
    took = float(root(sandbox, "python3 -c \"import time,socket\nt=time.time()\ntry: socket.getaddrinfo('example.com',80)\nexcept OSError: pass\nprint(time.time()-t)\""))
    assert took < within(12)
    assert "127.0.0.1" in root(sandbox, "getent ahostsv4 localhost")


def test_unix_sockets_of_the_host_are_not_there(sandbox: Sandbox) -> None:
    name = f"rf-{uuid.uuid4().hex}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + name)
        listener.listen()
        assert probe(sandbox, "abstract", name) == "ECONNREFUSED"


def test_the_control_channel_refuses_peers_inside(sandbox: Sandbox) -> None:
    refusals = {"", "ECONNREFUSED", "ECONNRESET", "EPERM", "EACCES", "EPIPE", "EPROTOTYPE"}
    for user in ("root", "user"):
        for name, answer in probe(sandbox, "control", user=user).items():
            # The agent takes no second spawner while it has one, so that socket may leave a caller waiting.
            assert answer in refusals | ({"silent"} if "spawner" in name else set()), (name, answer)
    assert root(sandbox, "echo unharmed") == "unharmed\n"


def test_a_user_cannot_take_the_place_of_the_spawner(sandbox: Sandbox) -> None:
    """A fake spawner would also start processes of root."""
    pretender = (
        "import os,socket,threading,time\n"
        "def pretend():\n"
        " while True:\n"
        "  s=socket.socket(socket.AF_UNIX,socket.SOCK_SEQPACKET)\n"
        "  try:\n   s.connect('\\0ringfence/spawner')\n   got=s.recv(65536)\n"
        "   if got: open('/tmp/stolen','wb').write(got)\n"
        "  except OSError: time.sleep(0.001)\n"
        "  s.close()\n"
        "for _ in range(8): threading.Thread(target=pretend).start()\n"
        "print('pretending',flush=True)"
    )
    assert Background(sandbox, pretender).said == "pretending\n"
    for _ in range(3):
        end_spawner(sandbox)
        until(lambda: starts(sandbox), "the host has replaced the spawner")
        assert root(sandbox, "id -u; test -e /tmp/stolen || echo nothing") == "0\nnothing\n"


def test_a_flood_of_the_control_channel_does_not_lock_the_host_out(sandbox: Sandbox) -> None:
    hog = (
        "import socket,time\nheld=[]\n"
        "for n in range(4000):\n"
        " try:\n  s=socket.socket(socket.AF_UNIX); s.setblocking(False); s.connect('\\0ringfence/control'); held.append(s)\n"
        " except OSError: pass\n"
        "print('flooded',flush=True); time.sleep(600)"
    )
    assert Background(sandbox, hog, "root").said == "flooded\n"
    assert root(sandbox, "echo answered") == "answered\n"
    assert Sandbox.connect(sandbox.sandbox_id).commands.run("echo too").stdout == "too\n"


def test_its_own_agent_wants_the_token_from_inside_too(sandbox: Sandbox) -> None:
    outcome = probe(sandbox, "own_agent")
    for call, code in outcome.items():
        if call.split()[1] in ("/init", "/freeze"):
            assert code == 404, (call, code)
        else:
            assert code in (401, 404), (call, code)


def test_control_routes_are_404_from_outside(sandbox: Sandbox, platform: Platform) -> None:
    for method in ("GET", "POST", "PUT", "DELETE"):
        answer = httpx.request(
            method,
            f"{platform.url}/init",
            headers={
                "E2b-Sandbox-Id": sandbox.sandbox_id,
                "E2b-Sandbox-Port": "49983",
                "X-Access-Token": sandbox._envd_access_token or "",
            },
            timeout=60,
        )
        assert answer.status_code == 404, method


def test_two_sandboxes_cannot_reach_each_other(sandbox: Sandbox, neighbour: Sandbox) -> None:
    neighbour.commands.run("python3 -m http.server 8123 --bind 0.0.0.0", background=True, timeout=0)
    addresses = root(neighbour, "hostname -I 2>/dev/null || true").split()
    outcome = probe(sandbox, "outward", *(f"{address}:8123" for address in [*addresses, "127.0.0.1"] if ":" not in address))
    assert all(seen["tcp"] != "ok" for seen in outcome.values())


def test_the_platform_answers_a_hostile_port_with_care(sandbox: Sandbox, platform: Platform) -> None:
    """A server inside that speaks nonsense harms only its own callers."""
    nonsense = (
        "import socket\ns=socket.create_server(('127.0.0.1',8200))\n"
        "print('up',flush=True)\n"
        "for data in (b'nonsense\\r\\n\\r\\n', b'HTTP/1.1 200 OK\\r\\nContent-Length: 5\\r\\n\\r\\nab',"
        " b'HTTP/1.1 200 OK\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\nZZ\\r\\n', b'HTTP/1.1 999999 X\\r\\n\\r\\n',"
        " b'HTTP/1.1 200 OK\\r\\n' + b'X: ' + b'y'*2000000 + b'\\r\\n\\r\\n', b''):\n"
        " c,_=s.accept(); c.recv(65536); c.sendall(data); c.close()\n"
    )
    assert Background(sandbox, nonsense).said == "up\n"
    for _ in range(6):
        try:
            answer = httpx.get(f"{platform.url}/", headers={"Host": sandbox.get_host(8200)}, timeout=20)
            assert answer.status_code in (200, 502)
        except httpx.HTTPError:
            pass
    assert httpx.get(f"{platform.url}/health", timeout=60).status_code == 200
    assert root(sandbox, "echo fine") == "fine\n"
