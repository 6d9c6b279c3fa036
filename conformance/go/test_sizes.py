"""A Go program inside sizes itself by the sandbox. RINGFENCE_GO names the compiler."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from e2b import Sandbox

from harness.hoststate import HostState, left_over
from harness.platform import Platform

PROGRAM = """package main

import (
	"fmt"
	"runtime"
)

func main() {
	fmt.Println(runtime.NumCPU(), runtime.GOMAXPROCS(0))
}
"""


def test_go_programs_use_the_processors_of_the_sandbox(platform: Platform, tmp_path: Path) -> None:
    (tmp_path / "main.go").write_text(PROGRAM)
    subprocess.run(
        [os.environ["RINGFENCE_GO"], "build", "-o", "size", "main.go"],
        cwd=tmp_path,
        env={**os.environ, "GOTOOLCHAIN": "local", "CGO_ENABLED": "0", "GOFLAGS": "-mod=mod", "GO111MODULE": "off"},
        timeout=300,
        check=True,
    )
    before = HostState.take()
    server = Platform(tmp_path / "data", config="[sandbox]\ncpu_count = 1\ndisk_mb = 256\n")
    try:
        server.start()
        server.use()
        with Sandbox.create(timeout=120) as box:
            box.files.write("/tmp/size", (tmp_path / "size").read_bytes())
            assert box.commands.run("chmod 755 /tmp/size && /tmp/size").stdout.split() == ["1", "1"]
        assert server.terminate() == 0, server.log_tail()
        assert server.down().returncode == 0
        assert left_over(before) == {}
    finally:
        server.close()
        platform.use()
