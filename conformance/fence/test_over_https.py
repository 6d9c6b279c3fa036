"""Policies that the SDK sets in domain mode: over HTTPS, with the certificate and the names of a platform of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from harness.internet import RESOLVER, Internet
from harness.names import run_with
from harness.secure import secure_platform

# Every address is tried by one sandbox only, but for those of the last one.
PROGRAM = """
import json
from e2b import Sandbox

EVERYTHING = ["0.0.0.0/0"]

def reached(box, *urls):
    return [box.commands.run(f"curl -s -m 10 -o /dev/null {url} || echo no").stdout == "" for url in urls]

seen = {}
with Sandbox.create(timeout=120) as box:
    seen["default"] = reached(box, "http://93.68.0.1/", "http://10.9.0.1/")
with Sandbox.create(timeout=120, allow_internet_access=False) as box:
    seen["no access"] = reached(box, "http://93.69.0.1/", "http://www.example.net/")
with Sandbox.create(timeout=120, network={"deny_out": EVERYTHING, "allow_out": ["93.68.0.2", "www.example.com"]}) as box:
    seen["allowed"] = reached(box, "http://93.68.0.2/", "http://www.example.com/", "http://93.69.0.2/", "http://www.example.net/")
with Sandbox.create(timeout=120) as box:
    urls = "http://93.68.0.3/", "http://93.68.0.4/"
    box.update_network({"deny_out": ["93.68.0.3"]})
    seen["denied"] = reached(box, *urls)
    Sandbox.update_network(box.sandbox_id, {"deny_out": EVERYTHING, "allow_out": ["93.68.0.3"]})
    seen["replaced"] = reached(box, *urls)
    box.update_network({})
    seen["open again"] = reached(box, *urls)
print(json.dumps(seen))
"""


def test_policies(internet: Internet, work_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    events = internet.mark()
    config = f'[egress]\nresolvers = "{RESOLVER}:53"\n'
    with internet.capture() as capture, secure_platform(work_dir / "https", config) as server:
        ran = run_with(
            RESOLVER,
            [sys.executable, str(tmp_path / "program.py")],
            env={**server.environment(), **server.credentials()},
            capture_output=True,
            text=True,
            timeout=120,
        )
        sent = {packet.to for packet in capture.packets()}
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {
        "default": [True, False],
        "no access": [False, False],
        "allowed": [True, True, False, False],
        "denied": [False, True],
        "replaced": [True, False],
        "open again": [True, True],
    }
    assert sent >= {"93.68.0.1", "93.68.0.2", "93.68.0.3", "93.68.0.4"}
    assert not sent & {"93.69.0.1", "93.69.0.2", "10.9.0.1"}
    assert events(host="www.example.com") != [] and events(host="www.example.net") == []
