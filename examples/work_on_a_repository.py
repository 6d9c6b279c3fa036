"""A coding agent that works on a repository, with keys that it never sees: its sandbox reaches two hosts, and the platform sets the keys on
requests to them, the token for this repository alone.

    OPENAI_API_KEY=... GITHUB_TOKEN=... python work_on_a_repository.py OWNER/NAME "what to do"
"""

from __future__ import annotations

import base64
import json
import os
import shlex
import sys
import urllib.request

from e2b import Sandbox

BRANCH = "agent"


def inject(box: Sandbox, injections: list[dict[str, object]]) -> None:
    """Has the platform set keys on requests of a sandbox."""
    url = f"{os.environ['E2B_API_URL']}/sandboxes/{box.sandbox_id}/injections"
    headers = {"X-API-Key": os.environ["E2B_API_KEY"], "Content-Type": "application/json"}
    body = json.dumps({"injections": injections}).encode()
    urllib.request.urlopen(urllib.request.Request(url, body, headers, method="PUT")).close()


def main() -> None:
    repository, task = sys.argv[1:]
    login = base64.b64encode(f"x-access-token:{os.environ['GITHUB_TOKEN']}".encode()).decode()
    box = Sandbox.create(
        "agents",
        timeout=1800,
        # The agent wants a key, and what it sends is replaced.
        envs={"CODEX_API_KEY": "placeholder"},
        network={"allow_out": ["api.openai.com", "github.com"], "deny_out": ["0.0.0.0/0"]},
    )
    with box:
        openai = {"type": "openai", "api_key": os.environ["OPENAI_API_KEY"]}
        github = {"type": "http", "base_url": f"https://github.com/{repository}/*", "headers": {"Authorization": f"Basic {login}"}}
        inject(box, [openai, github])
        address = shlex.quote(f"https://github.com/{repository}")
        box.commands.run(f"git clone --quiet {address} work && git -C work switch --quiet --create {BRANCH}", timeout=300)
        # The sandbox is what keeps it in bounds, so it asks nobody.
        agent = f"codex exec --dangerously-bypass-approvals-and-sandbox -- {shlex.quote(task)}"
        print(box.commands.run(agent, cwd="/home/user/work", timeout=1500).stdout)
        box.commands.run(f"git push --quiet origin {BRANCH}", cwd="/home/user/work", timeout=300)
        print(box.commands.run(f"git log --stat origin/HEAD..{BRANCH}", cwd="/home/user/work").stdout)


if __name__ == "__main__":
    main()
