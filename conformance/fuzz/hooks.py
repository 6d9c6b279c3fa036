"""What the fuzzer cannot know from the API's description, for the requests that it takes for valid."""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import schemathesis

# Entries of network settings that are valid. The description gives only examples of their syntax.
NETWORKS = ["203.0.113.0/24", "198.51.100.7", "2001:db8::/32", "0.0.0.0/0"]
DOMAINS = ["example.com", "*.example.com", "*"]
PROXIES = ["proxy.example.com:1080", "8.8.8.8:1", "[2606:4700:4700::1111]:65535"]
ALL = "0.0.0.0/0"
INJECTIONS: list[dict[str, Any]] = [
    {"type": "http", "base_url": "https://api.example.com/v1/*", "headers": {"Authorization": "Bearer a-secret"}},
    {"type": "http", "base_url": "api.example.com"},
    {"type": "openai", "api_key": "sk-a-secret", "if_queries": {"a": "b"}},
    {"type": "provider_b", "api_key": "a-secret", "base_url": "https://ai.example.com:8443"},
    {"type": "gemini", "api_key": "a-secret", "if_headers": {"X-Team": "blue"}},
    {"type": "qiniu", "api_key": "a-secret"},
    {"type": "github", "token": "ghp_a_secret"},
]
MOST_ENTRIES = 256
# The one that the description gives.
EXAMPLE = "user=alice&app=x"


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: schemathesis.Case, kwargs: dict[str, Any]) -> None:
    if case.meta is None or not case.meta.generation.mode.is_positive:
        return
    # A cursor is opaque: whatever no page gave is refused by right.
    if case.query:
        for cursor in ("nextToken", "tagsCursor", *(["cursor"] if case.path.endswith("/assignments") else [])):
            case.query.pop(cursor, None)
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
    if isinstance(case.body, dict):
        if case.body.get("autoPauseMemory") is False:
            # It says how a sandbox is paused at its deadline, and not whether; traffic resumes only one with its memory.
            case.body["autoPause"] = True
            case.body["autoResume"] = {"enabled": False}
        make_secrets_valid(case.path, case.body)
        # Bounds of metadata are in bytes, and those of a schema in characters, of up to four bytes.
        if isinstance(case.body.get("metadata"), dict):
            case.body["metadata"] = {key[:32]: value[:256] for key, value in case.body["metadata"].items() if isinstance(value, str)}
        # Where events may be sent to is said by the rules of the operator.
        if case.path.startswith("/events/webhooks") and isinstance(case.body.get("url"), str):
            case.body["url"] = choice(["https://example.com/hook", "https://hooks.example.com:8443/a?b=c"], case.body["url"])
        for settings in (case.body, case.body.get("network")):
            if isinstance(settings, dict):
                make_valid(settings)
    if "/templates" in case.path:
        make_template_valid(case)
    if "snapshotID" in case.path_parameters:
        case.path_parameters["snapshotID"] = choice(["s1", "s2", "s3:v1", "none"], str(case.path_parameters["snapshotID"]))
    # A name of any text, but a name.
    if case.path.endswith("/snapshots") and isinstance(case.body, dict) and isinstance(case.body.get("name"), str):
        case.body["name"] = choice(["s1", "s2", "s3:v1"], case.body["name"])
    # A range that ends before it begins is refused by right.
    if case.query and {"start", "end"} <= set(case.query):
        case.query["start"], case.query["end"] = sorted((case.query["start"], case.query["end"]))


def make_template_valid(case: schemathesis.Case) -> None:
    """Replaces what a template's description says in words: forms of names and ids, and sizes that are even."""
    if "buildID" in case.path_parameters:
        digest = hashlib.md5(str(case.path_parameters["buildID"]).encode()).hexdigest()
        case.path_parameters["buildID"] = str(uuid.UUID(digest))
    if "templateID" in case.path_parameters:
        kept = re.sub(r"[^a-z0-9]", "", str(case.path_parameters["templateID"]))
        if "/files/" in case.path and len(kept) != 20:
            kept = hashlib.sha256(kept.encode()).hexdigest()[:20]
        case.path_parameters["templateID"] = kept or "none"
    for parameters in (case.path_parameters, case.query or {}):
        if "tag" in parameters:
            parameters["tag"] = choice(["v1", "v2", "v3"], parameters["tag"])
    if "expires" in (case.query or {}):
        case.query["expires"] = str(case.query["expires"]).lstrip("-")
    if not isinstance(case.body, dict):
        return
    for key in ("name", "alias", "target"):
        if isinstance(case.body.get(key), str):
            case.body[key] = f"t{hashlib.sha256(case.body[key].encode(errors='replace')).hexdigest()[:3]}"
    if isinstance(case.body.get("tags"), list):
        case.body["tags"] = [choice(["v1", "v2", "v3"], tag) for tag in case.body["tags"]]
    for key, choices in (("cpuCount", [1, 2, 4]), ("memoryMB", [128, 512, 1024])):
        if isinstance(case.body.get(key), int | float):
            case.body[key] = choice(choices, case.body[key])
    # One source, and one that exists.
    if "fromImage" in case.body or "fromTemplate" in case.body:
        case.body.pop("fromImage", None)
        case.body["fromTemplate"] = "base"
    if case.body.get("fromImageRegistry") is not None:
        case.body["fromImageRegistry"] = {"type": "registry", "username": "user", "password": "a-secret"}


