"""A receiver of OTLP over HTTP on the loopback, which reads exports with the official messages, and answers as a test wants.

Unknown fields are an error: a number that is wrong would be nothing else to protobuf.
"""

from __future__ import annotations

import ssl
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest, ExportMetricsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from harness.traffic import until

# Time between the end of a push and the next one, which reads the metrics again.
INTERVAL_S = 15.0


def known(message: Message) -> None:
    """Asserts that all fields of a message, and of those in it, are defined."""
    assert len(UnknownFieldSet(message)) == 0, f"unknown fields in {message}"
    for descriptor, value in message.ListFields():
        if descriptor.message_type:
            for inner in (value,) if isinstance(value, Message) else value:
                known(inner)


def attributes(pairs: Any) -> dict[str, str | int]:
    """Attributes by their keys, which have to differ."""
    found = {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
    assert len(found) == len(pairs)
    return found


@dataclass
class Export:
    """One request to the receiver, with spans."""

    path: str
    headers: dict[str, str]
    body: bytes
    status: int
    message: ExportTraceServiceRequest = field(init=False)

    def __post_init__(self) -> None:
        self.message = ExportTraceServiceRequest.FromString(self.body)

    @property
    def spans(self) -> list[Span]:
        return [span for resource in self.message.resource_spans for scope in resource.scope_spans for span in scope.spans]


@dataclass
class Push:
    """One request to the receiver, with metrics, and when it came."""

    path: str
    headers: dict[str, str]
    body: bytes
    status: int
    came_ns: int = field(default_factory=time.time_ns)
    message: ExportMetricsServiceRequest = field(init=False)

    def __post_init__(self) -> None:
        self.message = ExportMetricsServiceRequest.FromString(self.body)

    @property
    def metrics(self) -> list[Metric]:
        return [metric for resource in self.message.resource_metrics for scope in resource.scope_metrics for metric in scope.metrics]

    @property
    def read_ns(self) -> int:
        """When the platform had read its metrics."""
        points = (point for metric in self.metrics for point in getattr(metric, metric.WhichOneof("data")).data_points)
        return min(point.time_unix_nano for point in points)


class Receiver:
    """Takes exports until it is closed. `answer` is a status, or `hang`, `huge` or `partial`; one of traces alone knows no metrics."""

    def __init__(self, certificate: Path | None = None, port: int = 0, has_metrics: bool = True) -> None:
        self.answer: int | str = 200
        self.exports: list[Export] = []
        self.pushes: list[Push] = []
        self.ended = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                is_push = self.path.endswith("/metrics")
                answer = receiver.answer if has_metrics or not is_push else 404
                status = answer if isinstance(answer, int) else 200
                headers = {name.lower(): value for name, value in self.headers.items()}
                noted = status if answer != "hang" else 0
                if is_push:
                    receiver.pushes.append(Push(self.path, headers, body, noted))
                else:
                    receiver.exports.append(Export(self.path, headers, body, noted))
                if answer == "hang":
                    receiver.ended.wait()
                    return
                self.send_response(status)
                if status in (429, 503):
                    self.send_header("retry-after", "1")
                response = ExportMetricsServiceResponse() if is_push else ExportTraceServiceResponse()
                if answer == "partial":
                    if is_push:
                        response.partial_success.rejected_data_points = 1
                    else:
                        response.partial_success.rejected_spans = len(receiver.exports[-1].spans)
                    response.partial_success.error_message = "a text of the receiver"
                content = response.SerializeToString()
                if answer == "huge":
                    self.send_header("content-length", str(1 << 40))
                    self.end_headers()
                    try:
                        while not receiver.ended.is_set():
                            self.wfile.write(bytes(1 << 20))
                    except OSError:
                        self.close_connection = True
                    return
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                """Nothing: tests say what they saw."""

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.server.daemon_threads = True
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        scheme = "https" if certificate else "http"
        self.url = f"{scheme}://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()

    def spans(self) -> list[Span]:
        """The spans of all exports that were accepted."""
        return [span for export in list(self.exports) if export.status == 200 for span in export.spans]

    def of_request(self, request_id: str) -> list[Span]:
        """The span of a request and its children, in the order in which they came."""
        own = [span for span in self.spans() if attributes(span.attributes).get("ringfence.request.id") == request_id]
        ids = {span.span_id for span in own}
        return own + [span for span in self.spans() if span.parent_span_id in ids]

    def wait_for(self, request_id: str, within_s: float = 20.0) -> list[Span]:
        """Waits until the span of a request has arrived, and returns it with its children."""
        return until(lambda: self.of_request(request_id), f"the span of {request_id} has come", within_s)

    def next_push(self, within_s: float = 40.0) -> Push:
        """The metrics that are read from now on: the first that are accepted."""
        count, now_ns = len(self.pushes), time.time_ns()
        # One that has been read may still be on its way, and one may be read at this moment if the last one is long ago.
        known_ns = max((push.read_ns for push in self.pushes[:count]), default=0)

        def is_of_now(push: Push, last_ns: int) -> bool:
            return push.status == 200 and push.read_ns > now_ns and last_ns + INTERVAL_S * 1e9 >= now_ns

        def came() -> list[Push]:
            pushes = self.pushes[count:]
            lasts_ns = [known_ns, *(push.read_ns for push in pushes)]
            return [push for push, last_ns in zip(pushes, lasts_ns, strict=False) if is_of_now(push, last_ns)]

        return until(came, "metrics have come", within_s)[0]

    def close(self) -> None:
        """Ends the server, and what hangs in it."""
        self.ended.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
