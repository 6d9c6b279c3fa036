"""What helm makes of the chart and some values, and what the code of the API server says about it."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from harness.patience import within

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "packaging" / "helm" / "ringfence"
RELEASE, NAMESPACE = "box", "sandboxes"
# A helm that is installed as a module says nothing else than that it knows Kubernetes 1.20.
CLUSTER = ("--kube-version", "1.36")
# What has no default.
REQUIRED: dict[str, Any] = {
    "server": {"domain": "sandbox.example.com", "database": {"secretName": "database"}, "masterKey": {"secretName": "master-key"}},
}

Object = dict[str, Any]


class Refused(Exception):
    """What helm said when it refused the values."""


@dataclass(frozen=True)
class Verdict:
    """What is said about one object."""

    object: Object
    errors: tuple[str, ...]
    # The strictest Pod Security Standard that pods of a workload meet, and what the next stricter one forbids.
    level: str = ""
    forbidden: tuple[str, ...] = ()


@dataclass
class Rendered:
    """The objects of a release."""

    verdicts: list[Verdict] = field(default_factory=list)
    text: str = ""

    @property
    def objects(self) -> list[Object]:
        return [verdict.object for verdict in self.verdicts]

    def errors(self) -> list[str]:
        """Everything that the API server would refuse."""
        return [f"{name_of(verdict.object)}: {error}" for verdict in self.verdicts for error in verdict.errors]

    def of(self, kind: str, name: str = "") -> Object:
        """The one object of a kind whose name ends so."""
        [found] = self.all(kind, name)
        return found

    def all(self, kind: str, name: str = "") -> list[Object]:
        return [each for each in self.objects if each["kind"] == kind and each["metadata"]["name"].endswith(name)]

    def level(self, kind: str) -> str:
        """The Pod Security Standard of the pods of the one workload of a kind."""
        [found] = [verdict.level for verdict in self.verdicts if verdict.object["kind"] == kind]
        return found

    def pod(self, kind: str) -> Object:
        """The template of the pods of a workload."""
        return self.of(kind)["spec"]["template"]

    def config(self, component: str) -> str:
        """A configuration file."""
        return self.of("ConfigMap", f"-{component}")["data"]["ringfence.toml"]


def name_of(each: Object) -> str:
    return f"{each['kind']} {each['metadata']['name']}"


def program(variable: str) -> str:
    """A program that `scripts/testing/assets.py` provides."""
    return os.environ[variable]


def helm(*words: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Runs helm, which must find nothing of this host."""
    plain = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "HELM_NO_PLUGINS": "1", "KUBECONFIG": "/nonexistent"}
    command = [program("RINGFENCE_HELM"), *words]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=within(60), env=plain)


def merged(base: Object, more: Object) -> Object:
    """One table of values over another, as helm lays them."""
    found = dict(base)
    for key, value in more.items():
        both = isinstance(value, dict) and isinstance(found.get(key), dict)
        found[key] = merged(found[key], value) if both else value
    return found


def render(values: Object | None = None, *words: str, required: bool = True, release: str = RELEASE) -> Rendered:
    """The objects that some values make. YAML has JSON in it, so values need no other form."""
    given = merged(REQUIRED, values or {}) if required else values or {}
    ran = helm(
        *("template", release, CHART, "--namespace", NAMESPACE, *CLUSTER, "--values", "-", *words), stdin=json.dumps(given)
    )
    if ran.returncode != 0:
        raise Refused(ran.stderr)
    return Rendered(judged(ran.stdout), ran.stdout)


def judged(text: str) -> list[Verdict]:
    """What is said about each object of a text."""
    return [
        Verdict(said["object"], tuple(said["errors"]), said.get("level", ""), tuple(said.get("forbidden") or ()))
        for said in map(json.loads, judge("objects", text).splitlines())
    ]


def judge(command: str, stdin: str = "") -> str:
    ran = subprocess.run(
        [program("RINGFENCE_JUDGE"), command], input=stdin, capture_output=True, text=True, timeout=within(60), check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@cache
def seccomp() -> str:
    """The profile of RuntimeDefault, as an OCI runtime reads it."""
    return judge("seccomp")


def yaml(path: Path) -> Any:
    """A file of YAML."""
    return json.loads(judge("json", path.read_text()))
