"""The head: registry, exporter and replicas around one Cluster. The Ray actor only holds a Head."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass

from pomona.v1 import registry_pb2_grpc
from pomona.workers import rpc
from pomona.workers.errors import OperatorError

from . import exporter
from .cluster import Cluster
from .config import ServeConfig
from .http_server import HttpServer, listen
from .launcher import Launcher, RayLauncher
from .placement import bind_host
from .registry import RegistryService
from .replicas import Failure, Replicas
from .view import ClusterView

log = logging.getLogger(__name__)

TICK_S = 0.5


@dataclass(frozen=True, slots=True)
class HeadStatus:
    """What `pomona serve` watches: the view, and why it cannot go on, if so."""

    view: ClusterView
    failure: Failure | None


class Head:
    """Serves one model's cluster from start to stop."""

    def __init__(self, config: ServeConfig, launcher: Launcher, *, token: str, weights_bytes: int = 0) -> None:
        self._config = config
        self._launcher = launcher
        self._token = token
        self._weights_bytes = weights_bytes
        self.cluster = Cluster(
            config.served_model_name or config.model, config.topology(), config.limits, time.monotonic
        )
        self._server = rpc.server(token)
        self._exporter: HttpServer | None = None
        self._replicas: Replicas | None = None
        self._ticking: asyncio.Task[None] | None = None

    async def start(self, head_host_id: str | None = None) -> str:
        """Open registry and exporter; returns the registry's address. Raises OSError for a port in use."""
        hosts = self._launcher.hosts()
        here = next((h for h in hosts if h.host_id == head_host_id), hosts[0])
        registry_pb2_grpc.add_RegistryServiceServicer_to_server(RegistryService(self.cluster), self._server)
        address = rpc.bind(self._server, bind_host(here, hosts))
        await self._server.start()
        config = self._config
        sock = listen(config.metrics_host, config.metrics_port)
        self._exporter = HttpServer(exporter.app(self.cluster.view, self._targets), sock)
        self._exporter.start()
        self.cluster.addresses = tuple(_addresses(config).items())
        self._ticking = asyncio.create_task(self._tick())
        self._replicas = Replicas(
            config,
            self.cluster,
            self._launcher,
            registry=address,
            token=self._token,
            weights_bytes=self._weights_bytes,
        )
        return address

    def deploy(self) -> None:
        """Start the replicas. Raises OperatorError when there is no host for one."""
        assert self._replicas is not None, "start first"
        self._replicas.start()

    def status(self) -> HeadStatus:
        refused = self.cluster.refused
        failure = Failure(str(refused), operator=True) if refused is not None else None
        if failure is None and self._replicas is not None:
            failure = self._replicas.failure
        return HeadStatus(self.cluster.view(), failure)

    async def stop(self) -> None:
        """End replicas, then the servers."""
        if self._ticking is not None:
            self._ticking.cancel()
        if self._replicas is not None:
            await self._replicas.stop()
        if self._exporter is not None:
            await self._exporter.stop()
        await self._server.stop(0.5)

    async def _tick(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                await asyncio.sleep(TICK_S)
                self.cluster.tick()

    def _targets(self) -> list[tuple[str, str]]:
        c = self._config
        return [("head", f"{c.metrics_host}:{c.metrics_port}"), ("gateway", f"{c.host}:{c.port}")]


def _addresses(config: ServeConfig) -> dict[str, str]:
    """What a person would open."""
    return {
        "api": f"http://{config.host}:{config.port}/v1",
        "page": f"http://{config.host}:{config.port}/",
        "cluster": f"http://{config.host}:{config.port}/cluster",
        "metrics": f"http://{config.metrics_host}:{config.metrics_port}/metrics",
    }


class HeadActor:
    """The head as a named detached Ray actor. No logic here."""

    def __init__(self, config: ServeConfig, token: str, weights_bytes: int) -> None:
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
        self._arguments = (config, token, weights_bytes)
        self._head: Head | None = None

    async def start(self) -> str:
        import ray

        config, token, weights_bytes = self._arguments
        self._head = Head(config, RayLauncher(), token=token, weights_bytes=weights_bytes)
        return await self._head.start(ray.get_runtime_context().get_node_id())

    async def deploy(self) -> str | None:
        """None, or why no host can take a replica."""
        assert self._head is not None
        try:
            self._head.deploy()
        except OperatorError as exc:
            return str(exc)
        return None

    async def status(self) -> HeadStatus:
        assert self._head is not None
        return self._head.status()

    async def stop(self) -> None:
        if self._head is not None:
            await self._head.stop()
