"""GrpcBackend against real gRPC servers on loopback: owners that answer, refuse, and go away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

import grpc
import pytest

from fakes import STOP, WAIT_S, last, token
from pomona.cluster.gateway.backend import GrpcBackend
from pomona.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
    telemetry_pb2,
)
from pomona.workers.errors import EngineError, LostHost, Overloaded, RequestError, Unavailable

Code = grpc.StatusCode
READY = telemetry_pb2.OWNER_PHASE_READY
REQUEST = inference_pb2.GenerateRequest(request_id="r", model="M", text="p")
ANSWER = [token("a"), last("b", STOP, 2)]


class Owner(inference_pb2_grpc.InferenceServiceServicer):
    """One owner leader that sends messages, then fails, waits or ends."""

    def __init__(self, *messages: Any, code: Code | None = None, hangs: bool = False, trailing: Any = ()) -> None:
        self.messages = messages
        self.code = code
        self.hangs = hangs
        self.trailing = trailing
        self.calls = 0
        self.called = asyncio.Event()
        self.tokens: list[Any] = []
        self.cancelled = asyncio.Event()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802 - gRPC's name
        self.calls += 1
        self.called.set()
        self.tokens.append(dict(context.invocation_metadata()).get("pomona-token"))
        try:
            for message in self.messages:
                yield message
            if self.hangs:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if self.code is not None:
            await context.abort(self.code, "details", self.trailing)


@asynccontextmanager
async def serving(add: Callable[[grpc.aio.Server], None], port: int = 0) -> AsyncIterator[tuple[str, grpc.aio.Server]]:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    add(server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{bound}", server
    finally:
        await server.stop(None)


def route(worker_id: str, address: str, phase: int = READY, limit: int = 4) -> registry_pb2.Route:
    worker = telemetry_pb2.WorkerIdentity(model="M", incarnation=worker_id, host="h")
    load = telemetry_pb2.LoadReport(
        max_running_requests=limit,
        seq=1,
        kv_tokens=telemetry_pb2.PoolLoad(capacity=9, used=2, evictable=3),
        active_bytes=600,
        cache_bytes=50,
        limit_bytes=1000,
        preempted_requests=7,
    )
    return registry_pb2.Route(worker_id=worker_id, worker=worker, address=address, phase=phase, load=load)


class Cluster:
    """Owners a, b, … that are tried in this order, and the backend in front of them."""

    def __init__(self, backend: GrpcBackend, servers: list[grpc.aio.Server]) -> None:
        self.backend = backend
        self.servers = servers
        self.retries = 0

    async def text(self) -> str:
        async with asyncio.timeout(WAIT_S), aclosing(self.backend.generate(REQUEST)) as messages:
            return "".join([message.text async for message in messages])

    async def assigned(self) -> int:
        return sum(owner["assigned_here"] for owner in (await self.backend.cluster())["gateway"]["owners"])


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Awaitable[Cluster]]]:
    async with AsyncExitStack() as stack:

        async def made(*owners: Owner) -> Cluster:
            routes, servers = [], []
            for index, owner in enumerate(owners):
                add = lambda s, o=owner: inference_pb2_grpc.add_InferenceServiceServicer_to_server(o, s)  # noqa: E731
                address, server = await stack.enter_async_context(serving(add))
                servers.append(server)
                routes.append(route("abc"[index], address, limit=9 - index))
            cluster = Cluster(GrpcBackend("secret", on_retry=lambda: counted(cluster)), servers)
            cluster.backend.apply(registry_pb2.WatchRoutesResponse(full=True, routes=routes, epoch=3))
            stack.push_async_callback(cluster.backend.aclose)
            return cluster

        def counted(cluster: Cluster) -> None:
            cluster.retries += 1

        yield made


async def test_an_answer_streams_from_the_owner_with_the_token_in_its_metadata(start: Any) -> None:
    """And the assignment is released when it ends."""
    owner = Owner(*ANSWER)
    cluster = await start(owner)
    assert await cluster.text() == "ab"
    assert owner.tokens == ["secret"]
    assert await cluster.assigned() == 0


@pytest.mark.parametrize("code", [Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED, Code.FAILED_PRECONDITION])
async def test_an_owner_that_refuses_is_passed_over(start: Any, code: Code) -> None:
    """Each refusal before the first message sends the request on, and is counted."""
    cluster = await start(Owner(code=code), Owner(code=code), Owner(*ANSWER))
    assert await cluster.text() == "ab"
    assert cluster.retries == 2
    assert await cluster.assigned() == 0


async def test_every_owner_is_tried_once_and_a_full_queue_is_the_answer(start: Any) -> None:
    """Overloaded tells clients more than that another owner was out of reach."""
    owners = [Owner(code=Code.RESOURCE_EXHAUSTED), Owner(code=Code.UNAVAILABLE)]
    cluster = await start(*owners)
    with pytest.raises(Overloaded):
        await cluster.text()
    assert [owner.calls for owner in owners] == [1, 1]
    assert await cluster.assigned() == 0


@pytest.mark.parametrize(
    ("code", "kind", "status"),
    [
        (Code.INVALID_ARGUMENT, RequestError, 400),
        (Code.DEADLINE_EXCEEDED, RequestError, 504),
        (Code.UNAVAILABLE, Unavailable, None),
        (Code.CANCELLED, Unavailable, None),
        (Code.INTERNAL, EngineError, None),
        (Code.UNAUTHENTICATED, EngineError, None),
    ],
)
async def test_status_codes_map_to_the_error_tree(
    start: Any, code: Code, kind: type[Exception], status: int | None
) -> None:
    """Once, before the first message."""
    with pytest.raises(kind) as caught:
        await (await start(Owner(code=code))).text()
    assert type(caught.value) is kind
    assert getattr(caught.value, "status", None) == status


async def test_what_the_worker_says_of_a_bad_request_reaches_the_client(start: Any) -> None:
    """Message, param and code; nobody else is asked."""
    trailing = (("pomona-error-param", "messages"), ("pomona-error-code", "context_length_exceeded"))
    cluster = await start(Owner(code=Code.INVALID_ARGUMENT, trailing=trailing), Owner(*ANSWER))
    with pytest.raises(RequestError, match="details") as caught:
        await cluster.text()
    assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")
    assert cluster.retries == 0


@pytest.mark.parametrize("code", [Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED, Code.CANCELLED])
async def test_a_failure_after_the_first_message_is_a_lost_host(start: Any, code: Code) -> None:
    """What the client has seen cannot be taken back by another owner."""
    other = Owner(*ANSWER)
    with pytest.raises(LostHost):
        await (await start(Owner(token("a"), code=code), other)).text()
    assert other.calls == 0


async def test_a_server_that_goes_away_mid_stream_is_a_lost_host(start: Any) -> None:
    """Not a cancellation of our own task."""
    cluster = await start(Owner(token("a"), hangs=True))
    async with aclosing(cluster.backend.generate(REQUEST)) as messages:
        assert (await anext(messages)).text == "a"
        await cluster.servers[0].stop(None)
        with pytest.raises(LostHost):
            await asyncio.wait_for(anext(messages), WAIT_S)
    assert await cluster.assigned() == 0


async def test_an_owner_that_cannot_be_reached_is_passed_over(start: Any) -> None:
    """Its server is gone before the head has noticed."""
    cluster = await start(Owner(*ANSWER), Owner(*ANSWER))
    await cluster.servers[0].stop(None)
    assert await cluster.text() == "ab"
    assert cluster.retries == 1


@pytest.mark.parametrize("messages", [[], [token("a")]], ids=["queued", "decode"])
async def test_closing_the_generator_aborts_the_call(start: Any, messages: list[Any]) -> None:
    """Closed between messages, or cancelled while it waits for one."""
    owner = Owner(*messages, hangs=True)
    cluster = await start(owner)
    stream = cluster.backend.generate(REQUEST)
    for _ in messages:
        await anext(stream)
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.wait_for(owner.called.wait(), WAIT_S)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    await stream.aclose()
    await asyncio.wait_for(owner.cancelled.wait(), WAIT_S)
    assert await cluster.assigned() == 0


async def test_a_stream_outlives_its_route_and_then_its_channel_is_closed(start: Any) -> None:
    """A head that restarts may forget an owner for a moment."""
    cluster = await start(Owner(token("a"), token("b"), last("c", STOP, 3)))
    backend = cluster.backend
    stream = backend.generate(REQUEST)
    await anext(stream)
    backend.apply(registry_pb2.WatchRoutesResponse(full=True, epoch=4))
    assert not backend.ready("M")
    assert [message.text async for message in stream] == ["b", "c"]
    assert backend._links == {}
    with pytest.raises(Unavailable, match="'M'"):
        await cluster.text()


async def test_configured_models_are_known_before_they_have_an_owner() -> None:
    """Clients hear "not now" instead of "no such model"."""
    backend = GrpcBackend("secret", models=["N"])
    backend.apply(registry_pb2.WatchRoutesResponse(full=True, routes=[route("a", "x:1", phase=99)]))
    assert backend.models() == ["M", "N"]
    assert not backend.ready("M")
    await backend.aclose()


class Head(registry_pb2_grpc.RegistryServiceServicer):
    """Sends what is put into `updates`, to one gateway at a time."""

    def __init__(self) -> None:
        self.updates: asyncio.Queue[registry_pb2.WatchRoutesResponse] = asyncio.Queue()

    async def WatchRoutes(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802 - gRPC's name
        assert dict(context.invocation_metadata())["pomona-token"] == "secret"
        while True:
            yield await self.updates.get()

    async def GetCluster(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        return registry_pb2.GetClusterResponse(cluster_json='{"hosts": ["h"]}')


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - what the backend shows has no event
            await asyncio.sleep(0.005)


async def test_routes_are_followed_across_a_restart_of_the_head() -> None:
    """The last table stays in force while the head is away; its next one replaces it."""
    backend = GrpcBackend("secret")
    head = Head()
    add = lambda server: registry_pb2_grpc.add_RegistryServiceServicer_to_server(head, server)  # noqa: E731
    async with serving(add) as (address, _):
        watching = asyncio.create_task(backend.watch(address))
        head.updates.put_nowait(registry_pb2.WatchRoutesResponse(full=True, routes=[route("a", "x:1")], epoch=1))
        await until(lambda: backend.ready("M"))
        head.updates.put_nowait(registry_pb2.WatchRoutesResponse(routes=[route("b", "y:1")], epoch=1))
        await until(lambda: len(backend._loads) == 2)
    await until(lambda: backend._head_stub is None)
    shown = await backend.cluster()
    assert set(shown) == {"gateway"}
    assert shown["gateway"]["head"] == {"address": address, "connected": False}
    assert backend.ready("M")
    head.updates.put_nowait(registry_pb2.WatchRoutesResponse(full=True, routes=[route("c", "z:1")], epoch=2))
    async with serving(add, int(address.rsplit(":")[-1])):
        await until(lambda: backend._head_stub is not None)
        shown = await backend.cluster()
        watching.cancel()
        await asyncio.wait([watching])
    assert shown["hosts"] == ["h"]
    own = shown["gateway"]
    assert (own["epoch"], own["models"]) == (2, [{"model": "M", "ready": True}])
    (owner,) = own["owners"]
    assert (owner["worker_id"], owner["phase"], owner["max_running_requests"]) == ("c", "ready", 4)
    assert owner["kv_tokens"] == {"capacity": 9, "used": 2, "evictable": 3, "free": 4}
    assert [owner[key] for key in ("active_bytes", "cache_bytes", "limit_bytes")] == [600, 50, 1000]
    assert owner["preempted_requests"] == 7
    await backend.aclose()
