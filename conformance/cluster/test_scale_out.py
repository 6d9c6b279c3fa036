"""The page `scale-out`, as it is written: from a platform in one process to two servers and two nodes, without losing a sandbox.

The tests are one story, in this order. A backup of what comes of it is the last part, as the page `backup` says.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2b import Sandbox

from docs.blocks import ROOT, blocks_of
from harness import hoststate
from harness.criu import criu_config
from harness.hoststate import HostState, left_over
from harness.patience import within
from harness.platform import Platform, binary
from harness.postgres import Postgres, programs
from harness.servers import Node, Server
from harness.traffic import until

CONFIG = "[sandbox]\ndisk_mb = 256\n" + criu_config()
COUNT = "i=0; while :; do i=$((i+1)); echo $i > /tmp/count; sleep 0.05; done"


class Box(Platform):
    """A platform whose database is in its data directory at first."""

    database: str | None = None

    def environment(self) -> dict[str, str]:
        own = super().environment()
        return own | {"RINGFENCE_DATABASE_URL": self.database} if self.database else own


class Story:
    """What there is at each step."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.postgres = Postgres(work / "pg")
        self.postgres.start()
        self.box = Box(work / "box", CONFIG)
        self.servers = [self.server("server", self.box.port), self.server("server-b")]
        self.nodes: list[Node] = []
        self.running = ""
        self.paused = ""

    def server(self, name: str, port: int = 0) -> Server:
        """A server of the service, which is where the box was if it has that port."""
        server = Server(self.work / name, self.postgres.url, None, CONFIG)
        server.port = port or server.port
        server.domain = f"sandbox.localhost:{self.box.port}"
        return server

    def run(self, page: str, words: str, stdin: str = "") -> str:
        """Runs the one block of a page with some words, for the directories and addresses of this story."""
        [block] = [block for block in blocks_of(page, (ROOT / page).read_text()) if block.language == "sh" and words in block.text]
        text = block.text
        here = {
            "/var/lib/ringfence-server-b": self.servers[1].data_dir,
            "/var/lib/ringfence-server": self.servers[0].data_dir,
            "https://server-a.example.com:3100": self.servers[0].nodes_address,
            "https://server-b.example.com:3100": self.servers[1].nodes_address,
        }
        for name, value in here.items():
            text = text.replace(name, str(value))
        commands = self.work / "bin"
        commands.mkdir(exist_ok=True)
        # Services are started and stopped by the test.
        for name, script in (("systemctl", "#!/bin/sh\n"), ("ringfence", f'#!/bin/sh\nexec "{binary()}" "$@"\n')):
            (commands / name).write_text(script)
            (commands / name).chmod(0o755)
        ran = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=within(120),
            env=self.box.environment()
            | {
                "PATH": f"{commands}:{programs()}:{os.environ['PATH']}",
                "RINGFENCE_DATA_DIR": str(self.box.data_dir),
                "RINGFENCE_DATABASE_URL": self.postgres.url,
                "DATABASE": self.postgres.url,
                "RINGFENCE_CONFIG": str(self.box.config_path),
            },
            cwd=self.work,
        )
        assert ran.returncode == 0, f"{block.name}: {ran.stderr}"
        return ran.stdout

    def goes_on(self) -> None:
        """The program that was begun at the start still counts, and the sandbox that was paused is there."""
        sandbox = Sandbox.connect(self.running, timeout=600)
        assert sandbox.commands.run("kill -0 $(cat /tmp/pid) && echo alive").stdout == "alive\n"
        before = int(sandbox.files.read("/tmp/count") or 0)
        until(lambda: int(sandbox.files.read("/tmp/count") or 0) > before, "it counts on")
        states = {info.sandbox_id: info.state.value for info in Sandbox.list().next_items()}
        assert states[self.running] == "running" and states[self.paused] == "paused", states

    def close(self) -> None:
        for part in (*self.servers, *self.nodes):
            if part.process and part.process.poll() is None:
                part.process.kill()
                part.process.wait(within(30))
            part.process = None
        for node in self.nodes[1:]:
            node.down()
        for server in self.servers:
            server.close()
        self.box.database = self.postgres.url
        self.box.close()
        self.postgres.stop()


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    before = HostState.take()
    story = Story(Path(tmp_path_factory.mktemp("o", numbered=True)))
    try:
        yield story
    finally:
        story.close()
    assert left_over(before) == {}


