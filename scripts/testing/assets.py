"""What tests need beside packages of the system: programs that are fetched or built, and environments of Python and Node.

How each is made is a function of `scripts/common.sh`, which the other scripts use as well. Here is what pins it, where it is
kept, and how it is tried before it is used.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from testing.cache import Cache, key

PYTHON = "/usr/bin/python3"
# Part of every key: raise it when a way of making something changes without any of its pins.
RECIPES = "1"
# The coding agents of the default form, one, and of the long form. Each is some hundred megabytes.
AGENTS = "codex"
ALL_AGENTS = "claude codex gemini opencode"


@dataclass(frozen=True)
class Asset:
    """One thing that can be provided."""

    name: str
    # A function of `scripts/common.sh` and its arguments before the directory.
    recipe: tuple[str, ...]
    # Path of what users of the asset are given, below its directory.
    program: str = ""
    # Arguments with which `program` must succeed, or nothing where files are all that can be checked.
    trial: tuple[str, ...] = ()
    # Files that it must have, where there is nothing to try.
    has: tuple[str, ...] = ()
    # Variables of `scripts/common.sh` and files of the repository that pin the content.
    variables: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    # Other assets that the recipe uses, by the variable that names them to it.
    uses: tuple[tuple[str, str], ...] = ()
    # Packages of the system that the recipe needs.
    packages: tuple[str, ...] = ()
    # Programs of the system that serve as well.
    instead: tuple[str, ...] = ()
    # Files hold absolute paths, so it is made where it stays.
    in_place: bool = False


def python(name: str, file: str, program: str = "bin/python") -> Asset:
    """An environment of what a file of requirements pins."""
    return Asset(
        f"python-{name}",
        ("python_environment", file),
        program="" if program == "bin/pytest" else program,
        trial=(),
        files=(file,),
        packages=("python3", "python3-venv"),
        in_place=True,
    )


def node_modules(name: str, directory: str) -> Asset:
    """Packages of Node of a lock file."""
    files = (f"{directory}/package.json", f"{directory}/package-lock.json")
    return Asset(f"npm-{name}", ("npm_into", directory), program="node_modules", files=files, packages=("nodejs", "npm"))


def agents(name: str, which: str) -> Asset:
    """What the recipe of coding agents fetches for some of them, for builds without a network."""
    files = ["templates/agents/requirements.txt", *(f"templates/agents/npm/{agent}/package-lock.json" for agent in which.split())]
    packages = ("python3", "python3-pip", "nodejs", "npm")
    return Asset(name, ("agents_packages_into", which), has=("wheels", "npm", "agents"), files=tuple(files), packages=packages)


SDKS = ("2.63.0", "2.45.1", "2.20.3", "2.8.1")
ALL = (
    # Debian's development suite has one version at a time, so another than the pinned one is taken where it is gone: an entry
    # stays until its pin changes or the cache is removed.
    Asset(
        "criu",
        ("criu_into",),
        program="criu",
        trial=("--version",),
        variables=("criu_version", "criu_hashes"),
        packages=("patchelf", "debian-archive-keyring"),
        instead=("criu",),
        in_place=True,
    ),
    Asset(
        "go",
        ("go_into",),
        program="bin/go",
        trial=("version",),
        variables=("go_version",),
        packages=("golang-go",),
        instead=("go", "/usr/local/go/bin/go"),
    ),
    Asset(
        "versitygw",
        ("versitygw_into",),
        program="versitygw",
        trial=("--version",),
        variables=("versitygw_version",),
        uses=(("RINGFENCE_GO", "go"),),
    ),
    Asset(
        "pebble",
        ("pebble_into",),
        has=("pebble", "pebble-challtestsrv"),
        variables=("pebble_version",),
        uses=(("RINGFENCE_GO", "go"),),
    ),
    Asset("helm", ("helm_into",), program="helm", trial=("version",), variables=("helm_version",), uses=(("RINGFENCE_GO", "go"),)),
    # The system of the image, without the program.
    Asset(
        "container-system",
        ("container_system_into",),
        program="root",
        has=("root/usr/bin/python3", "root/usr/sbin/mkfs.ext4"),
        variables=("image_suite", "image_packages"),
        packages=("mmdebstrap",),
    ),
    # What the API server says of objects, by its own code.
    Asset(
        "chart-judge",
        ("chart_judge_into",),
        program="judge",
        trial=("seccomp",),
        files=tuple(f"conformance/kubernetes/judge/{file}" for file in ("main.go", "go.mod", "go.sum")),
        uses=(("RINGFENCE_GO", "go"),),
    ),
    # What metrics are pushed to: no package of Debian has one, and its Prometheus takes nothing by OTLP.
    Asset(
        "collector",
        ("collector_into",),
        program="collector",
        trial=("--version",),
        files=tuple(f"conformance/monitoring/collector/{file}" for file in ("main.go", "go.mod", "go.sum")),
        uses=(("RINGFENCE_GO", "go"),),
    ),
    # From a package that is not installed: it would start a service.
    Asset("prometheus", ("debian_files_into", "prometheus"), has=("usr/bin/prometheus", "usr/bin/promtool")),
    Asset(
        "node",
        ("node_into",),
        program="node",
        trial=("--version",),
        variables=("node_version",),
        packages=("nodejs", "npm"),
        instead=("node",),
    ),
    *(python(version, f"conformance/python/requirements-{version}.txt", "bin/pytest") for version in SDKS),
    python("docs", "conformance/docs/requirements.txt", "bin/pytest"),
    python("monitoring", "conformance/monitoring/requirements.txt", "bin/pytest"),
    python("fuzz", "conformance/fuzz/requirements.txt", "bin/schemathesis"),
    python("mcp-2.3.0", "conformance/mcp/requirements-2.3.0.txt"),
    python("mcp-1.30.0", "conformance/mcp/requirements-1.30.0.txt"),
    python("signing", "conformance/signing/requirements.txt"),
    python("codeint-2.11.5", "conformance/codeint/requirements-2.11.5.txt", "bin/pytest"),
    python("codeint-2.8.1", "conformance/codeint/requirements-2.8.1.txt"),
    # What the recipe of the code interpreter fetches, for builds without a network.
    Asset(
        "code-interpreter-packages",
        ("code_interpreter_packages_into",),
        has=("wheels", "npm"),
        files=tuple(
            f"templates/code-interpreter/{file}"
            for file in ("requirements-server.txt", "requirements-kernel.txt", "server/code_interpreter/drivers/package-lock.json")
        ),
        packages=("python3", "python3-pip", "nodejs", "npm"),
    ),
    python("desktop-2.7.2", "conformance/desktop/requirements-2.7.2.txt", "bin/pytest"),
    python("desktop-1.7.4", "conformance/desktop/requirements-1.7.4.txt"),
    python("gateway", "conformance/gateway/requirements.txt", "bin/pytest"),
    Asset(
        "mcp-gateway-packages",
        ("mcp_gateway_packages_into",),
        has=("wheels",),
        files=("templates/mcp-gateway/requirements.txt",),
        packages=("python3", "python3-pip"),
    ),
    agents("agents-packages", AGENTS),
    agents("agents-packages-all", ALL_AGENTS),
    # What the recipe of the desktop installs and this system lacks. It is fetched again when packages of the system were updated
    # so that it no longer fits.
    Asset(
        "desktop-packages",
        ("desktop_packages_into",),
        program="try",
        trial=("simulate",),
        variables=("desktop_compression",),
        files=("templates/desktop/Dockerfile",),
    ),
    *(node_modules(f"javascript-{version}", f"conformance/javascript/{version}") for version in ("2.51.0", "2.49.0", "2.8.4")),
    *(node_modules(name, f"conformance/{name}") for name in ("cli", "browser", "mcp", "signing", "codeint", "desktop")),
)
BY_NAME = {asset.name: asset for asset in ALL}


class Assets:
    """The assets of one checkout and one cache."""

    def __init__(self, root: Path, cache: Cache) -> None:
        self.root = root
        self.cache = cache
        self._instead: dict[str, Path | None] = {}
        self._common = (root / "scripts" / "common.sh").read_text()

    def instead(self, name: str) -> Path | None:
        """The program of the system that serves instead of an asset, if there is one that is new enough."""
        if name not in self._instead:
            found = filter(None, map(shutil.which, BY_NAME[name].instead))
            self._instead[name] = next((Path(path) for path in found if is_new_enough(name, path)), None)
        return self._instead[name]

    def directory(self, name: str) -> Path:
        """The entry of an asset in the cache."""
        return self.cache.path(name, self.key(BY_NAME[name]))

    def value(self, name: str) -> str:
        """The path that users of an asset are given. It is known before the asset is made."""
        there = self.instead(name)
        return str(there or self.directory(name) / BY_NAME[name].program).rstrip("/")

    def key(self, asset: Asset) -> str:
        """Everything that pins the content of an asset."""
        pins: list[str | bytes] = [RECIPES, platform.machine(), *asset.recipe]
        pins += [f"{name}={self.variable(name)}" for name in asset.variables]
        pins += [(self.root / file).read_bytes() for file in asset.files]
        if asset.recipe[0] == "python_environment":
            pins.append(python_version())
        if asset.in_place:
            # What is made in its place is bound to it.
            pins.append(str(self.cache.root))
        return key(*pins)

    def variable(self, name: str) -> str:
        """A version that `scripts/common.sh` names."""
        found = re.search(rf"^{name}=(\S+)$", self._common, re.MULTILINE)
        if not found:
            raise ValueError(f"scripts/common.sh does not set {name}")
        return found.group(1)

    def wanted(self, names: Iterable[str]) -> list[str]:
        """The assets to provide: those named and what they use, without those that the system has, each after what it uses."""
        found: list[str] = []

        def add(name: str) -> None:
            if name in found or self.instead(name):
                return
            for _, other in BY_NAME[name].uses:
                add(other)
            found.append(name)

        for name in names:
            add(name)
        return found

    def packages(self, names: Iterable[str]) -> set[str]:
        """The packages of the system for some assets. All of them are installed before any platform runs."""
        found: set[str] = set()
        for name in self.wanted(names):
            found.update(BY_NAME[name].packages)
        return found

    def provide(self, name: str) -> bool:
        """Makes an asset unless it is there and good. Returns whether it was made now."""
        asset = BY_NAME[name]
        directory = self.directory(name)
        return self.cache.provide(directory, lambda into: self.make(asset, into), lambda at: self.serves(asset, at), asset.in_place)

    def make(self, asset: Asset, into: Path) -> None:
        """Runs the recipe. It fetches from the network, so it has a second try."""
        environment = {**os.environ, **{variable: self.value(other) for variable, other in asset.uses}}
        script = 'set -euo pipefail; root=$1; shift; . "$root/scripts/common.sh"; "$@"'
        command = ["bash", "-c", script, "bash", str(self.root), *asset.recipe, str(into)]
        into.parent.mkdir(parents=True, exist_ok=True)
        for attempt in (1, 2):
            ran = subprocess.run(command, cwd=self.root, env=environment, stdin=subprocess.DEVNULL, check=False)
            if ran.returncode == 0:
                return
            print(f"{asset.name}: attempt {attempt} of 2 failed", flush=True)
            shutil.rmtree(into, ignore_errors=True)
        raise subprocess.CalledProcessError(ran.returncode, command)

    def serves(self, asset: Asset, at: Path) -> bool:
        """Whether what is in a directory works as far as a moment can tell."""
        trial: list[str] = []
        if asset.recipe[0] == "python_environment":
            # Those of clients need not have pip's neighbours, but every one has an interpreter that starts.
            trial = [str(at / "bin" / "python"), "-c", "import sys; sys.exit(sys.prefix == sys.base_prefix)"]
        elif asset.trial:
            trial = [str(at / asset.program), *asset.trial]
        if not trial:
            return all((at / name).exists() for name in (asset.program, *asset.has))
        try:
            quiet = subprocess.DEVNULL
            return subprocess.run(trial, stdin=quiet, stdout=quiet, stderr=quiet, timeout=120, check=False).returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            return False


def python_version() -> str:
    """The version of the interpreter that environments are made of."""
    ran = subprocess.run([PYTHON, "--version"], capture_output=True, text=True, check=True)
    return ran.stdout.strip()


def is_new_enough(name: str, program: str) -> bool:
    """Whether a program of the system can be used as it is."""
    commands = {"criu": ["--version"], "go": ["env", "GOVERSION"], "node": ["--version"]}
    environment = {**os.environ, "GOTOOLCHAIN": "local"}
    try:
        ran = subprocess.run([program, *commands[name]], capture_output=True, text=True, env=environment, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    found = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", ran.stdout)
    if ran.returncode != 0 or not found:
        return False
    version = tuple(int(part or 0) for part in found.groups())
    return serves_version(name, version)


def serves_version(name: str, version: tuple[int, ...]) -> bool:
    """Whether the tests can use a version: CRIU for current kernels, Go for the Go SDK, Node for the JavaScript
    SDK's `engines`."""
    if name == "criu":
        return version >= (4, 2)
    if name == "go":
        return version >= (1, 22)
    if version[0] == 20:
        return version >= (20, 18, 1)
    return version >= (22, 9)
