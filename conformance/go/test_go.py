"""The Go SDK: `go test` of the module beside this file, run against a platform of its own that speaks HTTPS, because
the SDK speaks nothing else to sandboxes, on the host of the fake internet. RINGFENCE_GO names the program.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from harness.code_host import TOKEN, CodeHost
from harness.patience import factor, within
from harness.platform import Platform
from harness.policies import secure_platform_on_the_internet
from harness.traffic import PROGRAMS

HERE = Path(__file__).parent
SDK = "github.com/qiniu/go-sdk/v7/sandbox"
# What the platform does not have: other states. And the half of an interceptor that only
# servers run.
UNSERVED = re.compile(
    r"(Pause)|^(Marshal|Unmarshal)JSON$|^WrapStreamingHandler$"
)


def untried(profile: Path) -> list[str]:
    """Functions of the SDK's package that are public, and of which no line ran."""
    listed = subprocess.run(
        [os.environ["RINGFENCE_GO"], "tool", "cover", f"-func={profile}"],
        cwd=HERE,
        env={**os.environ, "GOTOOLCHAIN": "local"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    functions = re.findall(rf"^{re.escape(SDK)}/\S+\s+(\w+)\s+([\d.]+)%$", listed, re.M)
    public = [(name, share) for name, share in functions if name[0].isupper()]
    assert len(public) > 100
    return [name for name, share in public if share == "0.0" and not UNSERVED.search(name)]


def test_go(work_dir: Path, tmp_path: Path) -> None:
    profile, tests = tmp_path / "covered", tmp_path / "tests"
    # Made before, because it needs modules of the real internet.
    subprocess.run(
        [os.environ["RINGFENCE_GO"], "test", "-c", "-mod=readonly", f"-coverpkg={SDK}", "-o", tests, "."],
        cwd=HERE,
        env={**os.environ, "GOTOOLCHAIN": "local"},
        timeout=600,
        check=True,
    )
    with secure_platform_on_the_internet(work_dir / "go") as (platform, internet):
        CodeHost(internet).make("octocat/go")
        ran = subprocess.run(
            [tests, "-test.v", f"-test.timeout={within(300):.0f}s", f"-test.coverprofile={profile}"],
            cwd=HERE,
            env={
                **platform.environment(),
                **Platform.credentials(platform),
                **platform.credentials(),
                "RINGFENCE_AUTHORITY": str(internet.authority),
                "RINGFENCE_CODE_HOST_TOKEN": TOKEN,
                "RINGFENCE_PROGRAMS": str(PROGRAMS),
                "RINGFENCE_ADDRESS": f"127.0.0.1:{platform.port}",
                "RINGFENCE_PATIENCE": str(factor()),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=within(600),
        )
        print(f"\n{ran.stdout}")
        assert ran.returncode == 0
        assert len(re.findall("^--- PASS", ran.stdout, re.M)) > 0
        assert not re.findall("^ *--- (SKIP|FAIL)", ran.stdout, re.M)
        assert untried(profile) == []
