"""The pods of a release, started for real: the rendered specs, by an OCI runtime, with a real database and the published client.

The tests are one story, in this order, on one release: that is what an operator does, and it takes a start of everything once.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from harness.patience import within
from harness.traffic import until
from docs.blocks import blocks_of
from kubernetes import chart
from kubernetes.conftest import Release
from kubernetes.machine import NAME
from kubernetes.page import PAGE

# By which a process of a sandbox is found, whatever else runs on this host.
SECONDS = 1_000_000 + os.getpid()
STATUS = re.compile(r"^(\w+):\s+(.*)$", re.MULTILINE)


def status(pid: int) -> dict[str, str]:
    return dict(STATUS.findall(Path(f"/proc/{pid}/status").read_text()))


def processes_of(pod_id: str) -> list[int]:
    """Processes in control groups of a pod's containers."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if f"/{pod_id}" in Path(f"/proc/{entry}/cgroup").read_text():
                found.append(int(entry))
        except OSError:
            continue
    return found


def test_the_page_installs_what_the_server_needs(release: Release) -> None:
    """With its commands and values as they are written."""
    page = release.page
    for words in ("docker push", "create secret generic ringfence-database", "kubectl taint", "helm install"):
        page.run(page.block(words))
    state = page.state()
    assert state["namespaces"]["ringfence"] == {"pod-security.kubernetes.io/enforce": "privileged"}
    assert state["labels"][NAME] == {"ringfence/node": "true"} and state["taints"][NAME] == {"ringfence/node": "true:NoSchedule"}
    assert not {"database-url", "key"} & set(os.listdir(page.place))
    verdicts = chart.judged((page.place / "rendered.yaml").read_text())
    assert [error for verdict in verdicts for error in verdict.errors] == []
    [server] = [verdict.object for verdict in verdicts if verdict.object["kind"] == "Deployment"]
    env = server["spec"]["template"]["spec"]["containers"][0]["env"]
    for reference in (variable["valueFrom"]["secretKeyRef"] for variable in env if "valueFrom" in variable):
        assert state["secrets"][reference["name"]][reference["key"]].strip()
    assert re.fullmatch("[0-9a-f]{64}\n", state["secrets"]["ringfence-master-key"]["key"])


def test_the_server_starts_as_a_user_that_nobody_knows(release: Release) -> None:
    release.launch_server()
    assert release.server and release.server_pod
    release.wait_ready()
    found = status(release.server.pid())
    assert found["Uid"].split() == ["64010"] * 4 and found["Gid"].split() == ["64010"] * 4
    for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb"):
        assert int(found[f"Cap{kind}"], 16) == 0, kind
    assert (found["NoNewPrivs"], found["Seccomp"]) == ("1", "2")
    assert not release.server.execute("sh", "-c", "getent passwd 64010").stdout
    for path in ("/", "/usr", "/etc", "/etc/ringfence", "/var"):
        assert release.server.execute("touch", f"{path}/x").returncode != 0, path
    said = release.server.said()
    assert "error" not in said.lower() and "unknown variable" not in said, said
    for kind in ("startup", "readiness", "liveness"):
        assert release.server_pod.probe("server", kind) == 200, kind


def test_keys_of_the_server_are_private_and_elsewhere_than_the_master_key(release: Release) -> None:
    assert release.server
    data = "/var/lib/ringfence/server"
    listed = release.server.execute("stat", "--format", "%a %u %n", data, f"{data}/credentials.env").stdout
    assert [(line.split()[0][-3:], line.split()[1]) for line in listed.splitlines()] == [("700", "64010"), ("600", "64010")]
    # The key of the authority of the nodes is in the database, encrypted.
    assert release.server.execute("ls", f"{data}/nodes").stdout.split() == []
    assert release.server.execute("ls", f"{data}/secret.key").returncode != 0


