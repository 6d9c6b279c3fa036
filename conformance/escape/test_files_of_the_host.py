"""Files: of the host only /usr, read-only to it, and nothing written inside means anything outside."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2b import Sandbox

from harness.inside import Marked, root, status
from harness.platform import Platform


@pytest.fixture
def marks() -> Iterator[dict[str, Path]]:
    """Files with a name of their own in the places of the host that must not be seen inside."""
    name = f"rf-mark-{uuid.uuid4().hex}"
    places = ["/etc", "/home", "/opt", "/root", "/srv", "/tmp", "/var/lib", "/var/tmp", "/usr/local/share", "/usr/src", "/dev/shm"]
    made = {}
    try:
        for place in places:
            path = Path(place) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
            made[place] = path
        yield made
    finally:
        for path in made.values():
            path.unlink()


def test_nothing_but_usr_is_visible(marks: dict[str, Path], platform: Platform) -> None:
    with Sandbox.create() as box:
        name = next(iter(marks.values())).name
        assert root(box, f"find / -name '{name}' -not -path '/proc/*' 2>/dev/null | wc -l") == "0\n"
        assert root(box, "ls -A /usr/src | wc -l") == "0\n"
        # The platform's own certificate, and a note in the directory of Python packages.
        added = ("/usr/local/share/ca-certificates/ringfence-ca.crt", "/dist-packages/README.txt")
        assert not [file for file in root(box, "find /usr/local -type f").split() if not file.endswith(added)]
        assert root(box, "ls -A /root /home").count("\n") < 20
        passwd = root(box, "cat /etc/passwd")
        assert passwd != Path("/etc/passwd").read_text()
        shadow = Path("/etc/shadow").read_text()
        assert not [line for line in root(box, "cat /etc/shadow").splitlines() if "$" in line and line in shadow]
        for secret in ("/etc/machine-id", "/etc/ssh/ssh_host_ed25519_key", "/var/lib/dbus/machine-id"):
            if Path(secret).exists() and Path(secret).read_text().strip():
                assert Path(secret).read_text() not in root(box, f"cat {secret} 2>/dev/null || true") + "\0"


def fingerprint(*paths: str) -> dict[str, tuple[str, int, int]]:
    """Content, mode and time of change of files of the host."""
    seen = {}
    for path in paths:
        found = os.stat(path)
        seen[path] = (hashlib.sha256(Path(path).read_bytes()).hexdigest(), found.st_mode, found.st_mtime_ns)
    return seen


def test_writes_to_usr_stay_inside(sandbox: Sandbox, neighbour: Sandbox) -> None:
    files = ("/usr/bin/env", "/usr/bin/true", "/usr/bin/id", "/usr/lib/os-release")
    before = fingerprint(*files)
    names = sorted(os.listdir("/usr/bin"))
    root(sandbox, "echo evil > /usr/bin/env; rm /usr/bin/true; chmod 4777 /usr/bin/id; chown user /usr/bin/id")
    root(sandbox, "echo evil > /usr/bin/rf-new; mkdir /usr/rf-new; mv /usr/bin/yes /usr/bin/no; echo x >> /usr/lib/os-release")
    root(sandbox, "ln -f /usr/bin/cat /usr/bin/rf-link; truncate -s 0 /usr/bin/head; chmod 0 /usr/bin/tail")
    assert root(sandbox, "cat /usr/bin/env") == "evil\n"
    assert fingerprint(*files) == before
    assert sorted(os.listdir("/usr/bin")) == names
    assert not os.path.exists("/usr/rf-new")
    assert root(neighbour, "/usr/bin/env echo fine; test -x /usr/bin/true && test ! -e /usr/bin/rf-new && echo same") == "fine\nsame\n"


def test_setuid_bits_of_the_host_count_only_inside(sandbox: Sandbox) -> None:
    """Every file of /usr belongs to ids of the sandbox's own range when seen through it."""
    inside = Marked(sandbox)
    foreign = f"/proc/{inside.host_pid}/root/usr/bin"
    for name in ("su", "passwd", "env"):
        owner = os.stat(f"{foreign}/{name}").st_uid
        assert owner >= 65536, (name, owner)


