"""Finished templates as files (`ringfence template push|pull`), and what of builds is removed (`ringfence gc`)."""

from __future__ import annotations

import io
import json
import tarfile
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2b import Sandbox, Template

from harness.platform import Platform


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rf-") as path:
        yield Path(path)


@pytest.fixture(scope="module")
def pushed(platform: Platform, directory: Path) -> Path:
    """A template with a server, as a file."""
    name = f"t{uuid.uuid4().hex[:12]}"
    template = (
        Template()
        .from_template("base")
        .run_cmd("echo served > ~/index.html; truncate -s 3G ~/sparse; ln ~/index.html ~/other")
        .run_cmd("rm /etc/timezone", user="root")
        .run_cmd("head -c 3000000 /dev/urandom > ~/random; sha256sum ~/random > ~/sum")
        .set_workdir("/home/user")
        .set_start_cmd("python3 -m http.server 8000", "curl -sf http://localhost:8000/index.html")
    )
    Template.build(template, f"{name}:v1", cpu_count=1, memory_mb=512)
    path = directory / "template.tar"
    done = platform.run("template", "push", f"{name}:v1", str(path))
    assert done.returncode == 0, done.stderr
    assert path.stat().st_mode & 0o777 == 0o600
    again = platform.run("template", "push", f"{name}:v1", str(path))
    assert again.returncode == 1 and "exists" in again.stderr
    for wrong in (f"{name}:v2", "nothing"):
        refused = platform.run("template", "push", wrong, str(directory / "wrong.tar"))
        assert refused.returncode == 1, refused.stdout
    nothing = platform.run("template", "push", "base", str(directory / "wrong.tar"))
    assert nothing.returncode == 1 and "layers" in nothing.stderr
    assert not (directory / "wrong.tar").exists()
    return path


@pytest.fixture(scope="module")
def other(platform: Platform, directory: Path) -> Iterator[Platform]:
    """A platform that has not built the template."""
    other = Platform(directory / "data")
    try:
        other.start()
        other.use()
        yield other
    finally:
        other.close()
        platform.use()


