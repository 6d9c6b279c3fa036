"""The platform where /usr is an overlay, as in a container: sandboxes of `base` see a copy of it in the data directory.

The copy takes long enough that a platform can be killed in the middle of it. Nothing of a copy that is not complete is ever
seen in a sandbox, and what is left of it goes away with the next start.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2b import Sandbox

from harness.elapse import at_moment
from harness.hoststate import HostState, left_over
from harness.inside import root, status
from harness.overlaid import CAPABILITY, PAST_NS, Overlaid, overlaid
from harness.patience import within
from harness.platform import Platform
from harness.traffic import until

SEED = int(os.environ.get("RINGFENCE_CRASH_SEED", str(time.time_ns() % 1_000_000)))
# Kills in the middle of a copy.
KILLS = 3
PLACE = "/usr/lib/overlaid"
# Of every program: name, type, mode, owner, time, target and size. Times of directories are those of what `base` puts above
# them, and so is `python`.
LISTED = (
    r"find /usr/bin /usr/lib/overlaid /usr/libexec -path /usr/bin/python -o \( -type f -o -type l \) "
    r"-printf '%p %y %m %U:%G %T@ %l %s\n' -o -type d -printf '%p %y %m %U:%G\n' | sort"
)


@pytest.fixture
def place(work_dir: Path) -> Iterator[Overlaid]:
    before = HostState.take()
    with overlaid(work_dir / "overlay") as place:
        yield place
    assert left_over(before) == {}


@pytest.fixture
def server(work_dir: Path, place: Overlaid) -> Iterator[Platform]:
    """A platform there that was not started yet."""
    before = HostState.take()
    server = Platform(work_dir / "overlaid")
    server.starter = place.starter
    try:
        yield server
        if server.process:
            assert server.terminate() == 0, server.log_tail()
        if server.data_dir.exists():
            down = server.down()
            assert down.returncode == 0, down.stderr
        assert left_over(before) == {}
    finally:
        server.close()


def versions(server: Platform) -> set[str]:
    """The versions of `base`, complete or not."""
    return {path.name for path in (server.data_dir / "base").iterdir() if path.name != "current"}


def current(server: Platform) -> str:
    return os.readlink(server.data_dir / "base" / "current")


def findings(server: Platform) -> dict[str, dict[str, str]]:
    report = json.loads(server.run("doctor", "--format", "json").stdout)
    return {check["name"]: check for check in report["checks"]}


def test_sandboxes_have_what_usr_has(server: Platform, place: Overlaid) -> None:
    found = findings(server)
    assert found["base template"]["status"] == "ok"
    assert "keeps a copy of it" in found["base template"]["detail"] and " MB" in found["base template"]["detail"]
    assert found["data directory"]["status"] == "ok"
    server.start()
    server.use()
    assert server.log().count("gets a copy of") == 1
    copy = server.data_dir / "base" / current(server) / "host"
    assert copy.parent.stat().st_mode & 0o777 == 0o700
    # The same as before there was one.
    assert findings(server)["base template"]["detail"] == found["base template"]["detail"]

    with Sandbox.create() as box, Sandbox.create() as other:
        assert box.commands.run("python3 -c 'import ssl, sqlite3; print(6 * 7)'").stdout == "42\n"
        assert root(box, "id -un").strip() == "root" and box.commands.run("id -un").stdout == "user\n"
        if Path("/usr/bin/sudo").exists():
            assert box.commands.run("sudo id -u").stdout == "0\n"
        listed = place.run(LISTED)
        assert len(listed.splitlines()) > 100
        assert set(root(box, LISTED).splitlines()) ^ set(listed.splitlines()) == set()
        assert root(box, f"ls {PLACE}").split() == ["hard", "hard2", "plain", "setuid", "soft"]
        inside = root(box, f"stat -c '%a %u:%g %Y %h %i' {PLACE} {PLACE}/setuid {PLACE}/soft {PLACE}/hard {PLACE}/hard2").splitlines()
        seconds = PAST_NS // 1_000_000_000
        assert [line.rsplit(" ", 2)[0] for line in inside] == [
            f"2775 0:42 {seconds}", f"6751 12:34 {seconds}", f"777 56:78 {seconds}", f"644 0:0 {seconds}", f"644 0:0 {seconds}"
        ]
        assert inside[3] == inside[4] and inside[3].split()[3] == "2"
        assert os.getxattr(copy / "lib/overlaid/plain", "security.capability") == CAPABILITY
        assert status(box, "test -e /usr/share/doc") == 1, "hidden in the overlay"

        # A sandbox changes only its own.
        root(box, f"echo changed > {PLACE}/plain; rm {PLACE}/hard; chmod 0 /usr/bin/env; echo new > /usr/bin/new; chmod 755 /usr/bin/new")
        assert root(box, f"cat {PLACE}/plain /usr/bin/new {PLACE}/hard2") == "changed\nnew\nhard"
        assert root(other, f"cat {PLACE}/plain {PLACE}/hard; ls /usr/bin/new 2>&1 || true").startswith("plainhardls: cannot access")
        assert other.commands.run("env true; echo $?").stdout == "0\n"
    assert (copy / "lib/overlaid/plain").read_text() == "plain" and not (copy / "bin/new").exists()
    assert place.path(f"{PLACE}/plain").read_text() == "plain"


def test_a_data_directory_on_an_overlay_is_refused(server: Platform, place: Overlaid) -> None:
    outside, server.data_dir = server.data_dir, Path("/usr/lib/data")
    try:
        finding = findings(server)["data directory"]
        assert finding["status"] == "missing" and "/usr/lib (an overlay) cannot have mapped ids" in finding["detail"]
        assert "volume" in finding["fix"]
        server.launch()
        assert server.process and server.process.wait(within(60)) != 0
        server.process = None
    finally:
        server.data_dir = outside
    assert "cannot have mapped ids" in server.log_tail() and not place.path("/usr/lib/data").exists()


def test_kill_9_in_the_middle_of_a_copy(server: Platform, place: Overlaid) -> None:
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    copy = server.data_dir / "base" / "unfinished" / "host"
    hits = 0
    for attempt in range(1, KILLS * 4 + 1):
        server.launch()
        until(lambda: server.log().count("gets a copy of") == attempt, "a copy begins", every_s=0.002)
        at_moment(chance.uniform(0, 0.5))
        server.kill()
        hits += copy.exists()
        if hits == KILLS:
            break
        if not copy.exists():
            # It was complete before, and the next one begins with other packages.
            _change(place, f"attempt-{attempt}")
    assert hits == KILLS, f"only {hits} kills came in the middle; again with RINGFENCE_CRASH_SEED={SEED}"
    server.start()
    server.use()
    until(lambda: versions(server) == {current(server)}, "what was left is removed")
    with Sandbox.create() as box:
        assert root(box, f"cat {PLACE}/plain") == "plain"


def _change(place: Overlaid, name: str) -> None:
    """Changes /usr as a package does."""
    place.path(f"/usr/lib/{name}").write_text(name)


def test_a_change_of_packages_makes_another_copy(server: Platform, place: Overlaid) -> None:
    server.start()
    server.use()
    first = current(server)
    with Sandbox.create() as early:
        _change(place, "added")
        until((server.data_dir / "base" / "unfinished" / "host").exists, "a copy has begun", every_s=0.002)
        # Nobody waits for it, and nobody sees a part of it.
        with Sandbox.create() as meanwhile:
            if current(server) == first:
                assert status(meanwhile, "test -e /usr/lib/added") == 1
            assert meanwhile.commands.run("python3 -c 'print(1)'").stdout == "1\n"
        until(lambda: current(server) != first, "the copy is complete", within_s=60)
        with Sandbox.create() as late:
            assert root(late, "cat /usr/lib/added") == "added"
        assert status(early, "test -e /usr/lib/added") == 1
        assert early.commands.run("python3 -c 'print(1)'").stdout == "1\n"
        assert first in versions(server), "a sandbox has it"
    until(lambda: versions(server) == {current(server)}, "the copy that no sandbox has is removed", within_s=60)

    # A platform that is killed leaves its sandboxes, which another one adopts.
    box = Sandbox.create(timeout=600)
    server.kill()
    server.start()
    server.use()
    assert root(box, "cat /usr/lib/added") == "added"
    assert box.kill()

    # One that is stopped does not wait for a copy, and what is left of it goes away with the next start.
    _change(place, "last")
    until((server.data_dir / "base" / "unfinished" / "host").exists, "a copy has begun", every_s=0.002)
    assert server.terminate() == 0, server.log_tail()
    server.start()
    server.use()
    until(lambda: versions(server) == {current(server)}, "what was left is removed", within_s=60)
    with Sandbox.create() as box:
        assert root(box, "cat /usr/lib/last") == "last"
