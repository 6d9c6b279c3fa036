"""A client of a cluster: creates a sandbox, or connects to one, runs a command in it and prints what it says.

    client.py create COMMAND        prints the id of the sandbox first, and leaves the sandbox
    client.py ID COMMAND            in that sandbox
    client.py kill ID
"""

import sys

from e2b import Sandbox

[which, word] = sys.argv[1:]
if which == "kill":
    print(Sandbox.connect(word, timeout=300).kill())
else:
    box = Sandbox.create(timeout=300) if which == "create" else Sandbox.connect(which, timeout=300)
    if which == "create":
        print(box.sandbox_id)
    print(box.commands.run(word).stdout, end="")
