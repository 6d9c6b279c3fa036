"""Metrics by OTLP: what a receiver gets is what a scrape shows, read with the official messages and by a real collector, and
what a bad receiver can do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, DataPointFlags, HistogramDataPoint, NumberDataPoint

from harness.elapse import nothing_for
from harness.otlp import INTERVAL_S, Push, Receiver, attributes, known
from harness.patience import within
from harness.ports import free_port
from harness.prometheus import Prometheus
from harness.traced import CREDENTIAL, Traced
from harness.traffic import until

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "packaging" / "monitoring" / "alerts.yml"
DASHBOARD = ROOT / "packaging" / "monitoring" / "grafana-dashboard.json"
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Series = tuple[str, frozenset[tuple[str, str | int]]]


def scraped(platform: Traced) -> dict[Series, float]:
    """The values of a scrape, by name and labels."""
    found = {}
    for line in httpx.get(f"http://{platform.metrics}/metrics", timeout=60).text.splitlines():
        if not line.startswith("#"):
            series, value = line.rsplit(" ", 1)
            name, _, labels = series.partition("{")
            # Buckets have their bounds as numbers: a text can be written in several ways.
            pairs = {(key, str(float(text)) if key == "le" else text) for key, text in LABEL.findall(labels)}
            found[name, frozenset(pairs)] = float(value)
    return found


def pushed(push: Push) -> dict[Series, float]:
    """The values of a push, as a scrape names them."""
    found: dict[Series, float] = {}

    def note(name: str, pairs: dict[str, str | int], value: float) -> None:
        series = (name, frozenset(pairs.items()))
        assert series not in found, f"{series} comes twice"
        found[series] = value

    for metric in push.metrics:
        points = getattr(metric, metric.WhichOneof("data")).data_points
        for point in points:
            pairs = attributes(point.attributes)
            if isinstance(point, NumberDataPoint):
                value = float("nan") if point.flags else getattr(point, point.WhichOneof("value"))
                note(metric.name, pairs, value)
                continue
            assert isinstance(point, HistogramDataPoint)
            below = 0
            for bound, count in zip([*point.explicit_bounds, float("inf")], point.bucket_counts, strict=True):
                below += count
                note(f"{metric.name}_bucket", pairs | {"le": str(bound)}, below)
            assert below == point.count, "every value is in a bucket"
            note(f"{metric.name}_count", pairs, point.count)
            note(f"{metric.name}_sum", pairs, point.sum)
    return found


def cumulative(push: Push) -> Iterator[tuple[str, NumberDataPoint | HistogramDataPoint]]:
    """Everything that counts, with the name of its metric."""
    for metric in push.metrics:
        kind = metric.WhichOneof("data")
        if kind != "gauge":
            for point in getattr(metric, kind).data_points:
                yield metric.name, point


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    receiver = Receiver()
    traced = Traced(tmp_path_factory.mktemp("pushed"), receiver.url, receiver)
    try:
        box = traced.client.post("/sandboxes", json={"templateID": "base", "timeout": 60})
        assert box.status_code == 201
        assert traced.client.delete(f"/sandboxes/{box.json()['sandboxID']}").status_code == 204
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


def test_what_a_scrape_has_is_pushed(traced: Traced, receiver: Receiver) -> None:
    """Every series of a scrape, with the kind that OpenTelemetry has for it, and a value between those of a scrape before and after."""
    traced.request("GET", "/sandboxes")
    before = scraped(traced)
    push = receiver.next_push()
    after = scraped(traced)
    got = pushed(push)
    assert before.keys() <= got.keys() <= after.keys()
    assert len(got) > 200
    kinds: dict[str, str] = {}
    for metric in push.metrics:
        assert metric.name not in kinds and metric.description and metric.unit in {"", "s", "By"}, metric.name
        kinds[metric.name] = metric.WhichOneof("data")
        if kinds[metric.name] == "sum":
            assert metric.sum.is_monotonic and metric.name.endswith("_total")
        if kinds[metric.name] != "gauge":
            data = getattr(metric, kinds[metric.name])
            assert data.aggregation_temporality == AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
    for (name, pairs), value in got.items():
        metric = name if name in kinds else name.rsplit("_", 1)[0]
        if kinds[metric] != "gauge":
            assert before.get((name, pairs), 0.0) <= value <= after[name, pairs], name
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", httpx.get(f"http://{traced.metrics}/metrics", timeout=60).text, re.MULTILINE))
    for name, kind in kinds.items():
        expected = {"sum": ("_total", "counter"), "histogram": ("", "histogram"), "gauge": ("", "gauge")}[kind]
        family = name.removesuffix("_info") if name.endswith("_info") else name.removesuffix(expected[0])
        assert types[family] in {expected[1], "info"}, name
    assert got["ringfence_creates_total", frozenset({("outcome", "created")})] >= 1
    assert got["ringfence_capacity_max_sandboxes", frozenset()] == before["ringfence_capacity_max_sandboxes", frozenset()]


def test_what_is_unknown_has_no_value(traced: Traced, receiver: Receiver) -> None:
    """Without HTTPS there is no certificate that could expire: a scrape has NaN."""
    push = until(lambda: list(receiver.pushes), "metrics have come")[-1]
    (metric,) = [metric for metric in push.metrics if "certificate_expiry" in metric.name]
    (point,) = metric.gauge.data_points
    assert point.flags == DataPointFlags.DATA_POINT_FLAGS_NO_RECORDED_VALUE_MASK and point.WhichOneof("value") is None


def test_a_push_is_what_the_protocol_says(traced: Traced, receiver: Receiver) -> None:
    traced.span("GET", "/sandboxes")
    push = until(lambda: list(receiver.pushes), "metrics have come")[-1]
    known(push.message)
    assert push.path == "/v1/metrics"
    assert push.headers["content-type"] == "application/x-protobuf"
    assert push.headers["authorization"] == CREDENTIAL
    (resource,) = push.message.resource_metrics
    (of_spans,) = receiver.exports[-1].message.resource_spans
    assert resource.resource == of_spans.resource, "spans and metrics come from one program"
    (scope,) = resource.scope_metrics
    assert scope.scope == of_spans.scope_spans[0].scope


def test_values_count_since_the_start(tmp_path: Path) -> None:
    """The start of what counts is that of the program, the same in each push, and a later one after a restart. The last push is at the end."""
    receiver = Receiver()
    before_ns = time.time_ns()
    traced = Traced(tmp_path, receiver.url, receiver)
    try:
        first = until(lambda: list(receiver.pushes), "the first push is at the start")[0]
        second = receiver.next_push()
        assert INTERVAL_S - 1 <= (second.came_ns - first.came_ns) / 1e9 <= INTERVAL_S + 10
        starts = {point.start_time_unix_nano for push in (first, second) for _, point in cumulative(push)}
        assert len(starts) == 1 and before_ns < min(starts) < first.came_ns
        for push in (first, second):
            times = {point.time_unix_nano for metric in push.metrics for point in getattr(metric, metric.WhichOneof("data")).data_points}
            assert len(times) == 1 and min(starts) < min(times) <= push.came_ns
        earlier, later = pushed(first), pushed(second)
        assert all(later[series] >= value for series, value in earlier.items() if series[0].endswith(("_total", "_count", "_bucket")))

        box = traced.client.post("/sandboxes", json={"templateID": "base", "timeout": 60})
        assert box.status_code == 201
        assert traced.client.delete(f"/sandboxes/{box.json()['sandboxID']}").status_code == 204
        stops_ns = time.time_ns()
        traced.stop()
        assert len([push for push in receiver.pushes if push.read_ns > stops_ns]) == 1, "one push, at the end"
        created = ("ringfence_creates_total", frozenset({("outcome", "created")}))
        assert pushed(receiver.pushes[-1])[created] == later[created] + 1

        stopped_ns = time.time_ns()
        traced.platform.start()
        again = receiver.next_push()
        assert all(point.start_time_unix_nano > stopped_ns for _, point in cumulative(again)), "it counts anew"
        assert pushed(again)[created] == 0
        traced.stop()
        assert CREDENTIAL not in traced.platform.log() and "4711" not in traced.platform.log()
    finally:
        traced.close()
        receiver.close()


@pytest.mark.parametrize("answer", [503, "hang"])
def test_a_push_that_fails_is_not_repeated(traced: Traced, receiver: Receiver, answer: int | str) -> None:
    """The next one is at its time and has everything. Nothing waits, and the log says so once."""
    receiver.next_push()
    said = traced.platform.log().count("metrics cannot be exported")
    count, receiver.answer = len(receiver.pushes), answer
    until(lambda: len(receiver.pushes) > count, "a push fails", 40)
    began = time.monotonic()
    for _ in range(100):
        assert traced.request("GET", "/sandboxes")[0].status_code == 200
    assert time.monotonic() - began < within(10), "requests do not wait"
    nothing_for(INTERVAL_S * 0.7)
    # Those that are due by now on a slow machine are no storm.
    came = len(receiver.pushes)
    due = int((time.time_ns() - receiver.pushes[count].read_ns) / 1e9 / INTERVAL_S)
    assert came <= count + 1 + due, "no storm of attempts"
    assert traced.platform.log().count("metrics cannot be exported") <= said + 1
    assert CREDENTIAL not in traced.platform.log()
    receiver.answer = 200
    got = pushed(receiver.next_push())
    listed = [value for (name, pairs), value in got.items() if name.endswith("request_duration_seconds_count") and ("method", "GET") in pairs]
    assert sum(listed) >= 100


def test_a_receiver_of_traces_alone_is_left_alone(tmp_path: Path) -> None:
    receiver = Receiver(has_metrics=False)
    traced = Traced(tmp_path, receiver.url, receiver)
    try:
        until(lambda: receiver.pushes, "the first push was refused")
        nothing_for(INTERVAL_S + 3)
        assert len(receiver.pushes) == 1
        assert traced.span("GET", "/sandboxes")
        assert traced.platform.log().count("metrics cannot be exported") == 1 and "status 404" in traced.platform.log()
        traced.stop()
    finally:
        traced.close()
        receiver.close()


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """A real collector of OpenTelemetry: where it receives, and where Prometheus scrapes it."""
    receives, serves = (f"127.0.0.1:{free_port()}" for _ in range(2))
    config = {
        "receivers": {"otlp": {"protocols": {"http": {"endpoint": receives}}}},
        "exporters": {"prometheus": {"endpoint": serves}},
        "service": {
            "telemetry": {"metrics": {"level": "none"}},
            "pipelines": {"metrics": {"receivers": ["otlp"], "exporters": ["prometheus"]}},
        },
    }
    (tmp_path / "collector.yaml").write_text(json.dumps(config))
    with (tmp_path / "collector.log").open("wb") as log:
        words = [os.environ["RINGFENCE_COLLECTOR"], "--config", f"file:{tmp_path / 'collector.yaml'}"]
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        until(lambda: process.poll() is not None or answers(f"http://{serves}/metrics"), "the collector answers", 60)
        assert process.poll() is None, (tmp_path / "collector.log").read_text()
        yield f"http://{receives}", serves
    finally:
        process.terminate()
        process.wait(within(30))


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=within(20)).status_code == 200
    except httpx.TransportError:
        return False


def test_a_collector_hands_them_to_prometheus(tmp_path: Path, collector: tuple[str, str]) -> None:
    """Through a real collector into a real Prometheus: the same series under the same names as by a scrape, so that the alerts and the
    dashboard that come with the platform find theirs."""
    receives, serves = collector
    work = tmp_path / "platform"
    work.mkdir()
    traced = Traced(work, receives, None, extra="sampling_ratio = 0\n")
    prometheus = Prometheus(tmp_path / "prometheus", RULES, serves, honors=True)
    try:
        prometheus.wait_ready()
        box = traced.client.post("/sandboxes", json={"templateID": "base", "timeout": 60})
        assert box.status_code == 201
        assert traced.client.delete(f"/sandboxes/{box.json()['sandboxID']}").status_code == 204
        created = 'ringfence_creates_total{job="ringfence",outcome="created"}'
        until(lambda: prometheus.query(f"{created} == 1"), "the create was pushed", 40)
        # The collector adds where it has a metric from.
        of_platform = re.compile("__name__|job|instance|otel_scope_.*")
        there = set()
        for series in prometheus.ask("series", **{"match[]": '{job="ringfence",__name__=~"ringfence_.*"}'}):
            pairs = {(key, str(float(text)) if key == "le" else text) for key, text in series.items() if not of_platform.fullmatch(key)}
            there.add((series["__name__"], frozenset(pairs)))
        # What has no value is no series there, and requests since the push are not there yet.
        expected = {series for series, value in scraped(traced).items() if value == value and "api_request" not in series[0]}
        assert expected - there == set()
        asked = set(re.findall(r"\bringfence_[a-z_]+", RULES.read_text() + DASHBOARD.read_text()))
        assert {name for name in asked if name.startswith("ringfence_api")} <= {name for name, _ in there}
        (instance,) = {series["metric"]["instance"] for series in prometheus.query("ringfence_build_info")}
        assert instance and instance != serves, "it is the id of the node"
        (quantile,) = prometheus.query("histogram_quantile(0.5, sum by (le) (ringfence_create_stage_duration_seconds_bucket{stage='total'}))")
        assert 0 < float(quantile["value"][1]) < 10
        states = {rule["name"]: rule["health"] for group in prometheus.ask("rules")["groups"] for rule in group["rules"]}
        assert set(states.values()) == {"ok"}
        assert not re.search(r"cannot be exported|rejects", traced.platform.log()), traced.platform.log()
        traced.stop()
    finally:
        traced.close()
        prometheus.close()
