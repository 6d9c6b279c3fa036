"""Standard output and error of cells.

The stream of Jupyter collects what is written until a thread has sent it, however much that is. This one waits for the thread
when much is unsent, so that a cell is no further ahead of its client than some megabytes.
"""

from __future__ import annotations

import threading

from ipykernel.iostream import OutStream

# Characters after which a write waits at the end of a line, and wherever it is.
LINE, ALWAYS = 1 << 20, 8 << 20


class BoundedStream(OutStream):
    """A stream with a bound on what is written and not sent."""

    _unsent = 0
    _timer: object | None = None

    def write(self, string: str) -> int | None:
        """Writes, and waits when much is unsent."""
        written = super().write(string)
        self._unsent += len(string)
        if self._unsent >= ALWAYS or (self._unsent >= LINE and string.endswith("\n")):
            self._unsent = 0
            self._send()
        return written

    def flush(self) -> None:
        """Sends what was written. The kernel asks for it six times in a cell, and each time is a round through the thread, so it is
        left out where nothing is unsent: messages that follow go through the same thread, behind what it is sending."""
        if self._buffers:
            super().flush()

    def _schedule_flush(self) -> None:
        """Has what is written sent soon."""
        if not self._flush_pending:
            self._flush_pending = True
            self.pub_thread.schedule(self._send_later)

    def _send_later(self) -> None:
        self._timer = self._io_loop.call_later(self.flush_interval, self._flush)

    def _flush(self) -> None:
        # The time of what is sent here is over. It would come in the middle of a line of the next cell, which had two pieces then.
        timer, self._timer = self._timer, None
        if timer is not None and threading.current_thread() is self.pub_thread.thread:
            self._io_loop.remove_timeout(timer)
        super()._flush()

    def _send(self) -> None:
        thread = self.pub_thread.thread
        if thread is None or not thread.is_alive() or thread is threading.current_thread():
            return
        sent = threading.Event()
        self.pub_thread.schedule(self._flush)
        self.pub_thread.schedule(sent.set)
        # In steps, because an interrupt is seen between them.
        while thread.is_alive() and not sent.wait(0.5):
            pass
