"""Runs the test programs of the crates, several at a time:
`python3 -m testing.rust [--keep-going] EXECUTABLES DIRECTORY TIMINGS [PACKAGE...]`.

EXECUTABLES is what `cargo test --no-run --message-format=json` printed. Cargo would run one program after another, although
most of them wait most of the time. Each runs as cargo would run it: in the directory of its package, with the variables
that cargo sets for it. DIRECTORY gets an output per program, which is printed whole when it failed. After that nothing
else begins, unless `--keep-going` says so.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from testing.processes import reap

# Programs at the same time. They use a third of two processors when one runs.
AT_ONCE = 3
# What programs took one after another, in seconds; the longest begin first, and before them the rules of the repository, which
# fail in seconds.
SECONDS = {
    "xtask::xtask": 999,
    **{"runtime::linux": 100, "agent::it": 83, "server::remote": 83, "server::it": 67, "image::it": 47, "proxy::intercept": 45},
    **{"cli::it": 43, "node::linux": 38, "node::driver": 20, "store::it": 15, "blobs::s3": 9, "docs::ripgrep": 9, "runtime": 9},
}
BOUND_S = 900
PAUSE_S = 0.02
CLOSING = re.compile(r"^(test result: .*|\d+ passed, \d+ failed)$", re.MULTILINE)
PASSED = re.compile(r"(\d+) passed")
LINES = 40


@dataclass(frozen=True)
class Program:
    """One test program."""

    package: str
    # The target; nothing for the tests in a library or program itself.
    target: str
    path: Path
    directory: Path
    version: str = "0.0.0"

    @property
    def name(self) -> str:
        return f"{self.package}::{self.target}" if self.target else self.package

    @property
    def seconds(self) -> float:
        return SECONDS.get(self.name, 1)


def programs(messages: Iterable[str], packages: Sequence[str] = ()) -> list[Program]:
    """The test programs that cargo made, the longest first; those of some packages only, if any is named."""
    found = {}
    for line in messages:
        if not line.startswith("{"):
            continue
        message = json.loads(line)
        if message.get("reason") != "compiler-artifact" or not message.get("executable") or not message["profile"]["test"]:
            continue
        directory = Path(message["manifest_path"]).parent
        package = directory.name
        kind, name = message["target"]["kind"], message["target"]["name"]
        # A package may have a library and a program, each with tests of its own.
        target = "" if "lib" in kind else name
        if packages and package not in packages:
            continue
        version = message["package_id"].rpartition("#")[2].rpartition("@")[2]
        program = Program(package, target, Path(message["executable"]), directory, version)
        found[program.path] = program
    return sorted(found.values(), key=lambda program: (-program.seconds, program.name))


def environment(program: Program) -> dict[str, str]:
    """What cargo sets for a test program, as far as programs read it when they run."""
    major, minor, patch = (program.version.partition("-")[0].split(".") + ["0", "0"])[:3]
    return {
        **os.environ,
        "CARGO": shutil.which("cargo") or "cargo",
        "CARGO_MANIFEST_DIR": str(program.directory),
        "CARGO_MANIFEST_PATH": str(program.directory / "Cargo.toml"),
        "CARGO_PKG_NAME": program.package,
        "CARGO_PKG_VERSION": program.version,
        "CARGO_PKG_VERSION_MAJOR": major,
        "CARGO_PKG_VERSION_MINOR": minor,
        "CARGO_PKG_VERSION_PATCH": patch,
    }


class Runs:
    """The programs that run, so that none is left when this ends."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.running: set[subprocess.Popen[bytes]] = set()
        self.lock = threading.Lock()
        self.ended = False

    def run(self, program: Program) -> tuple[int, float, float, str]:
        """Runs one program. Returns its exit code, seconds, seconds of processors, and output."""
        log = self.logs / f"{program.name.replace('::', '-')}.log"
        begun = time.monotonic()
        with open(log, "wb") as out:
            with self.lock:
                if self.ended:
                    return -1, 0.0, 0.0, ""
                process = subprocess.Popen(
                    [program.path], cwd=program.directory, env=environment(program), stdin=subprocess.DEVNULL, stdout=out, stderr=out
                )
                self.running.add(process)
            overdue = False
            while (used_s := self._reap(process)) is None:
                if not overdue and time.monotonic() - begun > BOUND_S:
                    self._kill(process)
                    overdue = True
                time.sleep(PAUSE_S)
            if overdue:
                out.write(f"\nit did not end within {BOUND_S} s\n".encode())
        return process.returncode, time.monotonic() - begun, used_s, log.read_text(errors="replace")

    def _reap(self, process: subprocess.Popen[bytes]) -> float | None:
        """The seconds of processors that a program has used, once it has ended. A program is waited for and killed under the
        lock, so that its id is never that of another one.
        """
        with self.lock:
            used_s = reap(process)
            if process.returncode is None:
                return None
            self.running.discard(process)
            return used_s

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        with self.lock:
            if process in self.running:
                os.kill(process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Ends what runs; nothing begins any more."""
        with self.lock:
            self.ended = True
            for process in self.running:
                os.kill(process.pid, signal.SIGKILL)


def record(program: Program, code: int, seconds: float, output: str) -> str:
    """A line for the table of tests."""
    sections = []
    if code:
        # Names and messages are at the end, after what each test printed.
        sections = [["end of the output", "\n".join(output.splitlines()[-LINES:])]]
    return json.dumps(
        {
            "test": program.name,
            "outcome": "failed" if code else "passed",
            "seconds": {"call": round(seconds, 3)},
            "sections": sections,
        }
    )


def main(words: list[str]) -> int:
    goes_on = "--keep-going" in words
    executables, logs, timings, *packages = [word for word in words if word != "--keep-going"]
    found = programs(Path(executables).read_text().splitlines(), packages)
    if not found:
        print("cargo made no test programs", file=sys.stderr)
        return 1
    Path(logs).mkdir(parents=True, exist_ok=True)
    runs = Runs(Path(logs))
    failed = []
    tests = 0
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        futures = {pool.submit(runs.run, program): program for program in found}
        with open(timings, "a", encoding="utf-8") as table:
            for future in as_completed(futures):
                program = futures[future]
                if future.cancelled():
                    continue
                code, seconds, used_s, output = future.result()
                table.write(record(program, code, seconds, output) + "\n")
                table.flush()
                closing = CLOSING.findall(output)
                tests += sum(int(count) for line in closing for count in PASSED.findall(line))
                if code:
                    failed.append(program.name)
                    print(f"\n== {program.name} failed with {code}\n{output}", flush=True)
                    # What has begun ends by itself; nothing else begins.
                    for other in () if goes_on else futures:
                        other.cancel()
                else:
                    said = closing[-1] if closing else "ended with 0"
                    print(f"{program.name}: {said} ({seconds:.1f} s, {used_s:.1f} s of processors)", flush=True)
    except KeyboardInterrupt:
        print("ended before its time", flush=True)
        return 130
    finally:
        runs.end()
        pool.shutdown(cancel_futures=True)
    if failed:
        print(f"failed: {', '.join(failed)}")
        return 1
    print(f"test result: ok. {tests} tests in {len(found)} programs passed")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
