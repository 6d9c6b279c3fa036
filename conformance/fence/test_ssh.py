"""OpenSSH in a sandbox against OpenSSH in the fake internet: commands, files, git."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from e2b import Sandbox

from harness.inside import outgoing
from harness.internet import Internet
from harness.internet_names import home
from harness.traffic import until

SITE, OTHER = "ssh.example.com", "ssh.example.net"
SERVER = "/usr/sbin/sshd"
# A directory that the server wants to be root's, without making it on the host.
START = "mount -t tmpfs -o mode=755 tmpfs /run && mkdir /run/sshd && exec \"$0\" \"$@\""


@pytest.fixture(scope="module")
def keys(internet: Internet) -> Iterator[Path]:
    """The keys of server and client, in a directory, while the server runs on every address."""
    directory = internet.directory / "ssh"
    directory.mkdir()
    for name in ("host", "client"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", directory / name], check=True)
    shutil.copy(directory / "client.pub", directory / "authorized_keys")
    options = {
        "HostKey": directory / "host",
        "AuthorizedKeysFile": directory / "authorized_keys",
        "PidFile": "none",
        "PermitRootLogin": "prohibit-password",
        "PasswordAuthentication": "no",
        "UsePAM": "no",
        # The directories above are in /tmp, which everyone may write to.
        "StrictModes": "no",
        "Subsystem": "sftp internal-sftp",
    }
    (directory / "config").write_text("".join(f"{name} {value}\n" for name, value in options.items()))
    private = ("unshare", "--mount", "--propagation", "private", "sh", "-c", START)
    (directory / "log").touch()
    with internet.beyond(*private, SERVER, "-D", "-E", directory / "log", "-f", directory / "config") as server:
        until(lambda: server.poll() is not None or "listening on" in (directory / "log").read_text(), "sshd listens")
        assert server.poll() is None, (directory / "log").read_text()
        yield directory


@pytest.fixture
def box(create: Callable[..., Sandbox], keys: Path) -> Sandbox:
    """One with the key of the client, which knows the key of the servers and may reach all but one of them."""
    box = create(network={"deny_out": [home(OTHER)]})
    host_key = " ".join((keys / "host.pub").read_text().split()[:2])
    known = "".join(f"{name} {host_key}\n" for name in (SITE, OTHER, home(SITE)))
    config = "Host *\n  User root\n  IdentityFile ~/.ssh/id\n  ConnectTimeout 10\n  StrictHostKeyChecking yes\n"
    for name, content in (("id", (keys / "client").read_text()), ("known_hosts", known), ("config", config)):
        box.files.write(f"/home/user/.ssh/{name}", content)
    box.commands.run("chmod 700 ~/.ssh && chmod 600 ~/.ssh/*")
    return box


def test_commands_and_files(box: Sandbox, internet: Internet, tmp_path: Path) -> None:
    events = internet.mark()
    assert box.commands.run(f"ssh {SITE} echo from the server").stdout == "from the server\n"
    assert box.commands.run(f"ssh {home(SITE)} 'cat; exit 3' <<< through || echo ended with $?").stdout == "through\nended with 3\n"
    # Much in both directions on one connection.
    assert box.commands.run(f"head -c 20000000 /dev/zero | ssh {SITE} 'cat' | wc -c", timeout=60).stdout == "20000000\n"
    box.files.write("sent", "by sftp\n")
    box.commands.run(f"scp -q sent {SITE}:{tmp_path}/sent")
    assert (tmp_path / "sent").read_text() == "by sftp\n"
    refused = box.commands.run(f"ssh {OTHER} echo reached 2>&1 || true").stdout
    assert "reached" not in refused and "reset" in refused.lower(), refused
    assert events(kind="tcp", server=home(OTHER)) == []


def test_a_forwarded_port(box: Sandbox) -> None:
    """What a tunnel reaches is reached by the server, and not by the sandbox."""
    box.commands.run(f"ssh -f -N -L 127.0.0.1:7777:127.0.0.1:7 {SITE}")
    assert outgoing(box, {"do": "tcp", "to": "127.0.0.1", "port": 7777})[0]["result"] == "ok"


def test_git(box: Sandbox, tmp_path: Path) -> None:
    """Clone and push, by both forms of a remote."""
    bare = tmp_path / "project.git"
    environment = {**os.environ, "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@example.com"}
    environment |= {"GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@example.com"}
    for command in (
        f"git init -q --bare -b main {bare}",
        f"git clone -q {bare} {tmp_path}/work",
        f"git -C {tmp_path}/work checkout -q -B main",
        f"git -C {tmp_path}/work commit -q --allow-empty -m first",
        f"git -C {tmp_path}/work push -q origin main",
    ):
        subprocess.run(command.split(), check=True, capture_output=True, env=environment)
    said = box.commands.run(
        f"git clone -q ssh://root@{SITE}{bare} /tmp/clone && cd /tmp/clone"
        " && git -c user.name=b -c user.email=b@example.com commit -q --allow-empty -m second && git push -q origin main"
        f" && git clone -q {SITE}:{bare} /tmp/again && git -C /tmp/again log --format=%s",
        timeout=60,
    ).stdout
    assert said == "second\nfirst\n"
    log = subprocess.run(["git", "-C", bare, "log", "--format=%s", "main"], check=True, capture_output=True, text=True).stdout
    assert log == said
    refused = box.commands.run(f"git clone -q ssh://root@{OTHER}{bare} /tmp/none 2>&1 || echo refused").stdout
    assert refused.endswith("refused\n")
