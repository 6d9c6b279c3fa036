"""What the fuzzer cannot know from the API's description, for the requests that it takes for valid."""

from __future__ import annotations

import hashlib
from typing import Any
from urllib.parse import urlencode

import schemathesis

# The one that the description gives.
EXAMPLE = "user=alice&app=x"


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: schemathesis.Case, kwargs: dict[str, Any]) -> None:
    if case.meta is None or not case.meta.generation.mode.is_positive:
        return
    # A cursor is opaque: whatever no page gave is refused by right.
    if case.query:
        case.query.pop("nextToken", None)
        # Pairs of any text, but pairs.
        if "metadata" in case.query:
            text = str(case.query["metadata"])
            case.query["metadata"] = text if text == EXAMPLE else urlencode({text: text[::-1]})
    # A key belongs to one request: the same key with another is refused by right, with the same it repeats the answer.
    if case.headers and "Idempotency-Key" in case.headers:
        case.headers["Idempotency-Key"] = hashlib.sha256(repr((case.path, case.body)).encode()).hexdigest()
    # Closed ports and an open agent contradict each other, which no schema of one key can say.
    if isinstance(case.body, dict) and case.body.get("secure") is False:
        network = case.body.get("network")
        if isinstance(network, dict) and network.get("allowPublicTraffic") is False:
            del case.body["secure"]
    # A range that ends before it begins is refused by right.
    if case.query and {"start", "end"} <= set(case.query):
        case.query["start"], case.query["end"] = sorted((case.query["start"], case.query["end"]))
