"""Certificates by ACME from Pebble: issued, used by the SDK, renewed, and what happens when that fails."""

from __future__ import annotations

import http.client
import os
import re
import signal
import ssl
import stat
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from harness.hoststate import HostState, left_over
from harness.pebble import Pebble
from harness.ports import free_port
from harness.secure import SecurePlatform
from harness.traffic import until

HOST = "acme.localhost"
DAYS_90 = 90 * 24 * 60 * 60
# Renewed after 10 s.
SHORT_S = 15


class AcmePlatform(SecurePlatform):
    """A platform that asks `pebble` for its certificate."""

    def __init__(self, data_dir: Path, pebble: Pebble) -> None:
        super().__init__(data_dir)
        self.metrics_port = free_port()
        self.config_path = data_dir.parent / f"{data_dir.name}.toml"
        self.config_path.write_text(f"""
domain = "{HOST}:{self.port}"
metrics_listen = "127.0.0.1:{self.metrics_port}"

[acme]
directory = "{pebble.directory}"
accept_terms = true
contact = "operator@example.com"
dns_hook = "{pebble.hook}"
dns_wait_s = 0
ca = "{pebble.ca}"

[sandbox]
disk_mb = 256
""")

    @contextmanager
    def connected(self, ca: Path, name: str = f"api.{HOST}") -> Iterator[http.client.HTTPSConnection]:
        """A connection to a name, by a client that trusts one CA."""
        context = ssl.create_default_context(cafile=str(ca))
        connection = http.client.HTTPSConnection(name, self.port, timeout=10, context=context)
        try:
            connection.connect()
            yield connection
        finally:
            connection.close()

    def certificate(self, ca: Path, name: str = f"api.{HOST}") -> dict | None:
        """The certificate for a name, if the client accepts it."""
        try:
            with self.connected(ca, name) as connection:
                return connection.sock.getpeercert()
        except ssl.SSLError:
            return None

    def local_ca(self) -> Path:
        return self.data_dir / "tls" / "ca.pem"

    def doctor(self) -> str:
        assert self.config_path
        checks = self.run("doctor", "--config", str(self.config_path)).stdout.splitlines()
        return next(line for line in checks if line.split()[1:2] == ["https"])

    def hang_up(self) -> None:
        assert self.process
        self.process.send_signal(signal.SIGHUP)


def answers(connection: http.client.HTTPSConnection) -> bool:
    connection.request("GET", "/health")
    with connection.getresponse() as answer:
        answer.read()
        return answer.status == 200


@pytest.fixture
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("acme")


@pytest.fixture
def pebble(work: Path, request: pytest.FixtureRequest) -> Iterator[Pebble]:
    server = Pebble(work / "pebble", getattr(request, "param", DAYS_90))
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def platform(work: Path, pebble: Pebble) -> Iterator[AcmePlatform]:
    before = HostState.take()
    server = AcmePlatform(work / "data", pebble)
    try:
        yield server
        assert server.terminate() == 0, server.log_tail()
        down = server.down()
        assert down.returncode == 0, down.stderr
        assert left_over(before) == {}
        # Neither the key of the account nor that of the certificate.
        assert "PRIVATE KEY" not in server.log() and "key_pkcs8" not in server.log()
    finally:
        server.close()


