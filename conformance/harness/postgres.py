"""A PostgreSQL server of the tests' own: Debian's newest, on a Unix socket in a directory, as an unprivileged user, without TCP."""

from __future__ import annotations

import os
import pwd
import re
import signal
import subprocess
import time
from pathlib import Path

from harness.patience import within

DEBIAN = Path("/usr/lib/postgresql")
# What is lost with the power is of no interest here.
OPTIONS = ("listen_addresses=", "fsync=off", "full_page_writes=off", "max_connections=200")


class PostgresFailed(Exception):
    """PostgreSQL is not installed, or did not start; carries the end of its log."""


def programs() -> Path:
    """The directory of its programs."""
    found = [path / "bin" for path in DEBIAN.glob("*") if (path / "bin" / "initdb").exists()]
    if not found:
        raise PostgresFailed("PostgreSQL is not installed and the suite requires it: apt-get install postgresql")
    return max(found, key=lambda path: int(re.sub(r"\D", "", path.parent.name) or 0))


def user() -> pwd.struct_passwd | None:
    """Whom it runs as where this is root, which it refuses."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            pass
    raise PostgresFailed("there is neither a user postgres nor nobody")


class Postgres:
    """A server on a directory that this makes, whose path has to be short."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.data = directory / "data"
        self.log_path = directory / "log"
        self.process: subprocess.Popen[bytes] | None = None
        directory.mkdir(mode=0o755)
        owner = user()
        if owner:
            os.chown(directory, owner.pw_uid, owner.pw_gid)
        self._open_the_way()
        made = subprocess.run(
            self._as_user("initdb", "--no-sync", "--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", "-D", self.data),
            cwd=directory,
            capture_output=True,
            text=True,
            timeout=within(120),
        )
        if made.returncode != 0:
            raise PostgresFailed(f"initdb: {made.stderr}")

    def _open_the_way(self) -> None:
        """Lets its user reach the directory. Pytest makes the parents private again whenever it starts."""
        for parent in self.directory.parents:
            mode = parent.stat().st_mode
            if parent.stat().st_uid == os.geteuid() and not mode & 0o001:
                parent.chmod(mode | 0o011)

    def _as_user(self, program: str, *arguments: object) -> list[str]:
        # Killing the test kills its server, too.
        command = ["setpriv", "--pdeathsig", "QUIT"]
        owner = user()
        if owner:
            command += [f"--reuid={owner.pw_uid}", f"--regid={owner.pw_gid}", "--clear-groups"]
        return [*command, str(programs() / program), *map(str, arguments)]

    def start(self) -> None:
        self._open_the_way()
        options = [word for option in (*OPTIONS, f"unix_socket_directories={self.directory}") for word in ("-c", option)]
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                self._as_user("postgres", "-D", self.data, *options),
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "LC_ALL": "C"},
                start_new_session=True,
            )
        deadline = time.monotonic() + within(60)
        while self._ask("SELECT 1").returncode != 0:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise PostgresFailed(f"PostgreSQL did not start:\n{self.log_path.read_text(errors='replace')[-4000:]}")
            time.sleep(0.05)

    def _ask(self, sql: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [programs() / "psql", "-h", self.directory, "-U", "postgres", "-At", "-c", sql],
            capture_output=True,
            text=True,
            timeout=within(30),
        )

    def ask(self, sql: str) -> str:
        """The answer to a statement, as text."""
        answered = self._ask(sql)
        assert answered.returncode == 0, answered.stderr
        return answered.stdout.strip()

    @property
    def url(self) -> str:
        return f"postgres://postgres@localhost/postgres?host={self.directory}"

    def log_tail(self, lines: int = 30) -> str:
        """The end of its log, and how it has ended if it has."""
        code = self.process.poll() if self.process else None
        ended = [] if code is None else [f"ended with {code}"]
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:] + ended)

    def stop(self) -> None:
        """At once, as a crash would. SIGQUIT releases its shared memory, and SIGKILL would not."""
        if self.process:
            self.process.send_signal(signal.SIGQUIT)
            self.process.wait(within(30))
            self.process = None
