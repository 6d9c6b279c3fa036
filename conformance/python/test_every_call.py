"""Every method of a sandbox itself and of its class, through both APIs; what is not there yet is named."""

from __future__ import annotations

import inspect
import uuid
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from e2b import NotFoundException, SandboxException, SandboxQuery, SandboxState

from harness.surface import FLAVOURS, SANDBOX, Box, both, called, methods

# Methods for what the platform does not have.
UNSERVED = {
    "get_mcp_url",
    "get_mcp_token",
}


async def of_class(box: Box, method: str, *positional: Any, **named: Any) -> Any:
    """A call on the class; pages of a list are the caller's to await."""
    kind = SANDBOX[box.flavour]
    called[kind][method].update(named)
    result = getattr(kind, method)(*positional, **named)
    return await result if inspect.isawaitable(result) else result


@both
async def test_a_whole_life(box: Box) -> None:
    mark = uuid.uuid4().hex
    made = await of_class(
        box, "create", template="base", timeout=100, metadata={"mark": mark}, envs={"A": "b"}, secure=True,
        allow_internet_access=False, network={"allow_public_traffic": True}, lifecycle={"on_timeout": "kill"},
    )
    found = [item async for item in pages(box, SandboxQuery(metadata={"mark": mark}, state=[SandboxState.RUNNING]))]
    assert [item.sandbox_id for item in found] == [made.sandbox_id]
    before = datetime.now(timezone.utc)
    connected = await of_class(box, "connect", made.sandbox_id, timeout=200)
    after = datetime.now(timezone.utc)
    assert connected.sandbox_id == made.sandbox_id
    end_at = (await of_class(box, "get_info", made.sandbox_id)).end_at
    # A second for rounding.
    assert before + timedelta(seconds=199) <= end_at <= after + timedelta(seconds=201)
    await of_class(box, "set_timeout", made.sandbox_id, timeout=50)
    left = (await of_class(box, "get_info", made.sandbox_id)).end_at - datetime.now(timezone.utc)
    assert left <= timedelta(seconds=51)
    assert isinstance(await of_class(box, "get_metrics", made.sandbox_id), list)
    assert await of_class(box, "kill", made.sandbox_id) is True
    assert await of_class(box, "kill", made.sandbox_id) is False


async def pages(box: Box, query: SandboxQuery) -> Any:
    listing = await of_class(box, "list", query=query, limit=1, order="asc")
    while listing.has_next:
        items = listing.next_items()
        for item in await items if inspect.isawaitable(items) else items:
            yield item


@both
async def test_a_sandbox_at_hand(box: Box) -> None:
    assert await box.is_running(request_timeout=30)
    assert await box.get_host(80) == f"80-{box.sandbox_id}.{box.sandbox_domain}"
    await box.set_timeout(500)
    before = datetime.now(timezone.utc)
    again = await box.connect(timeout=600)
    after = datetime.now(timezone.utc)
    assert again.sandbox_id == box.sandbox_id
    end_at = (await box.get_info()).end_at
    assert before + timedelta(seconds=599) <= end_at <= after + timedelta(seconds=601)
    await box.shell("echo -n x > f")
    await box.update_network({"allow_out": ["1.1.1.1", "example.com"], "deny_out": ["0.0.0.0/0"]})
    await of_class(box, "update_network", box.sandbox_id, {})
    with pytest.raises(SandboxException, match="denyOut"):
        await box.update_network({"deny_out": ["example.com"]})
    assert "signature=" in await box.download_url("f") and "signature=" in await box.upload_url("f")

    async def measured() -> list[Any]:
        return await box.get_metrics(start=datetime.now(timezone.utc) - timedelta(minutes=1), end=datetime.now(timezone.utc))

    await box.until(measured, "it was measured")
    assert await box.kill() is True
    assert await box.is_running() is False
    with pytest.raises(NotFoundException):
        await box.get_info()


@both
async def test_pause_and_resume(box: Box) -> None:
    for pause in (box.pause, box.beta_pause):
        assert await pause() is True
        assert await pause() is False
        assert (await box.get_info()).state == SandboxState.PAUSED
        assert await box.is_running() is False
        await box.connect(timeout=120)
    assert await of_class(box, "pause", box.sandbox_id) is True
    await of_class(box, "connect", box.sandbox_id, timeout=120)
    assert await box.shell("echo alive") == "alive\n"


@both
async def test_snapshots(box: Box) -> None:
    name = f"s{uuid.uuid4().hex[:10]}"
    made = [await box.create_snapshot(), await of_class(box, "create_snapshot", box.sandbox_id, name=name)]
    for listing in (await box.list_snapshots(limit=1), await of_class(box, "list_snapshots", sandbox_id=box.sandbox_id, limit=5)):
        found = []
        while listing.has_next:
            items = listing.next_items()
            found += [item.snapshot_id for item in (await items if inspect.isawaitable(items) else items)]
        assert found == [snapshot.snapshot_id for snapshot in reversed(made)]
    assert await of_class(box, "delete_snapshot", made[0].snapshot_id) is True
    assert await of_class(box, "delete_snapshot", made[0].snapshot_id) is False
    assert await of_class(box, "delete_snapshot", made[1].snapshot_id) is True


@both
async def test_what_the_host_lacks_is_refused_and_harms_nothing(box: Box) -> None:
    """Without CRIU there are no forks; test_fork.py has them."""
    with pytest.raises(SandboxException, match="CRIU"):
        await box.fork(timeout=20, count=2)
    with pytest.raises(SandboxException, match="CRIU"):
        await of_class(box, "fork", box.sandbox_id)
    assert await box.shell("echo alive") == "alive\n"


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_nothing_is_left_untried(flavour: str) -> None:
    """Judges what the tests above have called."""
    kind = SANDBOX[flavour]
    public = set(methods(kind))
    assert UNSERVED <= public
    assert sorted(public - set(called[kind]) - UNSERVED) == []
