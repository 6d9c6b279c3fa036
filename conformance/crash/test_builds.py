"""kill -9 at random moments of builds of templates: each started build becomes ready, with exactly what its steps write.

Each cycle begins builds (a request, an upload, a start), kills the platform at a random moment, sometimes a second time
while it begins them again, and checks after the restart:

- a build whose start was answered becomes ready, and a sandbox from its template has the files of all steps;
- a build whose start got no answer waits for it or does the same;
- nothing half-written is left: no upload, no layer, no sandbox of a step.

How long builds take differs by ten times between machines, so builds without a kill are measured first, and the moments of
all cycles are spread over that time.

RINGFENCE_BUILD_CYCLES sets the number of cycles, RINGFENCE_CRASH_SEED the moments as parts of that time. A failure names both.
"""

from __future__ import annotations

import hashlib
import io
import os
import random
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
from e2b import Sandbox

from harness.elapse import at_moment
from harness.platform import Platform
from harness.traffic import until

CYCLES = int(os.environ.get("RINGFENCE_BUILD_CYCLES", "20"))
SEED = int(os.environ.get("RINGFENCE_CRASH_SEED", str(time.time_ns() % 1_000_000)))
BUILDERS = 2
UPLOAD_BYTES = 300_000


@dataclass
class Build:
    """What a client knows of its build."""

    name: str
    mark: str
    content: bytes
    template: str = ""
    build: str = ""
    started: bool = False
    # Whether it was under way just before the platform was killed.
    interrupted: bool = False

    @property
    def path(self) -> str:
        return f"/templates/{self.template}/builds/{self.build}"


