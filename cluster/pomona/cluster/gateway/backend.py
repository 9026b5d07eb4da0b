"""The gateway's one seam: what answers a `GenerateRequest`. The real one finds an owner and speaks gRPC to it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import grpc.aio

from pomona.v1 import inference_pb2, inference_pb2_grpc, registry_pb2, registry_pb2_grpc, telemetry_pb2
from pomona.workers.errors import EngineError, LostHost, Overloaded, PomonaError, RequestError, Unavailable

from ..router import Assignment, OwnerPhase, OwnerRoute, RoutingTable

logger = logging.getLogger(__name__)

Code = grpc.StatusCode
ChannelOptions = Sequence[tuple[str, Any]]

FIRST_BACKOFF_S = 0.2
LAST_BACKOFF_S = 2.0
HEAD_VIEW_TIMEOUT_S = 2.0

# gRPC shares connections, and their reconnect backoff, between channels of one process: a worker that comes back on
# an old address would wait out the backoff of its former life.
OWN_CONNECTIONS = ("grpc.use_local_subchannel_pool", 1)


class Backend(Protocol):
    """What the HTTP app needs of a cluster."""

    def models(self) -> list[str]:
        """The models that are served here, whether or not an owner is ready."""

    def ready(self, model: str) -> bool:
        """Whether an owner of `model` admits requests."""

    async def cluster(self) -> dict[str, Any]:
        """What GET /cluster shows, as JSON."""

    def generate(self, request: inference_pb2.GenerateRequest) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """The answer's messages. Closing the generator aborts the request.

        Raises RequestError, Overloaded, Unavailable, LostHost or EngineError.
        """


# ---- from the wire


PHASES: Mapping[int, OwnerPhase] = {
    telemetry_pb2.OWNER_PHASE_LOADING: OwnerPhase.LOADING,
    telemetry_pb2.OWNER_PHASE_READY: OwnerPhase.READY,
    telemetry_pb2.OWNER_PHASE_SUSPECT: OwnerPhase.SUSPECT,
    telemetry_pb2.OWNER_PHASE_DRAINING: OwnerPhase.DRAINING,
}


def owner_route(route: registry_pb2.Route) -> OwnerRoute:
    """A route off the wire; a phase that this version does not know gets no requests."""
    return OwnerRoute(
        worker_id=route.worker_id,
        model=route.worker.model,
        replica=route.worker.replica,
        owner=route.worker.owner,
        host=route.worker.host,
        incarnation=route.worker.incarnation,
        address=route.address,
        phase=PHASES.get(route.phase, OwnerPhase.SUSPECT),
        max_running_requests=route.load.max_running_requests,
        running=route.load.running_requests,
        waiting=route.load.waiting_requests,
        seq=route.load.seq,
        context_tokens=route.context_tokens,
    )


def _refused(exc: grpc.aio.AioRpcError) -> RequestError:
    pairs: Any = exc.trailing_metadata() or ()  # grpc-stubs knows another metadata type than grpc.aio has
    trailing = dict(pairs)
    param, code = trailing.get("pomona-error-param") or None, trailing.get("pomona-error-code") or None
    return RequestError(exc.details() or "The request cannot be served.", param=param, code=code)


def _timed_out(exc: grpc.aio.AioRpcError) -> RequestError:
    return RequestError(exc.details() or "The request ran out of time.", code="timeout", status=504)


ERRORS: Mapping[Code, Callable[[grpc.aio.AioRpcError], PomonaError]] = {
    Code.INVALID_ARGUMENT: _refused,
    Code.RESOURCE_EXHAUSTED: lambda _: Overloaded("Every queue for this model is full; try again in a moment."),
    Code.UNAVAILABLE: lambda _: Unavailable("The worker cannot be reached."),
    Code.CANCELLED: lambda _: Unavailable("The worker ended the call."),  # a server that stops cancels its calls
    Code.FAILED_PRECONDITION: lambda _: Unavailable("The worker is under an older plan."),
    Code.DEADLINE_EXCEEDED: _timed_out,
}


def to_error(exc: grpc.aio.AioRpcError, started: bool) -> PomonaError:
    """The error tree's word for a failed call; `started` says that a message had already come."""
    make = ERRORS.get(exc.code())
    if make is None:
        return EngineError(f"The worker failed the request ({exc.code().name}); its log says why.")
    error = make(exc)
    if started and isinstance(error, Unavailable):  # too late for another owner
        return LostHost("The worker was lost while it answered.")
    return error


