"""Every block of the pages runs against a real platform, or says why it cannot."""

from __future__ import annotations

import ast
import builtins
import json
import os
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest
from e2b import Sandbox

from docs import blocks as found
from docs.blocks import Block
from harness.names import run as run_with_names
from harness.platform import Platform
from harness.secure import SecurePlatform, secure_platform

BLOCKS = found.blocks()
# A block that does not run is a block that nobody checks: raise this only with a reason as good as the others.
NOT_RUN_MAX = 58
# The suite `kubernetes` runs every block of the first, with pods for which this suite has no place, and the suite `cluster` those of the second.
RUN_ELSEWHERE = ("docs/kubernetes.md", "docs/scale-out.md")


def runs(language: str) -> list:
    """Per page, its blocks of a language that run."""
    own = [block for block in BLOCKS if block.language == language and block.reason is None]
    return [pytest.param(list(group), id=page) for page, group in groupby(own, key=lambda block: block.page)]


@pytest.fixture
def environment(platform: Platform, tmp_path: Path) -> dict[str, str]:
    """What a reader has who followed "Getting started": credentials, and the programs on the PATH."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "ringfence").symlink_to(platform.binary)
    if modules := os.environ.get("RINGFENCE_CLI_MODULES"):
        (programs / "e2b").symlink_to(Path(modules) / ".bin" / "e2b")
    node = Path(os.environ["RINGFENCE_NODE"]).parent
    return {
        **platform.environment(),
        **platform.credentials(),
        "RINGFENCE_DATA_DIR": str(platform.data_dir),
        "HOME": str(tmp_path),
        "PATH": f"{programs}:{node}:{os.environ['PATH']}",
    }


def checked(command: list[str], environment: dict[str, str], where: Path, **options) -> None:
    ran = subprocess.run(
        command,
        cwd=where,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        **options,
    )
    print(ran.stdout)
    assert ran.returncode == 0, ran.stdout[-2000:]


@pytest.mark.parametrize("blocks", runs("sh"))
def test_shell(blocks: list[Block], environment: dict[str, str], tmp_path: Path) -> None:
    checked(["bash", "-c", found.shell(blocks)], environment, tmp_path)


@pytest.mark.parametrize("blocks", runs("python"))
def test_python(blocks: list[Block], environment: dict[str, str], tmp_path: Path) -> None:
    import sys

    (tmp_path / "page.py").write_text(found.python(blocks))
    checked([sys.executable, "page.py"], environment, tmp_path)


@pytest.mark.parametrize("blocks", runs("javascript"))
def test_javascript(blocks: list[Block], environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "page.mjs").write_text(found.javascript(blocks))
    (tmp_path / "node_modules").symlink_to(os.environ["RINGFENCE_NODE_MODULES"])
    checked([os.environ["RINGFENCE_NODE"], "page.mjs"], environment, tmp_path)


@pytest.fixture(scope="module")
def secure(work_dir: Path) -> Iterator[SecurePlatform]:
    with secure_platform(work_dir / "secure") as platform:
        yield platform


@pytest.mark.parametrize("blocks", runs("go"))
def test_go(blocks: list[Block], secure: SecurePlatform, tmp_path: Path) -> None:
    """Each block is a program: the Go SDK speaks HTTPS to names of sandboxes, so it has a platform of its own."""
    module = Path(__file__).parents[1] / "go"
    for name in ("go.mod", "go.sum"):
        shutil.copy(module / name, tmp_path / name)
    environment = {**secure.environment(), **secure.credentials(), "GOTOOLCHAIN": "local"}
    # Before the names are those of the platform: no other suite may have fetched them yet.
    checked([os.environ["RINGFENCE_GO"], "mod", "download"], environment, tmp_path)
    # Go as it comes without a C compiler resolves names itself.
    for number, block in enumerate(blocks):
        folder = tmp_path / f"block{number}"
        folder.mkdir()
        (folder / "main.go").write_text(block.text)
        ran = run_with_names(
            [os.environ["RINGFENCE_GO"], "run", "-mod=mod", f"./{folder.name}"],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        print(ran.stdout)
        assert ran.returncode == 0, f"{block.name}\n{ran.stdout[-2000:]}"


@pytest.mark.parametrize(
    "block", [pytest.param(block, id=block.name) for block in BLOCKS if block.language == "toml"]
)
def test_configuration(block: Block, platform: Platform, tmp_path: Path) -> None:
    """Exit code 2 is a configuration that is not accepted; the host may lack something else."""
    tomllib.loads(block.text)
    (tmp_path / "ringfence.toml").write_text(block.text)
    ran = platform.run("doctor", "--config", str(tmp_path / "ringfence.toml"))
    assert ran.returncode in (0, 1), ran.stderr


@pytest.mark.parametrize(
    "block", [pytest.param(block, id=block.name) for block in BLOCKS if block.language == "json"]
)
def test_json(block: Block) -> None:
    json.loads(block.text)


def test_blocks_that_do_not_run_are_few() -> None:
    listed = [f"{block.name}: {block.language}: {block.reason}" for block in BLOCKS if block.reason is not None and block.page not in RUN_ELSEWHERE]
    print("\n" + "\n".join(listed))
    assert len(listed) <= NOT_RUN_MAX, "\n".join(listed)
    for language in found.RUN:
        assert any(block.language == language and block.reason is None for block in BLOCKS), language


def test_what_is_refused_reads_as_the_page_says(platform: Platform) -> None:
    page = (found.PAGES / "troubleshooting.md").read_text()
    # What nft and iptables begin with, whether the host has them or not.
    netfilter = "python3 -c 'import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12)'"
    with Sandbox.create(timeout=120) as box:
        for command, said in {
            "unshare --user true": "Operation not permitted",
            "unshare --mount true": "Operation not permitted",
            "mount -t tmpfs none /mnt": "permission denied",
            "sysctl -w vm.overcommit_memory=1": 'permission denied on key "vm.overcommit_memory"',
            "echo 1 | tee /proc/sys/vm/overcommit_memory": "Read-only file system",
            netfilter: "Protocol not supported",
        }.items():
            ran = box.commands.run(f"({command}) 2>&1 || true", user="root").stdout
            assert said in ran, f"{command}: {ran}"
            assert said in page, said


def missing_names(text: str) -> set[str]:
    """Names that a program uses and does not define."""
    used, defined = set(), set(dir(builtins))
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
            case ast.Name(id=name) | ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                defined.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                defined.add(name)
            case ast.alias(name=name, asname=other):
                defined.add(other or name.partition(".")[0])
    return used - defined


def test_blocks_run_alone_or_their_page_says_that_they_do_not() -> None:
    """Readers copy one block. What the first pages and those about everything show is complete."""
    assert missing_names("import a.b as c\nfor x in c.d(y): print(x)") == {"y"}
    for path in found.pages():
        page = path.relative_to(found.ROOT).as_posix()
        own = [block for block in BLOCKS if block.page == page and block.language == "python"]
        incomplete = [(block.name, names) for block in own if (names := missing_names(block.text))]
        if incomplete:
            assert "go on from each other" in path.read_text(), incomplete
            assert page.startswith("docs/sandboxes/"), incomplete


def test_a_block_without_a_language_is_refused() -> None:
    for info in ("", "bash", "sh no-run", 'sh no-run="x"', "sh  "):
        with pytest.raises(ValueError, match="expected a language"):
            found.blocks_of("page.md", f"```{info}\ntrue\n```\n")
    (block,) = found.blocks_of("page.md", '```sh no-run="needs systemd"\ntrue\n```\n')
    assert (block.language, block.reason, block.text) == ("sh", "needs systemd", "true\n")


def test_a_failing_block_is_seen(environment: dict[str, str], tmp_path: Path) -> None:
    broken = Block("page.md", 1, "sh", None, "false\necho not here\n")
    with pytest.raises(AssertionError, match="failed in page.md:1"):
        checked(["bash", "-c", found.shell([broken])], environment, tmp_path)
