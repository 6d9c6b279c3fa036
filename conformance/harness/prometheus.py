"""A real Prometheus on the loopback, from the directory that RINGFENCE_PROMETHEUS names.

It scrapes one address every second and has the rules that are given to operators. What it stores is in a directory of the
test, and it asks nothing of the network.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import httpx

from harness.patience import within
from harness.ports import free_port
from harness.traffic import until


def program(name: str) -> Path:
    """`prometheus` or `promtool`."""
    return Path(os.environ["RINGFENCE_PROMETHEUS"]) / "usr" / "bin" / name


class Prometheus:
    """One server, until it is closed."""

    def __init__(self, work: Path, rules: Path, target: str, honors: bool = False) -> None:
        """`honors` is whether job and instance are those that the target names, as a collector does for others."""
        work.mkdir()
        self.log = work / "log"
        self.url = f"http://127.0.0.1:{free_port()}"
        config = work / "prometheus.yml"
        # The job has the name that the documentation gives it: an alert asks for it.
        config.write_text(
            "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
            f"rule_files: [{rules}]\n"
            f"scrape_configs: [{{job_name: ringfence, honor_labels: {str(honors).lower()}, static_configs: [{{targets: ['{target}']}}]}}]\n"
        )
        command = [
            program("prometheus"),
            f"--config.file={config}",
            f"--storage.tsdb.path={work / 'data'}",
            f"--web.listen-address={self.url.removeprefix('http://')}",
        ]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=work)

    def ask(self, path: str, **parameters: str) -> Any:
        """What the HTTP API answers, which has to be a success."""
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=within(20))
        assert answer.status_code == 200, f"{parameters}: {answer.text}"
        return answer.json()["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The result of an expression now."""
        return self.ask("query", query=expression)["result"]

    def wait_ready(self) -> None:
        """Waits until something was scraped and the rules were evaluated after that."""

        def scraped() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            try:
                if httpx.get(f"{self.url}/-/ready", timeout=within(20)).status_code != 200:
                    return False
            except httpx.TransportError:
                return False
            groups = self.ask("rules")["groups"]
            return bool(self.query("ringfence_build_info")) and all(group["evaluationTime"] > 0 for group in groups)

        until(scraped, lambda: f"scraped\n{self.log.read_text()}", 60)

    def close(self) -> None:
        """Ends the server."""
        self.process.terminate()
        self.process.wait(within(30))
