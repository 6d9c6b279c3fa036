"""The state of the host that a sandbox platform could leave behind, as comparable sets.

A snapshot is taken before the platform starts and compared after it is down. Only what a platform makes is looked
at (namespaces, mounts, its cgroups, loop devices, its processes, links, listening sockets, its files), because other
programs of the host come and go while the suites run. Other containers and other Ringfence platforms come and go as
well: once a suite has named its data directories with `own`, only what belongs to one of those counts, by the name of
its cgroup tree, by its path, by the data directory that its process has open, or by its ancestry. What has none of these
signs counts, so that a leak cannot hide by being nameless. Ends are asynchronous, so a comparison is retried until it is empty or
its deadline passes; what is left then is reported by name.

Everything is counted under a name that a restart of the platform does not change: no process ids, no inode numbers.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path

from harness.patience import within

NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts")
OWN_NAME = "ringfence"
REGISTRY = Path("/run/ringfence")
# What the tree of a data directory is called in every cgroup hierarchy.
TREE = re.compile(r"ringfence-[0-9a-f]{16}")
# First user id that any sandbox of any platform may have.
FIRST_SANDBOX_ID = 0x2000_0000
# The registry has an entry for each range of these ids, named by its number, which says whose it is. By the directory of
# the entries: how many ids such a range has.
IDS_OF_RANGE = {"regions": 4096 << 16, "blocks": 256 << 16}
# What a process of a platform has open in its data directory for as long as it lives.
HELD_OPEN = ("lock", "launchers.lock", "ringfence.db")
# What an interface that the platform makes is called. It belongs into the network namespace of a sandbox.
LINK = "eth0"
# Directories of the host that everyone uses, where what lies beside a data directory is not a suite's own.
SHARED_PLACES = {Path(place) for place in ("/", "/tmp", "/var", "/var/tmp", "/var/lib", "/dev/shm", "/run", "/root", "/mnt")}
# SQLite makes and removes these beside its file as it pleases.
SQLITE_SIDECARS = ("-wal", "-shm", "-journal")


# Data directories of the platforms under test; everything of the host counts while it is None.
_own: set[Path] | None = None


def own(*data_dirs: Path) -> None:
    """From now on, only what belongs to these data directories and those named before counts."""
    global _own
    _own = (_own or set()) | {path.resolve() for path in data_dirs}


@contextmanager
def only(*data_dirs: Path) -> Iterator[None]:
    """Meanwhile, only what belongs to these data directories counts. Platforms named before start and end things then."""
    global _own
    earlier, _own = _own, {path.resolve() for path in data_dirs}
    try:
        yield
    finally:
        _own = earlier


def tree_of(data_dir: Path) -> str:
    """Name of the cgroup tree of a data directory: FNV-1a of its path."""
    value = 0xCBF2_9CE4_8422_2325
    for byte in os.fsencode(data_dir):
        value = (value ^ byte) * 0x0100_0000_01B3 % 2**64
    return f"{OWN_NAME}-{value:016x}"


def _is_own_path(path: str) -> bool:
    return _own is None or any(path.startswith(str(directory)) for directory in _own)


def _is_below(path: str, directory: Path) -> bool:
    return path == str(directory) or path.startswith(f"{directory}/")


def _is_own_tree(text: str) -> bool | None:
    """Whether a cgroup's path lies in an own tree; None when it lies in the tree of no platform."""
    found = TREE.search(text)
    if found is None:
        return None
    return _own is None or found.group() in {tree_of(directory) for directory in _own}


def _ranges() -> Iterator[tuple[range, str]]:
    """The ranges of user ids that the platforms of this host have, and the data directory of each."""
    for kind, count in IDS_OF_RANGE.items():
        for entry in REGISTRY.glob(f"{kind}/*"):
            # A number may stand before the path, and what several have in common names none.
            _, slash, path = _text(str(entry)).partition("/")
            if slash and entry.name.isdigit():
                first = FIRST_SANDBOX_ID + int(entry.name) * count
                yield range(first, first + count), slash + path


