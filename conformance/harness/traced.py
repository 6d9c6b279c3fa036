"""A platform that exports to a receiver of OTLP, with a client that knows the ids of its requests."""

from __future__ import annotations

import re
import time
from pathlib import Path

import httpx
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from harness.otlp import Receiver
from harness.patience import within
from harness.platform import Platform
from harness.ports import free_port

CREDENTIAL = "Bearer receiver-credential-4711"


class Traced:
    """A platform, its receiver, and a client of it."""

    def __init__(self, work: Path, endpoint: str, receiver: Receiver | None, extra: str = "", headers: bool = True) -> None:
        self.receiver = receiver
        self.metrics = f"127.0.0.1:{free_port()}"
        config = f'metrics_listen = "{self.metrics}"\n[sandbox]\ndisk_mb = 256\n[telemetry]\notlp_endpoint = "{endpoint}"\n{extra}'
        if headers:
            (work / "headers").write_text(f"# of the receiver\nAuthorization: {CREDENTIAL}\n")
            config += f'otlp_headers_file = "{work / "headers"}"\n'
        self.platform = Platform(work / "data", config=config)
        self.platform.start()
        self.key = self.platform.credentials()["E2B_API_KEY"]
        self.client = httpx.Client(base_url=self.platform.url, headers={"X-API-Key": self.key}, timeout=within(60))

    def request(self, method: str, path: str, **rest: object) -> tuple[httpx.Response, str]:
        """A request, and its id."""
        response = self.client.request(method, path, **rest)  # type: ignore[arg-type]
        return response, response.headers["x-request-id"]

    def span(self, method: str, path: str, **rest: object) -> Span:
        """The span of a request."""
        assert self.receiver
        return self.receiver.wait_for(self.request(method, path, **rest)[1])[0]

    def count(self, outcome: str) -> int:
        """How many spans have had this outcome."""
        text = httpx.get(f"http://{self.metrics}/metrics", timeout=within(20)).text
        found = re.search(rf'^ringfence_trace_spans_total\{{outcome="{outcome}"\}} (\d+)$', text, re.MULTILINE)
        assert found, text
        return int(found[1])

    def stop(self) -> float:
        """Stops the platform, and returns how long that took."""
        begun = time.monotonic()
        assert self.platform.terminate() == 0, self.platform.log_tail()
        return time.monotonic() - begun

    def close(self) -> None:
        self.client.close()
        self.platform.close()
