"""Faults at random moments of a service of three servers and four nodes on one PostgreSQL and one bucket, each part in a network namespace of
its own: nothing is lost, half or twice.

Each cycle runs clients against all servers, does one thing to one part, lets the clients go on meanwhile, mends the part and
checks. A server or a node is killed, restarted, or stopped for some seconds and continued; what a machine sends to another one, or
to all others, is lost; the database crashes; the bucket is away; or a node drains, so that forks of its sandboxes go to others. Then:

- a sandbox whose create was answered and whose delete was not asked for is listed by every server, answers through any,
  and its program is one process, on one node; one whose delete was answered is gone at every server;
- a fork that was answered is such a sandbox, and has the program of its parent once more;
- a request without an answer may have happened or not, but not half;
- requests that fail meanwhile say that the platform is not available, and creates succeed soon after a server is lost.

RINGFENCE_FAULT_CYCLES sets the number of cycles, RINGFENCE_CRASH_SEED what happens when. A failure names its seed and its cycle.
With RINGFENCE_EARLIER_BIN, all parts begin with that program, and who is restarted goes on with the one under test: servers first.
"""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox
from e2b.exceptions import SandboxUnreachableException, ServiceBusyException

from harness.criu import criu_config
from harness.elapse import at_moment, slowly
from harness.hoststate import HostState, left_over
from harness.inside import host_pids
from harness.machines import HERE, Machines
from harness.patience import within
from harness.platform import binary
from harness.s3 import Gateway
from harness.servers import Node, Server, Service, running_service
from harness.traffic import until

CONFIG = "[sandbox]\ndisk_mb = 256\n" + criu_config()
CYCLES = int(os.environ.get("RINGFENCE_FAULT_CYCLES", "40"))
SEED = int(os.environ.get("RINGFENCE_CRASH_SEED", str(time.time_ns() % 1_000_000)))
CLIENTS = 3
POPULATION = 6
# How long creates may fail after a server is lost.
CREATES_AGAIN_S = 10.0
EARLIER = os.environ.get("RINGFENCE_EARLIER_BIN")
# What sandboxes are made of, as far as it can be counted.
COUNTED = ("namespaces", "mounts", "cgroups", "loops")
# One that does not answer is noticed after 15 s, so a few of the stops are longer.
STOPS_S = (0.5, 1.0, 2.0, 4.0, 18.0)
STOP_WEIGHTS = (4, 4, 4, 2, 1)
# Other nodes take over what a node has paused that is away for five seconds.
LOST_S = 9.0


@dataclass
class Known:
    """A sandbox whose create was answered."""

    id: str
    mark: str
    is_marked: bool = False
    # Its program is not started yet, and others leave it alone.
    is_new: bool = True


@dataclass
class World:
    """What the clients know, and therefore what must be true after a fault."""

    known: dict[str, Known] = field(default_factory=dict)
    deleting: set[str] = field(default_factory=set)
    deleted: set[str] = field(default_factory=set)
    marks_of_deleted: list[str] = field(default_factory=list)
    # A part is or was away, so that requests may fail: nodes may still move from one server to another for a moment after all are served.
    is_faulty: bool = False
    is_over: bool = False
    errors: list[BaseException] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)
    # The same threads in all cycles, because the client keeps connections for each.
    clients: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(CLIENTS))


class Unanswered(Exception):
    """A request that the fault has swallowed, or that was answered that it may be tried again."""


@pytest.fixture
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    work, earlier = tmp_path_factory.mktemp("f", numbered=True), Path(EARLIER) if EARLIER else None
    before = HostState.take()
    with Machines() as machines:
        gateway = Gateway(work, host=HERE)
        gateway.start()
        try:
            config = CONFIG + gateway.config()
            with running_service(work, 3, 4, config, is_placed=False, machines=machines, program=earlier) as service:
                service.gateway = gateway
                yield service
        finally:
            gateway.close()
    assert left_over(before) == {}


