"""Dockerfiles and archives: version 1 over REST, and `ringfence template build|list|show|delete`."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import shutil
import subprocess
import tarfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox

from harness.platform import Platform
from harness.registry import member, saved
from harness.traffic import until

PROGRAMS = ("bash", "cat", "id", "ls", "stat")


@pytest.fixture
def api(platform: Platform) -> Iterator[httpx.Client]:
    headers = {"X-API-Key": platform.credentials()["E2B_API_KEY"]}
    with httpx.Client(base_url=platform.url, headers=headers, timeout=60) as client:
        yield client


@pytest.fixture
def name(api: httpx.Client) -> Iterator[str]:
    name = f"d{uuid.uuid4().hex[:12]}"
    yield name
    api.delete(f"/templates/{name}")


def v1(api: httpx.Client, name: str, text: str) -> dict[str, object]:
    """Builds a Dockerfile as clients of version 1 do, and returns the last status."""
    made = api.post("/templates", json={"alias": name, "dockerfile": text})
    assert made.status_code == 202, made.text
    path = f"/templates/{made.json()['templateID']}/builds/{made.json()['buildID']}"
    started = api.post(path)
    assert (started.status_code, started.content) == (202, b""), started.text
    until(lambda: api.get(f"{path}/status").json()["status"] in ("ready", "error"), "it has ended", 120)
    return api.get(f"{path}/status").json()


def built(platform: Platform, name: str, *options: str | Path) -> str:
    """Builds with the command, and returns its log."""
    done = platform.run("template", "build", "--name", name, *map(str, options), timeout_s=180)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"template [a-z0-9]+ is ready after [0-9.]+ s\n", done.stdout), done.stdout
    return done.stderr


def output(name: str, command: str) -> str:
    with Sandbox.create(name, timeout=120) as box:
        return box.commands.run(command).stdout


STAGES = """# syntax=docker/dockerfile:1
ARG BASE=e2bdev/base
FROM $BASE AS build
ARG WORD=default
ENV GREETING="hello $WORD" PATH=/opt/tools:$PATH
RUN <<EOF
set -e
mkdir -p /out/sub /opt/tools
# Without a directory that has no name, which would be the one that a program is started in.
case ":$PATH:" in *::*) exit 1 ;; :/opt/tools:/usr/local/sbin:*) ;; *) exit 1 ;; esac
echo "$GREETING" > /out/greeting
echo one > /out/sub/a.txt; echo two > /out/sub/b.txt; echo three > /out/sub/c.bin
ln -s greeting /out/link
chown 1234:1235 /out/sub/a.txt; chmod 640 /out/sub/a.txt
EOF
RUN ["/bin/sh", "-c", "printf '%s' \\"$GREETING\\" > /out/exec"]
RUN <<'EOF'
#!/usr/bin/env python3
open("/out/script", "w").write("by python\\n")
EOF

FROM build AS unused
RUN exit 1

