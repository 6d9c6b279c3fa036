"""The Go SDK: `go test` of the module beside this file, run against a platform of its own that speaks HTTPS, because
the SDK speaks nothing else to sandboxes. RINGFENCE_GO names the program.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from harness.secure import secure_platform

HERE = Path(__file__).parent


def test_go(work_dir: Path) -> None:
    with secure_platform(work_dir / "go") as platform:
        ran = subprocess.run(
            [os.environ["RINGFENCE_GO"], "test", "-count=1", "-v", "-timeout=300s", "-mod=readonly", "./..."],
            cwd=HERE,
            env={
                **platform.environment(),
                **platform.credentials(),
                "GOTOOLCHAIN": "local",
                "RINGFENCE_ADDRESS": f"127.0.0.1:{platform.port}",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )
        print(f"\n{ran.stdout}")
        assert ran.returncode == 0
        assert len(re.findall("^--- PASS", ran.stdout, re.M)) > 0
        assert not re.findall("^ *--- (SKIP|FAIL)", ran.stdout, re.M)
