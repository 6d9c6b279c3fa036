"""Builds of templates through the SDK: what each step does, the cache, start commands, and why builds fail."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox, Template

from harness.patience import within
from harness.platform import Platform
from harness.traffic import until


@pytest.fixture
def api(platform: Platform) -> Iterator[httpx.Client]:
    headers = {"X-API-Key": platform.credentials()["E2B_API_KEY"]}
    with httpx.Client(base_url=platform.url, headers=headers, timeout=60) as client:
        yield client


@pytest.fixture
def name(api: httpx.Client) -> Iterator[str]:
    name = f"t{uuid.uuid4().hex[:12]}"
    yield name
    for suffix in ("", "-child"):
        api.delete(f"/templates/{name}{suffix}")


def build(template: object, name: str) -> list[str]:
    """Builds a template and returns the messages of its log."""
    lines: list[str] = []
    Template.build(template, name, on_build_logs=lambda entry: lines.append(entry.message))
    return lines


def test_every_step_leaves_its_files(name: str, tmp_path: Path) -> None:
    (tmp_path / "tree" / "deep").mkdir(parents=True)
    (tmp_path / "tree" / "deep" / "file").write_text("deep\n")
    (tmp_path / "tool.sh").write_text("#!/bin/sh\necho tool\n")
    template = (
        Template(file_context_path=tmp_path)
        .from_template("base")
        .set_envs({"GREETING": "hello", "BOTH": "$GREETING world"})
        .run_cmd('echo "$BOTH" > ~/greeting; echo gone > ~/gone; mkdir ~/kept')
        .set_workdir("/srv/app")
        .copy("tree", "tree")
        .copy("tool.sh", "/usr/local/bin/tool", user="root", mode=0o755)
        .make_symlink("/srv/app/tree/deep/file", "/srv/app/link")
        .rename("/home/user/kept", "/home/user/renamed")
        .remove("/home/user/gone")
        .run_cmd("id -un > /etc/by; stat -c %U:%a /usr/local/bin/tool > /etc/tool", user="root")
        .run_cmd("echo out; echo err >&2")
        .run_cmd("touch /usr/local/bin/python3.99", user="root")
    )
    lines = build(template, name)
    assert any(line.endswith("[stdout]: out") for line in lines), lines
    assert any(line.endswith("[stderr]: err") for line in lines), lines
    assert not any(line.startswith("CACHED") for line in lines)
    with Sandbox.create(name, timeout=120) as box:
        seen = box.commands.run(
            "pwd; cat ~/greeting tree/deep/file link /etc/by /etc/tool; tool; ls ~; touch here; echo \"[$GREETING]\""
        )
        want = "/srv/app\nhello world\ndeep\ndeep\nroot\nroot:755\ntool\ngreeting\nrenamed\n[]\n"
        assert seen.stdout == want
        # For an interpreter that a step has installed, as `user` will need it.
        packages = "/home/user/.local/lib/python3.99/site-packages"
        assert box.commands.run(f"stat -c '%U %a' {packages}").stdout == "user 755\n"
    # What a sandbox writes stays in it.
    with Sandbox.create(name, timeout=120) as box:
        assert not box.files.exists("/srv/app/here")

    again = build(template, name)
    assert sum(line.startswith("CACHED") for line in again) == 11, again
    assert any(line.startswith("CACHED [builder 1/11] ENV GREETING hello") for line in again), again
    child = Template().from_template(name).run_cmd("cat tree/deep/file > copy")
    build(child, f"{name}-child")
    with Sandbox.create(f"{name}-child", timeout=120) as box:
        assert box.commands.run("cat /srv/app/copy; ls ~").stdout == "deep\ngreeting\nrenamed\n"


def test_old_clients_run_steps_as_root(api: httpx.Client, name: str) -> None:
    """SDKs before 2.3.0 expect root, and nothing of such a build comes from the cache of the others."""
    step = {"type": "RUN", "args": [f"echo {name}; id -un > /tmp/by; chmod 666 /tmp/by; pwd >> /tmp/by"]}
    seen = []
    for version in ("2.3.0", "2.2.9"):
        made = api.post("/v3/templates", json={"name": name}).json()
        path = f"/templates/{made['templateID']}/builds/{made['buildID']}"
        agent = {"User-Agent": f"e2b-python-sdk/{version}"}
        started = api.post(f"/v2{path}", json={"fromTemplate": "base", "steps": [step]}, headers=agent)
        assert (started.status_code, started.content) == (202, b"")
        until(lambda path=path: api.get(f"{path}/status").json()["status"] in ("ready", "error"), "it has ended", 60)
        with Sandbox.create(name, timeout=120) as box:
            seen.append(box.commands.run("cat /tmp/by; id -un").stdout.split())
    assert seen == [["user", "/home/user", "user"], ["root", "/root", "user"]]


def test_forced_steps_are_run_again(name: str) -> None:
    def made(template: object) -> list[str]:
        build(template, name)
        with Sandbox.create(name, timeout=120) as box:
            return box.commands.run("cat ~/first ~/second").stdout.split()

    def template(force: bool) -> object:
        first = Template().from_template("base").run_cmd(f"echo {name}; date +%s%N > ~/first")
        return (first.skip_cache() if force else first).run_cmd("date +%s%N > ~/second")

    one, same, forced = made(template(False)), made(template(False)), made(template(True))
    assert one == same
    assert forced[0] == one[0]
    assert forced[1] != one[1]


def test_more_steps_than_layers(name: str) -> None:
    template = Template().from_template("base")
    for number in range(30):
        template = template.run_cmd(f"echo {number} >> ~/lines; rm -f ~/file{number - 1}; touch ~/file{number}")
    build(template, name)
    with Sandbox.create(name, timeout=120) as box:
        assert box.commands.run("wc -l < ~/lines; ls ~").stdout == "30\nfile29\nlines\n"


def test_a_sandbox_starts_with_its_server_answering(name: str) -> None:
    template = (
        Template()
        .from_template("base")
        .set_workdir("/home/user/www")
        .run_cmd("echo served > page")
        .set_envs({"PORT": "8000"})
        .set_start_cmd("exec python3 -m http.server $PORT", "curl -sf -o /dev/null localhost:8000/page")
    )
    lines = build(template, name)
    wanted = (
        "Running start command",
        "Waiting for template to be ready: curl -sf -o /dev/null localhost:8000/page",
        "Template is ready",
        "the build is finished",
    )
    assert [line for line in lines if line in wanted] == list(wanted), lines
    for _ in range(3):
        with Sandbox.create(name, timeout=120) as box:
            assert box.commands.run("curl -sf localhost:8000/page").stdout == "served\n"
    # A child has it as well, without asking for it.
    build(Template().from_template(name).run_cmd("echo changed > page"), f"{name}-child")
    with Sandbox.create(f"{name}-child", timeout=120) as box:
        assert box.commands.run("curl -sf localhost:8000/page").stdout == "changed\n"


def test_a_step_ends_with_its_command(name: str) -> None:
    """What it has left running would hold its output open for ever, and is ended. The output before is whole."""
    noise = "(while sleep 0.01; do echo noise; date >> /tmp/goes-on; done &)"
    template = (
        Template()
        .from_template("base")
        .run_cmd("(sleep 3600 &); sleep 3600 & echo first; seq 5000; echo last >&2")
        .run_cmd(f"{noise}; nohup sleep 3600 > /dev/null 2>&1 & until test -s /tmp/goes-on; do :; done")
        .run_cmd("! pgrep sleep; cp /tmp/goes-on /tmp/before")
        .set_start_cmd("echo log > /dev/stdout; touch /tmp/logged; exec sleep 3600", "(sleep 3600 &); test -e /tmp/logged")
    )
    lines = build(template, name)
    said = [line.split("]: ", 1)[1] for line in lines if line.startswith("[builder 1/3] [stdout]: ")]
    assert said == ["first", *map(str, range(1, 5001))]
    assert "[builder 1/3] [stderr]: last" in lines
    assert "[start] [stdout]: log" in lines
    with Sandbox.create(name, timeout=120) as box:
        box.commands.run("cmp /tmp/before /tmp/goes-on")


@pytest.mark.parametrize(
    ("change", "step", "message"),
    [
        (
            lambda template: template.run_cmd("true").run_cmd("seq 20; printf 'no such thing' >&2; exit 3"),
            "2",
            "the command ended with exit code 3\n14\n15\n16\n17\n18\n19\n20\nno such thing",
        ),
        (
            lambda template: template.run_cmd("true", user="nobody-here"),
            "1",
            "failed to run command 'true': command failed: unauthenticated: invalid username: 'nobody-here'",
        ),
        (lambda template: template.set_start_cmd("echo no port; exit 5", "false"), "finalize", "ended with exit code 5\nno port"),
        (lambda template: template.run_cmd("kill -9 $$"), "1", "exit code"),
    ],
)
def test_failures_name_their_step(
    api: httpx.Client, name: str, change: object, step: str, message: str
) -> None:
    with pytest.raises(Exception, match=re.escape(message)):
        Template.build(change(Template().from_template("base")), name)  # type: ignore[operator]
    template = next(item for item in api.get("/v2/templates").json() if name in item["aliases"])
    assert template["buildStatus"] == "error"
    builds = api.get(f"/templates/{template['templateID']}").json()["builds"]
    status = api.get(f"/templates/{template['templateID']}/builds/{builds[0]['buildID']}/status").json()
    assert status["reason"]["step"] == step
    assert message in status["reason"]["message"]
    refused = api.post("/sandboxes", json={"templateID": name})
    assert refused.status_code in (400, 404), refused.text


def test_a_ready_command_that_fails_says_why(name: str) -> None:
    attempt = "echo x >> /tmp/attempts; [ $(wc -l < /tmp/attempts) -ge 3 ] || { echo no-such-program: not found >&2; exit 127; }"
    lines = build(Template().from_template("base").set_ready_cmd(attempt), name)
    told = [line for line in lines if line.startswith("[ready] ")]
    assert told, lines
    for when, why in zip(told[::2], told[1::2], strict=True):
        assert re.fullmatch(r"\[ready\] not ready after [0-9]+ s: exit code 127", when), lines
        assert why == "[ready] no-such-program: not found"


def test_an_image_that_cannot_be_fetched_says_why(name: str) -> None:
    begun = time.monotonic()
    with pytest.raises(Exception, match="nothing.invalid"):
        Template.build(Template().from_image("nothing.invalid/image:1"), name)
    assert time.monotonic() - begun < within(60)


def test_steps_of_a_build_are_confined_like_any_sandbox(name: str) -> None:
    """Metadata and the host are out of reach, and root of a step is nobody on the host."""
    template = (
        Template()
        .from_template("base")
        .run_cmd("! curl -s -m 5 http://169.254.169.254/ && cat /proc/self/uid_map > /etc/map", user="root")
        .run_cmd("! mount -t tmpfs none /mnt && ! mknod /dev/sda b 8 0", user="root")
    )
    build(template, name)
    with Sandbox.create(name, timeout=120) as box:
        first, outside, _ = box.files.read("/etc/map").split()
        assert (first, outside != "0") == ("0", True)