def ask(world: World, server: Server, method: str, path: str, json: object = None, refusal: str = "") -> httpx.Response:
    """One request to the API; an answer that is final. With this refusal it may be answered at any time."""
    headers = {"X-API-Key": server.credentials()["E2B_API_KEY"]}
    try:
        answer = httpx.request(method, f"{server.url}{path}", headers=headers, json=json, timeout=within(60))
    except httpx.TransportError as error:
        if world.is_faulty:
            raise Unanswered from error
        raise
    if answer.status_code == 503:
        assert world.is_faulty or answer.json().get("error_code") == refusal, answer.text
        world.counts["answered 503"] += 1
        raise Unanswered
    if world.is_faulty and answer.status_code == 500 and is_create_cut(answer.json()):
        # Its node, or the server that was to create it, has gone in the middle of it: clients that try again by themselves must not make
        # a second one.
        world.counts["cut off"] += 1
        raise Unanswered
    assert answer.status_code < 500, f"{method} {path}: {answer.status_code} {answer.text}"
    return answer


def is_create_cut(error: dict[str, object]) -> bool:
    """Whether it is not known if a sandbox was created."""
    return error["error_code"] == "sandbox_create_failed" or "it is not known whether it did" in str(error["message"])


def connected(server: Server, id: str) -> Sandbox:
    credentials = server.credentials()
    return Sandbox.connect(id, timeout=3600, api_key=credentials["E2B_API_KEY"], api_url=server.url, sandbox_url=server.url)


def create(world: World, server: Server, chance: random.Random) -> None:
    mark = f"rf-{chance.getrandbits(48):012x}"
    answer = ask(world, server, "POST", "/sandboxes", {"templateID": "base", "timeout": 3600})
    assert answer.status_code == 201, answer.text
    made = Known(answer.json()["sandboxID"], mark)
    with world.lock:
        world.known[made.id] = made
        world.counts["creates"] += 1
    try:
        connected(server, made.id).commands.run(f"exec -a {mark} sleep 86400", background=True, timeout=0).disconnect()
        # The shell becomes it a moment after its start was answered, and is not to be paused or forked before.
        until(lambda: bool(host_pids(mark)), "the shell has become it")
        made.is_marked = True
        made.is_new = False
    except Exception as error:
        # A command that was not answered may have been started.
        if not world.is_faulty and made.id in world.known:
            raise
        made.mark = ""
        made.is_new = False
        raise Unanswered from error


def change(world: World, server: Server, known: Known, wish: str) -> None:
    paths = {"delete": "", "pause": "/pause", "connect": "/connect"}
    method = "DELETE" if wish == "delete" else "POST"
    answer = ask(world, server, method, f"/sandboxes/{known.id}{paths[wish]}", {"timeout": 3600} if wish == "connect" else None)
    if wish == "delete":
        assert answer.status_code == 204, answer.text
        with world.lock:
            world.deleting.discard(known.id)
            world.deleted.add(known.id)
            world.marks_of_deleted += [known.mark] * bool(known.mark)
    elif known.id in world.known:
        # 409: it is paused already.
        assert answer.status_code in (200, 201, 204, 409), f"{wish}: {answer.status_code} {answer.text}"
    world.counts[f"{wish}s"] += 1


def fork(world: World, server: Server, parent: Known, count: int) -> None:
    body = {"timeout": 3600, "count": count}
    # One whose copies could not be started lately is not copied again for a while.
    answer = ask(world, server, "POST", f"/sandboxes/{parent.id}/fork", body, "sandbox_fork_delayed")
    if answer.status_code == 409 or parent.id not in world.known:
        # It is paused, or about to be, or another client has deleted it.
        return
    assert answer.status_code == 201, answer.text
    children = answer.json()
    assert len(children) == count, children
    for child in children:
        if "error" in child:
            assert world.is_faulty, child
            world.counts["forks that failed"] += 1
            continue
        with world.lock:
            world.known[child["sandbox"]["sandboxID"]] = Known(child["sandbox"]["sandboxID"], parent.mark, parent.is_marked, is_new=False)
            world.counts["forks"] += 1


