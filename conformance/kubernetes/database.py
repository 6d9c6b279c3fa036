"""PostgreSQL outside of the pods, with a user and a password."""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path

from harness.patience import within
from harness.traffic import until
from kubernetes.machine import NETWORK, OUTSIDE, Machine

# With a character that addresses must write in another way.
PASSWORD = "pass/word"


class Database:
    """A server with an empty database, which can be stopped and started."""

    def __init__(self, machine: Machine, place: Path) -> None:
        self.machine = machine
        self.binaries = max(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
        self.data = place / "postgres"
        self.log = place / "postgres.log"
        self.process: subprocess.Popen[bytes] | None = None
        password = place / "password"
        password.write_text(PASSWORD)
        self.data.mkdir()
        for path in (self.data, password):
            shutil.chown(path, "postgres", "postgres")
        self.user = ["setpriv", "--reuid", "postgres", "--regid", "postgres", "--init-groups", "env", "-C", self.data]
        initial = ["--pgdata", self.data, "--username", "ringfence", "--pwfile", password, "--auth", "scram-sha-256", "--no-sync"]
        subprocess.run([*self.user, self.binaries / "initdb", *initial], check=True, capture_output=True, timeout=within(60))
        with open(self.data / "pg_hba.conf", "a") as rules:
            rules.write(f"host all all {NETWORK}.0/24 scram-sha-256\n")

    @property
    def url(self) -> str:
        return f"postgres://ringfence:{PASSWORD.replace('/', '%2F')}@{OUTSIDE}/postgres"

    def start(self) -> None:
        serve = [self.binaries / "postgres", "-D", self.data, "-h", OUTSIDE, "-k", "", "-c", "fsync=off"]
        with open(self.log, "ab") as log:
            command = self.machine.beside(*self.user, *serve)
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        ready = self.machine.beside(self.binaries / "pg_isready", "--quiet", "--host", OUTSIDE, "--username", "ringfence")
        until(lambda: subprocess.run(ready, check=False).returncode == 0, "the database answers", within_s=60)

    def stop(self) -> None:
        """Ends it with all connections."""
        if self.process:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(within(30))
            self.process = None