def archive(content: bytes) -> bytes:
    """The upload of one file."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as tar:
        info = tarfile.TarInfo("file")
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
    return data.getvalue()


def begin(api: httpx.Client, build: Build) -> None:
    """Requests, uploads and starts, until it is done or the platform dies."""
    made = api.post("/v3/templates", json={"name": build.name}).json()
    build.template, build.build = made["templateID"], made["buildID"]
    hashed = hashlib.sha256(build.content).hexdigest()
    upload = api.get(f"/templates/{build.template}/files/{hashed}").json()
    assert httpx.put(upload["url"], content=archive(build.content), timeout=30).status_code == 200
    steps = [
        {"type": "RUN", "args": [f"echo {build.mark} > ~/mark; seq 1 20000 > ~/numbers"]},
        {"type": "COPY", "args": ["file", "/home/user/copy", "", ""], "filesHash": hashed},
        {"type": "RUN", "args": ["mkdir ~/many && cd ~/many && touch $(seq 1 300) && rm ~/numbers"]},
        {"type": "RUN", "args": ["sha256sum < ~/copy > ~/sum; ln -s many ~/link"]},
    ]
    body = {"fromTemplate": "base", "steps": steps}
    answer = api.post(f"/v2{build.path}", json=body)
    assert answer.status_code == 202, answer.text
    build.started = True


def status(api: httpx.Client, build: Build) -> str:
    answer = api.get(f"{build.path}/status")
    assert answer.status_code == 200, answer.text
    assert answer.json()["status"] != "error", answer.text
    return answer.json()["status"]


def check(api: httpx.Client, build: Build) -> bool:
    """Whether the build became ready. One that was not started may wait for that for ever."""
    if not build.template:
        return False
    ended = ("ready",) if build.started else ("ready", "waiting")
    if until(lambda: (now := status(api, build)) in ended and now, f"{build} has ended", 60) == "waiting":
        return False
    with Sandbox.create(build.name, timeout=60) as box:
        seen = box.commands.run("cat ~/mark ~/sum; ls ~ ~/link/ | wc -l")
    # Five names, a blank line, two headings and 300 files.
    want = f"{build.mark}\n{hashlib.sha256(build.content).hexdigest()}  -\n308\n"
    assert seen.stdout == want, seen
    return True


def test_kill_9_at_random_moments_of_builds(crashing: Platform) -> None:
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    whole_s = undisturbed_s(crashing, chance)
    # One moment in each of as many equal parts of the time as there are cycles, and of some time after that.
    moments = [1.1 * whole_s * (part + chance.random()) / CYCLES for part in range(CYCLES)]
    chance.shuffle(moments)
    print(f"builds take {whole_s:.2f} s, the moments are {' '.join(f'{moment:.2f}' for moment in moments)} s")
    ready = interrupted = 0
    for cycle, moment_s in enumerate(moments):
        again_s = chance.uniform(0, whole_s / 2) if chance.random() < 0.3 else None
        builds = drawn(chance, str(cycle))
        # On a busy machine no random moment may meet a build; these do, then.
        is_under_way = cycle >= CYCLES - CYCLES // 3 - 1 and (interrupted == 0 or ready <= CYCLES // 2)
        try:
            ready += kill_and_check(crashing, builds, None if is_under_way else moment_s, again_s)
        except BaseException as error:
            error.add_note(f"in cycle {cycle} of {CYCLES}; again with RINGFENCE_CRASH_SEED={SEED}")
            raise
        interrupted += sum(build.interrupted for build in builds)
    print(f"{CYCLES} cycles, {ready} builds became ready, {interrupted} were interrupted")
    assert ready > CYCLES // 2, "most kills came before a build was started"
    assert interrupted > 0, "all kills came before a build was started or after it was ready"


def drawn(chance: random.Random, cycle: str) -> list[Build]:
    """The builds of a cycle, with marks and contents of their own."""
    return [
        Build(f"crash-{cycle}-{number}", f"m{chance.getrandbits(48):012x}", chance.randbytes(UPLOAD_BYTES))
        for number in range(BUILDERS)
    ]


def client_of(server: Platform) -> httpx.Client:
    return httpx.Client(base_url=server.url, headers={"X-API-Key": server.credentials()["E2B_API_KEY"]}, timeout=30)


def undisturbed_s(server: Platform, chance: random.Random) -> float:
    """Seconds from the first request of builds side by side until all are ready, on this machine at this hour."""
    builds = drawn(chance, "measured")
    with client_of(server) as api, ThreadPoolExecutor(BUILDERS) as threads:
        begun = time.monotonic()
        list(threads.map(lambda build: begin(api, build), builds))
        until(lambda: all(status(api, build) == "ready" for build in builds), "builds without a kill are ready", 60)
        took = time.monotonic() - begun
        for build in builds:
            assert check(api, build)
            assert api.delete(f"/templates/{build.template}").status_code == 204
    return took


def kill_and_check(server: Platform, builds: list[Build], moment_s: float | None, again_s: float | None) -> int:
    """Kills the platform some seconds after the builds begin, or once all are under way, and perhaps again after the start. Returns
    how many became ready."""
    errors: list[Exception] = []
    dying = threading.Event()

    def client(build: Build) -> None:
        try:
            with client_of(server) as api:
                begin(api, build)
        except Exception as error:
            if not dying.is_set():
                errors.append(error)

    threads = [threading.Thread(target=client, args=(build,), daemon=True) for build in builds]
    with client_of(server) as api:
        for thread in threads:
            thread.start()
        if moment_s is None:
            until(lambda: errors or all(build.started for build in builds), "the builds are under way", 60)
        else:
            at_moment(moment_s)
        for build in builds:
            build.interrupted = build.started and status(api, build) != "ready"
    dying.set()
    server.kill()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a client hangs although the platform is gone"
    if errors:
        raise ExceptionGroup("clients failed while no kill was under way", errors)
    server.start()
    if again_s is not None:
        at_moment(again_s)
        server.kill()
        server.start()
    with client_of(server) as api:
        ready = sum(check(api, build) for build in builds)
        for build in builds:
            if build.template:
                assert api.delete(f"/templates/{build.template}").status_code == 204
    # Builds have ended, so nothing is being written.
    files, layers = server.data_dir / "builds" / "files", server.data_dir / "layers"
    until(lambda: list(files.rglob(".partial-*")) == [], "no upload is unfinished")
    until(lambda: [path.name for path in layers.iterdir() if len(path.name) != 64] == [], "no layer is unfinished")
    until(lambda: server.run("sandbox", "list", "--format", "json").stdout.strip() == "[]", "no sandbox is left")
    return ready