def test_metrics_are_on_a_port_of_their_own(release: Release) -> None:
    assert release.server_pod
    assert release.machine.answer(f"http://{release.server_pod.address}:9464/metrics") == 200
    assert release.machine.answer(f"http://{release.server_pod.address}:3000/metrics") != 200


def test_names_below_the_domain_have_the_certificate_of_the_secret(release: Release) -> None:
    """Its files belong to root, and to the group of the server."""
    assert release.server_pod and release.server
    chain = release.machine.place / "tls.crt"
    for name in ("sandbox.example.com", "3000-abc.sandbox.example.com"):
        at = f"{name}:3000:{release.server_pod.address}"
        words = ["curl", "--silent", "--cacert", chain, "--resolve", at, "--output", "/dev/null", "--write-out", "%{http_code}", f"https://{name}:3000/docs"]
        ran = subprocess.run(release.machine.beside(*words), capture_output=True, text=True)
        assert ran.returncode == 0 and ran.stdout != "000", (name, ran)
    listed = release.server.execute("stat", "--dereference", "--format", "%a %u %g", "/etc/ringfence-tls/tls.key").stdout
    assert listed.split() == ["440", "0", "64010"]


def test_an_outage_of_the_database_takes_nobody_from_the_service(release: Release) -> None:
    assert release.server_pod and release.server
    release.database.stop()
    pod = release.server_pod
    until(lambda: pod.probe("server", "startup") == 503, "the server notices", within_s=30)
    assert [pod.probe("server", kind) for kind in ("readiness", "liveness")] == [200, 200]
    release.database.start()
    until(lambda: pod.probe("server", "startup") == 200, "the server notices", within_s=30)
    assert release.server.process.poll() is None


def test_a_machine_joins_with_its_own_token_and_once(release: Release) -> None:
    pod = release.create_pod_of_node()
    waiting = pod.start("join")
    until(lambda: "has no token for it" in waiting.said(), waiting.said)
    assert waiting.process.poll() is None, "it waits for an operator"
    found = status(waiting.pid())
    assert int(found["CapBnd"], 16) == 0 and (found["NoNewPrivs"], found["Seccomp"]) == ("1", "2")
    # As the page says, and as the kubelet updates a secret: with a rename of the link to its files.
    release.page.run(release.page.block("create secret generic ringfence-join"), release.server)
    [(machine, token)] = release.page.state()["secrets"]["ringfence-join"].items()
    assert machine == NAME
    release.token = token
    tokens = pod.volumes["join"]
    (tokens / "..2").mkdir()
    (tokens / "..2" / NAME).write_text(token)
    (tokens / "..2" / NAME).chmod(0o400)
    (tokens / NAME).symlink_to(f"..data/{NAME}")
    (tokens / "..next").symlink_to("..2")
    (tokens / "..next").rename(tokens / "..data")
    assert waiting.process.wait(within(60)) == 0, waiting.said()
    assert (release.node_dir / "link.json").stat().st_mode & 0o777 == 0o600
    assert token not in waiting.said()
    # The next pod of this machine needs none, and the token is good for no other one.
    os.rename(tokens / "..2", tokens / "..3")
    assert pod.complete("join") == 0
    assert "joined" not in pod.running[-1].said()


def test_a_sandbox_runs_by_the_published_client(release: Release) -> None:
    host = os.uname().nodename
    release.launch_node()
    assert NAME in release.operator("node", "list"), "the server lists the machine, not the pod"
    assert os.uname().nodename == host
    assert release.node_pod and release.node
    first, said = release.client("create", "echo $((6 * 7)); id -un; nproc >/dev/null").split("\n", 1)
    assert said == "42\nuser\n"
    assert "without limits" not in release.node.said()
    said = release.page.run(release.page.block("delete secret ringfence-join"), release.server)
    assert NAME in said and "ringfence-join" not in release.page.state()["secrets"]
    said = release.page.run(release.page.block("credentials.env"), release.server)
    assert len(re.findall("e2b_[0-9a-f]{40}", said)) == 2, "that of the first team, and one of a new team"
    report = release.node.execute("ringfence", "doctor").stdout
    assert "ringfence up` works on this host" in report and "missing" not in report, report
    assert (release.node_dir / "base/current/host/bin/python3").exists(), "a copy of the image's /usr"
    release.sandbox = first