FROM e2bdev/base
LABEL a=b
RUN useradd --uid 1600 --create-home app
COPY --from=build /out /copied
COPY --from=0 /out/sub/*.txt /some/
COPY --from=build --chown=app --chmod=0600 /out/link /owned
COPY --chmod=755 <<EOF <<"END" /bin-of-mine/
#!/bin/sh
echo tool $BASE-
EOF
$literal
END
WORKDIR /srv/app
RUN chown app .
USER app
RUN id -un > who; pwd >> who
"""


def test_stages_are_built_and_copied_between(api: httpx.Client, name: str) -> None:
    status = v1(api, name, STAGES)
    assert status["status"] == "ready", status.get("reason")
    log = "".join(status["logs"])
    assert "line 26: LABEL has no effect" in log
    assert "exit 1" not in log, "a stage that nothing needs"
    seen = output(
        name,
        "id -un; pwd; cat who /copied/greeting /copied/exec; echo; cat /copied/script /copied/link; ls /some; "
        "sudo -n true 2>/dev/null || true; stat -c '%u:%g:%a' /copied/sub/a.txt /owned; /bin-of-mine/EOF; cat /bin-of-mine/END",
    )
    assert seen == (
        "app\n/srv/app\napp\n/srv/app\nhello default\nhello default\nby python\nhello default\na.txt\nb.txt\n"
        "1234:1235:640\n1600:1600:600\ntool -\n$literal\n"
    )
    again = v1(api, name, STAGES)
    lines = [line for line in again["logs"] if re.search(r"\] (RUN|COPY|WORKDIR|USER app)", line)]
    assert lines and all("CACHED" in line for line in lines), lines


NUMBERS = """FROM e2bdev/base
RUN groupadd --gid 4000 crew && useradd --uid 1234 --gid 4000 --create-home known && usermod --append --groups crew user
USER user:crew
RUN id -u > /tmp/named && id -g >> /tmp/named && id -G >> /tmp/named && echo "$HOME" >> /tmp/named
USER 1234
RUN id -un > /tmp/number && id -gn >> /tmp/number && echo "$HOME" >> /tmp/number
USER 0:0
COPY --chown=2000:3000 <<END /tmp/copied
END
COPY --chown=known:crew <<END /tmp/of-known
END
USER 4242:5555
WORKDIR /made/by/id
RUN id -u > who && id -g >> who && id -G >> who && echo "$HOME" >> who
"""


def test_users_and_groups_are_given_by_number(api: httpx.Client, name: str) -> None:
    status = v1(api, name, NUMBERS)
    assert status["status"] == "ready", status.get("reason")
    assert output(name, "cat /tmp/named") == "1000\n4000\n4000\n/home/user\n"
    assert output(name, "cat /tmp/number") == "known\ncrew\n/home/known\n"
    assert output(name, "cat who") == "4242\n5555\n5555\n/\n"
    assert output(name, "stat -c %u:%g /tmp/copied /tmp/of-known /made /made/by/id") == "2000:3000\n1234:4000\n" + "4242:5555\n" * 2
    # The sandbox has this user as its own, for commands and for files.
    assert output(name, "id -u; id -g; id -G; pwd; echo $HOME") == "4242\n5555\n5555\n/made/by/id\n/\n"
    with Sandbox.create(name) as sandbox:
        sandbox.files.write("/tmp/file", "x")
        assert sandbox.commands.run("stat -c %u:%g /tmp/file").stdout == "4242:5555\n"
        assert sandbox.commands.run("id -u", user="1234").stdout == "1234\n"


def test_version_1_refuses_with_the_line(api: httpx.Client, name: str) -> None:
    for text, want in (
        ("FROM e2bdev/base\n\nRUN --mount=type=secret,id=x true\n", "line 3: RUN --mount"),
        ("FROM e2bdev/base\nRUN true\nCOPY app /app\n", "line 3: no files were uploaded for app"),
        ("FROM e2bdev/base\nRUN true\n# why\nRUN echo why; exit 7\n", "line 4: the command ended with exit code 7\nwhy"),
        ("FROM --platform=linux/riscv64 e2bdev/base\n", "line 1: platform"),
        ("FROM e2bdev/base\nUSER 70000\n", "line 2: USER 70000: a sandbox has the ids 0 to 65535"),
        ("FROM e2bdev/base\nUSER user:nothing\n", "line 2: "),
    ):
        status = v1(api, name, text)
        assert status["status"] == "error", status
        assert status["reason"]["message"].startswith(want), status["reason"]


def test_a_command_of_a_dockerfile_runs_from_the_start(api: httpx.Client, name: str) -> None:
    text = (
        "FROM e2bdev/base\nWORKDIR /www\nENV PORT=8123\nRUN echo served > page\n"
        'ENTRYPOINT exec python3 -m http.server $PORT\n'
    )
    made = api.post("/templates", json={"alias": name, "dockerfile": text, "readyCmd": "curl -sf localhost:8123/page"}).json()
    path = f"/templates/{made['templateID']}/builds/{made['buildID']}"
    assert api.post(path).status_code == 202
    until(lambda: api.get(f"{path}/status").json()["status"] in ("ready", "error"), "it has ended", 120)
    assert api.get(f"{path}/status").json()["status"] == "ready"
    assert output(name, "curl -sf localhost:8123/page; id -un") == "served\nuser\n"


def context(directory: Path) -> None:
    for file in ("app/main.py", "app/cache/x", "app/cache/keep/y", "one.txt", "two.txt", "secret.key", "tool.sh"):
        (directory / file).parent.mkdir(parents=True, exist_ok=True)
        (directory / file).write_text(f"{file}\n")
    (directory / "tool.sh").write_text("#!/bin/sh\necho tool\n")
    (directory / ".dockerignore").write_text("# not these\n*.key\napp/cache\n!app/cache/keep\n")
    (directory / "Dockerfile").write_text(
        "FROM e2bdev/base\n"
        "ARG WHERE=/nowhere\n"
        "ARG FROM_ENVIRONMENT\n"
        "COPY . /all/\n"
        "COPY app *.txt $WHERE/\n"
        "COPY --chown=user:user --chmod=0750 tool.sh ${WHERE}/tool\n"
        "ENV KEPT=$FROM_ENVIRONMENT\n"
        'RUN echo "$KEPT $WHERE" > /kept\n'
    )


def test_the_command_uploads_what_is_copied(platform: Platform, api: httpx.Client, name: str, tmp_path: Path) -> None:
    context(tmp_path)
    log = built(platform, name, "--cpu", "1", "--memory", "512", "--build-arg", "WHERE=/there", tmp_path)
    assert "uploaded files of line 4" in log and "[builder " in log
    seen = output(
        name,
        "id -un; pwd; cd /all; find . -type f | sort; cd /there; find . -type f | sort; "
        "stat -c %U:%G:%a tool one.txt; ./tool; cat /kept",
    )
    assert seen.splitlines() == [
        "user", "/home/user", "./.dockerignore", "./Dockerfile", "./app/cache/keep/y", "./app/main.py", "./one.txt", "./tool.sh", "./two.txt",
        "./cache/keep/y", "./main.py", "./one.txt", "./tool", "./two.txt",
        "user:user:750", "root:root:644", "tool", " /there",
    ]  # fmt: skip
    # Nothing has changed, and then one file has.
    log = built(platform, name, "--cpu", "1", "--memory", "512", "--build-arg", "WHERE=/there", tmp_path)
    assert log.count("CACHED") == 5 and "uploaded before: " in log
    (tmp_path / "tool.sh").write_text("#!/bin/sh\necho changed\n")
    log = built(platform, name, "--build-arg", "WHERE=/there", tmp_path)
    assert output(name, "/there/tool") == "changed\n"

    shown = json.loads(platform.run("template", "show", name, "--format", "json").stdout)
    assert (shown["aliases"], shown["buildCount"], len(shown["builds"])) == ([name], 3, 3)
    assert name in platform.run("template", "list").stdout
    listed = json.loads(platform.run("template", "list", "--format", "json").stdout)
    assert shown["templateID"] in [template["templateID"] for template in listed]
    assert f"id           {shown['templateID']}" in platform.run("template", "show", shown["templateID"]).stdout
    gone = platform.run("template", "delete", "not-a-template-of-mine", name)
    assert gone.returncode == 1 and gone.stdout == f"deleted {name}\n" and "not-a-template-of-mine" in gone.stderr
    assert name not in platform.run("template", "list").stdout


DOCUMENTS = r"""FROM e2bdev/base
ARG WORD=arg
ENV NAME=env
RUN <<'EOT' bash
echo "bash ${BASH_VERSINFO[0]:+yes} $NAME" > /bash
EOT
RUN <<EOT cat > /data && <<-'EOP' python3
#!/bin/false
$NAME $WORD
EOT
	import os
	open("/python", "w").write(os.environ["NAME"] + " $NAME\n")
	EOP
RUN <<"EOT"
echo "sh $NAME" > /script; cat - 3<<'A' <<B /dev/fd/3 > /two
$WORD
A
$WORD
B
EOT
RUN <<-EOT
#!/usr/bin/env python3
	open("/shebang", "w").write("python\n")
EOT
COPY <<EOT <<-'RAW' page.txt ./app/../other.txt /mixed/
"quoted" '$NAME' \$NAME \\ {"a": "b\\"c"}
EOT
	$NAME\n
	RAW
COPY linked none/../linked/sub/deep.txt to-page.txt /linked/
COPY --chmod=755 <<'EOT' /entry
#!/bin/sh
printf '%s\n' "$@" > /tmp/started
exec sleep 1000
EOT
ENTRYPOINT ["/entry", "two words"]
CMD echo $NAME
"""


def test_documents_links_and_an_entry_point(platform: Platform, name: str, tmp_path: Path) -> None:
    """What BuildKit makes of the same file."""
    for file in ("page.txt", "other.txt", "real/main.py", "real/sub/deep.txt"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(f"{file}\n")
    for link, target in (("linked", "real"), ("to-page.txt", "./page.txt"), ("real/inner", "main.py")):
        (tmp_path / link).symlink_to(target)
    (tmp_path / "Dockerfile").write_text(DOCUMENTS)
    built(platform, name, "--ready-cmd", "test -s /tmp/started", tmp_path)
    seen = output(
        name,
        "cd /; cat bash data python script two shebang; cat mixed/EOT mixed/RAW mixed/page.txt mixed/other.txt; ls -R /linked; "
        "readlink linked/inner; stat -c %F linked/to-page.txt; cat linked/to-page.txt linked/deep.txt /tmp/started",
    )
    assert seen.splitlines() == [
        "bash yes env", "#!/bin/false", "env arg", "env $NAME", "sh env", "arg", "$WORD", "python",
        '"quoted" \'env\' $NAME \\ {"a": "b\\"c"}', "$NAME\\n", "page.txt", "other.txt",
        "/linked:", "deep.txt", "inner", "main.py", "sub", "to-page.txt", "", "/linked/sub:", "deep.txt",
        "main.py", "regular file", "page.txt", "real/sub/deep.txt", "two words", "/bin/sh", "-c", "echo $NAME",
    ]  # fmt: skip


def test_the_command_refuses_before_it_asks_the_platform(platform: Platform, name: str, tmp_path: Path) -> None:
    for text, want in (
        ("FROM a\nONBUILD RUN x\n", "line 2: ONBUILD"),
        ("FROM a\nCOPY none /x\n", "line 2: none: no such file"),
        ("FROM a\nCOPY ../x /x\n", "line 2: ../x: is outside"),
        ("FROM a\nCOPY a/../../x /x\n", "line 2: a/../../x: is outside"),
        ("FROM a\nCOPY out /x\n", "line 2: out: is a link that leads out"),
        ("FROM a\nCOPY out/passwd /x\n", "line 2: out: is a link that leads out"),
        ("FROM a\nRUN <<EOF\n", "line 2: the heredoc has no end"),
    ):
        (tmp_path / "out").unlink(missing_ok=True)
        (tmp_path / "out").symlink_to("/etc")
        (tmp_path / "Dockerfile").write_text(text)
        done = platform.run("template", "build", "--name", name, str(tmp_path))
        assert done.returncode == 1 and want in done.stderr, done.stderr
    (tmp_path / "Dockerfile").write_text("FROM e2bdev/base\nRUN echo no such package; exit 3\n")
    done = platform.run("template", "build", "--name", name, "--format", "json", str(tmp_path))
    assert done.returncode == 1 and "exit code 3\n  no such package\n" in done.stderr
    assert json.loads(done.stdout)["status"] == "error"
    assert platform.run("template", "build", "--from-image", "a", "--from-archive", "b").returncode == 2


def rootfs() -> bytes:
    """A root file system without a distribution: a shell, a few programs and their libraries."""
    files = {Path(path) for name in PROGRAMS if (path := shutil.which(name))}
    for file in list(files):
        shown = subprocess.run(["ldd", file], capture_output=True, text=True).stdout
        files |= {Path(path) for path in re.findall(r"(/\S+) \(0x", shown)}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for file in sorted(files):
            member(archive, str(file).removeprefix("/"), file.resolve().read_bytes())
        member(archive, "bin/sh", type=tarfile.SYMTYPE, linkname="/usr/bin/bash")
        member(archive, "bin/bash", type=tarfile.SYMTYPE, linkname="/usr/bin/bash")
        member(archive, "etc/motd", b"from an archive\n", mode=0o644)
    return buffer.getvalue()


def image(layer: bytes) -> bytes:
    """An image of one layer and a variable."""
    return saved([layer], ["SAVED=yes"])


@pytest.mark.parametrize("form", ["plain", "gzip", "saved"])
def test_an_archive_becomes_a_template(platform: Platform, name: str, tmp_path: Path, form: str) -> None:
    files = rootfs()
    data = {"plain": files, "gzip": gzip.compress(files, 1), "saved": image(files)}[form]
    (tmp_path / "archive").write_bytes(data)
    log = built(platform, name, "--from-archive", tmp_path / "archive")
    assert "uploaded the archive" in log and "unpacked 1 layers" in log
    assert output(name, "cat /etc/motd; id -un") == "from an archive\nuser\n"
    log = built(platform, name, "--from-archive", tmp_path / "archive")
    assert "CACHED" in log


def test_a_dockerfile_begins_with_an_archive(platform: Platform, api: httpx.Client, name: str, tmp_path: Path) -> None:
    archive, context = tmp_path / "archive", tmp_path / "context"
    # No other build has uploaded it.
    archive.write_bytes(saved([rootfs()], ["SAVED=yes", f"NAME={name}"]))
    context.mkdir()
    (context / "Dockerfile").write_text("ARG BASE=e2bdev/base\nFROM $BASE\nRUN cat /etc/motd >/copied && echo $SAVED >>/copied\n")
    log = built(platform, name, "--base-archive", archive, context)
    assert "uploaded the archive" in log and "[base] FROM archive [" in log
    assert output(name, "cat /copied") == "from an archive\nyes\n"
    assert "CACHED [base] FROM archive [" in built(platform, name, "--base-archive", archive, context)
    # Other clients name what they have uploaded.
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    assert v1(api, name, f"FROM archive:{digest}\nRUN cat /etc/motd >/again\n")["status"] == "ready"
    assert output(name, "cat /again") == "from an archive\n"
    status = v1(api, name, f"FROM archive:{'0' * 64}\n")
    assert status["status"] == "error" and "there is no uploaded archive" in str(status["reason"])


def test_an_archive_that_the_dockerfile_does_not_take_is_refused(platform: Platform, name: str, tmp_path: Path) -> None:
    archive, options = tmp_path / "archive", ("template", "build", "--name", name)
    archive.write_bytes(b"never read by the platform")
    (tmp_path / "Dockerfile").write_text("ARG BASE=e2bdev/base\nFROM e2bdev/base\n")
    for more, code, want in (
        ((), 1, "no stage begins with the archive"),
        (("--build-arg", "BASE=debian"), 1, "--base-archive sets the build argument BASE"),
        (("--from-archive", str(archive)), 2, "cannot be used with"),
        (("--from-image", "debian"), 2, "cannot be used with"),
    ):
        done = platform.run(*options, "--base-archive", str(archive), *more, str(tmp_path))
        assert done.returncode == code and want in done.stderr, done.stderr
    done = platform.run("template", "add", "mcp-gateway", "--base-archive", str(tmp_path / "none"))
    assert done.returncode == 1 and "none" in done.stderr, done.stderr


def test_hostile_archives_fail_their_build(platform: Platform, name: str, tmp_path: Path) -> None:
    def tar(*members: tuple[str, dict[str, object]]) -> bytes:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for member_name, fields in members:
                member(archive, member_name, b"" if "type" in fields else b"x", **fields)
        return buffer.getvalue()

    for data in (
        tar(("../../../etc/escaped", {})),
        tar(("link", {"type": tarfile.SYMTYPE, "linkname": "/"}), ("a", {}))[:700],
        b"not an archive at all" * 100,
        image(b"not a layer"),
        gzip.compress(b"\0" * 10)[:-6],
    ):
        (tmp_path / "archive").write_bytes(data)
        done = platform.run("template", "build", "--name", name, "--from-archive", str(tmp_path / "archive"))
        assert done.returncode == 1 and "the build failed after" in done.stderr, done.stderr
        assert "internal error" not in done.stderr
    assert not Path("/etc/escaped").exists()


def test_a_stage_without_anything_takes_only_what_is_copied(api: httpx.Client, name: str) -> None:
    programs = " ".join(f"$(command -v {program})" for program in PROGRAMS)
    text = f"""FROM e2bdev/base AS build
RUN <<EOF
mkdir -p /root-of/bin && cd /root-of
for file in {programs} $(ldd {programs} | grep -oE '/[^ ]+' | tr -d : | sort -u); do
  mkdir -p ".$(dirname $file)"; cp -L "$file" ".$file"
done
[ -e bin/bash ] || cp "$(command -v bash)" bin/bash
[ -e bin/sh ] || ln -s bash bin/sh
EOF
FROM scratch
COPY --from=build /root-of /
RUN echo built > /made
"""
    status = v1(api, name, text)
    assert status["status"] == "ready", status.get("reason")
    assert output(name, "cat /made; ls /root-of 2>/dev/null || true") == "built\n"
