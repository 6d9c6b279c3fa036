"""The example of a worker for a hosted agent service, as it is, with a queue over HTTP: one sandbox for each session, paused when it is idle,
resumed at the next message, killed at the end; and a worker that is killed in the middle of something.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from e2b import Sandbox, SandboxQuery, SandboxState, Secret
from e2b.sandbox.sandbox_api import SandboxInfo

from harness.work_queue import TOKEN, Work, WorkQueue
from harness import model_api
from harness.model_api import SAID
from harness.patience import within
from harness.platform import Platform
from harness.traffic import until

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "agent_worker.py"
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def queue(platform: Platform) -> Iterator[WorkQueue]:
    # What is to come again earlier, a test lets expire.
    queue = WorkQueue(lease_s=within(30))
    yield queue
    queue.close()


@pytest.fixture
def start(queue: WorkQueue, platform: Platform) -> Iterator[Start]:
    """Starts workers. What they run is the message itself, as a program of the shell, unless a test says otherwise."""
    with ExitStack() as stack:

        def worker(command: str = "sh", *options: str) -> subprocess.Popen[str]:
            words = [sys.executable, EXAMPLE, queue.url, command, "--template", "base", "--idle", "2", "--renew", "0.2", "--wait", "1", *options]
            started = subprocess.Popen(words, env={**os.environ, "QUEUE_TOKEN": TOKEN}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            stack.callback(lambda: (started.kill(), started.wait()))
            return started

        yield worker
    for info in sandboxes():
        Sandbox.kill(info.sandbox_id)


def sandboxes(session: str | None = None, state: SandboxState | None = None) -> list[SandboxInfo]:
    """The sandboxes of the workers, or those of a session."""
    named = {"worker": "agent-worker"} | ({"session": session} if session else {})
    return Sandbox.list(query=SandboxQuery(metadata=named, state=[state] if state else None)).next_items()


def answered(work: Work) -> tuple[int, str]:
    assert work.done.wait(within(60)), work
    assert work.answer is not None
    return work.answer["code"], work.answer["output"]


def kill(worker: subprocess.Popen[str], queue: WorkQueue) -> None:
    """Kills a worker, the only one, and waits until the queue has nothing of it."""
    worker.kill()
    worker.wait()
    until(lambda: queue.waiting == 0, "the queue waits for nobody")


def test_sessions(queue: WorkQueue, start: Start) -> None:
    start()
    # A process of a session is there at its next message, as its files are.
    first = [queue.put(name, f"echo {name} >>turns; sleep 1000 >/dev/null & echo $! >pid; wc -l <turns; env") for name in ("one", "two")]
    second = queue.put("one", "echo more >>turns; kill -0 $(cat pid) && cat turns")
    for work in first:
        code, output = answered(work)
        # The token of the queue is not for what runs in the sandbox.
        assert (code, output.split()[0], TOKEN in output) == (0, "1", False)
    assert answered(second) == (0, "one\nmore\n")
    (one,), (two,) = sandboxes("one"), sandboxes("two")
    assert one.sandbox_id != two.sandbox_id
    # The platform pauses what is idle.
    until(lambda: len(sandboxes(state=SandboxState.PAUSED)) == 2, "both sandboxes are paused", within_s=30)
    assert answered(queue.put("two", "kill -0 $(cat pid) && cat turns")) == (0, "two\n")
    assert [info.sandbox_id for info in sandboxes("two")] == [two.sandbox_id]
    assert [info.state for info in sandboxes("one")] == [SandboxState.PAUSED]
    # A message that fails is an answer as well, and the session goes on.
    assert answered(queue.put("two", "echo why >&2; exit 7")) == (7, "why\n")
    assert answered(queue.put("two", "cat turns")) == (0, "two\n")
    # A session ends whether it runs or is paused.
    for name in ("one", "two"):
        assert answered(queue.put(name, kind="end"))[0] == 0
        assert sandboxes(name) == []
    assert answered(queue.put("two", kind="end"))[0] == 0
    assert all(work.given == 1 for work in queue.all)


def test_a_worker_that_is_killed_in_the_middle(queue: WorkQueue, start: Start) -> None:
    worker = start()
    work = queue.put("cut", "echo begun >>ran; while [ ! -e go ]; do sleep 0.05; done; cat ran")
    info = until(lambda: next(iter(sandboxes("cut")), None), "the sandbox is there", within_s=30)
    box = Sandbox.connect(info.sandbox_id, timeout=600)
    until(lambda: box.files.exists("ran"), "the message is being worked at", within_s=30)
    until(lambda: work.renewed >= 2, "the work is renewed", within_s=30)
    kill(worker, queue)
    queue.expire(work)
    start()
    # It was given out again, and the one that runs is waited for.
    until(lambda: work.given == 2, "the work is given out again", within_s=30)
    until(lambda: box.commands.run("pgrep -c flock || true").stdout == "1\n", "the second one waits", within_s=30)
    box.files.write("go", "")
    assert answered(work) == (0, "begun\n")
    # One that was done but not answered is not done again. The worker lets an idle sandbox be paused.
    box = Sandbox.connect(box.sandbox_id, timeout=600)
    box.files.write("ran", "changed")
    work.done.clear()
    queue.expire(work)
    assert answered(work) == (0, "begun\n")
    box = Sandbox.connect(box.sandbox_id, timeout=600)
    assert len(sandboxes("cut")) == 1 and box.files.read("ran") == "changed"


def test_a_sandbox_that_is_lost(queue: WorkQueue, start: Start) -> None:
    start()
    work = queue.put("lost", "touch begun; exec sleep 1000")
    info = until(lambda: next(iter(sandboxes("lost")), None), "the sandbox is there", within_s=30)
    box = Sandbox.connect(info.sandbox_id, timeout=600)
    until(lambda: box.files.exists("begun"), "the message is being worked at", within_s=30)
    box.kill()
    assert answered(work) == (1, "the sandbox of the session has ended")
    assert answered(queue.put("lost", "ls; echo new")) == (0, "new\n")


def test_what_cannot_begin_is_left_to_be_given_out_again(queue: WorkQueue, start: Start) -> None:
    worker = start("sh", "--template", "there-is-none")
    work = queue.put("early", "echo begun")
    assert worker.stdout
    said = [worker.stdout.readline(), worker.stdout.readline()]
    assert "early/0 is left: " in said[1] and "there-is-none" in said[1] and not work.done.is_set(), said
    kill(worker, queue)
    queue.expire(work)
    start()
    assert answered(work) == (0, "begun\n")


def test_a_worker_that_is_told_to_end_finishes_first(queue: WorkQueue, start: Start) -> None:
    worker = start()
    work = queue.put("last", "touch begun; while [ ! -e go ]; do sleep 0.05; done; echo done")
    info = until(lambda: next(iter(sandboxes("last")), None), "the sandbox is there", within_s=30)
    box = Sandbox.connect(info.sandbox_id, timeout=600)
    until(lambda: box.files.exists("begun"), "the message is being worked at", within_s=30)
    worker.send_signal(signal.SIGTERM)
    box.files.write("go", "")
    assert answered(work) == (0, "done\n")
    assert worker.wait(within(30)) == 0
    later = queue.put("last", "echo never")
    assert not later.done.is_set() and later.given == 0


def test_a_worker_of_a_coding_agent(queue: WorkQueue, start: Start, template: str) -> None:
    Secret.create("openai-key", model_api.key("api.openai.com"))
    rule = {"transform": {"headers": {"Authorization": f"Bearer {Secret.fill('openai-key')}"}}}
    network = {"rules": {"api.openai.com": [rule]}, "allow_out": ["api.openai.com"], "deny_out": ["0.0.0.0/0"]}
    create = json.dumps({"network": network, "envs": {"CODEX_API_KEY": "placeholder"}})
    start('codex exec --skip-git-repo-check --yolo -- "$(cat)"', "--template", template, "--create", create)
    code, output = answered(queue.put("coding", "RUN env | grep ^CODEX END"))
    assert code == 0 and SAID in output and "CODEX_API_KEY=placeholder" in output, output
    assert model_api.key("api.openai.com") not in output