def make_secrets_valid(path: str, body: dict[str, Any]) -> None:
    """Replaces injections and secrets that only look valid: what a type requires is not in the description."""
    if "injection" in body and body["injection"] is not None:
        body["injection"] = choice(INJECTIONS, body["injection"])
    if isinstance(body.get("injections"), list):
        body["injections"] = [choice(INJECTIONS, injection) for injection in body["injections"]]
    # A repository is fetched before the request is answered, and no code host is there.
    if isinstance(body.get("resources"), list):
        body["resources"] = []
    digest = hashlib.sha256(repr(body).encode()).hexdigest()
    if isinstance(body.get("authorization_token"), str):
        body["authorization_token"] = digest
    if path.startswith("/secrets"):
        valid = {"name": f"n{digest[:20]}", "value": digest}
        body.update({key: valid[key] for key in valid if isinstance(body.get(key), str)})
        if isinstance(body.get("metadata"), dict):
            body["metadata"] = json.loads(json.dumps(body["metadata"]).replace("\\u0000", ""))


def make_valid(settings: dict[str, Any]) -> None:
    """Replaces what only looks valid in network settings."""
    valid = {"allowOut": NETWORKS + DOMAINS, "denyOut": NETWORKS, "dnsServers": ["1.1.1.1", "10.0.0.53"]}
    for key, choices in valid.items():
        if isinstance(settings.get(key), list):
            settings[key] = [choice(choices, entry) for entry in settings[key]]
    # Domains require that everything else is denied.
    # Where these keys mean nothing, they may have any value.
    allowed, denied = (value if isinstance(value := settings.get(key), list) else [] for key in ("allowOut", "denyOut"))
    if set(allowed) & set(DOMAINS):
        settings["denyOut"] = [ALL, *denied][:MOST_ENTRIES]
    if isinstance(settings.get("maskRequestHost"), str):
        settings["maskRequestHost"] = choice(["", "localhost:${PORT}", "a.example"], settings["maskRequestHost"])
    if isinstance(settings.get("rules"), dict):
        headers = {"X-Team": "blue", "Authorization": "Bearer a-secret"}
        settings["rules"] = {"api.example.com": [{"transform": {"headers": headers}}]} if settings["rules"] else {}
    if isinstance(settings.get("egressProxy"), dict):
        make_proxy_valid(settings["egressProxy"])


def make_proxy_valid(proxy: dict[str, Any]) -> None:
    """Replaces texts that only look valid, and leaves out what contradicts something else."""
    valid = {"address": PROXIES, "username": ["user", "u" * 255], "password": ["", "secret", "p" * 255]}
    for key, choices in valid.items():
        if isinstance(proxy.get(key), str):
            proxy[key] = choice(choices, proxy[key])
    if "password" in proxy:
        proxy.setdefault("username", "user")
    tls = proxy.get("tls")
    if not isinstance(tls, dict):
        return
    if not tls.get("enabled"):
        tls.pop("serverName", None)
        tls.pop("caCert", None)
    if isinstance(tls.get("serverName"), str):
        tls["serverName"] = choice(["proxy.example.com", "203.0.113.1"], tls["serverName"])
    if isinstance(tls.get("caCert"), str):
        tls["caCert"] = certificate()


@cache
def certificate() -> str:
    """The first issuer that this host trusts, in PEM."""
    text = Path("/etc/ssl/certs/ca-certificates.crt").read_text()
    end = "-----END CERTIFICATE-----\n"
    return text[: text.index(end)] + end


def choice(choices: list[Any], text: object) -> Any:
    return choices[len(str(text)) % len(choices)]
