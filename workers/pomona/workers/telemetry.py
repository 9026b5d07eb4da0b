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


class Reporter:
    """Keeps this worker known to the head, for as long as the head can be reached, and again after that."""

    def __init__(
        self,
        registry_address: str,
        token: str,
        registration: registry_pb2.RegisterRequest,
        snapshot: Callable[[], telemetry_pb2.LoadReport],
        on_response: Callable[[registry_pb2.ReportLoadResponse], None],
    ) -> None:
        self._address = registry_address
        self._metadata = rpc.metadata(token)
        self._registration = registration
        self._snapshot = snapshot
        self._on_response = on_response
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """There is news: report soon."""
        self._changed.set()

    async def run(self) -> None:
        """Report until cancelled. A head that is away is asked again, for ever, with a bounded pause."""
        failures = 0
        async with rpc.channel(self._address) as channel:
            stub = registry_pb2_grpc.RegistryServiceStub(channel)
            while True:
                try:
                    await self._session(stub)
                    failures = 0
                except grpc.aio.AioRpcError as exc:
                    log.warning("head at %s: %s %s", self._address, exc.code().name, exc.details())
                await asyncio.sleep(RETRY_S[min(failures, len(RETRY_S) - 1)])
                failures += 1

    async def _session(self, stub: registry_pb2_grpc.RegistryServiceStub) -> None:
        registered = await stub.Register(self._registration, metadata=self._metadata, timeout=REGISTER_TIMEOUT_S)
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
