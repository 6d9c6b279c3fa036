"""gRPC from outside to a server inside, both of the published library."""

from __future__ import annotations

import io
import os
import queue
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import typing_extensions
from e2b import Sandbox

from harness.patience import within
from harness.platform import Platform
from harness.secure import SecurePlatform
from harness.traffic import program, until

PORT = 50051


@pytest.fixture(scope="module")
def library() -> bytes:
    """The library of this environment, which runs inside as well, because both have the Python of the host."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as files:
        for path in (Path(grpc.__file__).parent, Path(typing_extensions.__file__)):
            files.add(path, path.name)
    return archive.getvalue()


@pytest.fixture(scope="module")
def box(platform: Platform, library: bytes) -> Iterator[Sandbox]:
    with Sandbox.create(timeout=300) as box:
        box.files.write("/tmp/library.tar", library, request_timeout=60)
        box.commands.run("mkdir /tmp/library && tar -xf /tmp/library.tar -C /tmp/library")
        box.files.write("/tmp/grpc_server.py", program("grpc_server.py"))
        server = box.commands.run(
            f"exec python3 /tmp/grpc_server.py {PORT}", background=True, timeout=0, envs={"PYTHONPATH": "/tmp/library"}
        )
        out, error, _ = next(iter(server))
        assert (out, error) == ("up\n", None)
        yield box


def connect(platform: Platform, host: str) -> grpc.Channel:
    """To the address of the platform, under the name of the port."""
    address = f"ipv4:127.0.0.1:{platform.port}"
    name = host.partition(":")[0]
    options = [("grpc.default_authority", host), ("grpc.ssl_target_name_override", name), ("grpc.enable_retries", 0)]
    options += [("grpc.max_receive_message_length", 16 << 20)]
    if isinstance(platform, SecurePlatform):
        authority = Path(os.environ["SSL_CERT_FILE"]).read_bytes()
        return grpc.secure_channel(address, grpc.ssl_channel_credentials(authority), options)
    return grpc.insecure_channel(address, options)


@pytest.fixture
def channel(platform: Platform, box: Sandbox) -> Iterator[grpc.Channel]:
    with connect(platform, box.get_host(PORT)) as channel:
        yield channel


def test_unary_calls(channel: grpc.Channel) -> None:
    unary = channel.unary_unary("/test/Unary")
    answer, call = unary.with_call(b"abc", metadata=[("mark", "m")], timeout=20)
    assert (answer, call.code()) == (b"cba", grpc.StatusCode.OK)
    assert ("mark", "m") in {(item.key, item.value) for item in call.trailing_metadata()}
    large = os.urandom(10 << 20)
    assert unary(large, timeout=60) == large[::-1]
    assert unary(b"", timeout=20) == b""
    # Many on one connection of the client.
    calls = [unary.future(str(number).encode(), timeout=30) for number in range(100)]
    assert [call.result() for call in calls] == [str(number).encode()[::-1] for number in range(100)]


def test_messages_stream_from_the_server(channel: grpc.Channel, box: Sandbox) -> None:
    box.files.write("/tmp/lines", "first\n")
    answers = channel.unary_stream("/test/Stream")(b"/tmp/lines", timeout=30)
    assert next(answers) == b"first"
    # Only made now, so the first cannot have waited for it.
    box.files.write("/tmp/lines", "first\nsecond\nend\n")
    assert list(answers) == [b"second"]
    assert answers.code() == grpc.StatusCode.OK


def test_messages_stream_from_the_client(channel: grpc.Channel) -> None:
    collect = channel.stream_unary("/test/Collect")
    assert collect(iter([b"x" * 1000] * 5000), timeout=60) == b"5000 5000000"
    assert collect(iter([]), timeout=20) == b"0 0"


def test_messages_stream_both_ways(channel: grpc.Channel) -> None:
    sent: queue.Queue[Any] = queue.Queue()
    answers = channel.stream_stream("/test/Chat")(iter(sent.get, None), timeout=30)
    for number in range(50):
        sent.put(str(number).encode())
        assert next(answers) == str(number).encode()
    sent.put(None)
    assert list(answers) == []
    assert answers.code() == grpc.StatusCode.OK


def test_errors_have_their_status(channel: grpc.Channel, platform: Platform, box: Sandbox) -> None:
    with pytest.raises(grpc.RpcError) as failed:
        channel.unary_unary("/test/Fail")(b"", timeout=20)
    assert (failed.value.code(), failed.value.details()) == (grpc.StatusCode.NOT_FOUND, "no such thing: é")
    with pytest.raises(grpc.RpcError) as failed:
        channel.unary_unary("/test/None")(b"", timeout=20)
    assert failed.value.code() == grpc.StatusCode.UNIMPLEMENTED
    with connect(platform, box.get_host(PORT + 1)) as closed, pytest.raises(grpc.RpcError) as failed:
        closed.unary_unary("/test/Unary")(b"", timeout=20)
    assert failed.value.code() == grpc.StatusCode.UNAVAILABLE


def test_a_client_that_gives_up_is_noticed_inside(channel: grpc.Channel, box: Sandbox) -> None:
    call = channel.unary_unary("/test/Hang").future(b"", timeout=120)
    until(lambda: box.files.exists("/tmp/hanging"), "the call has begun inside")
    assert call.cancel() is True
    assert call.code() == grpc.StatusCode.CANCELLED
    until(lambda: box.files.exists("/tmp/cancelled"), "the server has noticed it")


def test_a_deadline_ends_a_call(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as failed:
        channel.unary_unary("/test/Hang")(b"", timeout=0.5)
    assert failed.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


def test_the_end_of_the_sandbox_ends_calls(platform: Platform, library: bytes, sandbox: Sandbox) -> None:
    sandbox.files.write("/tmp/library.tar", library, request_timeout=60)
    sandbox.commands.run("mkdir /tmp/library && tar -xf /tmp/library.tar -C /tmp/library")
    sandbox.files.write("/tmp/grpc_server.py", program("grpc_server.py"))
    handle = sandbox.commands.run(
        f"exec python3 /tmp/grpc_server.py {PORT}", background=True, timeout=0, envs={"PYTHONPATH": "/tmp/library"}
    )
    next(iter(handle))
    with connect(platform, sandbox.get_host(PORT)) as channel:
        call = channel.unary_unary("/test/Hang").future(b"", timeout=30)
        assert channel.unary_unary("/test/Unary")(b"ab", timeout=20) == b"ba"
        sandbox.kill()
        with pytest.raises(grpc.RpcError) as failed:
            call.result(timeout=within(20))
        assert failed.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL)
