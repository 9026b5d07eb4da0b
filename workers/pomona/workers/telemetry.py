"""Telemetry: register with the head, then report load; share and drain come back on the same stream.

Reports are absolute and only the latest matters: on change, at most ten and at least one a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

import grpc

from pomona.v1 import registry_pb2, registry_pb2_grpc, telemetry_pb2

from . import rpc

log = logging.getLogger(__name__)

MIN_INTERVAL_S = 0.1
MAX_INTERVAL_S = 1.0
RETRY_S = (0.2, 0.5, 1.0, 2.0)
REGISTER_TIMEOUT_S = 5.0
GOODBYE_TIMEOUT_S = 1.0


class Reporter:
    """Keeps this worker known to the head, for as long as the head can be reached, and again after that."""

    def __init__(
        self,
        registry_address: str,
        token: str,
        registration: Callable[[], registry_pb2.RegisterRequest],
        snapshot: Callable[[], telemetry_pb2.LoadReport],
        on_response: Callable[[registry_pb2.ReportLoadResponse], None],
    ) -> None:
        self._address = registry_address
        self._metadata = rpc.metadata(token)
        self._registration = registration
        self._snapshot = snapshot
        self._on_response = on_response
        self._changed = asyncio.Event()
        self.worker_id = ""

    def changed(self) -> None:
        """There is news: report soon."""
        self._changed.set()

    async def run(self) -> None:
        """Report until cancelled, then say goodbye. A head that is away is asked again, with a bounded pause."""
        self._failures = 0
        async with rpc.channel(self._address) as channel:
            stub = registry_pb2_grpc.RegistryServiceStub(channel)
            try:
                while True:
                    await self._try_session(stub)
                    await asyncio.sleep(RETRY_S[min(self._failures, len(RETRY_S) - 1)])
                    self._failures += 1
            finally:
                await self._deregister(stub)

    async def _try_session(self, stub: registry_pb2_grpc.RegistryServiceStub) -> None:
        try:
            await self._session(stub)
        except grpc.aio.AioRpcError as exc:
            log.warning("head at %s: %s %s", self._address, exc.code().name, exc.details())
        except Exception:  # whatever it was, a worker that no longer reports would be given up as lost
            log.exception("reporting to %s failed", self._address)

    async def _deregister(self, stub: registry_pb2_grpc.RegistryServiceStub) -> None:
        """The head hears it now, not when the lease runs out; when it cannot be told, the lease does."""
        goodbye = registry_pb2.DeregisterRequest(
            worker_id=self.worker_id, incarnation=self._registration().worker.incarnation, reason="stopped"
        )
        with contextlib.suppress(grpc.aio.AioRpcError):
            await stub.Deregister(goodbye, metadata=self._metadata, timeout=GOODBYE_TIMEOUT_S)

    async def _session(self, stub: registry_pb2_grpc.RegistryServiceStub) -> None:
        registered = await stub.Register(self._registration(), metadata=self._metadata, timeout=REGISTER_TIMEOUT_S)
        self.worker_id, self._failures = registered.worker_id, 0
        call = stub.ReportLoad(self._reports(registered.worker_id), metadata=self._metadata)
        try:
            async for response in call:
                self._on_response(response)
        finally:
            call.cancel()

    async def _reports(self, worker_id: str) -> AsyncIterator[registry_pb2.ReportLoadRequest]:
        while True:
            self._changed.clear()
            report = self._snapshot()
            report.worker_id = worker_id
            yield registry_pb2.ReportLoadRequest(report=report)
            await asyncio.sleep(MIN_INTERVAL_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), MAX_INTERVAL_S - MIN_INTERVAL_S)