def test_a_setuid_program_made_inside_is_nothing_on_the_host(sandbox: Sandbox, platform: Platform) -> None:
    name = f"rf-suid-{uuid.uuid4().hex[:8]}"
    for place in ("/home/user", "/usr/bin", "/dev/shm", "/tmp"):
        root(sandbox, f"cp /usr/bin/id {place}/{name} && chmod 6755 {place}/{name}")
    # File capabilities, as `setcap all+eip` writes them (linux/capability.h, revision 2).
    code = (
        "import os,struct\n"
        f"os.setxattr('/home/user/{name}','security.capability',struct.pack('<5I',0x02000001,*[0xffffffff]*4))"
    )
    sandbox.files.write("/tmp/setcap.py", code)
    status(sandbox, "python3 /tmp/setcap.py")
    inside = Marked(sandbox)
    through = f"/proc/{inside.host_pid}/root"
    for place in ("/home/user", "/usr/bin", "/dev/shm", "/tmp"):
        found = os.stat(f"{through}{place}/{name}")
        assert found.st_uid >= 65536 and found.st_gid >= 65536
        if "security.capability" in os.listxattr(f"{through}{place}/{name}"):
            # Revision 3 names the root that they count for, and that is not the host's.
            revision = os.getxattr(f"{through}{place}/{name}", "security.capability")[3]
            assert revision == 3
    # Wherever the host itself can see the file, no other user may reach it or gain anything by it.
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = line.split()[4].replace("\\040", " ")
        if not point.startswith(str(platform.data_dir)):
            continue
        for directory, _, names in os.walk(point):
            if name in names:
                path = os.path.join(directory, name)
                if os.stat(path).st_mode & (stat.S_ISUID | stat.S_ISGID) and os.stat(path).st_uid < 65536:
                    assert os.statvfs(path).f_flag & os.ST_NOSUID, path
    assert stat.S_IMODE(platform.data_dir.stat().st_mode) & 0o077 == 0
    walk = subprocess.run(
        ["find", str(platform.data_dir), "-name", name], user=65534, group=65534, extra_groups=[], capture_output=True
    )
    assert walk.stdout == b""


def test_setuid_inside_leads_to_root_inside_only(sandbox: Sandbox) -> None:
    assert sandbox.commands.run("sudo -n cat /proc/self/uid_map").stdout.split()[0] == "0"
    outer = int(sandbox.commands.run("sudo -n cat /proc/self/uid_map").stdout.split()[1])
    assert outer >= 65536


def test_the_agent_binary_cannot_be_changed(sandbox: Sandbox, platform: Platform) -> None:
    before = hashlib.sha256(platform.binary.read_bytes()).hexdigest()
    inner = [
        line.split()[4]
        for line in root(sandbox, "cat /proc/self/mountinfo").splitlines()
        if status(sandbox, f"test -f {line.split()[4]} -a -x {line.split()[4]}") == 0
    ]
    for path in [*inner, "/proc/1/exe"]:
        assert status(sandbox, f"echo x >> {path}") != 0
        assert status(sandbox, f"rm -f {path}") != 0
        assert status(sandbox, f"mv {path} /tmp/moved") != 0
    assert hashlib.sha256(platform.binary.read_bytes()).hexdigest() == before
    assert root(sandbox, "echo works") == "works\n"


def test_links_that_point_out_lead_nowhere(sandbox: Sandbox, platform: Platform) -> None:
    """The file API resolves names inside the sandbox, whatever a link says."""
    target = platform.data_dir / "credentials.env"
    root(sandbox, f"ln -s {target} /home/user/out; ln -s /proc/1/root/etc/shadow /home/user/shadow")
    from e2b import SandboxException

    with pytest.raises(SandboxException):
        sandbox.files.read("/home/user/out")
    before = target.read_bytes()
    try:
        sandbox.files.write("/home/user/out", "overwritten")
    except SandboxException:
        pass
    assert target.read_bytes() == before
