"""Events of a stream: what a kernel says while it runs a cell, as the lines that clients read.

Every line is ASCII: clients split lines at characters that are newlines for Unicode alone, and decode pieces of the body by
themselves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

Event = dict[str, Any]

# The field of a result for a MIME type. All others are in `extra`.
FIELDS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/json": "json",
    "application/javascript": "javascript",
    "e2b/data": "data",
    "e2b/chart": "chart",
}
BINARY = frozenset(("png", "jpeg", "pdf"))
KEEPALIVE: Event = {"type": "keepalive"}
END: Event = {"type": "end_of_execution"}


def line(event: Event) -> bytes:
    """One event as a line. NaN and infinities, which JSON lacks, become null."""
    try:
        text = json.dumps(event, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(finite(event), separators=(",", ":"), allow_nan=False)
    return text.encode("ascii") + b"\n"


def finite(value: Any) -> Any:
    """A copy of a value in which numbers that JSON lacks are null."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def started(count: int) -> Event:
    """The kernel has accepted a cell."""
    return {"type": "number_of_executions", "execution_count": count}


def output(name: str, text: str) -> Event:
    """A piece of stdout or stderr."""
    return {"type": name, "text": text, "timestamp": datetime.now(UTC).isoformat()}


def error(name: str, value: str, traceback: str = "") -> Event:
    """The one error of a cell."""
    return {"type": "error", "name": name, "value": value, "traceback": traceback}


def result(data: Mapping[str, Any], is_main: bool) -> Event:
    """A result by the MIME types that a kernel gave. What a type is absent for has no field."""
    event: Event = {"type": "result", "is_main_result": is_main}
    extra: dict[str, Any] = {}
    for mime, value in data.items():
        field = FIELDS.get(mime)
        if field is None:
            extra[mime] = value
        elif field == "text":
            event[field] = unquoted(joined(value))
        elif field in BINARY:
            event[field] = joined(value).replace("\n", "")
        elif field in ("json", "data", "chart"):
            event[field] = value
        else:
            event[field] = joined(value)
    if extra:
        event["extra"] = extra
    return event


def joined(value: Any) -> str:
    """A text that a kernel may give as a list of pieces."""
    return "".join(map(str, value)) if isinstance(value, list) else str(value)


def unquoted(text: str) -> str:
    """A text without the quotes around it, so that the value of `'abc'` is what it says."""
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return text