def _others() -> set[str]:
    """Holders that belong to other platforms."""
    return {holder for holder in holders() if not _is_own_path(holder)}


def _is_of_others(user: int) -> bool:
    """Whether a user id is of a sandbox of another platform."""
    return any(user in ids and not _is_own_path(holder) for ids, holder in _ranges())


def _is_own_process(pid: int) -> bool:
    """Whether a process belongs to a platform under test, or might: what cannot be told apart counts."""
    if _own is None:
        return True
    in_tree = _is_own_tree(_text(f"/proc/{pid}/cgroup"))
    if in_tree is not None:
        return in_tree
    parents = set()
    for member in [pid, *_ancestors(pid)]:
        if _runs_platform(member):
            if named := _data_dirs(member):
                return any(map(_is_own_path, named))
        elif member == os.getpid():
            return True
        elif member != pid:
            parents.add(member)
    # Nothing says whose it is. The range of ids may, and a program that someone else has started, and who is still there,
    # is theirs.
    ids = re.search(r"^Uid:\s+(\d+)", _text(f"/proc/{pid}/status"), re.MULTILINE)
    if ids is not None and int(ids.group(1)) >= FIRST_SANDBOX_ID:
        return not _is_of_others(int(ids.group(1)))
    return _runs_platform(pid) and not parents - set(_ancestors(os.getpid()))


def _runs_platform(pid: int) -> bool:
    return os.path.basename(_link(f"/proc/{pid}/exe") or "").startswith(OWN_NAME)


def _data_dirs(pid: int) -> set[str]:
    """The data directories of a process of a platform: from its command line, and from what it has open."""
    words = _text(f"/proc/{pid}/cmdline").split("\0")
    named = [after for word, after in zip(words, words[1:]) if word == "--data-dir"]
    named += [word.removeprefix("--data-dir=") for word in words if word.startswith("--data-dir=")]
    found = {str(Path(path).resolve()) for path in named}
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return found
    for descriptor in descriptors:
        directory, _, name = (_link(f"/proc/{pid}/fd/{descriptor}") or "").removesuffix(" (deleted)").rpartition("/")
        if name in HELD_OPEN and directory != str(REGISTRY):
            found.add(directory)
    return found