def client(world: World, service: Service, chance: random.Random) -> None:
    """One client: uses a server after the other until the cycle is over."""
    while not world.is_over:
        server = chance.choice(service.servers)
        with world.lock:
            wish = chance.choice(("create", "delete", "pause", "connect", "connect", "fork"))
            old = [known for known in world.known.values() if not known.is_new]
            if len(old) < 2:
                wish = "create"
            elif wish in ("create", "fork") and len(world.known) >= POPULATION:
                wish = "delete"
            known = chance.choice(old) if wish != "create" else None
            if wish == "delete" and known:
                del world.known[known.id]
                world.deleting.add(known.id)
        try:
            if known is None:
                create(world, server, chance)
            elif wish == "fork":
                # Two may be on nodes of two other servers, while theirs drains.
                fork(world, server, known, chance.choice((1, 1, 2)))
            else:
                change(world, server, known, wish)
        except Unanswered:
            world.counts["unanswered"] += 1
            slowly(0.05)
        except BaseException as error:
            error.add_note(f"a client failed in: {wish} of {known.id if known else 'a new sandbox'} at {server.data_dir.name}")
            world.errors.append(error)
            return


def kill_server(service: Service, world: World, chance: random.Random) -> Callable[[], None]:
    server = chance.choice(service.servers)
    server.kill()
    # Until it is back, its nodes are served by the others.
    lost = time.monotonic()
    others = [other for other in service.servers if other is not server]

    def created() -> bool:
        try:
            create(world, chance.choice(others), chance)
        except Unanswered:
            return False
        return True

    until(created, "creates succeed after a server was lost", 60, every_s=0.1)
    took = time.monotonic() - lost
    assert took < within(CREATES_AGAIN_S), f"creates failed for {took:.1f} s"
    return server.start


def stop_server(service: Service, world: World, chance: random.Random) -> Callable[[], None]:
    return stopped(chance.choice(service.servers), chance)


def stop_node(service: Service, world: World, chance: random.Random) -> Callable[[], None]:
    return stopped(chance.choice(service.nodes), chance)


def stopped(part: Server | Node, chance: random.Random) -> Callable[[], None]:
    process = part.process
    assert process
    process.send_signal(signal.SIGSTOP)
    seconds = chance.choices(STOPS_S, STOP_WEIGHTS)[0]
    # For so long it is stopped.
    at_moment(seconds)
    return lambda: process.send_signal(signal.SIGCONT)


def kill_node(service: Service, world: World, chance: random.Random) -> Callable[[], None]:
    node = chance.choice(service.nodes)
    assert node.process
    node.process.kill()
    node.process.wait()
    # Now and then for so long that others take over what it has paused.
    if chance.random() < 0.25:
        at_moment(LOST_S)
    return node.launch


def lose_bucket(service: Service, world: World, chance: random.Random) -> Callable[[], None]:
    service.gateway.stop()
    return service.gateway.start


def drain_node(service: Service, world: World, chance: random.Random) -> Callable[[], None]:
    node, server = chance.choice(service.nodes), chance.choice(service.servers)
    drained = server.run("node", "drain", node.id)
    assert drained.returncode == 0, drained.stderr

    def undrain() -> None:
        undrained = server.run("node", "undrain", node.id)
        assert undrained.returncode == 0, undrained.stderr

    return undrain


def restart_server(service: Service, world: World, chance: random.Random) -> Callable[[], None]:
    server = next((server for server in service.servers if server.binary != binary()), None) or chance.choice(service.servers)
    server.binary = binary()
    assert server.terminate() == 0, server.log_tail(60)
    return server.start


def restart_node(service: Service, world: World, chance: random.Random) -> Callable[[], None]:
    node = next((node for node in service.nodes if node.binary != binary()), None) or chance.choice(service.nodes)
    # A node is never newer than a server.
    node.binary = binary() if all(server.binary == binary() for server in service.servers) else node.binary
    assert node.terminate() == 0, node.log()[-6000:]
    return node.launch


