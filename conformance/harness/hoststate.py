"""The state of the host that a sandbox platform could leave behind, as comparable sets.

A snapshot is taken before the platform starts and compared after it is down. Only what a platform makes is looked
at (namespaces, mounts, its cgroups, loop devices, its processes, links, listening sockets, its files), because other
programs of the host come and go while the suites run. Other containers and other Ringfence platforms come and go as
well: once a suite has named its data directories with `own`, only what belongs to one of those counts, by the name of
its cgroup tree, by its path, or by its ancestry. Ends are asynchronous, so a comparison is retried until it is empty or
its deadline passes; what is left then is reported by name.

Everything is counted under a name that a restart of the platform does not change: no process ids, no inode numbers.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path

NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts")
OWN_NAME = "ringfence"
REGISTRY = Path("/run/ringfence")
# What the tree of a data directory is called in every cgroup hierarchy.
TREE = re.compile(r"ringfence-[0-9a-f]{16}")
# First user id that any sandbox of any platform may have.
FIRST_SANDBOX_ID = 0x2000_0000
# SQLite makes and removes these beside its file as it pleases.
SQLITE_SIDECARS = ("-wal", "-shm", "-journal")


# Data directories of the platforms under test; everything of the host counts while it is None.
_own: set[Path] | None = None


def own(*data_dirs: Path) -> None:
    """From now on, only what belongs to these data directories and those named before counts."""
    global _own
    _own = (_own or set()) | {path.resolve() for path in data_dirs}


def tree_of(data_dir: Path) -> str:
    """Name of the cgroup tree of a data directory: FNV-1a of its path."""
    value = 0xCBF2_9CE4_8422_2325
    for byte in os.fsencode(data_dir):
        value = (value ^ byte) * 0x0100_0000_01B3 % 2**64
    return f"{OWN_NAME}-{value:016x}"


def _is_own_path(path: str) -> bool:
    return _own is None or any(path.startswith(str(directory)) for directory in _own)


def _is_own_tree(text: str) -> bool | None:
    """Whether a cgroup's path lies in an own tree; None when it lies in the tree of no platform."""
    found = TREE.search(text)
    if found is None:
        return None
    return _own is None or found.group() in {tree_of(directory) for directory in _own}


def _is_own_process(pid: int) -> bool:
    """Whether a process belongs to a platform under test, or might: what cannot be told apart counts."""
    if _own is None:
        return True
    in_tree = _is_own_tree(_text(f"/proc/{pid}/cgroup"))
    if in_tree is not None:
        return in_tree
    if _runs_platform(pid):
        command = _text(f"/proc/{pid}/cmdline").split("\0")
        named = [after for word, after in zip(command, command[1:]) if word == "--data-dir"]
        return not named or any(_is_own_path(str(Path(path).resolve())) for path in named)
    ids = re.search(r"^Uid:\s+(\d+)", _text(f"/proc/{pid}/status"), re.MULTILINE)
    return _descends_from_us(pid) or (ids is not None and int(ids.group(1)) >= FIRST_SANDBOX_ID)


def _runs_platform(pid: int) -> bool:
    return os.path.basename(_link(f"/proc/{pid}/exe") or "").startswith(OWN_NAME)


def _descends_from_us(pid: int) -> bool:
    while pid > 1:
        if pid == os.getpid():
            return True
        stat = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
        pid = int(stat[1]) if len(stat) > 1 else 0
    return False


def _processes() -> list[int]:
    """Processes, without the dead ones that the host's init has not yet waited for: that is its matter alone."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and not _left_to_init(name)]


def _left_to_init(pid: str) -> bool:
    state_and_parent = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()[:2]
    return state_and_parent == ["Z", "1"]


def _link(path: str) -> str | None:
    """The target of a link below /proc, or None when the process is gone."""
    try:
        return os.readlink(path)
    except OSError:
        return None


def _text(path: str) -> str:
    try:
        return Path(path).read_bytes().decode(errors="replace")
    except OSError:
        return ""


def namespaces() -> Counter[str]:
    """How many namespaces of each kind some process is in."""
    found = set()
    for pid in filter(_is_own_process, _processes()):
        for kind in NAMESPACES:
            if link := _link(f"/proc/{pid}/ns/{kind}"):
                found.add(link)
    return Counter(link.split(":")[0] for link in found)


def foreign_processes() -> Counter[str]:
    """Commands of the processes in a pid namespace other than ours, and of the platform's own."""
    ours = os.readlink("/proc/self/ns/pid")
    found: Counter[str] = Counter()
    for pid in _processes():
        if pid == os.getpid():
            continue
        namespace = _link(f"/proc/{pid}/ns/pid")
        if namespace is None:
            continue
        if (namespace != ours or _runs_platform(pid)) and _is_own_process(pid):
            command = _text(f"/proc/{pid}/cmdline").replace("\0", " ").strip()
            found[command] += 1
    return found


