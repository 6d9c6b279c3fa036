"""Pebble, the ACME server for tests, with the DNS server that comes with it, on the loopback.

Both are programs of their own, named by RINGFENCE_PEBBLE, a directory. What they know is in memory: a restart makes
another authority.
"""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

from harness.patience import within
from harness.ports import free_port

HOOK = """#!/bin/sh
echo "$*" >>'{log}'
env | cut -d= -f1 | sort | tr '\\n' ' ' >'{log}.env'
[ -e '{stop}' ] && echo "the zone is locked" >&2 && exit 3
case $1 in
present) exec curl -sSf -d "{{\\"host\\":\\"$2\\",\\"value\\":\\"$3\\"}}" {dns}/set-txt ;;
cleanup) exec curl -sSf -d "{{\\"host\\":\\"$2\\"}}" {dns}/clear-txt ;;
esac
"""


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


def _answers(url: str, context: ssl.SSLContext | None = None) -> bytes:
    """The answer to a GET, once there is one."""
    deadline = time.monotonic() + within(20)
    while True:
        try:
            with urllib.request.urlopen(url, timeout=2, context=context) as answer:
                return answer.read()
        except urllib.error.HTTPError as answered:
            return answered.read()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


class Pebble:
    """An authority whose certificates are valid for `valid_s` seconds, and a hook that changes its DNS server."""

    def __init__(self, work: Path, valid_s: int) -> None:
        work.mkdir()
        self.work = work
        self.programs = Path(os.environ["RINGFENCE_PEBBLE"])
        self.processes: list[subprocess.Popen[bytes]] = []
        self.port, self.management, self.dns, self.dns_api = (free_port() for _ in range(4))
        self.ca = work / "ca.pem"
        self.hook = work / "hook"
        self.hook_log = work / "hook.log"
        self.stop_hook = work / "stop"
        self._certificate()
        config = {
            "listenAddress": f"127.0.0.1:{self.port}",
            "managementListenAddress": f"127.0.0.1:{self.management}",
            "certificate": str(work / "server.pem"),
            "privateKey": str(work / "server.key"),
            "httpPort": 1,
            "tlsPort": 1,
            "retryAfter": {"authz": 1, "order": 1},
            "keyAlgorithm": "ecdsa",
            "profiles": {"default": {"description": "the only one", "validityPeriod": valid_s}},
        }
        (work / "pebble.json").write_text(json.dumps({"pebble": config}))
        api = f"http://127.0.0.1:{self.dns_api}"
        self.hook.write_text(HOOK.format(log=self.hook_log, stop=self.stop_hook, dns=api))
        self.hook.chmod(0o755)

    def _certificate(self) -> None:
        """The certificate of the server itself, which has nothing to do with those that it issues."""
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc"]
        ca_key, request = self.work / "ca.key", self.work / "server.csr"
        _openssl("req", "-x509", *key, "-keyout", ca_key, "-out", self.ca, "-subj", "/CN=Of Pebble", "-days", "2")
        _openssl("req", *key, "-keyout", self.work / "server.key", "-out", request, "-subj", "/CN=Pebble")
        names = self.work / "names"
        names.write_text("subjectAltName=IP:127.0.0.1\n")
        signed = ["-CA", self.ca, "-CAkey", ca_key, "-CAcreateserial", "-days", "2", "-extfile", names]
        _openssl("x509", "-req", "-in", request, *signed, "-out", self.work / "server.pem")

    @property
    def directory(self) -> str:
        return f"https://127.0.0.1:{self.port}/dir"

    def start(self) -> None:
        dns = ["-dnsserver", f"127.0.0.1:{self.dns}", "-management", f"127.0.0.1:{self.dns_api}"]
        off = [word for name in ("http01", "https01", "tlsalpn01", "doh") for word in (f"-{name}", "")]
        self._run("pebble-challtestsrv", *dns, *off)
        self._run("pebble", "-config", self.work / "pebble.json", "-dnsserver", f"127.0.0.1:{self.dns}", "-strict")
        _answers(f"http://127.0.0.1:{self.dns_api}/")
        _answers(self.directory, self._context())

    def _run(self, program: str, *arguments: str | Path) -> None:
        # Every order is validated anew, and no request is refused by chance.
        settings = {"PEBBLE_VA_NOSLEEP": "1", "PEBBLE_AUTHZREUSE": "0", "PEBBLE_WFE_NONCEREJECT": "0"}
        with open(self.work / "log", "ab") as log:
            process = subprocess.Popen(
                [self.programs / program, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=settings
            )
        self.processes.append(process)

    def _context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.ca))

    def root(self) -> Path:
        """The CA certificate of the certificates that it issues now."""
        path = self.work / "root.pem"
        path.write_bytes(_answers(f"https://127.0.0.1:{self.management}/roots/0", self._context()))
        return path

    def hooks(self) -> list[list[str]]:
        """The arguments of every run of the hook."""
        return [line.split() for line in self.hook_log.read_text().splitlines()] if self.hook_log.exists() else []

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.processes.clear()

    def log(self) -> str:
        return (self.work / "log").read_text(errors="replace")
