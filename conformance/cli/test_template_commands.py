"""The template commands of the published client: built from a Dockerfile, listed, published, made again from the files that
`init` and `migrate` write, deleted.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2b import Sandbox

from harness.cli_client import Client, Terminal, used
from harness.patience import within
from harness.platform import Platform


@pytest.fixture
def client(platform: Platform, tmp_path: Path) -> Client:
    return Client(platform, tmp_path)


@pytest.fixture
def name(client: Client) -> Iterator[str]:
    name = f"t{uuid.uuid4().hex[:12]}"
    yield name
    for suffix in ("", "-dev"):
        client.run("template", "delete", "-y", f"{name}{suffix}")


def listed(client: Client) -> dict[str, dict[str, object]]:
    """The templates by their names."""
    return {item["aliases"][0]: item for item in json.loads(client.ok("template", "list", "-f", "json"))}


def write(directory: Path, dockerfile: str, name: str = "e2b.Dockerfile") -> Path:
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(dockerfile)
    return directory


def test_a_template_from_its_dockerfile_to_its_end(client: Client, name: str, tmp_path: Path) -> None:
    context = write(tmp_path / "context", "FROM e2bdev/base\nRUN echo run > /run.txt\nCOPY files /srv/files\n")
    (context / "files").mkdir()
    (context / "files" / "one").write_text("one\n")
    said = client.ok(
        *("template", "create", name, "--path", str(context), "--cmd", "python3 -m http.server 8000"),
        *("--ready-cmd", "curl -sf localhost:8000", "--cpu-count", "1", "--memory-mb", "512", "--min-free-disk-mb", "64"),
    )
    assert f"Building sandbox template {name} finished" in said
    assert "RUN echo run > /run.txt" in said
    item = listed(client)[name]
    assert (item["cpuCount"], item["memoryMB"], item["buildStatus"], item["public"]) == (1, 512, "ready", False)
    assert re.search(rf"Private +{item['templateID']} +{name} +1 +512 ", client.ok("template", "list"))
    with Sandbox.create(name, timeout=120) as box:
        assert box.commands.run("cat /run.txt /srv/files/one; curl -sf -o /dev/null localhost:8000; pwd").stdout == "run\none\n/home/user\n"

    other = write(context, "FROM e2bdev/base\nRUN echo other > /run.txt\n", "Other")
    said = client.ok("template", "create", name, "-p", str(other), "-d", "Other", "--no-cache")
    assert listed(client)[name]["buildCount"] == 2
    with Sandbox.create(item["templateID"], timeout=120) as box:
        assert box.commands.run("cat /run.txt; nproc").stdout == "other\n2\n"
        # What the client says of one that is used, and that nothing happens to it.
        refused = client.run("template", "delete", "-y", name)
        assert (refused.returncode, "400" in refused.stderr) == (1, True), refused.stderr

    assert f"default/{name}" in client.ok("template", "publish", "-y", name)
    assert listed(client)[name]["public"] is True
    client.ok("template", "unpublish", "-y", str(item["templateID"]))
    assert listed(client)[name]["public"] is False
    client.ok("template", "delete", "-y", name)
    assert name not in listed(client)
    for command, which, status in (("delete", name, "[404]"), ("publish", name, "[404]"), ("delete", "base", "[403]")):
        refused = client.run("template", command, "-y", which)
        assert (refused.returncode, status in refused.stderr) == (1, True), refused.stderr


def test_a_step_that_fails(client: Client, name: str, tmp_path: Path) -> None:
    write(tmp_path / "context", "FROM e2bdev/base\nRUN echo said; exit 3\n", "Dockerfile")
    failed = client.run("template", "create", name, "-p", str(tmp_path / "context"))
    assert failed.returncode == 1
    assert "[stdout]: said" in failed.stdout
    assert "exit code 3" in failed.stderr
    assert listed(client)[name]["buildStatus"] == "error"
    write(tmp_path / "context", "FROM e2bdev/base\nFROM e2bdev/base\n", "Dockerfile")
    assert "Multi-stage" in client.run("template", "create", name, "-p", str(tmp_path / "context")).stderr


def test_templates_are_chosen_from_a_list(client: Client, name: str, tmp_path: Path) -> None:
    write(tmp_path / "context", "FROM e2bdev/base\n")
    client.ok("template", "create", name, "-p", str(tmp_path / "context"))
    for command, after in (("publish", True), ("unpublish", False), ("delete", None)):
        terminal = Terminal(client, "template", command, "--select", "--yes")
        try:
            terminal.shows(name)
            # The list begins with `base`, and has no other but the new one.
            terminal.type("\x1b[B" * [*listed(client)].index(name) + " \r")
            terminal.shows(rf"(?i){command}ing sandbox template|{command[:-1]}ing sandbox template")
            assert terminal.end() == 0, terminal.screen
        finally:
            terminal.close()
        assert listed(client).get(name, {}).get("public") == after


@pytest.mark.parametrize("language", ["python-sync", "python-async", "typescript"])
def test_files_that_the_client_writes_build_a_template(
    client: Client, name: str, tmp_path: Path, language: str
) -> None:
    client.ok("template", "init", "-n", name, "-l", language, "-p", str(tmp_path))
    made = tmp_path / name
    assert f'"{name}"' in (made / ("build.prod.ts" if language == "typescript" else "build_prod.py")).read_text().replace("'", '"')
    old = write(tmp_path / "old", "FROM e2bdev/base\nRUN echo migrated > /migrated\n")
    (old / "e2b.toml").write_text(
        f'template_id = "x"\ntemplate_name = "{name}"\ndockerfile = "e2b.Dockerfile"\nstart_cmd = "sleep 1000"\n'
        'ready_cmd = "sleep 1"\ncpu_count = 1\nmemory_mb = 512\n'
    )
    client.ok("template", "migrate", "-l", language, "-p", str(old))
    if language == "typescript":
        # Its types are another program's matter.
        assert ".fromImage('e2bdev/base')" in (old / "template.ts").read_text()
        return
    environment = {**client.environment, "PATH": os.environ["PATH"]}
    for program in (made / "build_prod.py", old / "build_dev.py"):
        ran = subprocess.run(
            [sys.executable, program.name], cwd=program.parent, env=environment, capture_output=True, text=True, timeout=within(120)
        )
        # The first begins with the client's own image, which is the template `base` here.
        # Not its exit code: the interpreter may abort at its end, after the asynchronous client has done its work.
        assert "the build is finished" in ran.stdout and ran.stderr == "", (ran.returncode, ran.stdout, ran.stderr)
    with Sandbox.create(f"{name}-dev", timeout=120) as box:
        assert box.commands.run("cat /migrated; nproc").stdout == "migrated\n1\n"


def test_no_command_is_left_untried() -> None:
    """Judges what the tests above have used."""
    program = [os.environ["RINGFENCE_NODE"], os.environ["RINGFENCE_NODE_MODULES"] + "/@e2b/cli/dist/index.js"]
    shown = subprocess.run([*program, "template", "--help"], capture_output=True, text=True).stdout
    commands = re.findall(r"^  ([a-z]+)(?:\||  | \[)", shown.partition("Commands:")[2], re.M)
    assert len(commands) > 6
    # It deletes nothing, and only says where to read.
    assert {f"template {command}" for command in commands} - used["http"] == {"template help"}
