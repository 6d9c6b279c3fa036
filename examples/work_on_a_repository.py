"""A coding agent that works on a repository, with keys that it never sees: its sandbox reaches two hosts, and the keys for them are set
outside of it.

    python work_on_a_repository.py https://github.com/OWNER/NAME "what to do"

Two secrets of the team have to be there, `openai-key`, and `github-login`, which is base64 of `x-access-token:TOKEN`:

    python -c 'from e2b import Secret; import base64, getpass; Secret.create("openai-key", getpass.getpass("key: "))
    Secret.create("github-login", base64.b64encode(b"x-access-token:" + getpass.getpass("token: ").encode()).decode())'
"""

from __future__ import annotations

import shlex
import sys

from e2b import Sandbox, Secret

BRANCH = "agent"


def header(value: str) -> list[dict[str, object]]:
    """A rule that sets the header with the key on requests to its host."""
    return [{"transform": {"headers": {"Authorization": value}}}]


def main() -> None:
    repository, task = sys.argv[1:]
    rules = {
        "api.openai.com": header(f"Bearer {Secret.fill('openai-key')}"),
        "github.com": header(f"Basic {Secret.fill('github-login')}"),
    }
    box = Sandbox.create(
        "agents",
        timeout=1800,
        # The agent wants one, and what it sends is replaced.
        envs={"CODEX_API_KEY": "placeholder"},
        network={"rules": rules, "allow_out": list(rules), "deny_out": ["0.0.0.0/0"]},
    )
    with box:
        box.commands.run(f"git clone --quiet -- {shlex.quote(repository)} work && git -C work switch --quiet --create {BRANCH}", timeout=300)
        # The sandbox is what keeps it in bounds, so it asks nobody.
        agent = f"codex exec --dangerously-bypass-approvals-and-sandbox -- {shlex.quote(task)}"
        print(box.commands.run(agent, cwd="/home/user/work", timeout=1500).stdout)
        box.commands.run(f"git push --quiet origin {BRANCH}", cwd="/home/user/work", timeout=300)
        print(box.commands.run(f"git log --stat origin/HEAD..{BRANCH}", cwd="/home/user/work").stdout)


if __name__ == "__main__":
    main()