def test_a_wildcard_certificate_is_issued_once_and_used_by_the_sdk(
    platform: AcmePlatform, pebble: Pebble, monkeypatch: pytest.MonkeyPatch
) -> None:
    pebble.start()
    root = pebble.root()
    platform.start()
    issued = until(lambda: platform.certificate(root), "a certificate")
    assert {name for kind, name in issued["subjectAltName"] if kind == "DNS"} == {HOST, f"*.{HOST}"}
    for name in (HOST, f"49983-iabc.{HOST}"):
        assert platform.certificate(root, name), name
    assert platform.certificate(platform.local_ca()) is None

    # Two values of one record, each removed again, and nothing of the platform's environment.
    hooks = pebble.hooks()
    assert [words[0] for words in hooks] == ["present", "present", "cleanup", "cleanup"]
    assert {words[1] for words in hooks} == {f"_acme-challenge.{HOST}."}
    assert {words[2] for words in hooks[:2]} == {words[2] for words in hooks[2:]} and hooks[0][2] != hooks[1][2]
    assert set(Path(f"{pebble.hook_log}.env").read_text().split()) <= {"LANG", "PATH", "PWD", "OLDPWD", "SHLVL", "_"}

    (place,) = (platform.data_dir / "tls" / "acme").iterdir()
    files = {path.name: stat.S_IMODE(path.stat().st_mode) for path in place.iterdir()}
    assert files == {"account.json": 0o600, "certificate.pem": 0o600}

    expires = ssl.cert_time_to_seconds(issued["notAfter"])
    with urllib.request.urlopen(f"http://127.0.0.1:{platform.metrics_port}/metrics") as answer:
        metrics = answer.read().decode()
    shown = re.search(r"^ringfence_tls_certificate_expiry_timestamp_seconds (\S+)$", metrics, re.MULTILINE)
    assert shown and float(shown[1]) == expires
    assert platform.doctor().startswith("ok ") and "valid until" in platform.doctor()

    monkeypatch.setenv("SSL_CERT_FILE", str(root))
    platform.use()
    from e2b import Sandbox

    assert os.environ["E2B_DOMAIN"] == f"{HOST}:{platform.port}" and "E2B_API_URL" not in os.environ
    with Sandbox.create(timeout=60) as box:
        assert box.commands.run("echo over TLS").stdout == "over TLS\n"
        box.files.write("a.txt", "some text")
        assert box.files.read("a.txt") == "some text"
        box.kill()

    # A restart needs no server, and a SIGHUP asks for nothing.
    pebble.stop()
    assert platform.terminate() == 0
    platform.start()
    assert (platform.certificate(root) or {}).get("serialNumber") == issued["serialNumber"]
    platform.hang_up()
    until(lambda: "SIGHUP: the certificate is valid until" in platform.log(), "an answer to SIGHUP")
    assert len(pebble.hooks()) == 4


@pytest.mark.parametrize("pebble", [SHORT_S], indirect=True)
def test_certificates_are_renewed_under_open_connections(platform: AcmePlatform, pebble: Pebble) -> None:
    pebble.start()
    platform.start()
    root = pebble.root()
    first = until(lambda: platform.certificate(root), "a certificate")
    with platform.connected(root) as open_since_then:
        assert answers(open_since_then)

        def another(before: dict, ca: Path) -> dict | None:
            found = platform.certificate(ca)
            return found if found and found["serialNumber"] != before["serialNumber"] else None

        second = until(lambda: another(first, root), "a renewal", within_s=30)
        assert answers(open_since_then)
        # An authority that has lost its accounts.
        pebble.stop()
        pebble.start()
        root = pebble.root()
        until(lambda: another(second, root), "a certificate for another account", within_s=30)
        assert answers(open_since_then)
    # It is used before it is logged.
    until(lambda: platform.log().count("issued a certificate for") >= 3, "the log has all of them")
    assert platform.log().count("issued a certificate for") == 3
    assert "does not know the account" in platform.log()
    assert "cannot get a certificate" not in platform.log()


def test_a_failing_hook_and_an_absent_server_leave_the_platform_as_it_is(
    platform: AcmePlatform, pebble: Pebble
) -> None:
    platform.start()

    def failures() -> list[str]:
        return re.findall(r"cannot get a certificate from .*", platform.log())

    (absent,) = until(failures, "a failure")
    assert "connect to 127.0.0.1" in absent and "next try in" in absent, absent
    with httpx.Client(timeout=60) as plain:
        assert plain.get(f"{platform.url}/health").status_code == 200
    assert platform.certificate(platform.local_ca(), f"49983-iabc.{HOST}")
    assert pebble.hooks() == []

    pebble.stop_hook.touch()
    pebble.start()
    root = pebble.root()
    platform.hang_up()
    said = until(lambda: failures()[1:], "another failure")
    assert "exit status: 3: the zone is locked" in said[0], said
    # What may have been added is removed.
    assert [words[0] for words in pebble.hooks()] == ["present", "cleanup"]
    assert platform.certificate(root) is None and platform.certificate(platform.local_ca())

    pebble.stop_hook.unlink()
    pebble.hook.chmod(0o644)
    assert platform.doctor().startswith("degraded") and "not executable" in platform.doctor()
    platform.hang_up()
    until(lambda: failures()[2:], "a failure of the third kind")
    pebble.hook.chmod(0o755)

    # Records that nobody can see.
    pebble.hook.rename(pebble.hook.with_name("real"))
    pebble.hook.write_text("#!/bin/sh\nexit 0\n")
    pebble.hook.chmod(0o755)
    platform.hang_up()
    said = until(lambda: failures()[3:], "a refusal")
    assert "the server refused the DNS records" in said[0] and "No TXT records found" in said[0], said

    pebble.hook.with_name("real").rename(pebble.hook)
    platform.hang_up()
    until(lambda: platform.certificate(root), "a certificate")
    assert platform.doctor().startswith("ok")
