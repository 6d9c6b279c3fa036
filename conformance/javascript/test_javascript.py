"""The JavaScript SDK on Node: the suites beside this file, run by Node's own test runner against one platform, with
routing headers over HTTP and with a host name per sandbox over HTTPS.

RINGFENCE_NODE names the program and RINGFENCE_NODE_MODULES a directory with the pinned SDK. The suites are copied next
to it, so that they import the SDK by its name like any program does.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import packages
from harness.beside import beside
from harness.code_host import TOKEN, CodeHost
from harness.criu import criu_config
from harness.patience import factor, within
from harness.platform import Platform
from harness.policies import secure_platform_on_the_internet
from harness.registry import ENVIRONMENT, PASSWORD, USER, changes, layer, programs, registry
from harness.secure import secure_platform
from harness.traffic import PROGRAMS

HERE = Path(__file__).parent
CLASSES = ("Sandbox", "SandboxApi", "Filesystem", "Commands", "CommandHandle", "Pty", "WatchHandle", "Git", "TemplateBase")
# What the builder of templates calls its images, by default and one by choice.
IMAGES = (
    *("debian:stable", "debian:trixie", "ubuntu:latest", "fedora:44", "alpine:3.24", "archlinux:latest"),
    *("python:3", "node:lts", "oven/bun:latest"),
)
# Methods for what the platform does not have.
UNSERVED = {
    "Sandbox.getMcpUrl",
    "Sandbox.getMcpToken",
}
# What the suites called, by the way they reached the platform.
called: dict[str, set[str]] = {"http": set(), "https": set()}
SUITES = ("lifecycle", "commands", "pty", "files", "filesystem", "watch", "compression", "traffic", "git")


def test_every_suite_is_named() -> None:
    assert {path.name.removesuffix(".test.mjs") for path in HERE.glob("*.test.mjs")} == {*SUITES, "fork", "network", "templates"}


@pytest.fixture(scope="module")
def secure(work_dir: Path) -> Iterator[Platform]:
    # What is paused over HTTPS is written to disk.
    with secure_platform(work_dir / "javascript", criu_config()) as server:
        yield server


@pytest.mark.parametrize("suite", SUITES)
def test_over_http(platform: Platform, tmp_path: Path, suite: str) -> None:
    called["http"] |= run(platform, tmp_path, suite, {"RINGFENCE_PAUSE_STORAGE": "memory"})


@pytest.mark.parametrize("suite", SUITES)
def test_over_https(secure: Platform, tmp_path: Path, suite: str) -> None:
    called["https"] |= run(secure, tmp_path, suite, {"RINGFENCE_PAUSE_STORAGE": "disk"})


def test_forks(platform: Platform, tmp_path: Path) -> None:
    """On a platform with CRIU."""
    suite, data = tmp_path / "suite", tmp_path / "beside"
    suite.mkdir()
    data.mkdir()
    with beside(platform, data, criu_config()) as server:
        ways = run(server, suite, "fork")
    for calls in called.values():
        calls |= ways


def test_network(work_dir: Path, tmp_path: Path) -> None:
    """Over HTTPS, on the host of the fake internet."""
    with secure_platform_on_the_internet(work_dir / "javascript-network") as (server, internet):
        called["https"] |= run(server, tmp_path, "network", {"RINGFENCE_AUTHORITY": str(internet.authority)})


def test_templates(work_dir: Path, tmp_path: Path) -> None:
    """Over HTTPS, on the host of the fake internet, with registries, a code host and packages to install."""
    directory = work_dir / "javascript-templates"
    mirror, private = "mirror.example.com:5000", "registry.example.org:5443"
    builds = (
        f'[builds]\nregistry_mirrors = "docker.io={mirror}"\ninsecure_registries = "{mirror}"\n'
        f'registry_ca_files = "{private}={directory}/internet/authority.pem"\n'
    )
    with secure_platform_on_the_internet(directory, builds) as (server, internet):
        CodeHost(internet).make("octocat/templates")
        packages.make(tmp_path / "packages")
        with (
            registry(internet, directory / "open", *split(mirror)) as open_one,
            registry(internet, directory / "closed", *split(private), tls=True, closed=True) as closed_one,
        ):
            image = [layer(programs), layer(changes)]
            for name in IMAGES:
                env = [*ENVIRONMENT, f"IMAGE={name}"]
                repository, _, tag = name.partition(":")
                open_one.push(repository if "/" in repository else f"library/{repository}", tag, image, env=env)
            closed_one.push("tools/shell", "1", image)
            environment = {
                "RINGFENCE_AUTHORITY": str(internet.authority),
                "RINGFENCE_REGISTRY": f"{private} {USER} {PASSWORD}",
                "RINGFENCE_PACKAGES": str(tmp_path / "packages"),
                "RINGFENCE_CODE_HOST_TOKEN": TOKEN,
            }
            called["https"] |= run(server, tmp_path, "templates", environment)


def split(host: str) -> tuple[str, int]:
    name, _, port = host.partition(":")
    return name, int(port)


def modules_directory() -> Path:
    return Path(os.environ["RINGFENCE_NODE_MODULES"]).resolve()


def public_methods() -> set[str]:
    """The public methods of the SDK's classes, by its own declarations."""
    declared = (modules_directory() / "e2b" / "dist" / "index.d.ts").read_text()
    found = set()
    for name in CLASSES:
        body = re.search(rf"^declare class {name}\b.*?\n}}", declared, re.S | re.M)
        assert body, name
        owner = name.removesuffix("Api").removesuffix("Base")
        for static, method in re.findall(r"^ {2}(static )?(\w+)(?:<[^>]*>)?\(", body.group(0), re.M):
            if method != "constructor":
                found.add(f"{owner}.{static}{method}")
    return found


