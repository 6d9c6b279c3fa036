"""Every program of `examples/` that needs the plain SDK alone, as it is, in a process of its own. Those of the code interpreter
and the desktop are in the suites `codeint` and `desktop`, those of agents in `agents`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from e2b import Sandbox

from harness.criu import criu_config
from harness.patience import within
from harness.platform import Platform

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(name: str, *arguments: str | Path, code: int = 0) -> str:
    """What a program prints, with the credentials of the platform in use."""
    command = [sys.executable, EXAMPLES / name, *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=within(90), check=False)
    assert ran.returncode == code, ran.stdout + ran.stderr
    return ran.stdout


def test_a_program_that_nobody_has_read(platform: Platform, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("print('hello')\nopen('found.txt', 'w').write('42')\n")
    assert example("run_untrusted.py", program) == "hello\nfound.txt: 42\n"
    # The gateway takes a connection before it refuses it, so only what is read from it says so for certain.
    program.write_text("import socket\nsocket.create_connection(('192.0.2.1', 80), 5).recv(1)\n")
    assert example("run_untrusted.py", program, code=1).startswith("it failed with 1: Traceback")


def test_a_workspace_that_is_paused_between_turns(platform: Platform) -> None:
    first = re.fullmatch(r"(\w+) has had 1 turns\n", example("pause_between_turns.py"))
    assert first
    assert example("pause_between_turns.py", first[1]) == f"{first[1]} has had 2 turns\n"
    assert Sandbox.kill(first[1])


def test_attempts_from_one_state(work_dir: Path, platform: Platform) -> None:
    own = Platform(work_dir / "examples", config=criu_config())
    try:
        own.start()
        own.use()
        said = example("try_in_parallel.py").splitlines()
        assert len(said) == 3 and all(line.endswith(": True") for line in said), said
        assert own.terminate() == 0
    finally:
        own.close()
        platform.use()


def test_every_example_is_listed() -> None:
    listed = set(re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text()))
    assert listed == {path.name for path in EXAMPLES.glob("*.py")}