def test_a_token_is_good_once(release: Release) -> None:
    assert release.node
    url = next(line for line in release.node.pod.spec["initContainers"][0]["env"] if line["name"] == "SERVER_URL")["value"]
    ran = release.node.execute("ringfence", "node", "join", url, "--data-dir", "/tmp/other", stdin=release.token)
    assert ran.returncode == 1 and "token" in ran.stderr and release.token.strip() not in ran.stderr, ran


def test_processes_of_sandboxes_are_not_in_the_group_of_the_container(release: Release) -> None:
    assert release.node and release.node_pod
    assert release.node.pid() in processes_of(release.node_pod.id)
    release.client(release.sandbox, f"setsid sleep {SECONDS} >/dev/null 2>&1 </dev/null & echo begun")
    asleep = until(sleepers, "it sleeps")
    assert len(asleep) == 1
    unified = re.search(r"^0::(.*)$", Path(f"/proc/{asleep[0]}/cgroup").read_text(), re.MULTILINE)
    assert unified and unified[1].startswith("/ringfence-"), unified


def sleepers() -> list[int]:
    """The processes that sandboxes of these tests run and nothing else does."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if Path(f"/proc/{entry}/cmdline").read_bytes() == f"sleep\0{SECONDS}\0".encode():
                found.append(int(entry))
        except OSError:
            continue
    return found


def test_a_sandbox_outlives_the_pod_of_its_server(release: Release) -> None:
    assert release.server and release.server_pod
    assert release.server.terminate(60) == 0
    release.server_pod.delete()
    asleep = sleepers()
    release.launch_server()
    release.wait_ready()
    until(lambda: release.states() == ["connected"], release.said, within_s=60)
    assert sleepers() == asleep
    assert release.client(release.sandbox, "echo still here") == "still here\n"


@pytest.mark.parametrize("way", ["replaced", "killed"])
def test_a_sandbox_outlives_the_pod_of_its_node(release: Release, way: str) -> None:
    """With control groups of version 2, as on a machine of a cluster of today."""
    assert release.node and release.node_pod
    asleep = sleepers()
    assert len(asleep) == 1
    release.as_with_version_2()
    if way == "replaced":
        assert release.node.terminate(75) == 0
    else:
        release.node.signal(signal.SIGKILL)
        release.node.process.wait(within(30))
    assert sleepers() == asleep
    release.node_pod.delete()
    pod = release.create_pod_of_node()
    assert pod.complete("join") == 0
    release.launch_node()
    assert release.client(release.sandbox, "echo still here") == "still here\n"
    assert sleepers() == asleep


def test_everything_ends_with_the_sandbox(release: Release) -> None:
    assert release.client("kill", release.sandbox) == "True\n"
    until(lambda: sleepers() == [], "the sandbox has ended")


def test_a_machine_leaves_as_the_page_says(release: Release) -> None:
    assert release.node
    [listed] = json.loads(release.operator("node", "list", "--format", "json"))
    release.page.run(release.page.block("node forget"), release.server, id=listed["id"])
    assert release.page.state()["labels"][NAME] == {}
    assert release.states() == ["forgotten"]
    node = release.node
    until(lambda: "trying again" in node.said(), "the node is refused")


def test_every_block_of_the_page_is_tried() -> None:
    tried = {
        *("docker push", "generic ringfence-database", "kubectl taint", "helm install"),
        *("generic ringfence-join", "delete secret", "credentials.env", "node forget"),
    }
    blocks = [block for block in blocks_of(PAGE.name, PAGE.read_text()) if block.language == "sh"]
    assert [block.name for block in blocks if not any(words in block.text for words in tried)] == []
