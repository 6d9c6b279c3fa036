"""As much of `kubectl` as the page `kubernetes` uses, with a file as the cluster: STATE. PODS has the command that enters each workload.

Anything else is an error, as it would be of the real one.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import NoReturn

STATE = Path(os.environ["STATE"])
NAMESPACE = "ringfence"


def wrong(words: list[str]) -> NoReturn:
    sys.exit(f"kubectl: {' '.join(words)}: not known here")


def labelled(of: dict[str, str], words: list[str]) -> None:
    """`a=b` sets a label, and `a-` removes it."""
    for word in words:
        key, equals, value = word.partition("=")
        if equals:
            of[key] = value
        elif word.endswith("-"):
            del of[word[:-1]]
        else:
            wrong(words)


def content(words: list[str]) -> dict[str, str]:
    """The keys of a secret: `--from-file key=file`, or the files of a directory."""
    found: dict[str, str] = {}
    for option, word in zip(words[::2], words[1::2], strict=True):
        key, equals, file = word.partition("=")
        if option != "--from-file":
            wrong(words)
        if equals:
            found[key] = Path(file).read_text()
        else:
            found |= {path.name: path.read_text() for path in Path(word).iterdir()}
    return found


def main(words: list[str]) -> None:
    state = json.loads(STATE.read_text()) if STATE.exists() else {"namespaces": {}, "secrets": {}, "labels": {}, "taints": {}}
    if words[:2] == ["--namespace", NAMESPACE]:
        if NAMESPACE not in state["namespaces"]:
            sys.exit(f"kubectl: there is no namespace {NAMESPACE}")
        words = words[2:]
    match words:
        case ["exec", pod, "--", *command]:
            runtime = json.loads(os.environ["PODS"])[pod]
            os.execvp(runtime[0], [*runtime, *command])
        case ["create", "namespace", name]:
            state["namespaces"][name] = {}
        case ["label", "namespace", name, *labels]:
            labelled(state["namespaces"][name], labels)
        case ["label" | "taint" as verb, "node", *rest]:
            machines = [word for word in rest if not word.endswith("-") and "=" not in word]
            for machine in machines:
                labelled(state[f"{verb}s"].setdefault(machine, {}), rest[len(machines) :])
        case ["get", "nodes", "--selector", selector, "--output", "name"]:
            key, _, value = selector.partition("=")
            for machine, labels in state["labels"].items():
                if labels.get(key) == value and machine in os.environ["MACHINES"].split():
                    print(f"node/{machine}")
        case ["create", "secret", "generic", name, *files] if name not in state["secrets"]:
            state["secrets"][name] = content(files)
        case ["delete", "secret", name]:
            del state["secrets"][name]
        case _:
            wrong(words)
    STATE.write_text(json.dumps(state))


main(sys.argv[1:])
