"""The gateway as a Ray actor: the HTTP app under uvicorn, over the gRPC backend. No logic here."""

from __future__ import annotations

import asyncio
import logging
from importlib.metadata import version

from pomona.workers import rpc

from ..config import ServeConfig
from ..http_server import HttpServer, listen
from .app import create_app
from .backend import GrpcBackend
from .metrics import GatewayMetrics


class GatewayActor:
    """Serves HTTP from `start` to `stop`; goes on from its last routing table when the head is away."""

    def __init__(self, config: ServeConfig, registry_address: str, token: str) -> None:
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
        self._config = config
        self._registry_address = registry_address
        self._token = token

    async def start(self) -> None:
        """Raises OSError for a port in use."""
        config, metrics = self._config, GatewayMetrics()
        sock = listen(config.host, config.port)
        self._backend = GrpcBackend(
            self._token,
            rpc.CHANNEL_OPTIONS,
            models=[config.served_model_name or config.model],
            on_retry=metrics.retried,
        )
        app = create_app(self._backend, api_key=config.api_key, metrics=metrics, version=version("pomona"))
        self._http = HttpServer(app, sock)
        self._http.start()
        self._watching = asyncio.create_task(self._backend.watch(self._registry_address))

    async def stop(self) -> None:
        await self._http.stop()
        self._watching.cancel()
        await self._backend.aclose()
