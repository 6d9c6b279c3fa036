"""The chart by itself: what helm says of it, what values make, and what the API server would say of that."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest

from harness.patience import within
from harness.platform import binary
from kubernetes import chart
from kubernetes.chart import CHART, CLUSTER, NAMESPACE, REQUIRED, ROOT, Object, Refused, helm, merged, render

IN_A_ZONE = [{"matchExpressions": [{"key": "zone", "operator": "Exists"}]}]
AFFINITY: Object = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": IN_A_ZONE}}}
# Values that turn on or change everything that there is.
EVERYTHING: Object = {
    "fullnameOverride": "boxes",
    "image": {"repository": "mirror.example:5000/ringfence", "digest": "sha256:" + "0" * 64, "pullPolicy": "Always"},
    "imagePullSecrets": [{"name": "pull"}],
    "config": {
        "log_format": "json",
        "sandbox": {"memory_mb": 2048, "always_secure": True},
        "telemetry": {"sampling_ratio": 0.25, "otlp_endpoint": "http://127.0.0.1:4318"},
        "egress": {"hosts": {"db.internal": "10.0.0.1", "b": ["10.0.0.2", "10.0.0.3"]}, "allow_private": "10.0.0.0/24"},
        "limits": {"sandboxes": 100000000},
        "team": {"research": {"limits": {"sandboxes": 5}}},
    },
    "server": {
        "domain": "sandbox.example.com:8443",
        "address": "[::]",
        "database": {"secretKey": "address"},
        "masterKey": {"secretKey": "hex"},
        "blobs": {"bucket": "layers", "endpoint": "https://s3.example:9000", "secretName": "bucket", "prefix": "a/b"},
        "tls": {"secretName": "certificate"},
        "persistence": {"size": "1Ti", "storageClass": "fast"},
        "service": {"type": "LoadBalancer", "port": 443, "annotations": {"a": "b"}, "loadBalancerSourceRanges": ["192.0.2.0/24"]},
        "nodesService": {"type": "LoadBalancer", "port": 4100, "loadBalancerSourceRanges": ["192.0.2.0/24"]},
        "ingress": {"enabled": True, "className": "nginx", "annotations": {"a": "b"}, "tlsSecretName": "wildcard"},
        "metrics": {"port": 9000, "serviceMonitor": {"enabled": True, "interval": "15s", "labels": {"release": "prometheus"}}},
        "networkPolicy": {
            "clients": [{"ipBlock": {"cidr": "192.0.2.0/24"}}],
            "nodes": [{"ipBlock": {"cidr": "198.51.100.0/24"}}],
            "metrics": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        },
        "podDisruptionBudget": {"enabled": True},
        "resources": {"limits": {"memory": "2Gi"}},
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"operator": "Exists"}],
        "affinity": AFFINITY,
        "priorityClassName": "high",
        "podAnnotations": {"a": "b"},
        "podLabels": {"a": "b"},
        "extraVolumes": [{"name": "more", "secret": {"secretName": "more"}}],
        "extraVolumeMounts": [{"name": "more", "mountPath": "/more", "readOnly": True}],
        "extraEnv": [{"name": "RINGFENCE_LOG_LEVEL", "value": "debug"}],
    },
    "nodes": {
        "nodeSelector": {"kind": "untrusted"},
        "tolerations": [{"key": "untrusted", "operator": "Exists", "effect": "NoExecute"}],
        "affinity": AFFINITY,
        "serverUrl": "https://nodes.example.com:4100",
        "join": {"secretName": "tokens"},
        "dataPath": "/srv/boxes",
        "kernelModules": False,
        "updateStrategy": "OnDelete",
        "priorityClass": {"create": True, "value": 5},
        "resources": {"requests": {"memory": "1Gi"}, "limits": {"memory": "4Gi"}},
        "podAnnotations": {"a": "b"},
        "podLabels": {"a": "b"},
        "extraVolumes": [{"name": "more", "configMap": {"name": "more"}}],
        "extraVolumeMounts": [{"name": "more", "mountPath": "/more", "readOnly": True}],
        "extraEnv": [{"name": "RINGFENCE_LOG_LEVEL", "value": "debug"}],
    },
}
NOTHING: Object = {
    "server": {
        "replicas": 0,
        "metrics": {"enabled": False},
        "networkPolicy": {"enabled": False},
        "persistence": {"existingClaim": "there-already"},
        "runAsUser": None,
        "runAsGroup": None,
        "fsGroup": None,
        "resources": {"requests": {}},
    },
    "nodes": {"enabled": False},
}
SEVERAL: Object = {"server": {"replicas": 3, "blobs": {"bucket": "layers", "secretName": "bucket"}}}
NODES_ELSEWHERE: Object = {"nodes": {"networkPolicy": {"enabled": False}, "priorityClassName": "high", "nodeSelector": {}}}
SETS = {"required": {}, "everything": EVERYTHING, "nothing": NOTHING, "elsewhere": NODES_ELSEWHERE, "several": SEVERAL}


def test_helm_finds_nothing_to_say() -> None:
    ran = helm("lint", CHART, "--strict", *CLUSTER, "--values", "-", stdin=json.dumps(REQUIRED))
    assert ran.returncode == 0, ran.stdout
    assert "[WARNING]" not in ran.stdout and "[ERROR]" not in ran.stdout, ran.stdout


@pytest.mark.parametrize("values", SETS.values(), ids=SETS.keys())
def test_every_object_is_one_that_the_api_server_takes(values: Object) -> None:
    rendered = render(values)
    assert rendered.errors() == []
    names = [chart.name_of(each) for each in rendered.objects]
    assert len(names) == len(set(names))
    namespaced = {each["metadata"].get("namespace") for each in rendered.objects if each["kind"] != "PriorityClass"}
    assert namespaced == {NAMESPACE}


def test_the_judge_finds_what_is_wrong() -> None:
    """Otherwise the test above proves nothing."""
    text = render().text
    for good, bad, why in (
        ("terminationGracePeriodSeconds: 60", "terminationGracePeriod: 60", "unknown field"),
        ("terminationGracePeriodSeconds: 60", "terminationGracePeriodSeconds: 60\n      terminationGracePeriodSeconds: 61", "already set"),
        ("mountPath: /tmp", "mountPath: \"\"", "Required value"),
        ("containerPort: 3000", "containerPort: 99999", "must be between 1 and 65535"),
        ("name: data, mountPath: /var/lib/ringfence}", "name: lost, mountPath: /var/lib/ringfence}", "Not found"),
        ("type: Recreate", "type: Sometimes", "Unsupported value"),
    ):
        assert good in text, good
        errors = [error for verdict in chart.judged(text.replace(good, bad)) for error in verdict.errors]
        assert any(why in error for error in errors), (bad, errors)


def test_a_release_of_any_name_has_names_that_fit() -> None:
    for release in ("a", "ringfence", "x" * 53):
        rendered = render(release=release)
        assert rendered.errors() == []
        assert any("ringfence" in name for name in map(chart.name_of, rendered.objects)) or release.startswith("x")


def test_selectors_find_the_pods_and_nothing_else() -> None:
    rendered = render({"server": {"podDisruptionBudget": {"enabled": True}, "metrics": {"serviceMonitor": {"enabled": True}}}})
    pods = {kind: rendered.pod(kind)["metadata"]["labels"] for kind in ("Deployment", "DaemonSet")}

    def found(selector: dict[str, str]) -> list[str]:
        return [kind for kind, labels in pods.items() if selector.items() <= labels.items()]

    for kind in pods:
        assert found(rendered.of(kind)["spec"]["selector"]["matchLabels"]) == [kind]
    for service in rendered.all("Service"):
        assert found(service["spec"]["selector"]) == ["Deployment"]
        ports = {port["name"] for port in rendered.pod("Deployment")["spec"]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    assert found(rendered.of("PodDisruptionBudget")["spec"]["selector"]["matchLabels"]) == ["Deployment"]
    monitored = rendered.of("ServiceMonitor")["spec"]["selector"]["matchLabels"]
    [service] = [service for service in rendered.all("Service") if monitored.items() <= service["metadata"]["labels"].items()]
    assert service["spec"]["ports"][0]["name"] == rendered.of("ServiceMonitor")["spec"]["endpoints"][0]["port"]
    assert found(rendered.of("NetworkPolicy", "-server")["spec"]["podSelector"]["matchLabels"]) == ["Deployment"]
    assert found(rendered.of("NetworkPolicy", "-node")["spec"]["podSelector"]["matchLabels"]) == ["DaemonSet"]


def test_clients_do_not_reach_the_metrics() -> None:
    rendered = render()
    assert {port["name"] for port in rendered.of("Service", "ringfence")["spec"]["ports"]} == {"api"}
    rules = {rule["ports"][0]["port"]: rule.get("from") for rule in rendered.of("NetworkPolicy", "-server")["spec"]["ingress"]}
    assert rules["api"] is None
    assert rules["metrics"] == [{"podSelector": {}}]
    [nodes] = rules["nodes"]
    assert nodes["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "node"
    assert rendered.of("NetworkPolicy", "-node")["spec"]["ingress"] == []


@pytest.mark.parametrize("values", SETS.values(), ids=SETS.keys())
def test_the_program_takes_the_configuration(values: Object, tmp_path: Path) -> None:
    """By its own check, which refuses unknown keys and values. What it asks for then is not there: a role, or a certificate."""
    rendered = render(values)
    for component in ("server", *(["node"] if values.get("nodes", {}).get("enabled", True) else [])):
        file = tmp_path / f"{component}.toml"
        text = rendered.config(component)
        file.write_text(text)
        secret = {"RINGFENCE_BLOBS_ACCESS_KEY_ID": "a", "RINGFENCE_BLOBS_SECRET_ACCESS_KEY": "b"} if "bucket" in text else {}
        # The first command that reads the configuration and changes nothing.
        ran = subprocess.run(
            [binary(), "doctor", "--config", file], env={"PATH": "/usr/bin", **secret}, capture_output=True, text=True, timeout=within(60)
        )
        assert "ringfence up` " in ran.stdout, f"{ran.stderr}\n{text}"


def test_a_wrong_key_is_refused_by_the_program(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text(render({"config": {"sandbox": {"memory": 1}}}).config("server"))
    ran = subprocess.run([binary(), "doctor", "--config", file], env={"PATH": "/usr/bin"}, capture_output=True, text=True)
    assert "unknown key sandbox.memory" in ran.stderr


def test_values_become_the_configuration() -> None:
    rendered = render(EVERYTHING)
    server, node = (tomllib.loads(rendered.config(component)) for component in ("server", "node"))
    for config in (server, node):
        assert config["sandbox"] == {"memory_mb": 2048, "always_secure": True}
        assert config["telemetry"]["sampling_ratio"] == 0.25
        assert config["egress"]["hosts"] == {"db.internal": "10.0.0.1", "b": ["10.0.0.2", "10.0.0.3"]}
        assert config["limits"]["sandboxes"] == 100000000
    assert server["listen"] == "[::]:3000" and server["nodes"]["listen"] == "[::]:3100" and server["metrics_listen"] == "[::]:9000"
    assert server["domain"] == "sandbox.example.com:8443"
    bucket = {"store": "s3", "bucket": "layers", "endpoint": "https://s3.example:9000", "region": "us-east-1"}
    assert server["blobs"] == bucket | {"prefix": "a/b", "allow_http": False}
    assert node["data_dir"] == "/srv/boxes" and "blobs" not in node and "tls_cert" not in node
    acme = {"directory": "https://acme.example/directory", "accept_terms": True, "dns_hook": "/hook"}
    rendered = render({"config": {"acme": acme}})
    assert tomllib.loads(rendered.config("server"))["acme"] == acme
    assert "acme" not in rendered.config("node")


def test_pods_are_replaced_when_their_configuration_changes_and_only_then() -> None:
    def sums(values: Object) -> list[str]:
        rendered = render(values)
        return [rendered.pod(kind)["metadata"]["annotations"]["checksum/config"] for kind in ("Deployment", "DaemonSet")]

    before = sums({})
    both, server = sums({"config": {"log_format": "json"}}), sums({"server": {"domain": "other.example.com"}})
    assert both[0] != before[0] and both[1] != before[1]
    assert server[0] != before[0] and server[1] == before[1]
    # Of a new version of the chart nothing is in the pods but the image.
    assert "0.1.0" not in json.dumps([render({"image": {"tag": "x"}}).pod(kind) for kind in ("Deployment", "DaemonSet")])


REFUSED: dict[str, tuple[Any, str]] = {
    "no domain": ({"server": {"domain": ""}}, "server.domain is required"),
    "no database": ({"server": {"database": {"secretName": ""}}}, "server.database.secretName is required"),
    "no master key": ({"server": {"masterKey": {"secretName": ""}}}, "server.masterKey.secretName is required"),
    "a claim for two servers": (
        {"server": {"replicas": 2, "persistence": {"existingClaim": "one"}}},
        "server.persistence.existingClaim is for one server, and server.replicas is 2",
    ),
    "an unknown value": ({"server": {"domian": "a"}}, "additional properties 'domian' not allowed"),
    "an unknown table": ({"node": {}}, "additional properties 'node' not allowed"),
    "another kind": ({"server": {"replicas": "one"}}, "/server/replicas"),
    "a bucket without a key": ({"server": {"blobs": {"bucket": "a"}}}, "server.blobs.secretName is required with server.blobs.bucket"),
    "a monitor of nothing": ({"server": {"metrics": {"enabled": False, "serviceMonitor": {"enabled": True}}}}, "requires server.metrics.enabled"),
    "two priority classes": ({"nodes": {"priorityClass": {"create": True}, "priorityClassName": "a"}}, "nodes.priorityClassName"),
    "nodes over http": ({"nodes": {"serverUrl": "http://a:1"}}, "it is https://<host>:<port>"),
    "no port of nodes": ({"nodes": {"serverUrl": "https://a"}}, "it is https://<host>:<port>"),
    "a relative path": ({"nodes": {"dataPath": "data"}}, "/nodes/dataPath"),
    "a path with a way out": ({"nodes": {"dataPath": "/data/../etc"}}, "/nodes/dataPath"),
    "a domain with a scheme": ({"server": {"domain": "https://a.example"}}, "/server/domain"),
    "a port": ({"server": {"service": {"port": 0}}}, "/server/service/port"),
    "a service": ({"server": {"service": {"type": "ExternalName"}}}, "/server/service/type"),
    "root as the server": ({"server": {"runAsUser": 0}}, "/server/runAsUser"),
    "a digest": ({"image": {"digest": "sha256:1"}}, "/image/digest"),
    "an image with a tag": ({"image": {"repository": "ringfence:1"}}, "/image/repository"),
    "an update strategy": ({"nodes": {"updateStrategy": "Recreate"}}, "/nodes/updateStrategy"),
    "a password in the configuration": ({"config": {"database_url": "postgres://a:b@c/d"}}, "config.database_url cannot be set: it may hold a password"),
    "what the chart sets": ({"config": {"data_dir": "/data"}}, "config.data_dir cannot be set"),
    "the port of nodes": ({"config": {"nodes": {"listen": "a"}}}, "config.nodes cannot be set"),
    "a key with a dot": ({"config": {"sandbox.memory_mb": 1}}, "write sandbox.memory_mb as tables"),
    "a list of tables": ({"config": {"egress": {"hosts": [{"a": "b"}]}}}, "neither a text, nor a number"),
    "a secret as a variable": ({"server": {"extraEnv": [{"name": "RINGFENCE_MASTER_KEY", "value": "a"}]}}, "server.extraEnv: RINGFENCE_MASTER_KEY"),
}


@pytest.mark.parametrize(("values", "why"), REFUSED.values(), ids=REFUSED.keys())
def test_wrong_values_are_refused_with_their_name(values: Object, why: str) -> None:
    with pytest.raises(Refused) as refused:
        render(values)
    assert why in str(refused.value)


def test_every_value_has_a_comment_and_a_schema() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = chart.yaml(CHART / "values.yaml")

    def missing(value: Any, of: Object, at: str) -> list[str]:
        if not isinstance(value, dict) or "properties" not in of:
            return []
        found = [f"{at}{key}" for key in value.keys() ^ of["properties"].keys() if key != "global"]
        return found + [each for key in value.keys() & of["properties"].keys() for each in missing(value[key], of["properties"][key], f"{at}{key}.")]

    assert missing(values, schema, "") == []
    for paragraph in (CHART / "values.yaml").read_text().split("\n\n"):
        first, *rest = paragraph.strip("\n").splitlines()
        # A heading stands above the first paragraph of its table.
        said = rest[0] if re.match(r"^\w+:$", first) else first
        assert said.lstrip().startswith("#"), f"{said!r} has no comment"


def test_notes_say_how_a_machine_joins(tmp_path: Path) -> None:
    """Helm prints them with a cluster alone, so they are part of another object here."""
    copy = shutil.copytree(CHART, tmp_path / "ringfence")
    whole = '{{ include (print $.Template.BasePath "/NOTES.txt") . | quote }}'
    (copy / "templates" / "notes.yaml").write_text(f"apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: notes}}\ndata: {{text: {whole}}}\n")
    values = json.dumps(merged(REQUIRED, {"nodes": {"nodeSelector": {"a": "b", "c": "d"}}}))
    ran = helm("template", "box", copy, *CLUSTER, "--show-only", "templates/notes.yaml", "--values", "-", stdin=values)
    assert ran.returncode == 0, ran.stderr
    [verdict] = chart.judged(ran.stdout)
    text = verdict.object["data"]["text"]
    for words in ("--selector 'a=b,c=d'", "ringfence node token", "box-ringfence-join", "credentials.env", "There is no bucket", "not encrypted"):
        assert words in text, text
    # A shell can run what it says.
    script = "\n".join(line[2:] for line in text.splitlines() if line.startswith("  "))
    assert subprocess.run(["sh", "-n"], input=script, text=True).returncode == 0, script


def test_the_version_is_that_of_the_program() -> None:
    version = re.search(r'^version = "(.*)"$', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)
    assert version and chart.yaml(CHART / "Chart.yaml")["appVersion"] == version[1]


def test_a_chart_of_a_release_is_rendered_and_depends_on_its_arguments_alone(tmp_path: Path) -> None:
    made = []
    for name in ("a", "b"):
        out = tmp_path / name / "ringfence-chart.tgz"
        out.parent.mkdir()
        words = [sys.executable, ROOT / "scripts" / "release" / "chart.py", CHART, out, "0.2.0~20260102.0123abc", "1767312000"]
        subprocess.run(words, check=True)
        made.append(out.read_bytes())
    assert made[0] == made[1]
    with tarfile.open(out) as archive:
        names = {member.name for member in archive}
        assert {"ringfence/Chart.yaml", "ringfence/values.yaml", "ringfence/templates/server.yaml"} <= names
        assert {member.uname for member in archive} == {""}
    ran = helm("template", "box", out, *CLUSTER, "--values", "-", stdin=json.dumps(REQUIRED))
    assert ran.returncode == 0, ran.stderr
    assert 'image: "ringfence:0.2.0-20260102.0123abc"' in ran.stdout
