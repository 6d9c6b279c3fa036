"""The built-in template `base` as a place to work in: what developers do first, as `user` and as root.

There is no network in sandboxes yet, so packages come from a folder of wheels and from a `file:` repository, both made
here.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import subprocess
import zipfile
from pathlib import Path

import pytest
from e2b import CommandExitException, Sandbox

# What a client sets for an index of its own; nothing that would soften the marks of distributions.
WHEELS = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/tmp/wheels", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
DEBIAN = Path("/var/lib/dpkg/status").exists()


def out(sandbox: Sandbox, command: str, user: str = "user", envs: dict[str, str] | None = None) -> str:
    """Standard output of a command; a failure shows all that it said."""
    try:
        return sandbox.commands.run(command, user=user, envs=envs, timeout=120).stdout
    except CommandExitException as failed:
        raise AssertionError(f"{command}: {failed.exit_code}\n{failed.stdout}\n{failed.stderr}") from failed


def wheel(name: str, version: str) -> bytes:
    """A package with a module, a program that prints its version, and a header (PEP 427)."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"def main():\n    print({version!r})\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name}={name}:main\n",
        f"{name}-{version}.data/headers/{name}.h": f"#define VERSION {version}\n",
    }
    digest = lambda text: base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
    record = "".join(f"{path},sha256={digest(text)},{len(text)}\n" for path, text in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return packed.getvalue()


@pytest.fixture
def wheels(sandbox: Sandbox) -> Sandbox:
    for version in ("1.0", "2.0"):
        sandbox.files.write(f"/tmp/wheels/rfgreet-{version}-py3-none-any.whl", wheel("rfgreet", version))
    return sandbox


def test_python_has_its_short_name(sandbox: Sandbox) -> None:
    version = out(sandbox, "python3 --version")
    assert version.startswith("Python 3.")
    for command in ("python --version", "/usr/bin/env python --version", "/usr/bin/python --version"):
        assert out(sandbox, command) == version
    assert out(sandbox, "sudo python --version") == version
    assert out(sandbox, "python -m pip --version") == out(sandbox, "pip --version")


@pytest.mark.parametrize("user", ["user", "root"])
def test_pip_installs_without_flags(wheels: Sandbox, user: str) -> None:
    out(wheels, "pip install rfgreet==1.0", user, WHEELS)
    assert out(wheels, "rfgreet", user) == "1.0\n"
    out(wheels, "pip3 install --upgrade rfgreet", user, WHEELS)
    assert out(wheels, "rfgreet; python -c 'import rfgreet; rfgreet.main()'", user) == "2.0\n2.0\n"
    out(wheels, "python -m pip uninstall -y rfgreet", user, WHEELS)
    with pytest.raises(CommandExitException):
        wheels.commands.run("rfgreet", user=user)


def test_user_installs_beside_what_root_installed(wheels: Sandbox) -> None:
    out(wheels, "pip install rfgreet==1.0", "root", WHEELS)
    assert out(wheels, "rfgreet") == "1.0\n"
    wheels.files.write("/tmp/wheels/rfother-1.0-py3-none-any.whl", wheel("rfother", "1.0"))
    # In one shell, so the program is found by a path that was set before its directory was there.
    assert out(wheels, "pip install -q rfother && rfother", "user", WHEELS) == "1.0\n"
    assert out(wheels, "rfother") == "1.0\n"


# Installs a package and imports it, as notebooks and agents do.
INSTALLS = """
import importlib, subprocess, sys
subprocess.run([sys.executable, "-m", "pip", "install", "-q", *sys.argv[1:]], check=True)
importlib.invalidate_caches()
import rfgreet
rfgreet.main()
"""


def test_a_program_imports_what_it_has_just_installed(wheels: Sandbox) -> None:
    """Programs import as `user`, as root, and as `user` what root has in another version, which has to be left as it
    is."""
    wheels.files.write("/tmp/installs.py", INSTALLS)
    assert out(wheels, "python3 /tmp/installs.py rfgreet==1.0", "user", WHEELS) == "1.0\n"
    header = "find / -xdev -path '*/rfgreet/rfgreet.h' -printf '%u %p\n' 2>/dev/null || true"
    assert out(wheels, header, "root").startswith("user /home/user/.local/include/python3.")
    out(wheels, "pip uninstall -y rfgreet", "user")
    assert out(wheels, header, "root") == ""
    assert out(wheels, "python3 /tmp/installs.py rfgreet==1.0", "root", WHEELS) == "1.0\n"
    assert out(wheels, "python3 /tmp/installs.py --upgrade rfgreet", "user", WHEELS) == "2.0\n"
    assert out(wheels, "rfgreet") + out(wheels, "rfgreet", "root") == "2.0\n1.0\n"


def test_a_virtual_environment_has_pip(wheels: Sandbox) -> None:
    out(wheels, "python -m venv ~/venv && ~/venv/bin/pip install rfgreet", envs=WHEELS)
    assert out(wheels, ". ~/venv/bin/activate && rfgreet") == "2.0\n"


def test_a_c_program_is_built_and_runs(sandbox: Sandbox) -> None:
    sandbox.files.write("/tmp/a.c", '#include <stdio.h>\nint main(void) { puts("built"); }\n')
    assert out(sandbox, "gcc -o /tmp/a /tmp/a.c && /tmp/a") == "built\n"


def test_the_surroundings_are_those_of_a_small_machine(sandbox: Sandbox) -> None:
    modes = "stat -c '%a %U %n' /tmp /var/tmp /home/user /usr/local /usr/local/bin"
    assert out(sandbox, modes).splitlines() == [
        "1777 root /tmp",
        "1777 root /var/tmp",
        "755 user /home/user",
        "777 root /usr/local",
        "777 root /usr/local/bin",
    ]
    assert out(sandbox, "sudo stat -c '%a %U' /root").strip() == "700 root"
    assert out(sandbox, "sudo sh -c 'echo $HOME'; sudo -i pwd").splitlines() == ["/root", "/root"]
    assert out(sandbox, "sudo su - user -c 'id -un; pwd'").splitlines() == ["user", "/home/user"]
    # One answer to what time it is, wherever a program looks.
    assert out(sandbox, "date +%Z; cat /etc/timezone; readlink /etc/localtime").splitlines() == [
        "UTC",
        "Etc/UTC",
        "/usr/share/zoneinfo/Etc/UTC",
    ]
    assert out(sandbox, "python -c 'print(open(\"/etc/hosts\").encoding.lower())'") == "utf-8\n"
    assert out(sandbox, "echo $LANG", envs={"LANG": "C"}) == "C\n"
    assert out(sandbox, "getent hosts $(hostname) | cut -c1-8 && hostname -f").split()[-1] == "sandbox"
    out(sandbox, "sudo useradd -m -s /bin/bash ada && echo ada:secret | sudo chpasswd")
    assert out(sandbox, "sudo su - ada -c 'id -un'") == "ada\n"
    assert out(sandbox, "for file in ~/.bashrc ~/.profile /root/.bashrc; do sudo test -f $file && echo there; done").count("there") == 3


HELLO = """
set -e
cd "$(mktemp -d)"
version=$1
mkdir -p hello/DEBIAN hello/usr/bin hello/usr/share/rf-hello hello/etc/rf-hello
printf 'Package: rf-hello\\nVersion: %s\\nArchitecture: all\\nMaintainer: t <t@t.example>\\nDepends: bash, rf-dep\\nDescription: x\\n' \
  "$version" >hello/DEBIAN/control
echo /etc/rf-hello/conf >hello/DEBIAN/conffiles
echo "conf of $version" >hello/etc/rf-hello/conf
printf '#!/bin/sh\\necho hello %s\\n' "$version" >hello/usr/share/rf-hello/program
cat >hello/DEBIAN/postinst <<'SCRIPT'
#!/bin/sh
set -e
[ "$1" = configure ] || exit 0
update-alternatives --install /usr/bin/rf-hello rf-hello /usr/share/rf-hello/program 10
getent passwd rf-hello >/dev/null || useradd --system --home-dir /var/lib/rf-hello --shell /usr/sbin/nologin rf-hello
install -d -o rf-hello -m 0750 /var/lib/rf-hello
if command -v invoke-rc.d >/dev/null && [ -x /etc/init.d/rf-hello ]; then invoke-rc.d rf-hello start; fi
ldconfig
SCRIPT
cat >hello/DEBIAN/prerm <<'SCRIPT'
#!/bin/sh
set -e
if [ "$1" = remove ]; then update-alternatives --remove rf-hello /usr/share/rf-hello/program; fi
SCRIPT
mkdir -p hello/etc/init.d
printf '#!/bin/sh\\n### BEGIN INIT INFO\\n# Provides: rf-hello\\n# Default-Start: 2 3 4 5\\n### END INIT INFO\\ntouch /run/rf-started\\n' \
  >hello/etc/init.d/rf-hello
chmod 755 hello/DEBIAN/postinst hello/DEBIAN/prerm hello/usr/share/rf-hello/program hello/etc/init.d/rf-hello
mkdir -p dep/DEBIAN dep/usr/share/rf-dep
printf 'Package: rf-dep\\nVersion: 1\\nArchitecture: all\\nMaintainer: t <t@t.example>\\nDescription: x\\n' >dep/DEBIAN/control
# A package of the host in a later version: other files, one of them at a path that the host's has.
mkdir -p later/DEBIAN later/usr/share/later
printf 'Package: %s\\nVersion: 9:9999\\nArchitecture: %s\\nMaintainer: t <t@t.example>\\nDescription: x\\n' \
  "$2" "$(dpkg --print-architecture)" >later/DEBIAN/control
echo later >later/usr/share/later/file
mkdir -p later/usr/bin
printf '#!/bin/sh\\necho later\\n' >later/usr/bin/pgrep
chmod 755 later/usr/bin/pgrep
mkdir -p /tmp/repository
for package in hello dep later; do
  dpkg-deb --root-owner-group --build $package /tmp/repository/$package.deb >/dev/null
done
cd /tmp/repository
for deb in *.deb; do
  dpkg-deb --field $deb
  printf 'Filename: ./%s\\nSize: %s\\nSHA256: %s\\n\\n' $deb $(stat -c %s $deb) $(sha256sum <$deb | cut -d' ' -f1)
done >Packages
"""


def host_database() -> dict[str, str]:
    """What the host's package database is, by the content of its files."""
    found = {}
    for directory, _, names in os.walk("/var/lib/dpkg"):
        for name in names:
            path = os.path.join(directory, name)
            try:
                found[path] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
            except FileNotFoundError:
                continue
    return found


def test_apt_installs_upgrades_and_removes(sandbox: Sandbox) -> None:
    if not DEBIAN:
        assert out(sandbox, "ls -d /var/lib/dpkg || echo none") == "none\n"
        return
    before = host_database()
    sandbox.files.write("/tmp/hello.sh", HELLO)
    out(sandbox, "bash /tmp/hello.sh 1.0 procps")
    out(sandbox, "echo 'deb [trusted=yes] file:/tmp/repository ./' | sudo tee /etc/apt/sources.list.d/local.list")
    only = "-o Dir::Etc::sourcelist=sources.list.d/local.list -o Dir::Etc::sourceparts=-"
    out(sandbox, f"sudo apt-get update {only}")
    out(sandbox, "sudo apt-get install -y rf-hello")
    assert out(sandbox, "rf-hello; cat /etc/rf-hello/conf; getent passwd rf-hello | cut -d: -f6") == (
        "hello 1.0\nconf of 1.0\n/var/lib/rf-hello\n"
    )
    assert out(sandbox, "sudo stat -c '%U %a' /var/lib/rf-hello") == "rf-hello 750\n"
    assert out(sandbox, "apt-mark showauto rf-dep; dpkg -S /usr/share/rf-hello/program") == (
        "rf-dep\nrf-hello: /usr/share/rf-hello/program\n"
    )
    assert out(sandbox, "ls /run | grep -c rf-started || true") == "0\n", "no service starts by itself"

    # An upgrade with a modified file in /etc and without questions.
    out(sandbox, "echo changed | sudo tee /etc/rf-hello/conf && bash /tmp/hello.sh 2.0 procps")
    out(sandbox, f"sudo apt-get update {only} && sudo apt-get install -y rf-hello </dev/null")
    assert out(sandbox, "rf-hello; cat /etc/rf-hello/conf") == "hello 2.0\nchanged\n"

    # A package whose files are the host's: they are replaced and removed here alone.
    out(sandbox, "sudo apt-get install -y --only-upgrade procps")
    assert out(sandbox, "pgrep; cat /usr/share/later/file") == "later\nlater\n"
    assert out(sandbox, "test -e /usr/bin/pkill || echo gone") == "gone\n"

    out(sandbox, "sudo apt-get purge -y rf-hello && sudo apt-get autoremove -y --purge")
    assert out(sandbox, "ls -d /usr/share/rf-hello /usr/share/rf-dep /etc/rf-hello /usr/bin/rf-hello 2>/dev/null || true") == ""
    assert out(sandbox, "dpkg --audit; sudo apt-get check >/dev/null && echo sound") == "sound\n"
    # Others may install packages on the host meanwhile; these here would show.
    changed = {path for path, content in host_database().items() if before.get(path) != content}
    assert not [path for path in changed if "rf-" in path or "later" in path]
    assert subprocess.run(["dpkg-query", "-W", "rf-hello", "rf-dep"], capture_output=True).returncode == 1
    assert os.access("/usr/bin/pkill", os.X_OK)


def test_the_package_database_is_sound(sandbox: Sandbox) -> None:
    if not DEBIAN:
        assert out(sandbox, "ls -d /etc/apt || echo none") == "none\n"
        return
    theirs = subprocess.run(["dpkg", "--audit"], capture_output=True, text=True, check=True).stdout
    assert out(sandbox, "dpkg --audit; sudo dpkg --configure -a; sudo apt-get check >/dev/null") == theirs
    assert {line.split(":")[0] for line in out(sandbox, "dpkg -S '*/bin/bash' /usr/bin/dpkg").splitlines()} >= {"bash", "dpkg"}
    # Sources that cannot be reached yet are said to be unreachable, and nothing worse.
    assert "NO_PUBKEY" not in out(sandbox, "sudo apt-get update 2>&1")
    assert out(sandbox, "sudo -u _apt id -un") == "_apt\n"
    # What boots the host stays at its version, as the host's own `apt-get upgrade` is the one to change it.
    held = out(sandbox, "apt-mark showhold").split()
    kernels = subprocess.run(["dpkg-query", "-W", "-f", "${db:Status-Want} ${Package}\n", "linux-image-*"], capture_output=True, text=True)
    assert {line.split()[1] for line in kernels.stdout.splitlines() if line.startswith("install ")} <= set(held)


def test_npm_installs_programs_for_user(sandbox: Sandbox) -> None:
    if not Path("/usr/bin/npm").exists():
        assert out(sandbox, "command -v npm || echo none") == "none\n"
        return
    sandbox.files.write("/tmp/greet/package.json", '{"name": "rf-greet", "version": "1.0.0", "bin": "greet.js"}')
    sandbox.files.write("/tmp/greet/greet.js", '#!/usr/bin/env node\nconsole.log("greeted")\n')
    out(sandbox, "cd /tmp/greet && npm install -g --offline . && chmod +x greet.js")
    assert out(sandbox, "rf-greet") == "greeted\n"


def test_a_database_cluster_is_made(sandbox: Sandbox) -> None:
    """The package counts as installed, and nothing of it is set up: two commands, as the page says."""
    found = list(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not DEBIAN or not found:
        assert out(sandbox, "command -v pg_createcluster || echo none") == "none\n"
        return
    page = (Path(__file__).parents[2] / "docs" / "base.md").read_text()
    for command in ("sudo dpkg-reconfigure -f noninteractive postgresql-common", "sudo pg_createcluster 15 main --start"):
        assert command in page
        out(sandbox, command.replace("15", found[0].parts[-3]))
    assert out(sandbox, "sudo -u postgres psql -XqAt -c 'select 6 * 7'") == "42\n"
