"""Templates through the SDK: requests, uploads, names, tags and refusals. What steps do is tested elsewhere."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from e2b import Template

from harness.patience import within
from harness.platform import Platform

NOTHING = "no-such-template"


@pytest.fixture
def api(platform: Platform) -> Iterator[httpx.Client]:
    headers = {"X-API-Key": platform.credentials()["E2B_API_KEY"]}
    with httpx.Client(base_url=platform.url, headers=headers, timeout=within(30)) as client:
        yield client


@pytest.fixture
def name(api: httpx.Client) -> Iterator[str]:
    name = f"t{uuid.uuid4().hex[:12]}"
    yield name
    api.delete(f"/templates/{name}")


def test_a_requested_template_has_a_name_and_no_build(api: httpx.Client, name: str) -> None:
    assert Template.exists(name) is False
    asked = api.post("/v3/templates", json={"name": f"{name}:v1", "tags": ["v2"], "cpuCount": 2, "memoryMB": 512})
    assert asked.status_code == 202, asked.text
    made = asked.json()
    assert (made["aliases"], made["names"], made["tags"]) == ([name], [f"default/{name}"], ["v1", "v2"])
    assert Template.exists(name) is True
    assert Template.exists(f"{name}:v1") is False
    assert Template.get_tags(name) == []
    listed = api.get("/v2/templates").json()
    assert listed[0]["aliases"] == ["base"], "clients take the first that is ready"
    assert made["templateID"] in [item["templateID"] for item in listed]
    status = api.get(f"/templates/{made['templateID']}/builds/{made['buildID']}/status").json()
    assert (status["status"], status["logEntries"]) == ("waiting", [])


def test_base_cannot_be_changed(api: httpx.Client) -> None:
    for refused in (
        lambda: Template.assign_tags("base", "mine"),
        lambda: Template.remove_tags("base", "mine"),
        lambda: Template.get_tags("base"),
    ):
        with pytest.raises(Exception, match="403|does not belong"):
            refused()
    assert api.delete("/templates/base").status_code == 403
    assert api.patch("/v2/templates/base", json={"public": False}).status_code == 403
    for refused in (lambda: Template.assign_tags(f"{NOTHING}:v1", "mine"), lambda: Template.get_tags(NOTHING)):
        with pytest.raises(Exception, match="404|doesn't exist"):
            refused()


def test_files_are_uploaded_to_a_signed_address(api: httpx.Client, name: str, tmp_path: Path) -> None:
    made = api.post("/v3/templates", json={"name": name}).json()
    digest = "c" * 64
    path = f"/templates/{made['templateID']}/files/{digest}"
    asked = api.get(path)
    assert (asked.status_code, asked.json()["present"]) == (201, False)
    url = asked.json()["url"]
    archive = b"x" * (5 << 20)
    assert httpx.put(url, content=archive, timeout=within(30)).status_code == 200
    assert api.get(path).json()["present"] is True
    assert httpx.put(url.replace("token=", "token=0"), content=b"", timeout=within(30)).status_code == 403


def test_a_template_from_nothing_fails_at_its_base(name: str) -> None:
    template = Template().from_template(NOTHING).run_cmd("true")
    with pytest.raises(Exception, match=NOTHING):
        Template.build(template, name, cpu_count=2, memory_mb=512)