@pytest.mark.parametrize("way", sorted(called))
def test_nothing_is_left_untried(way: str) -> None:
    """Judges what the suites above have called."""
    public = public_methods()
    assert len(public) > 60
    assert UNSERVED <= public
    # Templates are built over the API alone, to which only the scheme of the address differs.
    elsewhere = {method for method in public if method.startswith("Template.")} if way == "http" else set()
    assert sorted(public - called[way] - UNSERVED - elsewhere) == []


def run(platform: Platform, directory: Path, suite: str, environment: dict[str, str] | None = None) -> set[str]:
    """Runs one suite, of which every test must pass, and returns what it called."""
    modules = modules_directory()
    version = json.loads((modules / "e2b" / "package.json").read_text())["version"]
    for source in HERE.glob("*.?js"):
        shutil.copy(source, directory)
    (directory / "node_modules").symlink_to(modules)
    ran = subprocess.run(
        [os.environ["RINGFENCE_NODE"], "--test", "--test-reporter=spec", f"--test-timeout={within(120_000):.0f}", f"{suite}.test.mjs"],
        cwd=directory,
        env={
            **platform.environment(),
            **platform.credentials(),
            "HOME": str(directory),
            "RINGFENCE_PROGRAMS": str(PROGRAMS),
            "RINGFENCE_CALLED": str(directory / "called"),
            "NODE_OPTIONS": f"--require={directory}/resolve.cjs",
            "RINGFENCE_ADDRESS": f"127.0.0.1:{platform.port}",
            "RINGFENCE_PATIENCE": str(factor()),
            **(environment or {}),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=within(300),
    )
    print(f"\ne2b {version}, {suite}\n{ran.stdout}")
    closing = [line.split() for line in ran.stdout.splitlines() if line.startswith("ℹ ")]
    counts = {words[1]: words[2] for words in closing if len(words) == 3}
    assert ran.returncode == 0
    assert int(counts["pass"]) > 0
    assert (counts["pass"], counts["skipped"], counts["todo"]) == (counts["tests"], "0", "0")
    return set((directory / "called").read_text().splitlines())
