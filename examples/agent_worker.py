"""A worker for a hosted agent service: it takes the messages of sessions from a queue, and runs each in the sandbox of its session.

    QUEUE_TOKEN=... python agent_worker.py https://queue.example.com 'codex exec --skip-git-repo-check --yolo -- "$(cat)"'

The command reads the message from its standard input, and what it prints is the answer. A session has one sandbox, which is there from its
first message until its end, and is paused by the platform when no message has come for a while. The worker keeps nothing: its sandboxes
are found by their metadata, and what it had begun when it was stopped or killed is given out again by the queue and goes on where it
was. So any number of workers can serve one queue.

What it needs of a queue, over HTTP with `Authorization: Bearer QUEUE_TOKEN`:

    GET  /work?wait=SECONDS   {"id", "session", "kind": "message" or "end", "text"}, or 204 if there is none in that time. The next one of a
                              session is given out when the one before is done, and one that nobody renews for a minute, again.
    POST /work/ID/renew       it is being worked at; 404 or 410: another worker has done it
    POST /work/ID/done        {"code", "output"}
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import threading
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from e2b import CommandExitException, NotFoundException, Sandbox, SandboxQuery

# Longer than any message takes: if the worker is gone by then, the sandbox is paused in the middle of it, and goes on when it is connected to.
WORK_S = 3600
# Runs a command for a message once, whoever asks how often, and says what it said. The lock is not for what it leaves in the background.
ONCE = """mkdir -p ~/.worker && cd ~/.worker && exec 9>"$1.lock" && flock 9 || exit 1
if [ ! -e "$1.code" ]; then
  (cd && sh -c "$2") <"$1.message" >"$1.output" 2>&1 9>&-
  echo $? >"$1.new" && mv "$1.new" "$1.code"
fi
cat "$1.output"
exit "$(cat "$1.code")"
"""


class Queue:
    """The queue of the service."""

    def __init__(self, url: str, token: str) -> None:
        self.url, self.token = url.rstrip("/"), token

    def ask(self, method: str, path: str, body: object = None) -> dict[str, str] | None:
        """What it answers; None where that is nothing."""
        request = urllib.request.Request(self.url + path, method=method, data=None if body is None else json.dumps(body).encode())
        request.add_header("Authorization", f"Bearer {self.token}")
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=60) as answer:
            content = answer.read()
        return json.loads(content) if content else None


class Worker:
    """Messages of all sessions, some at a time."""

    def __init__(self, queue: Queue, options: argparse.Namespace) -> None:
        self.queue, self.options = queue, options
        self.stopping = threading.Event()
        # One permit for each message that may be worked at, so that none is taken which would have to wait.
        self.free = threading.Semaphore(options.at_once)

    def run(self) -> None:
        with ThreadPoolExecutor(self.options.at_once) as pool:
            while not self.stopping.is_set():
                if not self.free.acquire(timeout=1):
                    continue
                work = self.take()
                if work is None:
                    self.free.release()
                else:
                    pool.submit(self.work, work)

    def take(self) -> dict[str, str] | None:
        try:
            return self.queue.ask("GET", f"/work?wait={self.options.wait}")
        except (OSError, ValueError) as error:
            print(f"the queue does not answer: {error}", flush=True)
            self.stopping.wait(2)
            return None

    def work(self, work: dict[str, str]) -> None:
        path = f"/work/{urllib.parse.quote(work['id'], safe='')}"
        ended = threading.Event()
        renewing = threading.Thread(target=self.renew, args=(path, ended), daemon=True)
        renewing.start()
        try:
            answer = self.end(work) if work["kind"] == "end" else self.message(work)
            self.queue.ask("POST", f"{path}/done", answer)
            print(f"{work['session']}: {work['id']} is done with {answer['code']}", flush=True)
        except Exception as error:
            # Nobody renews it any more, so it is given out again.
            print(f"{work['session']}: {work['id']} is left: {error}", flush=True)
        finally:
            ended.set()
            self.free.release()

    def renew(self, path: str, ended: threading.Event) -> None:
        while not ended.wait(self.options.renew):
            try:
                self.queue.ask("POST", f"{path}/renew", {})
            except OSError as error:
                print(f"{path} was not renewed: {error}", flush=True)

    def found(self, session: str) -> str | None:
        """The sandbox of a session, running or paused."""
        pages = Sandbox.list(query=SandboxQuery(metadata={"worker": self.options.name, "session": session}))
        while pages.has_next:
            for info in pages.next_items():
                return info.sandbox_id
        return None

    def message(self, work: dict[str, str]) -> dict[str, object]:
        session, ident = work["session"], work["id"]
        if sandbox := self.found(session):
            # Resumes it if it is paused.
            box = Sandbox.connect(sandbox, timeout=WORK_S)
        else:
            box = Sandbox.create(
                self.options.template,
                timeout=WORK_S,
                metadata={"worker": self.options.name, "session": session},
                lifecycle={"on_timeout": "pause"},
                # If another one has just created it for the same message, this is answered with the same.
                headers={"Idempotency-Key": f"{self.options.name}-{ident}"},
                **json.loads(self.options.create),
            )
        try:
            return self.run_once(box, ident, work["text"])
        except Exception:
            if self.found(session):
                raise
            # What was done is gone with the sandbox, so it is not done a second time by itself. The next message begins anew.
            return {"code": 1, "output": "the sandbox of the session has ended"}

    def run_once(self, box: Sandbox, ident: str, text: str) -> dict[str, object]:
        name = urllib.parse.quote(ident, safe="")
        try:
            box.files.write(f".worker/{name}.message", text)
            ran = box.commands.run(f"sh -c {shlex.quote(ONCE)} sh {shlex.quote(name)} {shlex.quote(self.options.command)}", timeout=WORK_S)
            return {"code": 0, "output": ran.stdout}
        except CommandExitException as failed:
            return {"code": failed.exit_code, "output": failed.stdout + failed.stderr}
        finally:
            # From now on it is idle.
            box.set_timeout(self.options.idle)

    def end(self, work: dict[str, str]) -> dict[str, object]:
        if sandbox := self.found(work["session"]):
            try:
                Sandbox.kill(sandbox)
            except NotFoundException:
                pass
        return {"code": 0, "output": ""}


def main() -> None:
    parser = argparse.ArgumentParser(description="takes messages from a queue and runs each in the sandbox of its session")
    parser.add_argument("queue", help="address of the queue")
    parser.add_argument("command", help="what runs for a message, in a shell, with the message as its standard input")
    parser.add_argument("--template", default="agents")
    parser.add_argument("--name", default="agent-worker", help="the same for all workers of a queue")
    parser.add_argument("--create", default="{}", help="JSON: further arguments of Sandbox.create, such as network and envs")
    parser.add_argument("--idle", type=int, default=60, help="seconds without a message after which a sandbox is paused")
    parser.add_argument("--at-once", type=int, default=8, help="messages that are worked at at the same time")
    parser.add_argument("--renew", type=float, default=15, help="seconds after which the queue is told that a message is being worked at")
    parser.add_argument("--wait", type=int, default=20, help="seconds for which the queue is asked to wait for a message")
    options = parser.parse_args()
    worker = Worker(Queue(options.queue, os.environ["QUEUE_TOKEN"]), options)
    # It ends when what it works at is done. Ended harder, what it leaves is given out again.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: worker.stopping.set())
    print(f"takes work from {options.queue}", flush=True)
    worker.run()


if __name__ == "__main__":
    main()
