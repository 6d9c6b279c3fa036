"""A machine of a cluster without a cluster: pods from rendered templates, started by a real OCI runtime in namespaces of the test's own.

Each pod has a network namespace on a bridge of the test, where its database and its clients are as well. The image has the system of that of
a release and the program under test, as an overlay, like the images of a container engine. What a kubelet would do is in `containers`; the
rest of a cluster is absent: nothing schedules, and services are names in the hosts files of pods.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

from harness.patience import within
from harness.traffic import until
from kubernetes import containers
from kubernetes.chart import ROOT, Object, program
from kubernetes.containers import Machine as Given
from kubernetes.containers import Mount, Unknown, Volumes

NETWORK = "10.244.7"
# The bridge, where everything is that is in no pod.
OUTSIDE = f"{NETWORK}.1"
# Of the services of the server. In a cluster they are addresses of their own.
SERVER = f"{NETWORK}.200"
NAME = "worker-1"
# Enters namespaces of its own for mounts, lays the image, and becomes the runtime, with which all that ends.
RUN = """
set -eu
mount --make-rprivate /
mount -t tmpfs -o mode=755 none "$1/layer"
mkdir "$1/layer/upper" "$1/layer/work"
mount -t overlay -o "lowerdir=$2:$3,upperdir=$1/layer/upper,workdir=$1/layer/work" none "$1/root"
shift 3
exec "$@"
"""


class Container:
    """A container that was started."""

    def __init__(self, pod: Pod, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.pod = pod
        self.id = f"{pod.id}-{name}"
        self.process = process
        self.log = log

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def execute(self, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """`kubectl exec`."""
        command = [*self.pod.machine.runtime, "exec", self.id, *words]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=within(60), check=False)

    def state(self) -> Object:
        ran = subprocess.run([*self.pod.machine.runtime, "state", self.id], capture_output=True, text=True, check=False)
        return json.loads(ran.stdout) if ran.returncode == 0 else {}

    def pid(self) -> int:
        """Its first process, as the machine numbers it."""
        return self.state().get("pid", 0)

    def signal(self, number: signal.Signals) -> None:
        subprocess.run([*self.pod.machine.runtime, "kill", self.id, number.name], check=True, capture_output=True)

    def terminate(self, grace_s: float) -> int:
        """What a kubelet does at the end of a pod: SIGTERM, and SIGKILL after the grace period. Whatever is left in its control group is ended by the
        runtime. Returns the exit code."""
        self.signal(signal.SIGTERM)
        try:
            return self.process.wait(within(grace_s))
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def kill(self) -> None:
        if self.process.poll() is None:
            subprocess.run([*self.pod.machine.runtime, "kill", self.id, "SIGKILL"], check=False, capture_output=True)
            try:
                self.process.wait(within(20))
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(within(20))
        subprocess.run([*self.pod.machine.runtime, "delete", "--force", self.id], check=False, capture_output=True)


class Pod:
    """A pod: namespaces that its containers share, and their volumes."""

    def __init__(self, machine: Machine, template: Object, name: str, address: str) -> None:
        self.machine = machine
        self.spec: Object = template["spec"]
        self.name = name
        self.id = f"{machine.prefix}-{name}"
        self.address = address
        self.place = machine.place / name
        self.place.mkdir()
        self.running: list[Container] = []
        # What other runtimes call pause.
        self.pause = subprocess.Popen(["unshare", "--net", "--uts", "--ipc", "sleep", "infinity"], stdin=subprocess.DEVNULL)
        until(lambda: os.readlink(f"/proc/{self.pause.pid}/ns/net") != os.readlink("/proc/self/ns/net"), "the pod has a network")
        machine.connect(self.pause.pid, address, name)
        volumes = Volumes(self.place / "volumes", machine.claims, machine.config_maps, machine.secrets)
        volumes.place.mkdir()
        group = self.spec.get("securityContext", {}).get("fsGroup")
        self.volumes = {volume["name"]: volumes.prepare(volume, group) for volume in self.spec.get("volumes", [])}

    def namespaces(self) -> dict[str, str]:
        shared = {kind: f"/proc/{self.pause.pid}/ns/{file}" for kind, file in (("network", "net"), ("ipc", "ipc"), ("uts", "uts"))}
        return shared if self.spec.get("hostPID") else {**shared, "pid": ""}

    def start(self, name: str, **added: str) -> Container:
        """Starts one of its containers, with further variables of the test."""
        every = [*self.spec.get("initContainers", []), *self.spec["containers"]]
        [spec] = [container for container in every if container["name"] == name]
        if self.spec.get("automountServiceAccountToken", True) or self.spec.get("enableServiceLinks", True):
            raise Unknown("tokens and variables of services are not tried here")
        place = self.place / name
        shutil.rmtree(place, ignore_errors=True)
        for directory in ("layer", "root"):
            (place / directory).mkdir(parents=True)
        mounts = [
            Mount(self.volumes[mount["name"]], mount["mountPath"], mount.get("readOnly", False)) for mount in spec.get("volumeMounts", [])
        ]
        for file, text in (("hosts", self.machine.hosts()), ("resolv.conf", f"nameserver {OUTSIDE}\n")):
            (place / file).write_text(text)
            mounts.append(Mount(place / file, f"/etc/{file}", False))
        given = Given(NAME, self.machine.secrets, self.address)
        config = containers.bundle(self.spec, spec, given, mounts, place / "root", self.namespaces(), added)
        config["linux"]["cgroupsPath"] = f"/{self.id}-{name}"
        (place / "config.json").write_text(json.dumps(config))
        log = self.place / f"{name}.log"
        words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", RUN, "sh", place, self.machine.image, program("RINGFENCE_CONTAINER_SYSTEM")]
        command = [*words, *self.machine.runtime, "run", "--bundle", place, f"{self.id}-{name}"]
        with open(log, "wb") as said:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        started = Container(self, name, process, log)
        self.running.append(started)
        return started

    def complete(self, name: str, **added: str) -> int:
        """Runs an init container to its end."""
        return self.start(name, **added).process.wait(within(60))

    def probe(self, container: str, kind: str) -> int:
        """The answer to a probe, or 0 where nothing answers."""
        [spec] = [each for each in self.spec["containers"] if each["name"] == container]
        [get] = [value for key, value in spec[f"{kind}Probe"].items() if key == "httpGet"]
        [port] = [port["containerPort"] for port in spec["ports"] if port["name"] == get["port"]]
        return self.machine.answer(f"http://{self.address}:{port}{get['path']}")

    def delete(self) -> None:
        """Ends everything of it. The volumes go with it, but for claims and paths of the machine."""
        for container in reversed(self.running):
            container.kill()
        self.running = []
        self.pause.kill()
        self.pause.wait(within(20))
        shutil.rmtree(self.place)
        self.machine.pods.remove(self)


class Machine:
    """One machine, its image and its network."""

    def __init__(self, place: Path, binary: Path) -> None:
        self.place = place
        # What names of containers and their control groups begin with.
        self.prefix = f"rf-{os.getpid()}"
        self.claims = place / "claims"
        self.claims.mkdir()
        self.runtime = ["runc", "--root", str(place / "runc")]
        self.secrets: dict[str, dict[str, str]] = {}
        self.config_maps: dict[str, dict[str, str]] = {}
        # The address of each service, by its name. The pod behind it has it.
        self.services: dict[str, str] = {}
        self.pods: list[Pod] = []
        self.given = 1
        self.links = 0
        self.image = place / "image"
        for source, path in ((binary, "usr/bin/ringfence"), (ROOT / "packaging" / "image" / "start", "usr/lib/ringfence/start")):
            target = self.image / path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
            target.chmod(0o755)
        self.outside = subprocess.Popen(["unshare", "--net", "sleep", "infinity"], stdin=subprocess.DEVNULL)
        until(lambda: os.readlink(f"/proc/{self.outside.pid}/ns/net") != os.readlink("/proc/self/ns/net"), "there is a network")
        # Without an address of its own a bridge has that of one of its ports, and peers lose it when that one goes.
        for words in ("link set lo up", "link add bridge address 02:00:00:00:00:01 type bridge", f"address add {OUTSIDE}/24 dev bridge", "link set bridge up"):
            subprocess.run(self.beside("ip", *words.split()), check=True)

    def beside(self, *command: str | Path) -> list[str | Path]:
        """A command of this host in the network outside of the pods."""
        return ["nsenter", "--target", str(self.outside.pid), "--net", *command]

    def connect(self, pid: int, address: str, name: str) -> None:
        """Connects the network of a pod to the bridge."""
        self.links += 1
        link = f"v{self.links}"
        # By its address: a pod that takes the address of another is found at once.
        mac = f"02:00:00:00:00:{int(address.rpartition('.')[2]):02x}"
        for words in (f"link add {link} type veth peer name eth0 netns {pid} address {mac}", f"link set {link} master bridge up"):
            subprocess.run(self.beside("ip", *words.split()), check=True)
        for words in ("link set lo up", f"address add {address}/24 dev eth0", "link set eth0 up", f"route add default via {OUTSIDE}"):
            subprocess.run(["nsenter", "--target", str(pid), "--net", "ip", *words.split()], check=True)
        subprocess.run(["nsenter", "--target", str(pid), "--uts", "hostname", name], check=True)

    def hosts(self) -> str:
        return "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in self.services.items())

    def pod(self, template: Object, name: str, address: str = "") -> Pod:
        """A pod, with an address of its own or that of a service."""
        self.given += 1
        made = Pod(self, template, name, address or f"{NETWORK}.{self.given}")
        self.pods.append(made)
        return made

    def answer(self, url: str) -> int:
        words = ["curl", "--silent", "--max-time", "10", "--output", "/dev/null", "--write-out", "%{http_code}", url]
        return int(subprocess.run(self.beside(*words), capture_output=True, text=True, check=False).stdout or 0)

    def close(self) -> None:
        """Ends all pods."""
        for pod in [*self.pods]:
            pod.delete()

    def leave(self) -> None:
        """Ends the network."""
        self.outside.kill()
        self.outside.wait(within(20))
