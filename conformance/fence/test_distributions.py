"""Templates from a real distribution: Debian, made of its packages, in a registry of the fake internet; what sandboxes need
is installed from a repository there, or is missing and named. And a server of it that answers when a sandbox is created.
"""

from __future__ import annotations

import gzip
import hashlib
import inspect
import subprocess
import sys
import tarfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox, Template

from escape import test_agent_survives, test_files_of_the_host, test_kernel, test_limits, test_network, test_proc_and_sys
from harness.internet import Internet
from harness.platform import Platform
from harness.registry import Registry, layer, member, registry
from python.test_base import INSTALLS, wheel

# Attempts of the suite of escapes: at the kernel, at what shows the host, at its files, at the agent and at neighbours.
ESCAPES = (
    test_kernel.test_calls_that_reach_for_the_kernel_or_the_host,
    test_kernel.test_i386_calls,
    test_kernel.test_no_new_namespace_and_no_way_into_another,
    test_kernel.test_socket_families,
    test_kernel.test_capabilities_and_filter_of_everything_that_runs,
    test_kernel.test_the_agent_cannot_be_entered,
    test_kernel.test_no_device_of_the_host,
    test_proc_and_sys.test_only_its_own_processes,
    test_proc_and_sys.test_a_signal_to_everybody_stays_inside,
    test_proc_and_sys.test_masked_files_of_proc,
    test_proc_and_sys.test_nothing_of_proc_and_sys_is_writable,
    test_proc_and_sys.test_sys_shows_no_hardware_and_no_neighbour,
    test_proc_and_sys.test_no_mount_names_a_sandbox_or_a_cgroup,
    test_proc_and_sys.test_no_neighbour_is_named_anywhere,
    test_proc_and_sys.test_of_cgroups_only_its_own_is_visible_and_nothing_writable,
    test_proc_and_sys.test_the_workload_is_limited_and_the_agent_is_not_in_its_group,
    test_proc_and_sys.test_ids_of_two_sandboxes_and_of_the_host_are_apart,
    test_files_of_the_host.test_writes_to_usr_stay_inside,
    test_files_of_the_host.test_a_setuid_program_made_inside_is_nothing_on_the_host,
    test_files_of_the_host.test_setuid_inside_leads_to_root_inside_only,
    test_files_of_the_host.test_the_agent_binary_cannot_be_changed,
    test_files_of_the_host.test_links_that_point_out_lead_nowhere,
    test_network.test_unix_sockets_of_the_host_are_not_there,
    test_network.test_the_control_channel_refuses_peers_inside,
    test_network.test_its_own_agent_wants_the_token_from_inside_too,
    test_network.test_two_sandboxes_cannot_reach_each_other,
    test_limits.test_a_disk_filler_meets_its_own_limit,
    test_limits.test_memory_in_files_counts_too,
)
ESCAPES_OF_USERS = (test_agent_survives.test_nothing_that_acts_on_another_process_reaches_the_agent,)

HOST, PORT, SITE = "registry.example.org", 5000, "www.example.com"
# What an image of a distribution lacks; it is fetched with what it needs.
PACKAGES = "sudo ca-certificates openssl curl iproute2"
APP = '''
import http.server, numpy
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = str(int(numpy.arange(10).sum())).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.ThreadingHTTPServer(("", 8000), Answer).serve_forever()
'''
READY = "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/')"


@pytest.fixture(scope="module")
def outside(internet: Internet) -> list[str]:
    """A prefix for commands that need the packages of the real internet."""
    return ["nsenter", f"--net=/proc/self/fd/{internet.outside}"]


@pytest.fixture(scope="module")
def debian(internet: Internet, outside: list[str], work_dir: Path) -> Iterator[Registry]:
    """Debian with Python, without sudo and certificates; a second time with a repository that has both."""
    directory = work_dir / "debian"
    repository = internet.documents / "distribution"
    for path in (directory, repository):
        path.mkdir(parents=True)
    root = directory / "root.tar"
    install = f"apt-get -q -y --no-install-recommends --download-only -o Dir::Cache::archives=/var/tmp/fetched install {PACKAGES}"
    fetch = f'chroot "$1" sh -c "mkdir -p /var/tmp/fetched/partial && {install}"'
    hooks = [f"--customize-hook={fetch}", f'--customize-hook=mv "$1"/var/tmp/fetched/*.deb {repository} && rm -r "$1"/var/tmp/fetched']
    made = subprocess.run(
        [*outside, "mmdebstrap", "--quiet", "--mode=root", "--variant=apt", "--dpkgopt=force-unsafe-io", "--include=python3", *hooks, "bookworm", root],
        pass_fds=[internet.outside], capture_output=True, text=True, timeout=400, check=False,
    )
    assert made.returncode == 0, made.stderr
    index = []
    for file in sorted(repository.glob("*.deb")):
        control = subprocess.run(["dpkg-deb", "-f", file], check=True, capture_output=True, text=True).stdout.strip()
        data = file.read_bytes()
        index.append(f"{control}\nFilename: ./{file.name}\nSize: {len(data)}\nSHA256: {hashlib.sha256(data).hexdigest()}\n")
    (repository / "Packages").write_text("\n".join(index))

    def sources(archive: tarfile.TarFile) -> None:
        line = f"deb [trusted=yes] http://{SITE}/files/distribution ./\n"
        member(archive, "etc/apt/sources.list", line.encode(), mode=0o644)

    image = gzip.compress(root.read_bytes(), 1)
    root.unlink()
    with registry(internet, work_dir / "debian-registry", HOST, PORT) as server:
        server.push("debian", "bare", [image])
        server.push("debian", "12", [image, layer(sources)])
        yield server