def crash_database(service: Service, world: World, chance: random.Random) -> Callable[[], None]:
    service.postgres.stop()
    return service.postgres.start


def cut_link(service: Service, world: World, chance: random.Random) -> Callable[[], None]:
    """What one machine sends to another one is lost, in one direction or in both."""
    server = chance.choice(service.servers)
    ends = [server.machine, chance.choice([part for part in (*service.servers, *service.nodes) if part is not server]).machine]
    chance.shuffle(ends)
    ways = [ends] if chance.random() < 0.5 else [ends, ends[::-1]]
    for source, to in ways:
        service.machines.cut(source, to)
    return cut_for_a_time(service, chance)


def cut_off(service: Service, world: World, chance: random.Random) -> Callable[[], None]:
    """What a machine sends to any other one is lost, though it hears them."""
    service.machines.cut(chance.choice([*service.servers, *service.nodes]).machine)
    return cut_for_a_time(service, chance)


def cut_for_a_time(service: Service, chance: random.Random) -> Callable[[], None]:
    # For so long it is cut.
    at_moment(chance.choices(STOPS_S, STOP_WEIGHTS)[0])
    return service.machines.mend


FAULTS = {
    "a server is killed": (kill_server, 3),
    "a server is stopped": (stop_server, 3),
    "a node is killed": (kill_node, 3),
    "a node is stopped": (stop_node, 2),
    "a server is restarted": (restart_server, 2),
    "a node is restarted": (restart_node, 2),
    "a link is cut": (cut_link, 3),
    "a machine is not heard": (cut_off, 2),
    "the database crashes": (crash_database, 2),
    "the bucket is away": (lose_bucket, 1),
    "a node drains": (drain_node, 2),
}


def cycle(service: Service, world: World, chance: random.Random, name: str) -> None:
    world.is_over = False
    fault = FAULTS[name][0]
    seeds = [random.Random(chance.getrandbits(64)) for _ in range(CLIENTS)]
    running = [world.clients.submit(client, world, service, own) for own in seeds]
    try:
        # The fault comes at a random moment of what the clients do.
        at_moment(chance.uniform(0.1, 1.0))
        world.is_faulty = True
        mend = fault(service, world, chance)
        # The clients go on without the part.
        at_moment(chance.uniform(0.1, 1.0))
        mend()
    finally:
        world.is_over = True
        wait(running)
    for one in running:
        one.result()
    assert not world.errors, world.errors
    until(service.is_served, lambda: f"all nodes are served: {[server.nodes() for server in service.servers]}", 60)
    check(world, service, chance)


def listed(server: Server) -> set[str]:
    headers = {"X-API-Key": server.credentials()["E2B_API_KEY"]}
    answer = httpx.get(f"{server.url}/v2/sandboxes?limit=100&state=running,paused", headers=headers, timeout=within(30))
    assert answer.status_code == 200, answer.text
    return {one["sandboxID"] for one in answer.json()}


def check(world: World, service: Service, chance: random.Random) -> None:
    """The state of the world after a fault."""

    def agreed() -> set[str] | None:
        lists = [listed(server) for server in service.servers]
        return lists[0] if all(one == lists[0] for one in lists) else None

    # A kill whose node was away is done when that is back.
    present: set[str] = set()

    def kills_are_done() -> bool:
        nonlocal present
        found = agreed()
        present = found or set()
        return found is not None and not world.deleted & found

    until(kills_are_done, lambda: f"deleted sandboxes are gone at every server: {world.deleted & present}", 30)
    lost = set(world.known) - present
    assert not lost, f"sandboxes were lost: {lost}"
    world.deleted |= world.deleting - present
    for name in present - set(world.known):
        # What was made or deleted without an answer is there or not, and whole: it answers before it is removed.
        server = chance.choice(service.servers)
        answers(server, name)
        assert Sandbox.kill(name, api_key=server.credentials()["E2B_API_KEY"], api_url=server.url)
        world.deleted.add(name)
    world.deleting.clear()
    list(world.clients.map(lambda known: answers(chance.choice(service.servers), known.id), world.known.values()))
    # Forks have the mark of their parent.
    marks = Counter(known.mark for known in world.known.values() if known.is_marked)
    until(lambda: all(len(host_pids(mark)) <= marks[mark] for mark in world.marks_of_deleted), "programs of deleted sandboxes have ended")
    world.marks_of_deleted.clear()
    for mark, expected in marks.items():
        found = host_pids(mark)
        assert len(found) == expected, f"{[one.id for one in world.known.values() if one.mark == mark]} have their program {len(found)} times"


