"""Images without what Debian has: one laid out like Alpine's, and one with a single program, in all forms that `skopeo`
and `umoci` write.

They are made here of Debian's packages: `busybox-static`, musl and a program that is linked with it, and the `os-release`
that Alpine has. There is no `apk` in them, so they show what a template is when nothing can be installed.
"""

from __future__ import annotations

import base64
import json
import shutil
import struct
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox

from harness.patience import within
from harness.platform import Platform

HELLO = '#include <stdio.h>\n#include <unistd.h>\nint main(void) { printf("hello from %d\\n", (int)getuid()); return 0; }\n'
ALPINE = 'NAME="Alpine Linux"\nID=alpine\nVERSION_ID=3.20.3\nPRETTY_NAME="Alpine Linux v3.20"\n'
LOADER = next(Path("/lib").glob("ld-musl-*.so.1"), None)


@pytest.fixture
def name(platform: Platform) -> Iterator[str]:
    name = f"i{uuid.uuid4().hex[:12]}"
    yield name
    httpx.delete(f"{platform.url}/templates/{name}", headers={"X-API-Key": platform.credentials()["E2B_API_KEY"]}, timeout=within(30))


def tool(*command: object) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (command, done.stderr)


def hello(target: Path, *options: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    source = target.parent / "hello.c"
    source.write_text(HELLO)
    tool("musl-gcc", *options, "-o", target, source)
    source.unlink()


def alpine(root: Path) -> None:
    """The layout of Alpine: busybox as every program, musl as the only library, no bash and no sudo."""
    assert LOADER is not None, "musl is not installed"
    for directory in ("bin", "sbin", "usr/bin", "usr/sbin", "lib", "etc", "root", "var"):
        (root / directory).mkdir(parents=True)
    busybox = shutil.which("busybox") or "/bin/busybox"
    shutil.copy(busybox, root / "bin/busybox")
    for applet in ("sh", "ls", "cat", "id", "stat", "test"):
        (root / "bin" / applet).symlink_to("/bin/busybox")
    shutil.copy(LOADER.resolve(), root / "lib" / LOADER.name)
    hello(root / "usr/bin/hello")
    (root / "root").chmod(0o700)
    (root / "etc/os-release").write_text(ALPINE)
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/sbin/nologin\n")
    (root / "etc/group").write_text("root:x:0:root\nwheel:x:10:root\nnobody:x:65534:\n")
    (root / "etc/shadow").write_text("root:*::0:::::\nnobody:!::0:::::\n")
    (root / "etc/machine-id").write_text("0123456789abcdef0123456789abcdef\n")


def single(root: Path) -> None:
    """One static program and a user, as in images that are called distroless."""
    (root / "etc").mkdir()
    hello(root / "app/hello", "-static")
    (root / "home/nonroot").mkdir(parents=True)
    shutil.chown(root / "home/nonroot", 65532, 65532)
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/sbin/nologin\nnonroot:x:65532:65532:nonroot:/home/nonroot:/sbin/nologin\n")
    (root / "etc/group").write_text("root:x:0:\nnonroot:x:65532:\n")


def image(directory: Path, fill: object) -> str:
    """An image that umoci makes, as a layout."""
    layout, bundle = directory / "layout", directory / "bundle"
    tool("umoci", "init", "--layout", layout)
    tool("umoci", "new", "--image", f"{layout}:made")
    tool("umoci", "unpack", "--image", f"{layout}:made", bundle)
    fill(bundle / "rootfs")
    tool("umoci", "repack", "--image", f"{layout}:made", bundle)
    return f"oci:{layout}:made"


def archive(form: str, directory: Path, source: str) -> Path:
    path = directory / "archive"
    match form:
        case "layout":
            tool("tar", "--create", "--file", path, "--directory", directory / "layout", ".")
        case "oci-archive":
            tool("skopeo", "copy", source, f"oci-archive:{path}:made")
        case "oci-archive-zstd":
            # It compresses only what is not compressed yet.
            plain = f"dir:{directory / 'plain'}"
            tool("skopeo", "copy", "--dest-decompress", source, plain)
            tool("skopeo", "copy", "--dest-compress", "--dest-compress-format", "zstd", plain, f"oci-archive:{path}:made")
            listed = subprocess.run(["tar", "--extract", "--to-stdout", "--file", path], check=True, capture_output=True)
            assert b"+zstd" in listed.stdout
        case "docker-archive":
            tool("skopeo", "copy", source, f"docker-archive:{path}:made:latest")
        case "tar-zstd":
            tool("tar", "--create", "--zstd", "--file", path, "--directory", directory / "bundle/rootfs", ".")
    return path


def build(platform: Platform, name: str, path: Path) -> str:
    done = platform.run("template", "build", "--name", name, "--from-archive", str(path), timeout_s=180)
    assert done.returncode == 0, done.stderr
    return done.stderr


def run(platform: Platform, box: Sandbox, user: str, *command: str) -> tuple[int, str]:
    """Starts a program without a shell, as the SDKs cannot: exit code and output."""
    message = json.dumps({"process": {"cmd": command[0], "args": list(command[1:])}, "stdin": False}).encode()
    headers = {
        "E2b-Sandbox-Id": box.sandbox_id,
        "E2b-Sandbox-Port": "49983",
        "X-Access-Token": box._envd_access_token or "",
        "Authorization": "Basic " + base64.b64encode(f"{user}:".encode()).decode(),
        "Content-Type": "application/connect+json",
        "Connect-Protocol-Version": "1",
    }
    content = struct.pack(">BI", 0, len(message)) + message
    answer = httpx.post(f"{platform.url}/process.Process/Start", content=content, headers=headers, timeout=30)
    assert answer.status_code == 200, answer.text
    code, output, rest = -1, b"", answer.content
    while rest:
        flags, length = struct.unpack(">BI", rest[:5])
        event, rest = json.loads(rest[5 : 5 + length]), rest[5 + length :]
        assert "error" not in event, event
        if flags & 2:
            break
        event = event["event"]
        output += base64.b64decode(event.get("data", {}).get("stdout", ""))
        if "end" in event:
            code = event["end"].get("exitCode", 0)
    return code, output.decode()


@pytest.mark.parametrize("form", ["layout", "oci-archive", "oci-archive-zstd", "docker-archive", "tar-zstd"])
def test_an_image_laid_out_like_alpine(platform: Platform, name: str, tmp_path: Path, form: str) -> None:
    log = build(platform, name, archive(form, tmp_path, image(tmp_path, alpine)))
    # Nothing can be installed, and the log says what is missing.
    assert "bash sudo ca-certificates curl iproute2 could not be installed" in log, log
    with Sandbox.create(name, timeout=120) as box:
        assert run(platform, box, "user", "/bin/sh", "-c", "id -un; id -Gn; echo $HOME; cat /etc/alpine-release /etc/os-release")[1].startswith(
            "user\nuser wheel\n/home/user\nNAME="
        )
        assert run(platform, box, "user", "/usr/bin/hello") == (0, "hello from 1000\n")
        modes = run(platform, box, "user", "/bin/stat", "-c", "%n %a %U", "/tmp", "/home/user", "/root", "/usr/local", "/code")[1]
        assert modes == "/tmp 1777 root\n/home/user 755 user\n/root 700 root\n/usr/local 777 root\n/code 777 root\n"
        assert run(platform, box, "user", "/bin/test", "-e", "/etc/machine-id")[0] == 1
        # A user that is made meanwhile can be named at once. Debian's busybox has no `adduser`.
        line = "guest:x:1234:1234::/tmp:/bin/sh"
        assert run(platform, box, "root", "/bin/sh", "-c", f"echo {line} >> /etc/passwd") == (0, "")
        assert run(platform, box, "guest", "/bin/id", "-un") == (0, "guest\n")
        assert run(platform, box, "4321", "/bin/sh", "-c", "id -u; id -g; echo $HOME") == (0, "4321\n0\n/\n")
        box.files.write("/home/user/file", "text")
        assert box.files.read("/home/user/file") == "text"


def test_an_image_with_one_program(platform: Platform, name: str, tmp_path: Path) -> None:
    log = build(platform, name, archive("oci-archive", tmp_path, image(tmp_path, single)))
    assert "the image has no bash sudo ca-certificates curl iproute2, and it is of no distribution whose packages are known" in log, log
    with Sandbox.create(name, timeout=120) as box:
        assert run(platform, box, "nonroot", "/app/hello") == (0, "hello from 65532\n")
        assert run(platform, box, "user", "/app/hello") == (0, "hello from 1000\n")
        assert {entry.name for entry in box.files.list("/")} >= {"app", "code", "etc", "home", "root", "tmp", "usr", "var"}
        box.files.write("/tmp/file", "text")
        assert box.files.get_info("/tmp/file").owner == "user"
        assert "nonroot:x:65532:65532" in box.files.read("/etc/passwd")


APK = """#!/bin/sh
shift 2
case " $* " in *" iproute2 "*) echo "iproute2: no such package" >&2; exit 1;; esac
for package in "$@"; do printf '#!/bin/sh\\necho %s of apk\\n' "$package" > "/usr/bin/$package"; /bin/busybox chmod 755 "/usr/bin/$package"; done
"""


def test_packages_are_installed_as_far_as_there_are_any(platform: Platform, name: str, tmp_path: Path) -> None:
    def with_packages(root: Path) -> None:
        alpine(root)
        (root / "sbin/apk").write_text(APK)
        (root / "sbin/apk").chmod(0o755)

    image(tmp_path, with_packages)
    log = build(platform, name, archive("layout", tmp_path, ""))
    assert "iproute2 could not be installed" in log and "not all of curl iproute2 could be installed: the sandbox works without" in log, log
    with Sandbox.create(name, timeout=120) as box:
        for package in ("bash", "sudo", "curl"):
            assert run(platform, box, "user", f"/usr/bin/{package}") == (0, f"{package} of apk\n")
