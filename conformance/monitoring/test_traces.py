"""Traces by OTLP: what a receiver gets of API requests, read with the official messages, and what a bad receiver can do."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from harness.otlp import Receiver, attributes, known
from harness.patience import within
from harness.traced import CREDENTIAL, Traced
from harness.traffic import until

# What the platform waits for a receiver that hangs once everything else has stopped, and some more for that.
STOPS_S = 8.0
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    receiver = Receiver()
    traced = Traced(tmp_path_factory.mktemp("traces"), receiver.url, receiver)
    try:
        yield traced
        traced.stop()
    finally:
        traced.close()
        receiver.close()


@pytest.fixture
def receiver(traced: Traced) -> Iterator[Receiver]:
    """The receiver, which works again after a test."""
    assert traced.receiver
    yield traced.receiver
    traced.receiver.answer = 200


def test_a_create_is_a_span_with_its_stages(traced: Traced, receiver: Receiver) -> None:
    begun = time.time_ns()
    response, request = traced.request("POST", "/sandboxes", json={"templateID": "base", "timeout": 60})
    ended = time.time_ns()
    assert response.status_code == 201, response.text
    own, *stages = receiver.wait_for(request)
    assert own.name == "POST /sandboxes" and own.kind == Span.SPAN_KIND_SERVER
    assert not own.parent_span_id and own.status.code == Status.STATUS_CODE_UNSET
    assert begun <= own.start_time_unix_nano < own.end_time_unix_nano <= ended
    got = attributes(own.attributes)
    team = got.pop("ringfence.team.id")
    assert team and team in traced.platform.run("team", "list").stdout
    assert got == {
        "http.request.method": "POST",
        "http.route": "/sandboxes",
        "http.response.status_code": 201,
        "network.protocol.version": "1.1",
        "ringfence.operation": "create_sandbox_v1",
        "ringfence.request.id": request,
    }
    timing = re.findall(r"([\w-]+);dur=([\d.]+)", response.headers["server-timing"])
    assert timing[-1][0] == "total"
    assert [span.name for span in stages] == [name for name, _ in timing[:-1]], "one span for each stage, in their order"
    at = own.start_time_unix_nano
    for span, (_, milliseconds) in zip(stages, timing, strict=False):
        assert span.trace_id == own.trace_id and span.parent_span_id == own.span_id
        assert span.kind == Span.SPAN_KIND_INTERNAL
        assert span.start_time_unix_nano >= at, "stages follow each other within their request"
        at = span.end_time_unix_nano
        took = span.end_time_unix_nano - span.start_time_unix_nano
        # The header is rounded to microseconds.
        assert abs(took - float(milliseconds) * 1e6) <= 1000
    assert at <= own.end_time_unix_nano
    sum_ms = sum(float(milliseconds) for _, milliseconds in timing[:-1])
    total_ms = float(timing[-1][1])
    own_ms = (own.end_time_unix_nano - own.start_time_unix_nano) / 1e6
    assert sum_ms <= total_ms + 0.02 and total_ms <= own_ms + 0.002
    ids = [span.span_id for span in (own, *stages)]
    assert len(set(ids)) == len(ids)
    sandbox = response.json()["sandboxID"]
    assert traced.request("POST", f"/sandboxes/{sandbox}/pause")[0].status_code == 204
    resumed, request = traced.request("POST", f"/sandboxes/{sandbox}/resume", json={"timeout": 60})
    assert resumed.status_code == 201
    own, *stages = receiver.wait_for(request)
    assert own.name == "POST /sandboxes/{sandboxID}/resume"
    timing = re.findall(r"([\w-]+);dur=", resumed.headers.get("server-timing", ""))
    assert [span.name for span in stages] == [name for name in timing if name != "total"]
    assert traced.request("DELETE", f"/sandboxes/{sandbox}")[0].status_code == 204


def test_what_no_request_waits_for_is_a_span(traced: Traced, receiver: Receiver) -> None:
    """A pause at the deadline, a resume by traffic, and a build with its steps."""

    def found(name: str, key: str, value: str) -> Span:
        def look() -> list[Span]:
            return [span for span in receiver.spans() if span.name == name and attributes(span.attributes).get(key) == value]

        (span,) = until(look, f"the span {name} of {value} has come", 60)
        assert span.kind == Span.SPAN_KIND_INTERNAL and not span.parent_span_id and attributes(span.attributes)["ringfence.team.id"]
        return span

    body = {"templateID": "base", "timeout": 2, "autoPause": True, "autoResume": {"enabled": True}}
    made, _ = traced.request("POST", "/v2/sandboxes", json=body)
    assert made.status_code == 201, made.text
    sandbox = made.json()["sandboxID"]
    paused = found("pause", "ringfence.sandbox.id", sandbox)
    assert attributes(paused.attributes)["ringfence.reason"] == "timeout" and paused.status.code == Status.STATUS_CODE_UNSET
    assert paused.end_time_unix_nano > paused.start_time_unix_nano
    traced.client.get("/", headers={"E2b-Sandbox-Id": sandbox, "E2b-Sandbox-Port": "8000"})
    resumed = found("resume", "ringfence.sandbox.id", sandbox)
    assert attributes(resumed.attributes)["ringfence.reason"] == "traffic" and resumed.trace_id != paused.trace_id
    assert traced.request("DELETE", f"/sandboxes/{sandbox}")[0].status_code == 204

    for command, is_good in (("true", True), ("echo secret-4711; false", False)):
        template = traced.request("POST", "/v3/templates", json={"name": "traced", "cpuCount": 1, "memoryMB": 256})[0].json()
        steps = [{"type": "RUN", "args": [command, "root"]}, {"type": "ENV", "args": ["A", "secret-4711"]}]
        path = f"/v2/templates/{template['templateID']}/builds/{template['buildID']}"
        started, _ = traced.request("POST", path, json={"fromTemplate": "base", "steps": steps})
        assert started.status_code == 202, started.text
        built = found("build", "ringfence.build.id", template["buildID"])
        code = Status.STATUS_CODE_UNSET if is_good else Status.STATUS_CODE_ERROR
        assert built.status.code == code
        parts = [span for span in receiver.spans() if span.parent_span_id == built.span_id]
        assert [span.name for span in parts] == ["build.source", "build.step"], "a variable makes no layer"
        assert all(span.trace_id == built.trace_id for span in parts)
        assert attributes(parts[1].attributes) == {"ringfence.build.cached": "false"} and parts[1].status.code == code
    assert b"secret-4711" not in b"".join(export.body for export in list(receiver.exports))


def test_an_export_is_what_the_protocol_says(traced: Traced, receiver: Receiver) -> None:
    traced.span("GET", "/sandboxes")
    for export in list(receiver.exports):
        known(export.message)
        assert export.path == "/v1/traces"
        assert export.headers["content-type"] == "application/x-protobuf"
        assert export.headers["authorization"] == CREDENTIAL
        (resource,) = export.message.resource_spans
        found = attributes(resource.resource.attributes)
        assert set(found) == {"service.name", "service.version", "service.instance.id", "host.name"} and all(found.values())
        assert found["service.name"] == "ringfence"
        for span in export.spans:
            assert len(span.trace_id) == 16 and len(span.span_id) == 8 and span.flags & 1


def test_routes_are_templates(traced: Traced) -> None:
    span = traced.span("GET", "/sandboxes/i2345678901234567890?secret=query-4711")
    assert span.name == "GET /sandboxes/{sandboxID}"
    assert attributes(span.attributes)["http.response.status_code"] == 404
    assert span.status.code == Status.STATUS_CODE_UNSET, "the platform has not failed"
    span = traced.span("GET", "/nothing/secret-4711")
    assert span.name == "GET" and "http.route" not in attributes(span.attributes)
    span = traced.span("SECRET", "/sandboxes")
    assert span.name == "HTTP /sandboxes" and attributes(span.attributes)["http.request.method"] == "_OTHER"


def test_a_request_without_credentials_has_no_team(traced: Traced) -> None:
    found = attributes(traced.span("GET", "/sandboxes", headers={"X-API-Key": "e2b_wrong"}).attributes)
    assert found["http.response.status_code"] == 401 and "ringfence.team.id" not in found


def test_a_trace_of_the_official_sdk_goes_on(traced: Traced) -> None:
    tracer = TracerProvider().get_tracer("test")
    headers: dict[str, str] = {}
    with tracer.start_as_current_span("of the client") as client:
        TraceContextTextMapPropagator().inject(headers)
        span = traced.span("GET", "/sandboxes", headers=headers | {"tracestate": "vendor=secret-4711"})
    context = client.get_span_context()
    assert trace.format_trace_id(context.trace_id) == span.trace_id.hex()
    assert trace.format_span_id(context.span_id) == span.parent_span_id.hex()
    assert span.flags & 0x300 == 0x300, "the parent is in another program"
    assert not span.trace_state


def test_what_is_not_sampled_is_not_exported(traced: Traced, receiver: Receiver) -> None:
    _, unsampled = traced.request("GET", "/sandboxes", headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
    # Spans are exported in the order of their requests.
    traced.span("GET", "/sandboxes")
    assert not receiver.of_request(unsampled)


@pytest.mark.parametrize(
    "header",
    [
        f"00-{TRACE}-{PARENT}",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{PARENT}-01-secret-4711",
        "secret-4711" * 1000,
    ],
)
def test_a_malformed_parent_is_none(traced: Traced, header: str) -> None:
    span = traced.span("GET", "/sandboxes", headers={"traceparent": header})
    assert span.trace_id.hex() != TRACE and not span.parent_span_id


def test_nothing_that_a_client_sends_is_in_a_span(traced: Traced, receiver: Receiver) -> None:
    secret = "secret-4711"
    body = {
        "templateID": "base",
        "timeout": 60,
        "metadata": {secret: secret},
        "envVars": {"SECRET": secret},
    }
    headers = {"user-agent": secret, "x-forwarded-for": secret, "baggage": f"a={secret}", "cookie": secret}
    response, request = traced.request("POST", f"/sandboxes?token={secret}", json=body, headers=headers)
    assert response.status_code == 201, response.text
    receiver.wait_for(request)
    sandbox = response.json()["sandboxID"]
    traced.span("DELETE", f"/sandboxes/{sandbox}")
    traced.span("POST", "/sandboxes", json={"templateID": secret})
    traced.span("POST", f"/{secret}", content=secret)
    exported = b"".join(export.body for export in list(receiver.exports))
    assert b"/sandboxes" in exported
    for text in (secret, sandbox, traced.key, traced.key.removeprefix("e2b_"), CREDENTIAL, "cookie"):
        assert text.encode() not in exported, text
    assert CREDENTIAL.split()[1] not in traced.platform.log()


@pytest.mark.parametrize("status", [429, 503])
def test_an_export_is_sent_again(traced: Traced, receiver: Receiver, status: int) -> None:
    receiver.answer = status
    _, request = traced.request("GET", "/sandboxes")
    refused = until(lambda: [export for export in list(receiver.exports) if export.status == status], "it was refused")
    receiver.answer = 200
    (span,) = receiver.wait_for(request)
    assert span.span_id in {span.span_id for export in refused for span in export.spans}, "the same span came again"


@pytest.mark.parametrize("answer", [500, 400, 301, "partial"])
def test_what_a_receiver_rejects_is_counted(traced: Traced, receiver: Receiver, answer: int | str) -> None:
    before, exports = traced.count("failed"), len(receiver.exports)
    receiver.answer = answer
    _, request = traced.request("GET", "/sandboxes")
    until(lambda: traced.count("failed") > before, "it is counted")
    receiver.answer = 200
    later = traced.span("GET", "/sandboxes")
    ids = [attributes(span.attributes).get("ringfence.request.id") for export in receiver.exports[exports:] for span in export.spans]
    assert ids.count(request) == 1, "it was not sent again"
    assert later.name == "GET /sandboxes"


def test_a_huge_answer_is_not_read(traced: Traced, receiver: Receiver) -> None:
    before, failed = traced.count("exported"), traced.count("failed")
    receiver.answer = "huge"
    traced.request("GET", "/sandboxes")
    until(lambda: traced.count("exported") > before, "it was accepted, and the rest of the answer is not waited for")
    assert traced.count("failed") == failed


def test_a_receiver_that_hangs_delays_nothing(traced: Traced, receiver: Receiver) -> None:
    receiver.answer = "hang"
    exports = len(receiver.exports)
    traced.request("GET", "/sandboxes")
    until(lambda: len(receiver.exports) > exports, "the export hangs")
    ids, longest = [], 0.0
    for _ in range(200):
        begun = time.monotonic()
        ids.append(traced.request("GET", "/sandboxes")[1])
        longest = max(longest, time.monotonic() - begun)
    # One that did would wait for ten seconds.
    assert longest < within(5), "requests do not wait for the receiver"
    receiver.answer = 200
    # The export that hangs is given up after ten seconds, and sent again.
    for request in (ids[0], ids[-1]):
        receiver.wait_for(request, 40)
    # Said once, with what failed before, and not for each export.
    assert traced.platform.log().count("spans cannot be exported") <= 3


def test_a_stop_exports_what_is_left(tmp_path: Path) -> None:
    receiver = Receiver()
    traced = Traced(tmp_path, receiver.url, receiver)
    try:
        _, request = traced.request("GET", "/sandboxes")
        traced.stop()
        assert receiver.of_request(request)
    finally:
        traced.close()
        receiver.close()


@pytest.mark.parametrize("trouble", ["hangs", "is absent"])
def test_a_stop_is_bounded_when_a_receiver(tmp_path: Path, trouble: str) -> None:
    receiver = Receiver()
    if trouble == "hangs":
        receiver.answer = "hang"
    else:
        receiver.close()
    traced = Traced(tmp_path, receiver.url, receiver)
    try:
        for _ in range(50):
            traced.request("GET", "/sandboxes")
        assert traced.stop() < within(STOPS_S)
        assert "spans could not be exported before the end" in traced.platform.log()
    finally:
        traced.close()
        if trouble == "hangs":
            receiver.close()


def test_a_ratio_of_zero_leaves_the_traces_of_clients(tmp_path: Path) -> None:
    receiver = Receiver()
    traced = Traced(tmp_path, receiver.url, receiver, extra="sampling_ratio = 0\n")
    try:
        for _ in range(20):
            traced.request("GET", "/sandboxes")
        span = traced.span("GET", "/sandboxes", headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
        assert span.trace_id.hex() == TRACE
        assert len(receiver.spans()) == 1
        traced.stop()
    finally:
        traced.close()
        receiver.close()


def certificate(work: Path) -> Path:
    """A certificate for the loopback and its key, in one file."""
    pem = work / "receiver.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"),
            *("-subj", "/CN=receiver", "-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE"),
            *("-keyout", work / "key", "-out", work / "ca.pem"),
        ],
        check=True,
        capture_output=True,
    )
    pem.write_text((work / "key").read_text() + (work / "ca.pem").read_text())
    return pem


@pytest.mark.parametrize("is_trusted", [True, False])
def test_a_receiver_has_to_prove_who_it_is(tmp_path: Path, is_trusted: bool) -> None:
    receiver = Receiver(certificate(tmp_path))
    extra = f'ca_file = "{tmp_path / "ca.pem"}"\n' if is_trusted else ""
    traced = Traced(tmp_path, receiver.url, receiver, extra=extra)
    try:
        _, request = traced.request("GET", "/sandboxes")
        if is_trusted:
            receiver.wait_for(request)
        else:
            until(lambda: "its certificate is not trusted" in traced.platform.log(), "the log says why")
        traced.stop()
        assert is_trusted or receiver.exports == []
    finally:
        traced.close()
        receiver.close()