def mounts() -> Counter[str]:
    """The mounts of our mount namespace, as `point type source`."""
    found: Counter[str] = Counter()
    for line in _text("/proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        point = left.split()[4]
        kind, source = right.split()[:2]
        # What lies beside a data directory counts as well: suites keep theirs in one temporary directory.
        near = _own is None or any(point.startswith(str(directory.parent)) for directory in _own)
        if not near and OWN_NAME not in line:
            continue
        found[f"{point} {kind} {source}"] += 1
    return found


def cgroups() -> set[str]:
    """The platform's cgroups in every hierarchy."""
    found = set()
    for directory, names, _ in os.walk("/sys/fs/cgroup"):
        for name in names:
            path = os.path.join(directory, name)
            if OWN_NAME in path and _is_own_tree(path) is not False:
                found.add(path)
    return found


def hierarchies() -> set[str]:
    """Version 1 cgroup hierarchies of the kernel: one that is mounted nowhere can live on."""
    found = {line.split(":")[1] for line in _text("/proc/self/cgroup").splitlines()}
    # One for all platforms of the host: it lives as long as the last of them, and says something once there is none.
    if any(map(_runs_platform, _processes())):
        found.discard(f"name={OWN_NAME}")
    return found


def _without_spare(paths: set[str]) -> set[str]:
    """Without the disks that launchers have ready for the next sandbox, as long as there are launchers."""
    spare = {path for path in paths if "disks/spare-" in path}
    return paths - spare if spare and any(map(_runs_platform, _processes())) else paths


def loop_devices() -> set[str]:
    """Files that loop devices are bound to."""
    found = set()
    for device in Path("/sys/block").glob("loop*"):
        if (backing := _text(f"{device}/loop/backing_file").strip()) and _is_own_path(backing):
            found.add(backing)
    return _without_spare(found)


def links() -> set[str]:
    """Network interfaces of our network namespace."""
    return set(os.listdir("/sys/class/net"))


def sockets() -> set[str]:
    """Unix sockets of our network namespace that carry the platform's name."""
    names = {line.split()[-1] for line in _text("/proc/net/unix").splitlines() if OWN_NAME in line}
    return {name for name in names if not name.startswith("/") or _is_own_path(name)}


def loose_files() -> set[str]:
    """Files with the platform's name in the places where programs drop files."""
    found = set()
    for directory in ("/run", "/dev/shm", "/var/run", "/var/lock"):
        try:
            found.update(f"{directory}/{name}" for name in os.listdir(directory) if OWN_NAME in name and name != OWN_NAME)
        except OSError:
            continue
    # What CRIU makes for a restore. It is never the host's.
    found.update(map(str, Path("/tmp").glob(".criu.*")))
    return found | registered()


def registered() -> set[str]:
    """Data directories in the registry that all platforms of the host share, which the last one removes."""
    found = {f"{REGISTRY}: {_text(str(entry))}" for entry in REGISTRY.glob("regions/*") if _is_own_path(_text(str(entry)))}
    return found | ({str(REGISTRY)} if REGISTRY.exists() and _own is None else set())


def files(root: Path) -> set[str]:
    """Everything below a directory, by relative path, without crossing into mounts."""
    found = set()
    if not root.exists():
        return found
    device = root.stat().st_dev
    for directory, names, leaves in os.walk(root):
        kept = []
        for name in names:
            path = os.path.join(directory, name)
            found.add(os.path.relpath(path, root) + "/")
            try:
                if os.lstat(path).st_dev == device:
                    kept.append(name)
            except OSError:
                continue
        names[:] = kept
        found.update(
            os.path.relpath(os.path.join(directory, leaf), root)
            for leaf in leaves
            if not leaf.endswith(SQLITE_SIDECARS)
        )
    return _without_spare(found)


@dataclass
class HostState:
    """One look at the host."""

    namespaces: Counter[str] = field(default_factory=Counter)
    processes: Counter[str] = field(default_factory=Counter)
    mounts: Counter[str] = field(default_factory=Counter)
    cgroups: Counter[str] = field(default_factory=Counter)
    hierarchies: Counter[str] = field(default_factory=Counter)
    loops: Counter[str] = field(default_factory=Counter)
    links: Counter[str] = field(default_factory=Counter)
    sockets: Counter[str] = field(default_factory=Counter)
    loose: Counter[str] = field(default_factory=Counter)
    files: Counter[str] = field(default_factory=Counter)

    @classmethod
    def take(cls, data_dir: Path | None = None) -> HostState:
        """Looks at the host, and at the files of a data directory when one is given."""
        return cls(
            namespaces=namespaces(),
            processes=foreign_processes(),
            mounts=mounts(),
            cgroups=Counter(cgroups()),
            hierarchies=Counter(hierarchies()),
            loops=Counter(loop_devices()),
            links=Counter(links()),
            sockets=Counter(sockets()),
            loose=Counter(loose_files()),
            files=Counter(files(data_dir)) if data_dir else Counter(),
        )

    def added(self, later: HostState) -> dict[str, dict[str, int]]:
        """What `later` has more than this one, by kind and name; empty when nothing was left over."""
        extra = {}
        for kind in fields(self):
            more = getattr(later, kind.name) - getattr(self, kind.name)
            if more:
                extra[kind.name] = dict(more)
        return extra

    def counts(self) -> dict[str, int]:
        """How many there are of each kind."""
        return {kind.name: getattr(self, kind.name).total() for kind in fields(self)}


def left_over(before: HostState, data_dir: Path | None = None, within_s: float = 15.0) -> dict[str, dict[str, int]]:
    """What is on the host now and was not `before`, once it no longer shrinks to nothing within the deadline."""
    deadline = time.monotonic() + within_s
    while True:
        extra = before.added(HostState.take(data_dir))
        if not extra or time.monotonic() > deadline:
            return extra
        time.sleep(0.05)
