"""What systems of tests are made of, what serves files to them, and the programs of their users."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.patience import within
from harness.traffic import until
from install.fresh import Fresh

HAVE = "ca-certificates,curl,e2fsprogs,openssl,rpm"
PORT = 8000
UBUNTU = frozenset({"noble"})


def made(place: Path, suite: str, packages: str, *words: str) -> Path:
    """Makes a root file system; its archive."""
    archive = place / "root.tar"
    excluded = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale")]
    mirrors = [word for word in words if not word.startswith("--")]
    options = [word for word in words if word.startswith("--")]
    ran = subprocess.run(
        ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={packages}", *excluded, *options, suite, archive, *mirrors],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout
    return archive


def keyring_of_ubuntu(place: Path) -> Path:
    """The keys of Ubuntu's archive, from a package of Debian's, which Debian signs."""
    own = place / "apt"
    for directory in ("lists/partial", "cache/archives/partial"):
        (own / directory).mkdir(parents=True)
    (own / "sources.list").write_text(f"deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] {mirror()} trixie main\n")
    (own / "apt.conf").write_text(
        f'Dir::Etc::sourcelist "{own}/sources.list";\nDir::Etc::sourceparts "-";\nDir::State::lists "{own}/lists";\n'
        f'Dir::Cache "{own}/cache";\nAPT::Sandbox::User "root";\n'
    )
    environment = os.environ | {"APT_CONFIG": str(own / "apt.conf")}
    for words in (["update"], ["download", "ubuntu-keyring"]):
        subprocess.run(["apt-get", "-qq", *words], check=True, capture_output=True, cwd=own, env=environment)
    [package] = own.glob("*.deb")
    subprocess.run(["dpkg-deb", "-x", package, own / "package"], check=True)
    return own / "package" / "usr" / "share" / "keyrings" / "ubuntu-archive-keyring.gpg"


def mirror() -> str:
    words = ["apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages"]
    sites = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()
    return next(site for site in sites if site.rstrip("/").endswith("/debian"))


def unpacked(archives: list[Path], into: Path) -> Path:
    into.mkdir()
    for archive in archives:
        subprocess.run(["tar", "--numeric-owner", "-xpf", archive, "-C", into, "--exclude=./dev/*"], check=True)
    return into


@contextmanager
def serving(own: Fresh, served: Path) -> Iterator[None]:
    """A server with these files, in the network of the system."""
    words = [sys.executable, "-m", "http.server", str(PORT), "--bind", "127.0.0.1", "--directory", served]
    server = subprocess.Popen(own.beside(*words), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: own_answers(own, PORT), "the server of the files answers")
        yield
    finally:
        server.kill()
        server.wait(30)


def own_answers(own: Fresh, port: int, path: str = "/") -> bool:
    words = ["curl", "--silent", "--fail", "--output", "/dev/null", f"http://127.0.0.1:{port}{path}"]
    return subprocess.run(own.beside(*words)).returncode == 0


def keys_of(own: Fresh) -> dict[str, str]:
    """What the platform wrote down for clients."""
    words = own.run("cat", "/var/lib/ringfence/credentials.env")
    return dict(word.split("=", 1) for line in words.splitlines() for word in shlex.split(line, comments=True) if "=" in word)


def client(own: Fresh, program: Path, *words: str) -> str:
    """What a program of a user prints, in the network of the system."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("E2B_", "RINGFENCE_"))}
    ran = subprocess.run(
        own.beside(sys.executable, program, *words),
        env=plain | {name: value for name, value in keys_of(own).items() if name.startswith("E2B_")},
        capture_output=True,
        text=True,
        timeout=within(60),
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def first_output(own: Fresh) -> str:
    """What the newcomer's first program prints."""
    return client(own, Path(__file__).with_name("client.py"))
