"""A queue of messages of sessions over HTTP, as a hosted agent service has it: what is given out comes again when nobody renews it, and a
session has one message out at a time. It is what `examples/agent_worker.py` needs of a queue.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "queue-canary-0123456789"


@dataclass
class Work:
    """A message, or the end of a session."""

    id: str
    session: str
    kind: str
    text: str
    given: int = 0
    renewed: int = 0
    until: float = 0.0
    answer: dict[str, Any] | None = None
    done: threading.Event = field(default_factory=threading.Event)


class WorkQueue:
    """The queue and its server."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self.all: list[Work] = []
        # Requests that wait for work. One of a worker that was killed still takes what comes next.
        self.waiting = 0
        self.changed = threading.Condition()
        queue = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                status, answer = 401, None
                if self.headers.get("Authorization") == f"Bearer {TOKEN}":
                    status, answer = queue.answer(self.command, self.path, body)
                content = b"" if answer is None else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = serve

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def put(self, session: str, text: str = "", kind: str = "message") -> Work:
        with self.changed:
            work = Work(f"{session}/{len(self.all)}", session, kind, text)
            self.all.append(work)
            self.changed.notify_all()
        return work

    def expire(self, work: Work) -> None:
        """Gives something out again, as if it had not been renewed in time."""
        with self.changed:
            work.until = 0
            self.changed.notify_all()

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, object]:
        url = urlsplit(path)
        parts = url.path.split("/")
        if method == "GET" and url.path == "/work":
            with self.changed:
                self.waiting += 1
            work = self.take(float(parse_qs(url.query)["wait"][0]))
            with self.changed:
                self.waiting -= 1
            return (200, {"id": work.id, "session": work.session, "kind": work.kind, "text": work.text}) if work else (204, None)
        work = next((work for work in self.all if len(parts) == 4 and work.id == unquote(parts[2])), None)
        if method != "POST" or work is None:
            return 404, None
        with self.changed:
            if work.done.is_set():
                return 410, None
            work.until = time.monotonic() + self.lease_s
            work.renewed += parts[3] == "renew"
            if parts[3] == "done":
                work.answer = json.loads(body)
                work.done.set()
                self.changed.notify_all()
        return 200, {}

    def take(self, wait_s: float) -> Work | None:
        deadline = time.monotonic() + wait_s
        with self.changed:
            while True:
                now, seen = time.monotonic(), set()
                for work in self.all:
                    if work.done.is_set() or work.session in seen:
                        continue
                    # The first of a session that is not done; the others wait for it.
                    seen.add(work.session)
                    if work.until <= now:
                        work.given, work.until = work.given + 1, now + self.lease_s
                        return work
                if now >= deadline:
                    return None
                self.changed.wait(min(0.1, deadline - now))
