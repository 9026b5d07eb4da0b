"""The head's gRPC service: workers register and report, gateways watch. Edge only: it asks `Cluster` and answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc

from pomona.v1 import registry_pb2, registry_pb2_grpc

from . import wire
from .cluster import Cluster
from .membership import LEASE_S, UnknownWorker

if TYPE_CHECKING:  # generic in the stubs only
    Context = grpc.aio.ServicerContext[Any, Any]

# Gateways hear of changes at most so often, and at least so often (phases move with time alone).
WATCH_MIN_INTERVAL_S = 0.05
WATCH_MAX_INTERVAL_S = 1.0


class RegistryService(registry_pb2_grpc.RegistryServiceServicer):
    """Serves one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def Register(self, request: registry_pb2.RegisterRequest, context: Context) -> registry_pb2.RegisterResponse:
        if not self._cluster.expects(request.worker.model, request.worker.replica, request.worker.owner):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this cluster wants no such owner")
        member = self._cluster.register(wire.to_identity(request), wire.to_memory(request.memory), request.epoch)
        return registry_pb2.RegisterResponse(worker_id=member.worker_id, lease_s=LEASE_S)

    async def ReportLoad(
        self, request_iterator: AsyncIterator[registry_pb2.ReportLoadRequest], context: Context
    ) -> AsyncIterator[registry_pb2.ReportLoadResponse]:
        async for request in request_iterator:
            report = request.report
            try:
                member = self._cluster.report(report.worker_id, report.incarnation, wire.to_load(report))
            except UnknownWorker:
                await context.abort(grpc.StatusCode.NOT_FOUND, "unknown worker: register again")
            response = registry_pb2.ReportLoadResponse(drain=member.draining)
            if member.allocation is not None:
                response.allocation.CopyFrom(wire.from_allocation(member.allocation))
            yield response

    async def WatchRoutes(
        self, request: registry_pb2.WatchRoutesRequest, context: Context
    ) -> AsyncIterator[registry_pb2.WatchRoutesResponse]:
        sent: dict[str, registry_pb2.Route] = {}
        full = True
        with self._cluster.changes() as changed:
            while True:
                changed.clear()
                routes = {r.worker_id: r for r in self._routes(request.model)}
                update = registry_pb2.WatchRoutesResponse(
                    full=full,
                    routes=[r for w, r in routes.items() if sent.get(w) != r],
                    removed_worker_ids=sorted(sent.keys() - routes.keys()),
                    epoch=self._cluster.epoch,
                )
                if full or update.routes or update.removed_worker_ids:
                    yield update
                sent, full = routes, False
                await asyncio.sleep(WATCH_MIN_INTERVAL_S)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), WATCH_MAX_INTERVAL_S)

    def _routes(self, model: str) -> list[registry_pb2.Route]:
        now = self._cluster.now()
        return [wire.to_route(m, now) for m in self._cluster.members.all() if not model or m.identity.model == model]

    async def Deregister(
        self, request: registry_pb2.DeregisterRequest, context: Context
    ) -> registry_pb2.DeregisterResponse:
        self._cluster.deregister(request.worker_id, request.incarnation)
        return registry_pb2.DeregisterResponse()

    async def GetCluster(
        self, request: registry_pb2.GetClusterRequest, context: Context
    ) -> registry_pb2.GetClusterResponse:
        return registry_pb2.GetClusterResponse(cluster_json=json.dumps(self._cluster.view().to_json()))
