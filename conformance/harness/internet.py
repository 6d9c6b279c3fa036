"""A fake internet: this process, and everything that it starts, in a network namespace whose only way out is a link to
another namespace, where every address answers.

The near side is a host with a public address. On the far side `internet_servers` listens, for all addresses, private
ones too, so that a connection which must not be made would succeed if it were. The same servers listen on the host, on
its loopback and its own addresses. What leaves the host is captured on the link. The namespaces have no names: they
vanish with their processes.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import model_api, package_mirror
from harness.capture import Capture, destined_to
from harness.patience import within
from harness.traffic import until

CLONE_NEWNET, PR_SET_PDEATHSIG = 0x40000000, 1
LINK = "uplink"
HOST_V4, GATEWAY_V4 = "185.199.0.2", "185.199.0.1"
HOST_V6, GATEWAY_V6 = "2a0a:e5c0::2", "2a0a:e5c0::1"
HOST_LINK, GATEWAY_LINK = "02:00:00:00:00:02", "02:00:00:00:00:01"
# Packets to this address are lost without an answer.
BLACK_HOLE = "23.23.23.23"
RESOLVER = "9.9.9.9"
# The last ones are a code host, whose repositories need a token, the APIs of models, which need a key, and registries of packages.
DOMAINS = ("example.com", "example.net", "example.org", "github.com", *model_api.DOMAINS, *package_mirror.DOMAINS)
# No packet of a sandbox may leave for one of these. The link's own addresses and neighbour discovery are not among them.
CLOSED = [
    *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24"),
    *("192.0.2.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
    *("::/96", "::ffff:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48", "2001:db8::/32", "2002:a09:1::/48", "fc00::/7"),
    *("fe80::/10", "fec0::/10", "ff00::/8"),
]

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _end_with_parent() -> None:
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Internet:
    """The fake internet, for as long as the context lasts. Threads that were started before stay where they were."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.documents = directory / "documents"
        self.certificates = directory / "certificates"
        self.authority = directory / "authority.pem"
        self.log_path = directory / "internet.log"
        self.host_log_path = directory / "host.log"
        self.servers: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Internet:
        for path in (self.documents, self.certificates):
            path.mkdir(parents=True)
        self._issue_certificates()
        self.outside = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        checked(libc.unshare(CLONE_NEWNET))
        try:
            self._connect()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for servers in self.servers:
            assert servers.stdin
            servers.stdin.close()
            servers.wait(within(10))
        checked(libc.setns(self.outside, CLONE_NEWNET))
        os.close(self.outside)

    def until_closed(self, *addresses: str) -> None:
        """Waits until the host has no connection to these: the packets that end one may leave after its client has gone."""

        def left() -> list[str]:
            shown = subprocess.run(["ss", "-tnH"], capture_output=True, text=True, check=True).stdout
            return [line for line in shown.splitlines() if line.split()[4].rpartition(":")[0].strip("[]").removeprefix("::ffff:") in addresses]

        until(lambda: not left(), lambda: f"connections have ended: {left()}")

    def _connect(self) -> None:
        far = self._serve(self.log_path, "unshare", "--net").pid
        self.ip("link set lo up", f"link add {LINK} address {HOST_LINK} type veth peer name {LINK} address {GATEWAY_LINK} netns {far}")
        for where, v4, v6 in ((None, HOST_V4, HOST_V6), (far, GATEWAY_V4, GATEWAY_V6)):
            self.ip(
                "link set lo up",
                # No link-local address, whose announcement would delay the first packets.
                f"link set {LINK} addrgenmode none",
                f"address add {v4}/30 dev {LINK}",
                f"address add {v6}/64 dev {LINK} nodad",
                f"link set {LINK} up",
                inside=where,
            )
        # Neighbours that are known for ever, so that no packet waits for their resolution.
        for where, link, neighbours in ((None, GATEWAY_LINK, (GATEWAY_V4, GATEWAY_V6)), (far, HOST_LINK, (HOST_V4, HOST_V6))):
            self.ip(*(f"neighbour replace {to} lladdr {link} nud permanent dev {LINK}" for to in neighbours), inside=where)
        self.ip(f"route add default via {GATEWAY_V4}", f"-6 route add default via {GATEWAY_V6}")
        self.ip(
            # In the main table, where the route to the host is more specific.
            "route add local 0.0.0.0/0 dev lo table main",
            "-6 route add local ::/0 dev lo table main",
            f"route add blackhole {BLACK_HOLE}/32",
            inside=far,
        )
        self._serve(self.host_log_path)
        # From now on until the end: what leaves for an address that is closed.
        self.closed = Capture(LINK, destined_to(CLOSED))

    def _serve(self, log: Path, *prefix: str) -> subprocess.Popen[str]:
        """Starts the servers, and ends them with this process."""
        servers = subprocess.Popen(
            [*prefix, sys.executable, "-m", "harness.internet_servers", log, self.certificates, self.documents],
            cwd=Path(__file__).parent.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=_end_with_parent,
        )
        self.servers.append(servers)
        assert servers.stdout
        assert servers.stdout.readline() == "ready\n", "the servers of the fake internet did not start"
        return servers

    @contextmanager
    def beyond(self, *command: str | Path) -> Iterator[subprocess.Popen[bytes]]:
        """A program that runs among the servers, whose addresses are all local to it, until the context ends."""
        started = subprocess.Popen(
            ["nsenter", "--net", "--target", str(self.servers[0].pid), *command],
            stdin=subprocess.DEVNULL,
            preexec_fn=_end_with_parent,
        )
        try:
            yield started
        finally:
            started.terminate()
            started.wait(within(10))

    def ip(self, *commands: str, inside: int | None = None) -> None:
        """Runs commands of `ip`, here or in the namespace of a process."""
        prefix = ["nsenter", "--net", "--target", str(inside)] if inside else []
        for command in commands:
            subprocess.run([*prefix, "ip", *command.split()], check=True)

    def capture(self) -> Capture:
        """Records what leaves the host from now on."""
        return Capture(LINK)

    def events(self, **values: Any) -> list[dict[str, Any]]:
        """What arrived at the servers, by values that an event must have."""
        if not self.log_path.exists():
            return []
        lines = [json.loads(line) for line in self.log_path.read_bytes().splitlines()]
        return [event for event in lines if all(event.get(name) == value for name, value in values.items())]

    def host_events(self) -> list[dict[str, Any]]:
        """What arrived at the servers of the host, which no sandbox may reach."""
        return [json.loads(line) for line in self.host_log_path.read_bytes().splitlines()]

    def mark(self) -> Callable[..., list[dict[str, Any]]]:
        """Returns a function like `events` for events from now on."""
        since = len(self.events())

        def later(**values: Any) -> list[dict[str, Any]]:
            fresh = self.events()[since:]
            return [event for event in fresh if all(event.get(name) == value for name, value in values.items())]

        return later

    def ended(self, connection: dict[str, Any], within_s: float = 20) -> dict[str, Any]:
        """How a connection that a server has accepted ended."""
        until(lambda: bool(self.events(kind="end", id=connection["id"])), f"{connection} has ended", within_s)
        return self.events(kind="end", id=connection["id"])[0]

    def _issue_certificates(self) -> None:
        """An authority, and a certificate for each domain and the names below it."""
        key = self.directory / "authority.key"
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc", "-days", "30"]
        self._openssl("req", "-x509", *curve, "-subj", "/CN=fake internet", "-keyout", key, "-out", self.authority)
        for domain in DOMAINS:
            parts = self.directory / f"{domain}.key", self.directory / f"{domain}.crt"
            self._openssl(
                *("req", "-x509", *curve, "-CA", self.authority, "-CAkey", key, "-subj", f"/CN={domain}"),
                *("-addext", f"subjectAltName=DNS:{domain},DNS:*.{domain}", "-addext", "basicConstraints=critical,CA:FALSE"),
                *("-keyout", parts[0], "-out", parts[1]),
            )
            (self.certificates / f"{domain}.pem").write_bytes(b"".join(part.read_bytes() for part in parts))

    def _openssl(self, *arguments: str | Path) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True)


if __name__ == "__main__":
    # A shell on the host of the fake internet, to look around.
    import tempfile

    with tempfile.TemporaryDirectory() as directory, Internet(Path(directory)) as internet:
        begun = time.monotonic()
        subprocess.run([os.environ.get("SHELL", "sh"), *sys.argv[1:]], check=False)
        print(internet.log_path.read_text(), f"{time.monotonic() - begun:.1f} s")
