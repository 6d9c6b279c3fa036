"""Programs that people run continue unharmed when their sandbox was on disk, ten times over.

RINGFENCE_GO names a compiler.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2b import PtySize, Sandbox

from harness.asked import Asked
from harness.beside import beside
from harness.criu import criu_config, pause
from harness.platform import Platform
from harness.traffic import get, program, until

CYCLES = 10
CONFIG = "[sandbox]\nmemory_mb = 2048\ndisk_mb = 2048\n"


@pytest.fixture(scope="module")
def disk(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    with beside(platform, tmp_path_factory.mktemp("programs"), CONFIG + criu_config()) as server:
        yield server


@pytest.fixture
def box(disk: Platform) -> Iterator[Sandbox]:
    box = Sandbox.create(timeout=300)
    try:
        yield box
    finally:
        box.kill()


class Terminal:
    """A program on a terminal, which is told what to write to a file."""

    def __init__(self, box: Sandbox, *lines: str) -> None:
        self.pid = box.pty.create(PtySize(rows=24, cols=80), timeout=0).pid
        for line in lines:
            self.type(box, line)

    def type(self, box: Sandbox, line: str) -> None:
        box.pty.send_stdin(self.pid, f"{line}\n".encode())

    def end(self, box: Sandbox) -> None:
        assert box.pty.kill(self.pid) is True


def written(box: Sandbox, path: str, content: str) -> None:
    """Waits until a file has this content."""
    until(lambda: box.files.exists(path) and box.files.read(path) == content, f"{path} is {content!r}")


class PythonOnATerminal:
    def __init__(self, box: Sandbox) -> None:
        self.terminal = Terminal(box, "exec python3 -q -i", "import os; kept = {'name': 'kept', 'seen': []}")
        self.terminal.type(box, "def tell(cycle): kept['seen'].append(cycle); open('/tmp/repl', 'w').write(repr(kept))")
        # The end of the definition.
        self.terminal.type(box, "")

    def check(self, box: Sandbox, cycle: int) -> None:
        self.terminal.type(box, f"tell({cycle})")
        written(box, "/tmp/repl", repr({"name": "kept", "seen": list(range(cycle + 1))}))

    def end(self, box: Sandbox) -> None:
        self.terminal.type(box, "open('/tmp/repl', 'w').write('ended'); exit()")
        written(box, "/tmp/repl", "ended")


class Node:
    def __init__(self, box: Sandbox, disk: Platform) -> None:
        self.disk = disk
        self.requests = 0
        box.files.write("/tmp/counter.js", program("paused/counter.js"))
        self.pid = box.commands.run("exec node /tmp/counter.js", background=True, timeout=0).pid
        ready = "curl -sf --retry 50 --retry-connrefused --retry-delay 1 http://localhost:8000/"
        self.inner_pid = self.counted(box.commands.run(ready).stdout)

    def counted(self, answer: str) -> int:
        self.requests += 1
        said = json.loads(answer)
        assert said["requests"] == self.requests
        return said["pid"]

    def check(self, box: Sandbox, cycle: int) -> None:
        assert self.counted(box.commands.run("curl -sf --max-time 20 http://localhost:8000/").stdout) == self.inner_pid
        assert self.counted(get(self.disk.url, box.get_host(8000)).text) == self.inner_pid

    def end(self, box: Sandbox) -> None:
        assert box.commands.kill(self.pid) is True


class Postgres:
    """A server, and a session with a transaction that is open all the time."""

    def __init__(self, box: Sandbox) -> None:
        make = "PATH=$(echo /usr/lib/postgresql/*/bin):$PATH; initdb --no-sync -A trust -U user -D /tmp/db"
        box.commands.run(f"{make} && exec pg_ctl -w -D /tmp/db -l /tmp/db.log -o '-k /tmp -h \"\"' start", timeout=120)
        self.psql = "psql -h /tmp -XqAt -v ON_ERROR_STOP=1 postgres"
        box.commands.run(f"{self.psql} -c 'CREATE TABLE rows (cycle int)'")
        self.session = Asked(box, f"exec {self.psql}")
        self.backend = self.session.ask(box, "BEGIN; SELECT 'whole', pg_backend_pid();")

    def seen_by_others(self, box: Sandbox) -> str:
        return box.commands.run(f"{self.psql} -c 'SELECT count(*) FROM rows'").stdout

    def check(self, box: Sandbox, cycle: int) -> None:
        said = self.session.ask(box, f"INSERT INTO rows VALUES ({cycle}); SELECT 'whole', count(*) FROM rows;")
        assert said == f"whole|{cycle + 1}\n"
        assert self.seen_by_others(box) == "0\n"
        assert self.session.ask(box, "SELECT 'whole', pg_backend_pid();") == self.backend

    def end(self, box: Sandbox) -> None:
        self.session.ask(box, "COMMIT; SELECT 'whole';")
        assert self.seen_by_others(box) == f"{CYCLES}\n"
        self.session.end(box)
        box.commands.run("$(echo /usr/lib/postgresql/*/bin)/pg_ctl -w -D /tmp/db -m fast stop")


class Pip:
    """Installs packages whose builds last as many cycles as there are."""

    PACKAGES = CYCLES // 2

    def __init__(self, box: Sandbox) -> None:
        names = [f"slow{number}" for number in range(self.PACKAGES)]
        for name in names:
            box.files.write(f"/tmp/wheels/{name}-1.0.tar.gz", self.source(name))
        options = "--no-index --no-build-isolation --no-cache-dir --disable-pip-version-check --find-links /tmp/wheels"
        command = f"mkdir /tmp/pip; pip install {options} --target /tmp/installed {' '.join(names)} >/tmp/pip.log 2>&1"
        self.pid = box.commands.run(f"{command}; echo $? >/tmp/pip.code", background=True, timeout=0).pid

    @staticmethod
    def source(name: str) -> bytes:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            for file, text in {
                "setup.py": program("paused/setup.py"),
                f"{name}.py": f"name = {name!r}\n",
                "PKG-INFO": f"Metadata-Version: 1.0\nName: {name}\nVersion: 1.0\n",
            }.items():
                about = tarfile.TarInfo(f"{name}-1.0/{file}")
                about.size = len(text)
                archive.addfile(about, io.BytesIO(text.encode()))
        return packed.getvalue()

    def check(self, box: Sandbox, cycle: int) -> None:
        at = cycle // 2
        until(lambda: box.files.exists(f"/tmp/pip/at{at}"), f"it builds package {at}")
        assert not box.files.exists(f"/tmp/pip/at{at + 1}")
        assert self.pid in [process.pid for process in box.commands.list()]
        if cycle % 2:
            box.files.write(f"/tmp/pip/go{at}", "")

    def end(self, box: Sandbox) -> None:
        written(box, "/tmp/pip.code", "0\n")
        imported = ", ".join(f"slow{number}" for number in range(self.PACKAGES))
        box.commands.run(f"cd /tmp/installed && python3 -c 'import {imported}'")


class Bash:
    def __init__(self, box: Sandbox) -> None:
        counts = "(while :; do echo $((++i)) >/tmp/job.new; mv /tmp/job.new /tmp/job; sleep 0.02; done) &"
        self.terminal = Terminal(box, "cd /usr/share; kept=0; alias told='echo told'", counts)
        until(lambda: box.files.exists("/tmp/job"), "the job counts")

    def check(self, box: Sandbox, cycle: int) -> None:
        self.terminal.type(box, f"echo $((++kept)) $PWD $(jobs -rp | wc -l) $(told) >/tmp/bash{cycle}")
        written(box, f"/tmp/bash{cycle}", f"{cycle + 1} /usr/share 1 told\n")
        first = int(box.files.read("/tmp/job"))
        until(lambda: int(box.files.read("/tmp/job")) > first, "the job counts on")

    def end(self, box: Sandbox) -> None:
        self.terminal.type(box, "kill %1; wait; echo $? >/tmp/ended")
        written(box, "/tmp/ended", "0\n")
        self.terminal.end(box)


class Tmux:
    def __init__(self, box: Sandbox) -> None:
        counts = "while :; do echo counted $((++i)); sleep 0.02; done"
        box.commands.run(f"tmux new-session -d -s kept -x 80 -y 24 bash --norc -c '{counts}'")
        box.commands.run("tmux new-window -d -t kept:1 bash --norc; tmux send-keys -t kept:1 'x=0' Enter")
        self.server = box.commands.run("tmux display-message -p '#{pid}'").stdout

    def count(self, box: Sandbox) -> int:
        shown = box.commands.run("tmux capture-pane -p -t kept:0").stdout.split()
        return max([int(word) for word in shown if word.isdigit()], default=0)

    def check(self, box: Sandbox, cycle: int) -> None:
        first = self.count(box)
        until(lambda: self.count(box) > first, "the shell in tmux counts on")
        box.commands.run(f"tmux send-keys -t kept:1 'echo $((++x)) >/tmp/tmux{cycle}' Enter")
        written(box, f"/tmp/tmux{cycle}", f"{cycle + 1}\n")
        assert box.commands.run("tmux display-message -p '#{pid}'").stdout == self.server

    def end(self, box: Sandbox) -> None:
        box.commands.run("tmux kill-server")


class Java:
    def __init__(self, box: Sandbox) -> None:
        box.files.write("/tmp/Count.java", program("paused/Count.java"))
        self.program = Asked(box, "exec java -Xmx256m /tmp/Count.java")
        self.size = 0

    def check(self, box: Sandbox, cycle: int) -> None:
        word, line, size = self.program.ask(box, str(cycle)).split()
        assert (word, line) == ("whole", str(cycle))
        assert int(size) > self.size
        self.size = int(size)

    def end(self, box: Sandbox) -> None:
        self.program.end(box)


class Go:
    def __init__(self, box: Sandbox, tmp_path: Path) -> None:
        (tmp_path / "server.go").write_text(program("paused/server.go"))
        environment = {**os.environ, "GOTOOLCHAIN": "local", "CGO_ENABLED": "0", "GO111MODULE": "off"}
        build = [os.environ["RINGFENCE_GO"], "build", "-o", "server", "server.go"]
        subprocess.run(build, cwd=tmp_path, env=environment, timeout=300, check=True)
        box.files.write("/tmp/server", (tmp_path / "server").read_bytes())
        self.pid = box.commands.run("chmod 755 /tmp/server && exec /tmp/server", background=True, timeout=0).pid
        self.inner_pid = ""

    def check(self, box: Sandbox, cycle: int) -> None:
        ask = "until exec 3<>/dev/tcp/127.0.0.1/7000; do sleep 0.05; done 2>/dev/null; cat <&3"
        count, pid = box.commands.run(f"bash -c '{ask}'").stdout.split()
        assert int(count) == cycle + 1
        assert pid == (self.inner_pid or pid)
        self.inner_pid = pid

    def end(self, box: Sandbox) -> None:
        assert box.commands.kill(self.pid) is True


class Objects:
    def __init__(self, box: Sandbox) -> None:
        box.files.write("/tmp/objects.py", program("paused/objects.py"))
        self.program = Asked(box, "exec python3 /tmp/objects.py")

    def check(self, box: Sandbox, cycle: int) -> None:
        said = self.program.ask(box, str(cycle))
        assert said.splitlines()[-1] == f"whole {cycle} 90000"

    def end(self, box: Sandbox) -> None:
        self.program.end(box)


def pause_and_resume(box: Sandbox, *programs) -> None:
    """Checks all programs in each of the cycles, and after the last one."""
    for cycle in range(CYCLES):
        for running in programs:
            running.check(box, cycle)
        pause(box)
        box = Sandbox.connect(box.sandbox_id, timeout=300)
    for running in programs:
        running.end(box)


def test_terminals_servers_and_an_installation(disk: Platform, box: Sandbox) -> None:
    pause_and_resume(box, PythonOnATerminal(box), Node(box, disk), Postgres(box), Pip(box), Bash(box), Tmux(box))


def test_runtimes_with_much_memory(box: Sandbox, tmp_path: Path) -> None:
    pause_and_resume(box, Java(box), Go(box, tmp_path), Objects(box))
