"""Several attempts from one prepared state: a sandbox is set up once, forked with its processes, and each fork tries something else.

    python try_in_parallel.py
"""

from __future__ import annotations

import os

import httpx
from e2b import Sandbox

ATTEMPTS = ("sum(range(1000))", "500 * 999", "sum(n for n in range(1000) if n)")


def fork(box: Sandbox, count: int) -> list[Sandbox]:
    """Copies of a sandbox, with what runs in it. The SDK has no method for that yet."""
    url = f"{os.environ['E2B_API_URL']}/sandboxes/{box.sandbox_id}/fork"
    answer = httpx.post(url, headers={"X-API-Key": os.environ["E2B_API_KEY"]}, json={"count": count, "timeout": 120}, timeout=60)
    answer.raise_for_status()
    return [Sandbox.connect(made["sandbox"]["sandboxID"]) for made in answer.json() if "sandbox" in made]


def main() -> None:
    with Sandbox.create(timeout=120) as box:
        # What takes long is done once; here it stands for a checkout with everything installed.
        box.files.write("prepared.txt", "499500")
        copies = fork(box, len(ATTEMPTS))
        try:
            for copy, attempt in zip(copies, ATTEMPTS, strict=True):
                check = f"python3 -c 'print({attempt} == int(open(\"prepared.txt\").read()))'"
                print(f"{attempt}: {copy.commands.run(check).stdout.strip()}")
        finally:
            for copy in copies:
                copy.kill()


if __name__ == "__main__":
    main()
