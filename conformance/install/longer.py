"""A program of a user whose sandbox lives longer than the platform: `create` prints its id, `look ID` what is in it."""

import sys

from e2b import Sandbox

match sys.argv[1:]:
    case ["create"]:
        box = Sandbox.create(timeout=1800)
        box.files.write("/home/user/kept", "kept\n")
        box.commands.run("exec -a long-marker sleep 3600", background=True)
        print(box.sandbox_id)
    case ["look", sandbox_id]:
        box = Sandbox.connect(sandbox_id)
        print(box.commands.run("cat /home/user/kept; ps -eo args= | grep -c '^long-marker'").stdout.split())