def _ancestors(pid: int) -> list[int]:
    """The parent of a process, its parent, and so on."""
    found: list[int] = []
    while pid > 1:
        stat = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
        pid = int(stat[1]) if len(stat) > 1 else 0
        found.append(pid)
    return found


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
    others = [Path(holder) for holder in _others()]
    for line in _text("/proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        point = left.split()[4]
        kind, source = right.split()[:2]
        if not _is_near(point) and (
            OWN_NAME not in line or _is_own_tree(line) is False or any(_is_below(point, other) for other in others)
        ):
            continue
        found[f"{point} {kind} {source}"] += 1
    return found


def _is_near(point: str) -> bool:
    """Whether a path lies beside an own data directory: suites keep theirs in one temporary directory."""
    if _own is None:
        return True
    return any(_is_below(point, place if place.parent in SHARED_PLACES else place.parent) for place in _own)


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
    # One for all platforms of the host: it lives as long as the last of them, and says something once there is none. A
    # platform whose processes have all been killed is one as long as it is registered, or has cgroups.
    if any(map(_runs_platform, _processes())) or _others() or _other_trees():
        found.discard(f"name={OWN_NAME}")
    return found


def _other_trees() -> bool:
    """Whether another platform of the host has cgroups."""
    root = Path("/sys/fs/cgroup")
    found = [path.name for pattern in (f"{OWN_NAME}-*", f"*/{OWN_NAME}-*") for path in root.glob(pattern)]
    return any(_is_own_tree(name) is False for name in found)


def _without_spare(paths: set[str]) -> set[str]:
    """Without the disks that launchers have ready for the next sandbox, as long as there are launchers of ours."""
    spare = {path for path in paths if "disks/spare-" in path}
    has_launchers = spare and any(_runs_platform(pid) and _is_own_process(pid) for pid in _processes())
    return paths - spare if has_launchers else paths


def loop_devices() -> set[str]:
    """Files that loop devices are bound to."""
    found = set()
    for device in Path("/sys/block").glob("loop*"):
        if (backing := _text(f"{device}/loop/backing_file").strip()) and _is_own_path(backing):
            found.add(backing)
    return _without_spare(found)


def links() -> set[str]:
    """Network interfaces of our network namespace. Other programs of the host make some there, unless it is one that a suite
    has made for itself: there every interface counts, and elsewhere those that are called as the platform calls its own.
    """
    # Not from /sys, which shows the namespace in which it was mounted.
    found = {name for _, name in socket.if_nameindex()}
    is_shared = _link("/proc/thread-self/ns/net") == _link(f"/proc/{os.getppid()}/ns/net")
    return found & {LINK} if is_shared and _own is not None else found


def sockets() -> set[str]:
    """Unix sockets of our network namespace that carry the platform's name."""
    found = set()
    for line in _text("/proc/net/unix").splitlines():
        name = line.split()[-1]
        if OWN_NAME not in line:
            continue
        if _is_own_path(name) if name.startswith("/") else _is_own_socket(line.split()[6]):
            found.add(name)
    return found


def _is_own_socket(inode: str) -> bool:
    """Whether a socket belongs to a process of ours, or of nobody that can be found."""
    if _own is None:
        return True
    found = [pid for pid in _processes() if _has_open(pid, f"socket:[{inode}]")]
    return not found or any(map(_is_own_process, found))


def _has_open(pid: int, target: str) -> bool:
    try:
        return any(_link(f"/proc/{pid}/fd/{descriptor}") == target for descriptor in os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return False


def loose_files() -> set[str]:
    """Files with the platform's name in the places where programs drop files."""
    found = set()
    for directory in ("/run", "/dev/shm", "/var/run", "/var/lock"):
        try:
            found.update(f"{directory}/{name}" for name in os.listdir(directory) if OWN_NAME in name and name != OWN_NAME)
        except OSError:
            continue
    # What CRIU makes for a restore. It is never the host's, nor that of a sandbox of another platform.
    for path in Path("/tmp").glob(".criu.*"):
        try:
            if not _is_of_others(path.lstat().st_uid):
                found.add(str(path))
        except OSError:
            continue
    return found | registered()


def holders() -> set[str]:
    """The data directories that have blocks of ids. Earlier versions had regions of them."""
    blocks = (_text(str(entry)).partition(" ")[2] for entry in REGISTRY.glob("blocks/*"))
    return {*blocks, *(text for text in (_text(str(entry)) for entry in REGISTRY.glob("regions/*")) if text.startswith("/"))}


def registered() -> set[str]:
    """Data directories in the registry that all platforms of the host share, which the last one removes."""
    found = {f"{REGISTRY}: {path}" for path in holders() if _is_own_path(path)}
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
    deadline = time.monotonic() + within(within_s)
    loose: Counter[str] | None = None
    looks = 0
    while True:
        now = HostState.take(data_dir)
        # In the places that all programs share, a file of another that comes and goes has another name at each look. One
        # that was left is there at all of them.
        loose = now.loose if loose is None else loose & now.loose
        now.loose = loose
        extra = before.added(now)
        looks += 1
        # One look can last longer than the deadline, and does not tell what is left from what comes and goes.
        if not extra or (looks > 1 and time.monotonic() > deadline):
            return extra
        time.sleep(0.05)


def steady(data_dir: Path | None = None, for_s: float = 0.5) -> HostState:
    """The state of the host once nothing has changed for a moment."""
    state, since = HostState.take(data_dir), time.monotonic()
    while time.monotonic() - since < for_s:
        time.sleep(0.02)
        if (now := HostState.take(data_dir)) != state:
            state, since = now, time.monotonic()
    return state
