"""What a release page offers, as a newcomer uses it: on fresh systems, from a server, to the output of a first sandbox.

Systems are made by mmdebstrap, from mirrors, with what every installation of a server has besides the smallest one: a client of
HTTP, openssl, and file systems. Nothing is downloaded after that, so what is measured is what an installation takes. Distributions
of RPM are not among what it can make: their tools are tried on a Debian whose own are hidden, with a repository of packages
that the RPM depends on.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness import hoststate
from harness.hoststate import HostState, left_over
from harness.patience import within
from harness.platform import binary
from harness.traffic import until
from install.fresh import Fresh

pytestmark = pytest.mark.alone("systems of their own use the control groups of the host")

ROOT = Path(__file__).resolve().parents[2]
HAVE = "ca-certificates,curl,e2fsprogs,openssl,rpm"
# The promise, and what one of two cores beside other work may take.
FIRST_OUTPUT_S = 60.0
PORT = 8000
UBUNTU = frozenset({"noble"})
# What apt says of a mirror that a network does not have.
UNREACHED = ("Could not resolve", "Temporary failure resolving", "Could not connect", "Unable to connect")
# Files of the package of ext4.
MKFS = ("mke2fs", "mkfs.ext4")


@pytest.fixture(scope="session")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All files of a release, of the program under test."""
    work = tmp_path_factory.mktemp("release")
    # Symbols are most of it, and a release has none.
    program = work / "ringfence"
    subprocess.run(["strip", "-o", program, binary()], check=True)
    key = work / "key.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", key], check=True, capture_output=True)
    made = subprocess.run(
        [ROOT / "scripts" / "release.sh", "--fast", work / "dist"],
        env=os.environ | {"RINGFENCE_BIN": str(program), "RINGFENCE_SIGNING_KEY_FILE": str(key)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert made.returncode == 0, made.stdout
    return work / "dist"


@pytest.fixture(scope="session", params=["bookworm", "trixie", "noble"])
def system(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive of a root file system."""
    place = tmp_path_factory.mktemp("system")
    if request.param not in UBUNTU:
        return made(place, request.param, HAVE, mirror())
    # Its mirror is the one that mmdebstrap knows.
    return made(place, request.param, HAVE, "--components=main,universe", f"--keyring={keyring_of_ubuntu(place)}")


@pytest.fixture(scope="session")
def system_of_rpm(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Archives of a root file system that has `dnf`, and no package manager that would be preferred."""
    place = tmp_path_factory.mktemp("system-of-rpm")
    base = made(place, "trixie", f"{HAVE},dnf", mirror())
    root = unpacked([base], place / "root")
    # What the package depends on comes from a repository.
    spec, built = place / "e2fsprogs.spec", place / "built"
    for name in MKFS:
        wanted = built / "root" / "usr" / "sbin"
        wanted.mkdir(parents=True, exist_ok=True)
        os.rename(root / "usr" / "sbin" / name, wanted / name)
    os.rename(root / "usr" / "bin" / "apt-get", root / "usr" / "bin" / "hidden-apt-get")
    files = "\n".join(f"/usr/sbin/{name}" for name in MKFS)
    spec.write_text(
        "Name: e2fsprogs\nVersion: 1\nRelease: 1\nSummary: Tools of ext4\nLicense: GPL\nAutoReqProv: no\n"
        f"%description\nTools of ext4.\n%install\ncp -a {built}/root/. %{{buildroot}}/\n%files\n{files}\n"
    )
    # The tool of a host that may have no such thing as its own packages' database.
    words = ["--define", f"_topdir {built}", "--define", f"_dbpath {built}/db", "--define", "_build_id_links none"]
    subprocess.run(["rpmbuild", "-bb", "--quiet", "--define", "__os_install_post %{nil}", *words, spec], check=True, capture_output=True)
    repository = root / "srv" / "repository"
    repository.mkdir()
    for package in built.glob("RPMS/*/*.rpm"):
        shutil.copy(package, repository)
    subprocess.run(["createrepo_c", "--quiet", repository], check=True, capture_output=True)
    sources = root / "etc" / "yum.repos.d"
    sources.mkdir(exist_ok=True)
    (sources / "local.repo").write_text("[local]\nname=local\nbaseurl=file:///srv/repository\nenabled=1\ngpgcheck=0\n")
    archive = place / "system.tar"
    subprocess.run(["tar", "--numeric-owner", "-C", root, "-cf", archive, "."], check=True)
    shutil.rmtree(root)
    return [archive]


def made(place: Path, suite: str, packages: str, *words: str) -> Path:
    """Makes a root file system; its archive. What cannot be reached is no fault of what is tested."""
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
    if suite in UBUNTU and any(sign in ran.stdout for sign in UNREACHED):
        pytest.skip(f"the archive of {suite} is not reached from here")
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
def fresh(archives: list[Path], place: Path, served: Path) -> Iterator[Fresh]:
    """A fresh system that reaches a server with these files; nothing of it is left on the host."""
    before = HostState.take()
    hoststate.own(place / "root" / "var" / "lib" / "ringfence")
    own = Fresh(unpacked(archives, place / "root"))
    server = None
    try:
        words = [sys.executable, "-m", "http.server", str(PORT), "--bind", "127.0.0.1", "--directory", served]
        server = subprocess.Popen(own.beside(*words), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(lambda: own_answers(own, PORT), "the server of the files answers")
        yield own
    finally:
        if server:
            server.kill()
            server.wait(30)
        own.close()
    assert left_over(before) == {}


def own_answers(own: Fresh, port: int, path: str = "/") -> bool:
    words = ["curl", "--silent", "--fail", "--output", "/dev/null", f"http://127.0.0.1:{port}{path}"]
    return subprocess.run(own.beside(*words)).returncode == 0


@contextmanager
def running(own: Fresh, log: Path, *command: str) -> Iterator[None]:
    """A platform in the foreground, until a first look at its health succeeds and then for as long as this lasts."""
    with open(log, "wb") as said:
        process = subprocess.Popen(own.inside(*command), stdin=subprocess.DEVNULL, stdout=said, stderr=said)
    try:
        until(lambda: process.poll() is not None or own_answers(own, 3000, "/health"), "the platform answers", within_s=60)
        assert process.poll() is None, log.read_text()
        yield
    finally:
        # `nsenter` gives no signals on, so the platform is asked to end.
        subprocess.run(own.inside("/usr/bin/env", "ringfence", "down"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        process.wait(within(60))


def first_output(own: Fresh) -> str:
    """What the newcomer's first program prints."""
    words = own.run("cat", "/var/lib/ringfence/credentials.env")
    keys = dict(word.split("=", 1) for line in words.splitlines() for word in shlex.split(line, comments=True) if "=" in word)
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("E2B_", "RINGFENCE_"))}
    ran = subprocess.run(
        own.beside(sys.executable, Path(__file__).with_name("client.py")),
        env=plain | {name: value for name, value in keys.items() if name.startswith("E2B_")},
        capture_output=True,
        text=True,
        timeout=within(60),
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize("form", ["deb", "tarball"])
def test_from_a_fresh_system_to_the_output_of_a_sandbox(
    system: Path, release: Path, form: str, tmp_path: Path, record_property
) -> None:
    url = f"http://127.0.0.1:{PORT}"
    with fresh([system], tmp_path, release) as own:
        there = own.files()
        own.run("curl", "--silent", "--fail", "--output", "/tmp/install.sh", f"{url}/install.sh")
        words = ("sh", "/tmp/install.sh", "--url", url, *(("--format", form) if form == "tarball" else ()))
        begun = time.monotonic()
        said = own.run(*words)
        installed = time.monotonic() - begun
        assert "there is no systemd" in said, said
        with running(own, tmp_path / "log", "ringfence", "up"):
            assert first_output(own) == "42\n"
            took = time.monotonic() - begun
            # While it runs: the sandboxes and the platform do not notice.
            again = own.run(*words)
            assert "is installed" in again, again
            assert first_output(own) == "42\n"
        record_property("installed_s", installed)
        record_property("first_output_s", took)
        print(f"installed after {installed:.1f} s, first output of a sandbox after {took:.1f} s")
        assert took <= within(FIRST_OUTPUT_S)
        own.run("sh", "/tmp/install.sh", "--uninstall")
        assert (own.root / "var/lib/ringfence").is_dir(), "data stays"
        own.run(*words, "--no-start")
        own.run("sh", "/tmp/install.sh", "--uninstall", "--purge")
        assert "not installed" in own.run("sh", "/tmp/install.sh", "--uninstall")
        assert own.files() - there == set()


def test_an_rpm_by_its_own_tools(system_of_rpm: list[Path], release: Path, tmp_path: Path) -> None:
    """By `dnf`, which takes what the package depends on from a repository; its scripts leave nothing."""
    url = f"http://127.0.0.1:{PORT}"
    with fresh(system_of_rpm, tmp_path, release) as own:
        there = own.files()
        own.run("curl", "--silent", "--fail", "--output", "/tmp/install.sh", f"{url}/install.sh")
        words = ("sh", "/tmp/install.sh", "--url", url)
        begun = time.monotonic()
        said = own.run(*words)
        assert ".rpm is signed and whole" in said, said
        assert "e2fsprogs" in own.run("rpm", "--query", "--whatprovides", "/usr/sbin/mkfs.ext4")
        with running(own, tmp_path / "log", "ringfence", "up"):
            assert first_output(own) == "42\n"
            took = time.monotonic() - begun
            assert "is installed" in own.run(*words)
            assert first_output(own) == "42\n"
        print(f"first output of a sandbox after {took:.1f} s")
        assert took <= within(FIRST_OUTPUT_S)
        own.run("sh", "/tmp/install.sh", "--uninstall")
        assert (own.root / "var/lib/ringfence").is_dir(), "data stays"
        own.run(*words, "--no-start")
        own.run("sh", "/tmp/install.sh", "--uninstall", "--purge")
        assert "not installed" in own.run("sh", "/tmp/install.sh", "--uninstall")
        of_others = {f"usr/sbin/{name}" for name in MKFS}
        # Directories that all packages share belong to another package on systems of RPM.
        left = {name for name in own.files() - there if "ringfence" in name or not (own.root / name).is_dir()}
        assert left <= of_others


def test_an_rpm(system: Path, release: Path, tmp_path: Path) -> None:
    """By the `rpm` of Debian, which knows no package that it could depend on."""
    with fresh([system], tmp_path, release) as own:
        there = own.files()
        package = next(release.glob("*.rpm")).name
        own.run("curl", "--silent", "--fail", "--output", "/tmp/ringfence.rpm", f"http://127.0.0.1:{PORT}/{package}")
        own.run("rpm", "--install", "--nodeps", "/tmp/ringfence.rpm")
        assert (own.root / "etc/ringfence/ringfence.toml").stat().st_mode & 0o777 == 0o600
        own.run("rpm", "--verify", "--nodeps", "ringfence")
        own.run("ringfence", "doctor")
        own.run("rpm", "--erase", "ringfence")
        # Directories that all packages share belong to another package on systems of RPM.
        left = {name for name in own.files() - there if "ringfence" in name or not (own.root / name).is_dir()}
        assert left == set()


def test_an_image_of_containers(release: Path, tmp_path: Path) -> None:
    """What `docker load` reads and what `podman load` reads is one image; it starts with all privileges, and keeps all in its volume."""
    image = next(release.glob("*-image-amd64.tar"))
    for kind in ("docker-archive", "oci-archive"):
        seen = subprocess.run(["skopeo", "inspect", "--config", f"{kind}:{image}"], check=True, capture_output=True, text=True).stdout
        config = json.loads(seen)["config"]
        assert config["Volumes"] == {"/var/lib/ringfence": {}}, kind
    with tarfile.open(image) as archive:
        manifest = json.load(archive.extractfile("manifest.json"))[0]
        layers = []
        for index, name in enumerate(manifest["Layers"]):
            layers.append(tmp_path / f"{index}.tar.gz")
            layers[-1].write_bytes(archive.extractfile(name).read())
    with fresh(layers, tmp_path, release) as own:
        start = [*config["Entrypoint"], *config["Cmd"]]
        with running(own, tmp_path / "log", "env", *config["Env"], *start):
            assert first_output(own) == "42\n"
