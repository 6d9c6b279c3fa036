"""What pods of the chart may do, and where secrets are, whatever the values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kubernetes.chart import Object, Rendered, render
from kubernetes.test_chart import EVERYTHING, SETS

# What volumes of the machine a node needs, each for a reason that its template gives.
OF_THE_MACHINE = {"/run/ringfence", "/dev", "/sys/fs/cgroup", "/lib/modules"}
# Words that nothing but a reference to a secret may hold.
SECRETS = ("postgres://", "password", "PRIVATE KEY")


def pods(rendered: Rendered) -> Iterator[tuple[str, Object]]:
    for kind in ("Deployment", "DaemonSet"):
        for each in rendered.all(kind):
            yield kind, each["spec"]["template"]["spec"]


def every_container(spec: Object) -> list[Object]:
    return [*spec.get("initContainers", []), *spec["containers"]]


def texts(value: Any) -> Iterator[str]:
    """Every text in an object, keys included."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts(inner)
    elif isinstance(value, str):
        yield value


@pytest.mark.parametrize("values", SETS.values(), ids=SETS.keys())
def test_the_server_meets_the_strictest_standard(values: Object) -> None:
    rendered = render(values)
    assert rendered.level("Deployment") == "restricted"
    [server] = rendered.pod("Deployment")["spec"]["containers"]
    security = server["securityContext"]
    assert security == {
        "privileged": False,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    spec = rendered.pod("Deployment")["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    for field in ("hostPID", "hostNetwork", "hostIPC", "shareProcessNamespace"):
        assert field not in spec
    assert not [volume for volume in spec["volumes"] if "hostPath" in volume]


def test_a_node_is_privileged_and_has_nothing_else_of_the_machine() -> None:
    rendered = render()
    [verdict] = [verdict for verdict in rendered.verdicts if verdict.object["kind"] == "DaemonSet"]
    # These and no other are reasons why it is not restricted.
    assert {reason.partition(":")[0] for reason in verdict.forbidden} == {"host namespaces", "hostPath volumes", "privileged"}
    spec = rendered.pod("DaemonSet")["spec"]
    assert spec["hostPID"] is True and "hostNetwork" not in spec and "hostIPC" not in spec
    paths = {volume["hostPath"]["path"] for volume in spec["volumes"] if "hostPath" in volume}
    assert paths == {*OF_THE_MACHINE, "/var/lib/ringfence-node"}
    [node] = spec["containers"]
    assert node["securityContext"] == {"privileged": True, "runAsUser": 0}
    assert not {mount["name"] for mount in node["volumeMounts"]} & {"join"}, "a token is for joining alone"
    [join] = spec["initContainers"]
    assert join["securityContext"]["capabilities"] == {"drop": ["ALL"]} and "privileged" not in join["securityContext"]
    assert join["securityContext"]["readOnlyRootFilesystem"] is True and join["securityContext"]["allowPrivilegeEscalation"] is False
    assert {mount["name"] for mount in join["volumeMounts"]} == {"config", "data", "join"}


@pytest.mark.parametrize("values", SETS.values(), ids=SETS.keys())
def test_no_pod_has_a_token_of_the_cluster_or_variables_of_services(values: Object) -> None:
    rendered = render(values)
    for _, spec in pods(rendered):
        assert spec["automountServiceAccountToken"] is False
        # A service that is called `ringfence` would set RINGFENCE_PORT and others.
        assert spec["enableServiceLinks"] is False
    assert not [each["kind"] for each in rendered.objects if "Role" in each["kind"]], "nothing of it asks the cluster"
    for account in rendered.all("ServiceAccount"):
        assert account["automountServiceAccountToken"] is False


@pytest.mark.parametrize("values", SETS.values(), ids=SETS.keys())
def test_secrets_are_references_and_the_chart_has_none(values: Object) -> None:
    rendered = render(values)
    assert rendered.all("Secret") == []
    for each in rendered.objects:
        for text in texts(each):
            assert not any(word in text for word in SECRETS), text
    for _, spec in pods(rendered):
        for container in every_container(spec):
            for variable in container["env"]:
                if variable["name"] in ("RINGFENCE_DATABASE_URL", "RINGFENCE_MASTER_KEY") or "SECRET_ACCESS_KEY" in variable["name"]:
                    assert variable.keys() == {"name", "valueFrom"} and variable["valueFrom"].keys() == {"secretKeyRef"}
            # Everyone who may list processes or pods sees arguments.
            assert "--token" not in json.dumps([container["command"], container.get("args")])


def test_secrets_of_the_server_are_not_in_pods_of_nodes() -> None:
    rendered = render(EVERYTHING)
    node = json.dumps(rendered.pod("DaemonSet"))
    for name in ("database", "master-key", "bucket", "certificate", "RINGFENCE_MASTER_KEY", "RINGFENCE_DATABASE_URL", "secretKeyRef"):
        assert name not in node, name
    assert "layers" not in rendered.config("node")


def test_files_with_secrets_are_read_by_their_container_alone() -> None:
    rendered = render({"server": {"tls": {"secretName": "certificate"}}})
    for _, spec in pods(rendered):
        for volume in spec["volumes"]:
            if "secret" in volume:
                assert volume["secret"]["defaultMode"] == 0o400
                mounts = [mount for container in every_container(spec) for mount in container["volumeMounts"] if mount["name"] == volume["name"]]
                assert len(mounts) == 1 and mounts[0]["readOnly"] is True


def test_sandboxes_outlive_what_the_cluster_does_to_nodes() -> None:
    """What the tests of pods rely on, and an operator."""
    rendered = render()
    daemons = rendered.of("DaemonSet")["spec"]
    assert daemons["updateStrategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}}
    spec = daemons["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] >= 75
    assert rendered.pod("Deployment")["spec"]["terminationGracePeriodSeconds"] >= 60
    # There is one server, whose data directory has one user.
    assert rendered.of("Deployment")["spec"]["strategy"] == {"type": "Recreate"}
    assert rendered.of("PersistentVolumeClaim")["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    # Several have none in common, and one at most is away because of an operator.
    several = render({"server": {"replicas": 2}})
    assert several.of("Deployment")["spec"]["strategy"]["type"] == "RollingUpdate"
    assert several.all("PersistentVolumeClaim") == []
    assert several.of("PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    assert rendered.all("PodDisruptionBudget") == []
    assert several.level("Deployment") == rendered.level("Deployment") == "restricted"
    [ports] = [rule["from"] for rule in several.of("NetworkPolicy", "-server")["spec"]["ingress"] if rule["ports"] == [{"port": "nodes"}]]
    assert [peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in ports] == ["node", "server"]
    assert spec["nodeSelector"] == {"ringfence/node": "true"}
    assert render({"nodes": {"nodeSelector": {"a": "b"}}}).pod("DaemonSet")["spec"]["nodeSelector"] == {"a": "b"}
    # Once it has started, nothing depends on the database: its outage takes no traffic from sandboxes, and restarts nothing.
    [server] = rendered.pod("Deployment")["spec"]["containers"]
    paths = {kind: server[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/health", "readiness": "/docs", "liveness": "/docs"}
