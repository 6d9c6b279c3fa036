"""The repositories of the code host of the fake internet, which git's own server serves to those who have a token."""

from __future__ import annotations

import subprocess
from pathlib import Path

from harness.internet import Internet

HOST = "github.com"
TOKEN = "ghp_canary0123456789abcdef"


def git(directory: Path, *command: str) -> str:
    options = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    return subprocess.run(["git", "-C", directory, *options, *command], check=True, capture_output=True, text=True).stdout


class CodeHost:
    """A server of repositories, and the tokens that it accepts."""

    def __init__(self, internet: Internet) -> None:
        self.internet = internet
        self.root = internet.documents / "code_host"
        self.root.mkdir()
        self.accept(TOKEN)

    def accept(self, *tokens: str) -> None:
        (self.root / "tokens").write_text("\n".join(tokens))

    def make(self, name: str, branch: str = "main") -> Path:
        """A repository with a commit; its working copy."""
        bare, work = self.root / f"{name}.git", self.root / f"{name}.work"
        bare.parent.mkdir(exist_ok=True)
        subprocess.run(["git", "init", "-q", "--bare", "-b", branch, bare], check=True)
        git(bare, "config", "http.receivepack", "true")
        subprocess.run(["git", "init", "-q", "-b", branch, work], check=True)
        (work / "README.md").write_text(f"# {name}\n")
        (work / "run.sh").write_text("#!/bin/sh\necho ran\n")
        (work / "run.sh").chmod(0o755)
        git(work, "add", ".")
        git(work, "commit", "-q", "-m", "first")
        git(work, "tag", "v1")
        git(work, "push", "-q", "--tags", str(bare), branch)
        return work

    def commit(self, work: Path, message: str) -> None:
        (work / "README.md").write_text(f"{message}\n")
        git(work, "commit", "-q", "-a", "-m", message)
        git(work, "push", "-q", str(work.with_suffix(".git")), "HEAD")

    def requests(self) -> list[str]:
        return [event["path"] for event in self.internet.events(kind="http") if event.get("host") == HOST]

    def fetches(self, since: int) -> list[str]:
        """Requests for packs and for references, since a number of requests."""
        return [path for path in self.requests()[since:] if path.endswith("/git-upload-pack")]
