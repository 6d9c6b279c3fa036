"""Qiniu's Python SDK: saved rules with signed requests, and a sandbox that refers to one. Prints `ok` at the end."""

import os
import sys

from qiniu.services.sandbox import SandboxClient
from qiniu.services.sandbox.errors import SandboxError

SECRET = "a value of a header"


def client(secret_key: str, access_key: str = os.environ["RINGFENCE_ACCESS_KEY"]) -> SandboxClient:
    return SandboxClient(
        endpoint=os.environ["E2B_API_URL"],
        api_key=os.environ["E2B_API_KEY"],
        access_key=access_key,
        secret_key=secret_key,
    )


signed = client(os.environ["RINGFENCE_SECRET_KEY"])
http = {"type": "http", "base_url": "https://api.example.com/v1/*", "headers": {"X-Key": SECRET}}
rule = signed.create_injection_rule(name="from python", injection=http)
try:
    assert rule["injection"] == http, rule
    assert signed.get_injection_rule(rule["ruleID"]) == rule
    assert rule["ruleID"] in [one["ruleID"] for one in signed.list_injection_rules()]
    renamed = signed.update_injection_rule(rule["ruleID"], name="renamed")
    assert (renamed["name"], renamed["injection"]) == ("renamed", http), renamed
    try:
        signed.create_injection_rule(name="renamed", injection=http)
        raise SystemExit("a second rule of the same name")
    except SandboxError as error:
        assert error.response.status_code == 409, error
    try:
        client("another").list_injection_rules()
        raise SystemExit("a wrong signature")
    except SandboxError as error:
        assert error.response.status_code == 401, error
    if sys.argv[1:2] == ["beside"]:
        # Another user has a rule of the same name, and neither sees the other's.
        other = client(sys.argv[3], access_key=sys.argv[2])
        same = other.create_injection_rule(name="renamed", injection=http)
        assert [one["ruleID"] for one in other.list_injection_rules()] == [same["ruleID"]]
        assert same["ruleID"] not in [one["ruleID"] for one in signed.list_injection_rules()]
        other.delete_injection_rule(same["ruleID"])
    # The client signs this request, because it refers to a rule.
    box = signed._request(
        "POST",
        "/sandboxes",
        body={"templateID": "base", "timeout": 30, "injections": [{"type": "id", "id": rule["ruleID"]}]},
        auth_type="qiniu",
    )
    shown = signed._request("GET", f"/sandboxes/{box['sandboxID']}/injections")
    assert shown == {"injections": [{"type": "id", "id": rule["ruleID"]}]}, shown
    signed._request("DELETE", f"/sandboxes/{box['sandboxID']}", empty=True)
finally:
    signed.delete_injection_rule(rule["ruleID"])
print("ok")
