"""The commands of the page `kubernetes` of the documentation, as an operator copies them: with a `kubectl` that has one machine and the pods of the tests,
the real helm, and no docker.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from docs.blocks import ROOT, Block, blocks_of
from harness.patience import within
from kubernetes.chart import CHART, CLUSTER, program
from kubernetes.machine import NAME, Container

PAGE = ROOT / "docs" / "kubernetes.md"
# What helm would do in a cluster is to render.
HELM = f"""#!/bin/sh
set -eu
[ "$1 $2 $3 $4 $5 $6" = "install ringfence ringfence-VERSION-chart.tgz --namespace ringfence --values" ]
exec "$REAL_HELM" template ringfence "{CHART}" --namespace ringfence {" ".join(CLUSTER)} --values "$7" >rendered.yaml
"""


class Page:
    """The page, and what its commands leave behind."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.place.mkdir()
        blocks = blocks_of("docs/kubernetes.md", PAGE.read_text())
        self.blocks = [block for block in blocks if block.language == "sh"]
        [values] = [block for block in blocks if block.language == "yaml" and "image:" in block.text]
        (self.place / "values.yaml").write_text(values.text)
        programs = self.place / "bin"
        programs.mkdir()
        for name, text in (
            ("kubectl", f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("kubectl.py")} "$@"\n'),
            ("helm", HELM),
            ("docker", "#!/bin/sh\n"),
        ):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)

    def block(self, words: str) -> Block:
        """The one block with some words."""
        [found] = [block for block in self.blocks if words in block.text]
        return found

    def run(self, block: Block, server: Container | None = None, **replaced: str) -> str:
        """Runs a block, with a server for `kubectl exec`, and returns what it prints."""
        text = block.text
        for name, value in replaced.items():
            text = text.replace(f"<{name}>", value)
        runtime = [*server.pod.machine.runtime, "exec", server.id] if server else []
        environment = {
            "PATH": f"{self.place / 'bin'}:{os.environ['PATH']}",
            "HOME": str(self.place),
            "REAL_HELM": program("RINGFENCE_HELM"),
            "PODS": json.dumps({"deployment/ringfence-server": runtime}),
            "MACHINES": NAME,
            "STATE": str(self.place / "state.json"),
        }
        ran = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text], cwd=self.place, env=environment, capture_output=True, text=True, timeout=within(60)
        )
        assert ran.returncode == 0, f"{block.name}: {ran.stderr}"
        return ran.stdout

    def state(self) -> dict[str, dict[str, dict[str, str]]]:
        """What the cluster has: secrets, and labels and taints of machines."""
        return json.loads((self.place / "state.json").read_text())