# ---- the real backend


@dataclass(slots=True)
class _Link:
    channel: grpc.aio.Channel
    stub: Any


class GrpcBackend:
    """Owners over gRPC, found in the table that the head streams.

    `models` are served here even while they have no owner, so that clients hear "not now" instead of "no such
    model". `on_retry` is called for every try after a request's first.
    """

    def __init__(
        self,
        token: str,
        channel_options: ChannelOptions = (),
        models: Iterable[str] = (),
        on_retry: Callable[[], None] = lambda: None,
    ) -> None:
        self._metadata = (("pomona-token", token),)
        self._options = [*channel_options, OWN_CONNECTIONS]
        self._configured = frozenset(models)
        self._on_retry = on_retry
        self._table = RoutingTable()
        self._loads: dict[str, telemetry_pb2.LoadReport] = {}
        self._links: dict[str, _Link] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._head = ""
        self._head_stub: Any = None  # set while its routes are followed
        self._epoch = 0

    # -- Backend

    def models(self) -> list[str]:
        return sorted(self._configured.union(self._table.models()))

    def ready(self, model: str) -> bool:
        return self._table.ready(model)

    async def cluster(self) -> dict[str, Any]:
        """The head's own view (view.ClusterView) where it answers, and beside it what this gateway routes by."""
        return {**await self._head_view(), "gateway": self._own_view()}

    async def _head_view(self) -> dict[str, Any]:
        if self._head_stub is None:
            return {}
        try:
            reply = await self._head_stub.GetCluster(
                registry_pb2.GetClusterRequest(), metadata=self._metadata, timeout=HEAD_VIEW_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as exc:
            logger.info("head %s did not tell its view: %s", self._head, exc.details())
            return {}
        view: dict[str, Any] = json.loads(reply.cluster_json)
        return view

    def _own_view(self) -> dict[str, Any]:
        routes = sorted(self._table.routes().values(), key=lambda route: (route.model, route.replica, route.owner))
        return {
            "head": {"address": self._head, "connected": self._head_stub is not None},
            "epoch": self._epoch,
            "models": [{"model": model, "ready": self.ready(model)} for model in self.models()],
            "owners": [self._owner(route) for route in routes],
        }

    def _owner(self, route: OwnerRoute) -> dict[str, Any]:
        load = self._loads[route.worker_id]
        return {
            "worker_id": route.worker_id,
            "model": route.model,
            "replica": route.replica,
            "owner": route.owner,
            "host": route.host,
            "address": route.address,
            "phase": route.phase.value,
            "max_running_requests": route.max_running_requests,
            "running_requests": route.running,
            "waiting_requests": route.waiting,
            "preempted_requests": load.preempted_requests,
            "assigned_here": self._table.in_flight(route.worker_id),
            "context_tokens": route.context_tokens,
            "kv_tokens": _pool(load.kv_tokens),
            "aux_state_slots": _pool(load.aux_slots),
            "active_bytes": load.active_bytes,
            "cache_bytes": load.cache_bytes,
            "limit_bytes": load.limit_bytes,
        }

    async def generate(
        self, request: inference_pb2.GenerateRequest
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        refused: Unavailable | None = None
        tried: frozenset[str] = frozenset()
        while (assignment := self._table.assign(request.model, tried)) is not None:
            if tried:
                self._on_retry()
            tried |= {assignment.worker_id}
            try:
                async with aclosing(self._stream(assignment, request)) as messages:
                    async for message in messages:
                        yield message
                return  # noqa: TRY300 - the answer is complete
            except Unavailable as exc:
                # A full queue says more than an owner that was out of reach.
                refused = refused if isinstance(refused, Overloaded) else exc
            finally:
                self._release(assignment)
        raise refused or Unavailable(f"No worker for '{request.model}' is ready; try again in a moment.")

    async def _stream(
        self, assignment: Assignment, request: inference_pb2.GenerateRequest
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """One try at one owner. Unavailable is raised before the first message only."""
        call = self._link(assignment).stub.Generate(request, metadata=self._metadata)
        started = False
        try:
            async for message in call:
                started = True
                yield message
        except grpc.aio.AioRpcError as exc:
            logger.info("request %s at %s: %s", request.request_id, assignment.worker_id, exc.details())
            raise to_error(exc, started) from exc
        finally:
            call.cancel()

    # -- channels, one a worker: a worker has one address for life

    def _link(self, assignment: Assignment) -> _Link:
        link = self._links.get(assignment.worker_id)
        if link is None:
            channel = grpc.aio.insecure_channel(assignment.address, options=self._options)
            link = self._links[assignment.worker_id] = _Link(channel, inference_pb2_grpc.InferenceServiceStub(channel))
        return link

    def _release(self, assignment: Assignment) -> None:
        self._table.release(assignment)
        self._drop_unused_links()

    def _drop_unused_links(self) -> None:
        """Closes channels to workers that are gone, once our last stream there has ended."""
        routes = self._table.routes()
        for worker_id in [w for w in self._links if w not in routes and not self._table.in_flight(w)]:
            self._in_background(self._links.pop(worker_id).channel.close(None))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def aclose(self) -> None:
        """Closes every channel; streams under way end."""
        links, self._links = self._links, {}
        await asyncio.gather(*(link.channel.close(None) for link in links.values()), *self._closing)

    # -- routes

    def apply(self, update: registry_pb2.WatchRoutesResponse) -> None:
        """Takes one message of WatchRoutes."""
        self._table.apply(update.full, map(owner_route, update.routes), update.removed_worker_ids)
        self._epoch = update.epoch
        self._loads.update((route.worker_id, route.load) for route in update.routes)
        routes = self._table.routes()
        self._loads = {worker_id: load for worker_id, load in self._loads.items() if worker_id in routes}
        self._drop_unused_links()

    async def watch(self, head_address: str) -> None:
        """Follows the head's routes until cancelled; the last table stays in force while the head is away."""
        self._head = head_address
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                await self._follow(head_address)
                reason = "the head ended the stream"
            except grpc.aio.AioRpcError as exc:
                reason = exc.details() or exc.code().name
            if self._head_stub is not None:
                logger.warning("head %s is away, serving from the last table: %s", head_address, reason)
                backoff_s = FIRST_BACKOFF_S
            self._head_stub = None
            await asyncio.sleep(backoff_s)
            backoff_s = min(LAST_BACKOFF_S, backoff_s * 2)

    async def _follow(self, head_address: str) -> None:
        async with grpc.aio.insecure_channel(head_address, options=self._options) as channel:
            stub = registry_pb2_grpc.RegistryServiceStub(channel)
            async for update in stub.WatchRoutes(registry_pb2.WatchRoutesRequest(), metadata=self._metadata):
                if self._head_stub is None:
                    logger.info("following the routes of head %s", head_address)
                    self._head_stub = stub
                self.apply(update)


def _pool(pool: telemetry_pb2.PoolLoad) -> dict[str, int]:
    return {
        "capacity": pool.capacity,
        "used": pool.used,
        "evictable": pool.evictable,
        "free": max(0, pool.capacity - pool.used - pool.evictable),
    }