def test_one_box_begins_with_sandboxes(story: Story) -> None:
    story.box.start()
    story.box.use()
    sandbox = Sandbox.create(timeout=600)
    sandbox.commands.run(f"setsid sh -c '{COUNT}' >/dev/null 2>&1 & echo $! > /tmp/pid", background=False)
    until(lambda: sandbox.files.exists("/tmp/count"), "it counts")
    story.running = sandbox.sandbox_id
    paused = Sandbox.create(timeout=600, metadata={"of": "the box"})
    paused.files.write("/tmp/kept", "kept")
    paused.pause()
    story.paused = paused.sandbox_id
    story.goes_on()


def test_the_database_moves_to_postgres(story: Story) -> None:
    assert story.box.terminate() == 0
    assert "copied" in story.run("docs/scale-out.md", "split database")
    # A unit that has lost the address of the database.
    refused = story.box.run("up", "--listen", "127.0.0.1:0")
    assert refused.returncode == 1 and "ringfence.db.moved" in refused.stderr, refused
    story.box.database = story.postgres.url
    story.box.start()
    story.goes_on()


def test_the_box_becomes_a_server_and_a_node(story: Story) -> None:
    assert story.box.terminate() == 0
    story.run("docs/scale-out.md", "split node")
    [server, _] = story.servers
    left = set(os.listdir(story.box.data_dir))
    assert not left & {"secret.key", "credentials.env", "node.json", "builds", "tls"} and "link.json" in left, left
    assert not [name for name in left if name.startswith("ringfence.db")], left
    server.start()
    node = Node(story.box.data_dir, story.servers)
    story.nodes.append(node)
    node.launch()
    until(lambda: len(server.serves()) == 1, node.log, within_s=60)
    server.use()
    story.goes_on()


def test_another_machine_gets_sandboxes(story: Story) -> None:
    [server, _] = story.servers
    token = story.run("docs/scale-out.md", "ringfence node token")
    node = Node(story.work / "node", story.servers)
    story.nodes.append(node)
    join = "ringfence node join"
    [block] = [block for block in blocks_of("page", (ROOT / "docs/scale-out.md").read_text()) if join in block.text]
    assert block.text.split("\n")[1].startswith("ringfence node --data-dir"), "then it runs"
    addresses = [each.nodes_address for each in story.servers]
    joined = subprocess.run(
        [binary(), "node", "join", *addresses, "--data-dir", node.node_dir], input=token, capture_output=True, text=True, env=node.environment()
    )
    assert joined.returncode == 0, joined.stderr
    node.launch()
    until(lambda: len(server.serves()) == 2, node.log, within_s=60)
    ids = {each["id"] for each in server.nodes()}

    def spread() -> bool:
        sandbox = Sandbox.create(timeout=60)
        placed = story.postgres.ask(f"SELECT node_id FROM sandboxes WHERE id = '{sandbox.sandbox_id}'")
        sandbox.kill()
        ids.discard(placed)
        return not ids

    until(spread, "sandboxes are on both", within_s=60)
    story.goes_on()


def test_another_server_takes_over(story: Story) -> None:
    [server, other] = story.servers
    story.run("docs/scale-out.md", "install -m 600")
    other.start()
    other.use()
    story.goes_on()
    assert server.terminate() == 0
    until(lambda: len(other.serves()) == 2, other.log_tail, within_s=60)
    story.goes_on()
    resumed = Sandbox.connect(story.paused, timeout=600)
    assert resumed.files.read("/tmp/kept") == "kept"
    resumed.pause()


def test_a_backup_brings_it_back(story: Story) -> None:
    """All servers are lost, with their database; the hosts of the nodes are not."""
    [server, other] = story.servers
    story.run("docs/backup.md", "cp -p /var/lib/ringfence-server/secret.key")
    assert other.terminate() == 0
    story.postgres.stop()
    story.postgres = Postgres(story.work / "pg2")
    story.postgres.start()
    for lost in story.servers:
        (lost.data_dir / "secret.key").unlink()
        lost.data_dir.rename(story.work / f"lost-{lost.data_dir.name}")
        lost.database = story.postgres.url
    story.run("docs/backup.md", "pg_restore")
    server.start()
    until(lambda: len(server.serves()) == 2, server.log_tail, within_s=60)
    # The keys of clients are in the database, by their hashes: what they had is good.
    os.environ["E2B_API_URL"] = os.environ["E2B_SANDBOX_URL"] = server.url
    story.goes_on()
    for id_ in (story.running, story.paused):
        assert Sandbox.kill(id_)
    for part in (server, *story.nodes):
        assert part.terminate() == 0
    for node in story.nodes:
        down = node.down()
        assert down.returncode == 0, down.stderr
