"""What a release page offers, as a newcomer uses it: on fresh systems, from a server, to the output of a first sandbox.

Systems are made by mmdebstrap, from mirrors, with what every installation of a server has besides the smallest one: a client of
HTTP, openssl, and file systems. Nothing is downloaded after that, so what is measured is what an installation takes. Distributions
of RPM are not among what it can make: their tools are tried on a Debian whose own are hidden, with a repository of packages
that the RPM depends on.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness import hoststate
from harness.hoststate import HostState, left_over
from harness.patience import within
from harness.traffic import until
from install.fresh import Fresh
from install.systems import HAVE, PORT, UBUNTU, first_output, keyring_of_ubuntu, made, mirror, own_answers, serving, unpacked

pytestmark = pytest.mark.alone("systems of their own use the control groups of the host")

# The promise, and what one of two cores beside other work may take.
FIRST_OUTPUT_S = 60.0
# Files of the package of ext4.
MKFS = ("mke2fs", "mkfs.ext4")


# Not every network reaches the archive of Ubuntu, and a test that is skipped is a failure.
UBUNTU_MIRROR = os.environ.get("RINGFENCE_UBUNTU_MIRROR")


@pytest.fixture(scope="session", params=["bookworm", "trixie", *(sorted(UBUNTU) if UBUNTU_MIRROR else [])])
def system(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive of a root file system."""
    place = tmp_path_factory.mktemp("system")
    if request.param not in UBUNTU:
        return made(place, request.param, HAVE, mirror())
    # Only root can read what is in a directory of tests.
    words = ["--components=main,universe", f"--keyring={keyring_of_ubuntu(place)}", '--aptopt=APT::Sandbox::User "root"']
    assert UBUNTU_MIRROR
    return made(place, request.param, HAVE, UBUNTU_MIRROR, *words)


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
        # The shell of scripts, which every system of RPM has from another package.
        "Provides: /bin/sh\n"
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
    variables = root / "etc" / "dnf" / "vars"
    variables.mkdir(parents=True, exist_ok=True)
    (variables / "releasever").write_text("1\n")
    archive = place / "system.tar"
    subprocess.run(["tar", "--numeric-owner", "-C", root, "-cf", archive, "."], check=True)
    shutil.rmtree(root)
    return [archive]


@contextmanager
def fresh(archives: list[Path], place: Path, served: Path) -> Iterator[Fresh]:
    """A fresh system that reaches a server with these files; nothing of it is left on the host."""
    before = HostState.take()
    hoststate.own(place / "root" / "var" / "lib" / "ringfence")
    own = Fresh(unpacked(archives, place / "root"))
    try:
        with serving(own, served):
            yield own
    finally:
        own.close()
    assert left_over(before) == {}


@contextmanager
def running(own: Fresh, log: Path, *command: str, down: tuple[str, ...] = ()) -> Iterator[None]:
    """A platform in the foreground, until a first look at its health succeeds and then for as long as this lasts."""
    with open(log, "wb") as said:
        process = subprocess.Popen(own.inside(*command), stdin=subprocess.DEVNULL, stdout=said, stderr=said)
    try:
        until(lambda: process.poll() is not None or own_answers(own, 3000, "/health"), "the platform answers", within_s=60)
        assert process.poll() is None, log.read_text()
        yield
    finally:
        # `nsenter` gives no signals on, so the platform is asked to end.
        subprocess.run(own.inside("/usr/bin/env", "ringfence", "down", *down), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        process.wait(within(60))


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


def test_a_purge_after_a_platform_with_a_directory_of_its_own(system: Path, release: Path, tmp_path: Path) -> None:
    """What it left in `/run` is no sign of sandboxes of the package's; a directory that was made and never used has none either."""
    other = "/srv/other"
    words = ("sh", "/tmp/install.sh", "--url", f"http://127.0.0.1:{PORT}")
    with fresh([system], tmp_path, release) as own:
        hoststate.own(own.root / other.lstrip("/"))
        there = own.files()
        own.run("curl", "--silent", "--fail", "--output", "/tmp/install.sh", f"http://127.0.0.1:{PORT}/install.sh")
        own.run(*words, "--no-start")
        with running(own, tmp_path / "log", "ringfence", "up", "--data-dir", other, down=("--data-dir", other)):
            own.run("test", "-d", "/run/ringfence")
        own.run("sh", "/tmp/install.sh", "--uninstall", "--purge")
        own.run(*words, "--no-start")
        own.run("mkdir", "/var/lib/ringfence")
        own.run("sh", "/tmp/install.sh", "--uninstall", "--purge")
        left = {name for name in own.files() - there if not name.startswith(other.lstrip("/"))}
        assert left == set()


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
