"""gRPC as every part uses it, on real sockets: the token in all four call shapes, and no shared ports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from pomona.workers import rpc

TOKEN = "correct horse battery staple"
WAIT_S = 5.0
SERVICE = "test.Echo"
SHAPES = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class Echo:
    """Says back what it hears, in all four shapes, and counts how often it was reached."""

    def __init__(self) -> None:
        self.reached = 0

    async def unary_unary(self, request: bytes, _: object) -> bytes:
        self.reached += 1
        return request

    async def unary_stream(self, request: bytes, _: object) -> AsyncIterator[bytes]:
        self.reached += 1
        yield request

    async def stream_unary(self, requests: AsyncIterator[bytes], _: object) -> bytes:
        self.reached += 1
        return b"".join([r async for r in requests])

    async def stream_stream(self, requests: AsyncIterator[bytes], _: object) -> AsyncIterator[bytes]:
        self.reached += 1
        async for request in requests:
            yield request

    def handlers(self) -> grpc.GenericRpcHandler:
        named = {shape: getattr(grpc, f"{shape}_rpc_method_handler")(getattr(self, shape)) for shape in SHAPES}
        return grpc.method_handlers_generic_handler(SERVICE, named)


async def _once(message: bytes) -> AsyncIterator[bytes]:
    yield message


async def call(channel: grpc.aio.Channel, shape: str, metadata: object) -> list[bytes]:
    """One call of the shape with one message each way."""
    asks, answers = shape.split("_")
    request = b"hello" if asks == "unary" else _once(b"hello")
    made = getattr(channel, shape)(f"/{SERVICE}/{shape}")(request, metadata=metadata, timeout=WAIT_S)
    return [await made] if answers == "unary" else [response async for response in made]


@pytest.fixture
async def echo():
    """(what is served, a channel to it)."""
    served, server = Echo(), rpc.server(TOKEN)
    server.add_generic_rpc_handlers((served.handlers(),))
    address = rpc.bind(server, "127.0.0.1")
    await server.start()
    async with rpc.channel(address) as channel:
        yield served, channel
    await server.stop(0)


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_call_with_the_clusters_token_is_served(echo, shape):
    served, channel = echo
    assert await call(channel, shape, rpc.metadata(TOKEN)) == [b"hello"]
    assert served.reached == 1


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "metadata",
    [None, rpc.metadata(""), rpc.metadata("wrong"), rpc.metadata(TOKEN[:-1]), (("another-key", TOKEN),)],
    ids=["none", "empty", "wrong", "short", "elsewhere"],
)
async def test_a_call_without_it_is_unauthenticated_and_reaches_nothing(echo, shape, metadata):
    served, channel = echo
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel, shape, metadata)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert TOKEN not in (caught.value.details() or "")
    assert served.reached == 0


async def test_a_refused_stream_that_never_ends_is_still_refused(echo):
    _, channel = echo
    still = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        yield b"hello"
        await still.wait()

    made = channel.stream_stream(f"/{SERVICE}/stream_stream")(endless(), metadata=rpc.metadata("wrong"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(WAIT_S):
            await made.read()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    still.set()


async def test_a_method_that_is_not_there_says_so(echo):
    _, channel = echo
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary(f"/{SERVICE}/nothing")(b"", metadata=rpc.metadata(TOKEN), timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_bound_server_has_a_port_of_its_own_that_peers_can_dial():
    first, second = rpc.server(TOKEN), rpc.server(TOKEN)
    addresses = {rpc.bind(first, "127.0.0.1"), rpc.bind(second, "127.0.0.1")}
    assert len(addresses) == 2
    assert all(address.startswith("127.0.0.1:") and not address.endswith(":0") for address in addresses)
    await first.stop(0)
    await second.stop(0)


async def test_a_port_in_use_is_an_os_error_that_names_it():
    first, second = rpc.server(TOKEN), rpc.server(TOKEN)
    address = rpc.bind(first, "127.0.0.1")
    await first.start()
    with pytest.raises(OSError, match=address):
        rpc.bind(second, "127.0.0.1", int(address.rpartition(":")[2]))
    await first.stop(0)
    await second.stop(0)


async def test_an_address_of_no_interface_is_an_os_error():
    server = rpc.server(TOKEN)
    with pytest.raises(OSError, match=r"192\.0\.2\.1"):
        rpc.bind(server, "192.0.2.1")
    await server.stop(0)


async def test_a_stopped_servers_port_can_be_bound_again():
    first, second = rpc.server(TOKEN), rpc.server(TOKEN)
    address = rpc.bind(first, "127.0.0.1")
    await first.start()
    await first.stop(0)
    assert rpc.bind(second, "127.0.0.1", int(address.rpartition(":")[2])) == address
    await second.stop(0)