def files_of(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        return {entry.name: archive.extractfile(entry).read() for entry in archive}


def written(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


def manifest_of(files: dict[str, bytes]) -> dict[str, Any]:
    return json.loads(files["manifest.json"])


def layers(platform: Platform) -> set[str]:
    return {path.name for path in (platform.data_dir / "layers").iterdir()}


def collected(platform: Platform, *options: str) -> dict[str, Any]:
    done = platform.run("gc", "--format", "json", *options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_template_works_on_another_platform(pushed: Path, other: Platform) -> None:
    files = files_of(pushed)
    manifest = manifest_of(files)
    ids = [layer["id"] for layer in manifest["layers"]]
    assert list(files) == ["manifest.json", *(f"layers/{id}.tar.zst" for id in ids)]
    assert manifest["cpu_count"] == 1 and manifest["memory_mb"] == 512
    done = other.run("template", "pull", "pulled", str(pushed))
    assert done.returncode == 0, done.stderr
    assert set(ids) <= layers(other)
    with Sandbox.create("pulled", timeout=120) as box:
        seen = box.commands.run(
            "curl -s localhost:8000/other; sha256sum -c ~/sum; stat -c %s ~/sparse; du -k ~/sparse | cut -f1; "
            "test -e /etc/timezone || echo gone; nproc; stat -c %h ~/other"
        )
        assert seen.stdout.split() == ["served", "/home/user/random:", "OK", "3221225472", "0", "gone", "1", "2"]
    # Pulled again, it is another build of the same template, and nothing is stored twice.
    before = layers(other)
    assert other.run("template", "pull", "pulled", str(pushed)).returncode == 0
    assert layers(other) == before
    # Templates can be built from it.
    Template.build(Template().from_template("pulled").run_cmd("cat ~/index.html > ~/copy"), "child")
    with Sandbox.create("child", timeout=120) as box:
        assert box.commands.run("cat ~/copy").stdout == "served\n"
    # It is in use.
    assert not collected(other, "--dry-run")["layers"]
    space = collected(other)
    assert not space["layers"]
    [team] = space["teams"]
    assert team["team"] == "default" and team["template_bytes"] > 3_000_000


def test_another_team_gets_it(pushed: Path, other: Platform) -> None:
    refused = other.run("template", "pull", "--team", "nobody", "theirs", str(pushed))
    assert refused.returncode == 1 and "no team" in refused.stderr
    assert other.run("team", "create", "guests").returncode == 0
    assert other.run("template", "pull", "--team", "guests", "theirs", str(pushed)).returncode == 0
    key = other.run("key", "create", "--team", "guests").stdout.strip()
    with Sandbox.create("theirs", timeout=120, api_key=key) as box:
        assert box.commands.run("cat ~/index.html").stdout == "served\n"
    with pytest.raises(Exception, match="not found|unknown|exist"):
        Sandbox.create("theirs", timeout=120)


def test_files_that_are_not_what_they_say_are_refused(pushed: Path, directory: Path) -> None:
    files = files_of(pushed)
    manifest = manifest_of(files)
    first, last = list(files)[1], list(files)[-1]
    damaged = bytearray(files[last])
    damaged[len(damaged) // 2] ^= 1
    swapped = {**files, first: files[last], last: files[first]}
    renamed = {("layers/../../x" if name == last else name): content for name, content in files.items()}

    def with_manifest(**changes: Any) -> dict[str, bytes]:
        return {**files, "manifest.json": json.dumps({**manifest, **changes}).encode()}

    elsewhere = {"system": "plan-9-x86_64", "packages": manifest["base"]["packages"]}
    image = {"layers": {"base": True, "layers": ["0" * 64]}}
    cases = {
        "layer": {**files, last: bytes(damaged)},
        "content is that of": swapped,
        "not one of a template": renamed,
        "missing": {name: content for name, content in files.items() if name != last},
        "format 2": with_manifest(format=2),
        "unknown field": with_manifest(surprise=1),
        "out of range": with_manifest(memory_mb=0),
        "fit together": with_manifest(config={**manifest["config"], "image": image}),
        "plan-9": with_manifest(base=elsewhere),
    }
    fresh = Platform(directory / "fresh")
    try:
        fresh.start()
        for number, (want, content) in enumerate(cases.items()):
            path = written(directory / f"case{number}.tar", content)
            refused = fresh.run("template", "pull", "pulled", str(path))
            assert refused.returncode == 1 and want in refused.stderr, (want, refused.stderr, refused.stdout)
            path.unlink()
        whole = pushed.read_bytes()
        for size in (0, 100, 700, len(whole) // 2, len(whole) - 2000):
            path = directory / "cut.tar"
            path.write_bytes(whole[:size])
            refused = fresh.run("template", "pull", "pulled", str(path))
            assert refused.returncode == 1 and "truncated" in refused.stderr, refused.stderr
        assert not any(name.startswith("new-") for name in layers(fresh))
        # What was complete before the rest was refused is not used by anything.
        left = collected(fresh, "--dry-run")["layers"]
        assert {layer["id"] for layer in left} == layers(fresh) != set()
        shown = fresh.run("gc", "--dry-run").stdout
        assert f"would remove {len(left)} layers" in shown
        assert layers(fresh) == {layer["id"] for layer in left}
        assert collected(fresh)["layers"] == left
        assert layers(fresh) == set()
        # Another base is refused unless the operator wants it.
        path = written(directory / "elsewhere.tar", with_manifest(base=elsewhere))
        done = fresh.run("template", "pull", "--any-base", "pulled", str(path))
        assert done.returncode == 0 and "plan-9" in done.stderr, done.stderr
        assert not collected(fresh)["layers"]
    finally:
        fresh.close()