@pytest.fixture
def name(platform: Platform) -> Iterator[str]:
    name = f"t{uuid.uuid4().hex[:12]}"
    yield name
    headers = {"X-API-Key": platform.credentials()["E2B_API_KEY"]}
    httpx.delete(f"{platform.url}/templates/{name}", headers=headers, timeout=60)


def build(template: object, name: str) -> list[str]:
    lines: list[str] = []
    Template.build(template, name, on_build_logs=lambda entry: lines.append(f"{entry.level} {entry.message}"))
    return lines


def test_what_sandboxes_need_is_installed(debian: Registry, name: str) -> None:
    lines = build(Template().from_image(f"{HOST}:{PORT}/debian:12").run_cmd("sudo -n id -un > ~/by"), name)
    assert not [line for line in lines if line.startswith("warn")], lines
    with Sandbox.create(name, timeout=120) as box:
        seen = box.commands.run('cat ~/by; . /etc/os-release; echo "$ID"; id -un; sudo -n cat /etc/shadow | wc -l; echo ${BASH_VERSION%%.*}')
        assert seen.stdout.split()[:3] == ["root", "debian", "user"]
        certificates = box.commands.run("grep -c BEGIN /etc/ssl/certs/ca-certificates.crt; sudo apt-get check; dpkg --audit")
        assert int(certificates.stdout.split()[0]) > 100
        # What people's start and ready commands expect.
        assert box.commands.run("curl --version | head -c 4; ss -V").stdout.startswith("curl")
        # What the host's own /usr has and this image not.
        assert not box.files.exists("/usr/bin/gcc")


def test_what_cannot_be_installed_is_named(debian: Registry, name: str) -> None:
    """The package sources of the image do not answer here as a repository does."""
    lines = build(Template().from_image(f"{HOST}:{PORT}/debian:bare").run_cmd("id -un"), name)
    warned = [line for line in lines if line.startswith("warn")]
    assert ["sudo" in line and "ca-certificates" in line for line in warned] == [True], lines
    with Sandbox.create(name, timeout=120) as box:
        assert box.commands.run("id -un; pwd").stdout == "user\n/home/user\n"


@pytest.fixture(scope="module")
def imported(debian: Registry, platform: Platform) -> Iterator[str]:
    """A template from Debian, with Python alone."""
    name = f"t{uuid.uuid4().hex[:12]}"
    build(Template().from_image(f"{HOST}:{PORT}/debian:12"), name)
    yield name
    httpx.delete(f"{platform.url}/templates/{name}", headers={"X-API-Key": platform.credentials()["E2B_API_KEY"]}, timeout=60)


@pytest.fixture(params=[*ESCAPES, *ESCAPES_OF_USERS])
def escape(request: pytest.FixtureRequest) -> Callable[..., None]:
    return request.param


def test_nothing_escapes_from_a_sandbox_of_an_image(imported: str, platform: Platform, escape: Callable[..., None]) -> None:
    """What is tried in sandboxes of `base`, as far as it needs no program that this image lacks."""
    with Sandbox.create(imported, timeout=120) as sandbox, Sandbox.create(imported, timeout=120) as neighbour:
        given = {"sandbox": sandbox, "neighbour": neighbour, "platform": platform}
        wanted = {name: given[name] for name in inspect.signature(escape).parameters if name in given}
        for user in ("root", "user"):
            if escape in ESCAPES_OF_USERS:
                escape(**wanted, user=user)
            elif user == "root":
                escape(**wanted)


def test_a_server_with_numpy_answers_when_create_returns(
    debian: Registry, internet: Internet, outside: list[str], platform: Platform, name: str, tmp_path: Path
) -> None:
    wheels = internet.documents / "simple" / "numpy"
    wheels.mkdir(parents=True)
    for package, into in (("numpy==2.2.6", wheels), ("pip==25.1.1", tmp_path)):
        subprocess.run(
            [*outside, sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--python-version=3.11", "--only-binary=:all:", "-d", into, package],
            pass_fds=[internet.outside], check=True, capture_output=True, timeout=300,
        )
    next(tmp_path.glob("pip-*.whl")).rename(tmp_path / "pip.zip")
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "main.py").write_text(APP)
    index = f"--index-url http://{SITE}/files/simple/ --trusted-host {SITE}"
    dockerfile = f"""
FROM {HOST}:{PORT}/debian:12
COPY pip.zip /opt/pip.zip
RUN python3 /opt/pip.zip/pip install --break-system-packages {index} numpy
WORKDIR /srv/app
COPY app .
USER user
"""
    template = Template(file_context_path=tmp_path).from_dockerfile(dockerfile)
    build(template.set_start_cmd("exec python3 main.py", f'python3 -c "{READY}"'), name)
    for _ in range(2):
        with Sandbox.create(name, timeout=120) as box:
            answer = httpx.get(f"{platform.url}/", headers={"Host": box.get_host(8000)}, timeout=60)
            assert (answer.status_code, answer.text) == (200, "45")
    # Beside what root has installed, in one interpreter; the package has headers.
    with Sandbox.create(name, timeout=120) as box:
        box.files.write("/tmp/rfgreet-1.0-py3-none-any.whl", wheel("rfgreet", "1.0"))
        box.files.write("/tmp/installs.py", INSTALLS.replace('"-m", "pip"', '"/opt/pip.zip/pip"'))
        options = "--break-system-packages --no-index --disable-pip-version-check"
        assert box.commands.run(f"python3 /tmp/installs.py {options} /tmp/rfgreet-1.0-py3-none-any.whl").stdout == "1.0\n"
        # Where a user without write permission for the directories of the system installs.
        packages = "python3 -c 'import site, sys; print(site.getusersitepackages() in sys.path)'"
        assert box.commands.run(packages).stdout == "True\n"
