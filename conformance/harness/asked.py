"""A program in a sandbox that answers each line of its input."""

from __future__ import annotations

from e2b import Sandbox


class Asked:
    """A program whose answers end with a line that has a certain word in it."""

    def __init__(self, box: Sandbox, command: str, word: str = "whole", user: str | None = None) -> None:
        handle = box.commands.run(command, background=True, stdin=True, timeout=0, user=user)
        handle.disconnect()
        self.pid = handle.pid
        self.word = word

    def ask(self, box: Sandbox, line: str) -> str:
        """The answer of the program to a line, in the sandbox where it was started or in one that goes on from that."""
        handle = box.commands.connect(self.pid, timeout=0)
        box.commands.send_stdin(self.pid, f"{line}\n")
        said = ""
        for out, error, _ in handle:
            assert not error, error
            said += out or ""
            assert "broken" not in said, said
            if self.word in said and said.endswith("\n"):
                break
        handle.disconnect()
        assert self.word in said, f"it has ended: {said}"
        return said

    def end(self, box: Sandbox) -> None:
        assert box.commands.kill(self.pid) is True
