"""The first program of a newcomer: creates a sandbox with what `credentials.env` says, runs a command, and prints its output."""

from e2b import Sandbox

with Sandbox.create(timeout=60) as box:
    print(box.commands.run("echo $((6 * 7))").stdout, end="")
