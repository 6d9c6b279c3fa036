"""What operators load into the tools they have: alerts and a dashboard, tried with a real Prometheus that scrapes a platform.

Grafana is in no package of Debian. Of its dashboard everything that Grafana would ask a Prometheus is asked here, and the
rest is checked against what its format demands.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox

from harness.patience import within
from harness.platform import Platform
from harness.ports import free_port
from harness.prometheus import Prometheus, program
from harness.traffic import until

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "packaging" / "monitoring" / "alerts.yml"
DASHBOARD = ROOT / "packaging" / "monitoring" / "grafana-dashboard.json"
RUNBOOK = ROOT / "docs" / "alerts.md"
CASES = Path(__file__).with_name("alerts_test.yml")
ALERTS = re.findall(r"^ +- alert: (\w+)$", RULES.read_text(), re.MULTILINE)
# Columns of a row of Grafana.
COLUMNS = 24


def promtool(*arguments: str | Path, cwd: Path | None = None) -> str:
    """Runs promtool, which has to succeed."""
    ran = subprocess.run(
        [program("promtool"), *arguments], cwd=cwd, capture_output=True, text=True, timeout=within(60), check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def panels() -> list[dict]:
    return json.loads(DASHBOARD.read_text())["panels"]


def questions() -> list[str]:
    """Every expression of the dashboard, as Grafana sends it for all platforms."""
    found = [target["expr"] for panel in panels() for target in panel.get("targets", ())]
    return [expression.replace("$instance", ".*").replace("$__rate_interval", "1m") for expression in found]


def names(expression: str) -> set[str]:
    """The metrics that an expression asks for."""
    return set(re.findall(r"\bringfence_[a-z_]+", expression))


@pytest.fixture(scope="module")
def metered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Platform, Prometheus]]:
    """A platform on which something happened, and a Prometheus that watched it."""
    work = tmp_path_factory.mktemp("monitoring")
    port = free_port()
    # No bound on sandboxes is +Inf, of which nothing is a part: the alert about it asks for a number.
    config = f'metrics_listen = "127.0.0.1:{port}"\n[sandbox]\ndisk_mb = 256\n[capacity]\nmax_sandboxes = 100\n'
    server = Platform(work / "data", config=config)
    prometheus = None
    try:
        server.start()
        server.use()
        prometheus = Prometheus(work / "prometheus", RULES, f"127.0.0.1:{port}")
        prometheus.wait_ready()
        box = Sandbox.create(timeout=60)
        assert box.commands.run("echo ready").stdout == "ready\n"
        box.kill()
        expires = Sandbox.create(timeout=1)
        until(lambda: not expires.is_running(), "the sandbox is over")
        created = 'ringfence_creates_total{outcome="created"} >= 2'
        ended = 'ringfence_sandbox_ends_total{reason="expired"} >= 1'
        until(lambda: prometheus.query(created) and prometheus.query(ended), "Prometheus saw all of it")
        yield server, prometheus
        prometheus.close()
        assert server.terminate() == 0, server.log_tail()
        assert server.down().returncode == 0
    finally:
        if prometheus:
            prometheus.close()
        server.close()


def test_the_rules_are_what_prometheus_reads() -> None:
    assert f"{len(ALERTS)} rules found" in promtool("check", "rules", RULES)


def test_each_alert_fires_and_is_quiet(tmp_path: Path) -> None:
    """Each on series that must make it fire, and on series on which it must not."""
    cases = CASES.read_text()
    for alert in ALERTS:
        assert f"name: {alert} fires\n" in cases and f"name: {alert} is quiet\n" in cases, f"{alert} has no case"
    for file in (RULES, CASES):
        shutil.copy(file, tmp_path)
    promtool("test", "rules", CASES.name, cwd=tmp_path)


@pytest.mark.parametrize(("expression", "fails"), [("vector(1) > 2", "fires"), ("vector(1)", "is quiet")])
def test_the_cases_find_expressions_that_are_wrong(expression: str, fails: str, tmp_path: Path) -> None:
    """With alerts that never fire, each first case fails; with alerts that always do, each second one."""
    shutil.copy(CASES, tmp_path)
    rules, replaced = re.subn(
        r"(- alert: \w+\n +expr: )(.*?)(\n +(?:for|labels):)", rf"\g<1>{expression}\g<3>", RULES.read_text(), flags=re.DOTALL
    )
    assert replaced == len(ALERTS)
    (tmp_path / RULES.name).write_text(rules)
    with pytest.raises(AssertionError) as failed:
        promtool("test", "rules", CASES.name, cwd=tmp_path)
    assert [alert for alert in ALERTS if f"{alert} {fails}" not in str(failed.value)] == []


def test_each_alert_says_what_to_do(metered: tuple[Platform, Prometheus]) -> None:
    """What `runbook` names is a section of a page that the platform serves, and says more than the alert."""
    server, _ = metered
    page = httpx.get(f"{server.url}/docs/alerts", timeout=60).text
    text = RUNBOOK.read_text()
    for alert in ALERTS:
        assert f"runbook: /docs/alerts#{alert.lower()}\n" in RULES.read_text(), alert
        assert f'id="{alert.lower()}"' in page, f"{alert} has no section"
        section = text.partition(f"## {alert}\n")[2].partition("\n## ")[0]
        assert len(section.split()) >= 25, f"the section of {alert} says little"
    headings = re.findall(r"^## (Ringfence\w+)$", text, re.MULTILINE)
    assert headings == ALERTS, "sections stand in the order of the alerts"


def test_what_is_asked_for_is_exported(metered: tuple[Platform, Prometheus]) -> None:
    """An expression whose metric was renamed has no result for ever, and nobody would notice."""
    _, prometheus = metered
    known = set(prometheus.ask("label/__name__/values"))
    asked = names(RULES.read_text()) | {name for question in questions() for name in names(question)}
    assert asked - known == set()


def test_every_panel_has_an_answer(metered: tuple[Platform, Prometheus]) -> None:
    _, prometheus = metered
    assert len(questions()) >= 30
    for question in questions():
        # A scrape that a busy host was late for leaves nothing to see until the next one.
        until(lambda question=question: prometheus.query(question), f"{question} has an answer")


def test_nothing_fires_on_a_platform_that_is_well(metered: tuple[Platform, Prometheus]) -> None:
    _, prometheus = metered

    def rules() -> dict[str, tuple[str, str]]:
        groups = prometheus.ask("rules")["groups"]
        return {rule["name"]: (rule["state"], rule["health"]) for group in groups for rule in group["rules"]}

    # One scrape that a busy host was late for makes it pending.
    until(lambda: rules().get("RingfenceDown") == ("inactive", "ok"), lambda: f"the platform is seen: {rules()}")
    states = rules()
    assert set(states) == set(ALERTS)
    # The host of the tests may be short of memory or of space: then these two are right.
    host = {"RingfenceMemoryLow", "RingfenceDiskLow"}
    # And it may be so slow for a while that these are pending.
    slow = {"RingfenceCreatesSlow", "RingfenceExpiryLate", "RingfenceDown"}
    well = {name: {("inactive", "ok"), ("pending", "ok")} if name in slow else {("inactive", "ok")} for name in states.keys() - host}
    assert {name: states[name] for name, good in well.items() if states[name] not in good} == {}


def test_a_platform_that_is_gone_is_noticed(metered: tuple[Platform, Prometheus]) -> None:
    """The last test of the file: it stops the platform."""
    server, prometheus = metered
    assert server.terminate() == 0
    until(lambda: prometheus.query('ALERTS{alertname="RingfenceDown",alertstate="pending"}'), "the alert is pending")
    server.start()


def test_the_dashboard_is_what_grafana_reads() -> None:
    """Ids are unique, panels fill their rows and overlap nowhere, and each says what it shows."""
    dashboard = json.loads(DASHBOARD.read_text())
    assert dashboard["uid"] == "ringfence" and dashboard["schemaVersion"] >= 36
    assert {variable["name"] for variable in dashboard["templating"]["list"]} == {"datasource", "instance"}
    taken: set[tuple[int, int]] = set()
    ids: set[int] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken and max(x for x, _ in cells) < COLUMNS, panel["title"]
        taken |= cells
        assert panel["id"] not in ids
        ids.add(panel["id"])
        if panel["type"] != "row":
            assert panel["title"] and panel["description"] and panel["targets"], panel["id"]
            letters = [target["refId"] for target in panel["targets"]]
            assert len(set(letters)) == len(letters)
            assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])