def answers(server: Server, id: str) -> None:
    last: list[Exception] = []

    def said() -> str | None:
        # A node that is connected is taken over first, and its sandboxes are answered 503 until then. Traffic is answered so once by a
        # server that believes that one which has just been restarted has the node: it asks again for the next request.
        try:
            return connected(server, id).commands.run("echo alive").stdout
        except ServiceBusyException as error:
            last[:] = [error]
        except SandboxUnreachableException as error:
            if "not ready, try again" not in str(error):
                raise
            last[:] = [error]
        return None

    assert until(said, lambda: f"{id} answers at {server.data_dir.name}, which says {last}", 10, every_s=0.1) == "alive\n"


def counted() -> dict[str, int]:
    counts = HostState.take().counts()
    return {kind: counts[kind] for kind in COUNTED}


@contextmanager
def named(service: Service, number: int, name: str) -> Iterator[None]:
    """A failure says how to get there again, and what the logs have of the sandboxes that it names."""
    try:
        yield
    except BaseException as error:
        ids = re.findall(r"\bi[0-9a-z]{20}\b", str(error))
        for part in (*service.servers, *service.nodes):
            for line in part.log().splitlines():
                if any(id in line for id in ids):
                    print(f"{part.log_path.stem}: {line}")
        error.add_note(f"in cycle {number} of {CYCLES} ({name}); again with RINGFENCE_CRASH_SEED={SEED}")
        raise


def test_faults_at_random_moments(service: Service) -> None:
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    world = World()
    # Each node makes what it makes once. Servers tell each other about once a second what nodes they have.
    has_run: set[str] = set()
    world.is_faulty = True
    while len(has_run) < len(service.nodes):
        server = chance.choice(service.servers)
        try:
            answer = ask(world, server, "POST", "/sandboxes", {"templateID": "base", "timeout": 3600})
        except Unanswered:
            slowly(0.1)
            continue
        id = answer.json()["sandboxID"]
        answers(server, id)
        has_run.add(service.postgres.ask(f"SELECT node_id FROM sandboxes WHERE id = '{id}'"))
        ask(world, server, "DELETE", f"/sandboxes/{id}")
    none: dict[str, int] = {}

    def is_steady() -> bool:
        earlier, now = dict(none), counted()
        none.update(now)
        return earlier == now

    until(is_steady, "the host is steady", 30, every_s=1.0)
    world.is_faulty = False
    happened: Counter[str] = Counter()
    begun = time.monotonic()
    names, weights = list(FAULTS), [weight for _, weight in FAULTS.values()]
    # Each kind at least once, then by chance.
    chosen = chance.sample(names, len(names))
    for number in range(CYCLES):
        name = chosen[number] if number < len(chosen) else chance.choices(names, weights)[0]
        with named(service, number, name):
            cycle(service, world, chance, name)
        happened[name] += 1
    for id in list(world.known):
        ask(world, chance.choice(service.servers), "DELETE", f"/sandboxes/{id}")
    now: dict[str, int] = {}

    def is_empty() -> bool:
        now.update(counted())
        return now == none

    until(is_empty, lambda: f"nothing is left of any sandbox: the host has {now} instead of {none}", 30, every_s=0.2)
    print(f"{CYCLES} faults in {time.monotonic() - begun:.0f} s: {dict(happened)}; {dict(world.counts)}; nothing lost, half or twice")
