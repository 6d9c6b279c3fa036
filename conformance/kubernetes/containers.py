"""A container of a pod as the OCI runtime is told about it: what the kubelet and containerd make of its spec.

Only what the chart uses is here, and what else a spec says is refused, so that nothing of it goes untried.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubernetes import chart
from kubernetes.chart import Object

# What every container gets that drops nothing.
DEFAULT_CAPABILITIES = frozenset(
    {
        *("CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "MKNOD", "NET_RAW", "SETGID", "SETUID", "SETFCAP", "SETPCAP"),
        *("NET_BIND_SERVICE", "SYS_CHROOT", "KILL", "AUDIT_WRITE"),
    }
)
MASKED = (
    *("/proc/acpi", "/proc/asound", "/proc/kcore", "/proc/keys", "/proc/latency_stats"),
    *("/proc/timer_list", "/proc/timer_stats", "/proc/sched_debug", "/sys/firmware"),
)
READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
TERMINALS = ("nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Fields of a container that are tried, or that say something to a cluster alone.
TRIED = frozenset(
    {"name", "command", "args", "env", "securityContext", "volumeMounts", "startupProbe", "readinessProbe", "livenessProbe", "ports"}
)
OF_A_CLUSTER = frozenset({"image", "imagePullPolicy", "resources"})
SECURITY = frozenset(
    {
        *("privileged", "allowPrivilegeEscalation", "readOnlyRootFilesystem", "capabilities", "seccompProfile"),
        *("runAsUser", "runAsGroup", "runAsNonRoot", "fsGroup", "fsGroupChangePolicy"),
    }
)


class Unknown(Exception):
    """A spec says something that is not tried here."""


@dataclass(frozen=True)
class Machine:
    """What a container gets from the machine that its pod is on."""

    name: str
    secrets: dict[str, dict[str, str]]
    # The address of the pod.
    address: str = ""


@dataclass(frozen=True)
class Mount:
    """A volume of a pod, prepared on the host."""

    source: Path
    target: str
    read_only: bool


def all_capabilities() -> list[str]:
    """Those of this process, which are all that a privileged container can get here."""
    last = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
    mask = int(next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff:")).split()[1], 16)
    return [name for number, name in enumerate(NAMES[: last + 1]) if mask >> number & 1]


NAMES = (
    "CAP_CHOWN CAP_DAC_OVERRIDE CAP_DAC_READ_SEARCH CAP_FOWNER CAP_FSETID CAP_KILL CAP_SETGID CAP_SETUID CAP_SETPCAP CAP_LINUX_IMMUTABLE "
    "CAP_NET_BIND_SERVICE CAP_NET_BROADCAST CAP_NET_ADMIN CAP_NET_RAW CAP_IPC_LOCK CAP_IPC_OWNER CAP_SYS_MODULE CAP_SYS_RAWIO CAP_SYS_CHROOT "
    "CAP_SYS_PTRACE CAP_SYS_PACCT CAP_SYS_ADMIN CAP_SYS_BOOT CAP_SYS_NICE CAP_SYS_RESOURCE CAP_SYS_TIME CAP_SYS_TTY_CONFIG CAP_MKNOD "
    "CAP_LEASE CAP_AUDIT_WRITE CAP_AUDIT_CONTROL CAP_SETFCAP CAP_MAC_OVERRIDE CAP_MAC_ADMIN CAP_SYSLOG CAP_WAKE_ALARM CAP_BLOCK_SUSPEND "
    "CAP_AUDIT_READ CAP_PERFMON CAP_BPF CAP_CHECKPOINT_RESTORE"
).split()


def environment(container: Object, machine: Machine, added: dict[str, str]) -> list[str]:
    """The variables of a container. References are followed as the kubelet does, and nothing else is in it."""
    found = {"PATH": PATH, "HOSTNAME": "pod", "KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    for variable in container.get("env", []):
        origin = variable.get("valueFrom", {})
        if "value" in variable:
            value = re.sub(r"\$\((\w+)\)", lambda match: found[match[1]], variable["value"])
        elif reference := origin.get("secretKeyRef"):
            value = machine.secrets[reference["name"]][reference["key"]]
        elif origin.get("fieldRef", {}).get("fieldPath") == "spec.nodeName":
            value = machine.name
        elif origin.get("fieldRef", {}).get("fieldPath") == "status.podIP":
            value = machine.address
        else:
            raise Unknown(f"variable {variable}")
        found[variable["name"]] = value
    return [f"{name}={value}" for name, value in (found | added).items()]


def merged_security(pod: Object, container: Object) -> Object:
    """What counts for a container: its own, and otherwise what the pod says."""
    found = {**pod.get("securityContext", {}), **container.get("securityContext", {})}
    if unknown := found.keys() - SECURITY:
        raise Unknown(f"securityContext: {unknown}")
    return found


def bundle(
    pod: Object, container: Object, machine: Machine, mounts: list[Mount], root: Path, namespaces: dict[str, str], added: dict[str, str]
) -> Object:
    """The configuration of an OCI runtime for one container."""
    if unknown := container.keys() - TRIED - OF_A_CLUSTER:
        raise Unknown(f"container: {unknown}")
    security = merged_security(pod, container)
    privileged = security.get("privileged", False)
    dropped = set(security.get("capabilities", {}).get("drop", []))
    if security.get("capabilities", {}).keys() - {"drop"} or dropped - {"ALL"}:
        raise Unknown(f"capabilities: {security['capabilities']}")
    capabilities = all_capabilities() if privileged else [] if dropped else sorted(f"CAP_{name}" for name in DEFAULT_CAPABILITIES)
    user = security.get("runAsUser", 0)
    if security.get("runAsNonRoot") and user == 0:
        raise Unknown("the kubelet refuses root with runAsNonRoot")
    group = security.get("fsGroup")
    # Root has its capabilities in effect, other users only what a program brings, which is nothing.
    in_effect = capabilities if user == 0 else []
    process: Object = {
        "terminal": False,
        "user": {"uid": user, "gid": security.get("runAsGroup", 0), "additionalGids": [group] if group is not None else []},
        "args": [*container["command"], *container.get("args", [])],
        "env": environment(container, machine, added),
        "cwd": "/",
        "capabilities": {"bounding": capabilities, "effective": in_effect, "permitted": in_effect},
        "noNewPrivileges": not security.get("allowPrivilegeEscalation", True),
        # As of a pod with small requests.
        "oomScoreAdj": 980,
    }
    linux: Object = {
        "namespaces": [{"type": "mount"}, *({"type": kind, "path": path} if path else {"type": kind} for kind, path in namespaces.items())],
        "resources": {"devices": [{"allow": privileged, "access": "rwm"}]},
        "rootfsPropagation": "rprivate",
    }
    if not privileged:
        linux |= {"maskedPaths": list(MASKED), "readonlyPaths": list(READ_ONLY)}
        profile = security.get("seccompProfile", {}).get("type", "Unconfined")
        if profile == "RuntimeDefault":
            linux["seccomp"] = json.loads(chart.seccomp())
        elif profile != "Unconfined":
            raise Unknown(f"seccompProfile: {profile}")
    return {
        "ociVersion": "1.0.2",
        "process": process,
        "root": {"path": str(root), "readonly": security.get("readOnlyRootFilesystem", False)},
        "mounts": all_mounts(mounts, privileged),
        "linux": linux,
    }


def all_mounts(mounts: list[Mount], privileged: bool) -> list[Object]:
    """Those of every container, but for what a volume replaces, and the volumes of this one."""
    # Control groups of version 1 cannot be shown as a runtime does where this machine is a container itself.
    writable = "rw" if privileged else "ro"
    every: list[Object] = [
        {"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid", "noexec", "nodev"]},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "strictatime", "mode=755", "size=65536k"]},
        {"destination": "/dev/pts", "type": "devpts", "source": "devpts", "options": [*TERMINALS]},
        {"destination": "/dev/mqueue", "type": "mqueue", "source": "mqueue", "options": ["nosuid", "noexec", "nodev"]},
        {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": ["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"]},
        {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "noexec", "nodev", writable]},
        {"destination": "/sys/fs/cgroup", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "noexec", "nodev", "ro", "mode=755"]},
    ]
    replaced = {mount.target for mount in mounts}
    own = [
        {"destination": mount.target, "type": "bind", "source": str(mount.source), "options": ["rbind", "rprivate", "ro" if mount.read_only else "rw"]}
        for mount in mounts
    ]
    both: list[Object] = [*(each for each in every if each["destination"] not in replaced), *own]
    return sorted(both, key=lambda mount: mount["destination"].count("/"))


class Volumes:
    """The volumes of one pod, made on the host as the kubelet makes them."""

    def __init__(self, place: Path, claims: Path, config_maps: dict[str, dict[str, str]], secrets: dict[str, dict[str, str]]) -> None:
        self.place = place
        # Claims outlive pods.
        self.claims = claims
        self.config_maps = config_maps
        self.secrets = secrets

    def prepare(self, volume: Object, group: int | None) -> Path:
        """The directory of a volume."""
        name = volume["name"]
        kinds = volume.keys() - {"name"}
        if len(kinds) != 1:
            raise Unknown(f"volume {volume}")
        [kind] = kinds
        spec: Any = volume[kind]
        at = self.place / name
        if kind == "configMap":
            self.write(at, self.config_maps[spec["name"]], spec.get("defaultMode", 0o644), group)
        elif kind == "secret":
            if spec["secretName"] not in self.secrets and not spec.get("optional"):
                raise Unknown(f"the kubelet waits for the secret {spec['secretName']}")
            self.write(at, self.secrets.get(spec["secretName"], {}), spec.get("defaultMode", 0o644), group)
        elif kind == "emptyDir":
            at.mkdir()
            at.chmod(0o777)
            self.give(at, group)
        elif kind == "persistentVolumeClaim":
            at = self.claims / spec["claimName"]
            # A fresh file system belongs to root.
            at.mkdir(mode=0o755, exist_ok=True)
            self.give(at, group)
        elif kind == "hostPath":
            at = Path(spec["path"])
            if spec["type"] == "DirectoryOrCreate":
                at.mkdir(mode=0o755, parents=True, exist_ok=True)
            elif spec["type"] != "Directory" or not at.is_dir():
                raise Unknown(f"the kubelet refuses the path of the machine {spec}")
        else:
            raise Unknown(f"volume of the kind {kind}")
        return at

    def write(self, at: Path, content: dict[str, str], mode: int, group: int | None) -> None:
        """Files as the kubelet writes them: links to a directory of their own, which it can replace as a whole."""
        data = at / "..1"
        data.mkdir(parents=True)
        at.chmod(0o777)
        (at / "..data").symlink_to("..1")
        for name, text in content.items():
            file = data / name
            file.write_text(text)
            # What a group is to read, it may.
            file.chmod(mode | (0o040 if group is not None else 0))
            if group is not None:
                os.chown(file, 0, group)
            (at / name).symlink_to(f"..data/{name}")

    def give(self, at: Path, group: int | None) -> None:
        """The group of a volume, which new files in it inherit."""
        if group is not None:
            os.chown(at, 0, group)
            at.chmod(at.stat().st_mode & 0o777 | 0o2070)

