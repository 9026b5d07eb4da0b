"""Keeping the wanted replicas running: place, start, watch, start anew. One supervising task a replica."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass

from pomona.workers.errors import OperatorError
from pomona.workers.spec import Ended, Stage, WorkerSpec

from .capacity import part
from .cluster import Cluster
from .config import ServeConfig
from .launcher import Handle, Launcher
from .membership import OwnerKey
from .placement import Host, bind_host, choose
from .view import ReplicaView

log = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 0.2
BACKOFF_S = (1.0, 2.0, 5.0, 15.0, 60.0)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a replica could not start. `operator` says that the person at the command line can mend it."""

    reason: str
    operator: bool


def backoff_s(failures: int) -> float:
    """How long to wait before the next start after so many failures in a row."""
    return BACKOFF_S[min(failures, len(BACKOFF_S)) - 1] if failures else 0.0


class Replicas:
    """Replicas of one rank each. `failure` is set when one never came up: then nothing is tried again."""

    def __init__(
        self,
        config: ServeConfig,
        cluster: Cluster,
        launcher: Launcher,
        *,
        registry: str,
        token: str,
        weights_bytes: int,
    ) -> None:
        self._config = config
        self._cluster = cluster
        self._launcher = launcher
        self._registry = registry
        self._token = token
        self._weights_bytes = weights_bytes
        self._placed: dict[int, Host] = {}
        self._handles: dict[int, Handle] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._starts = 0
        self.failure: Failure | None = None

    def start(self) -> None:
        """Place every replica, then start and supervise each. Raises OperatorError when there is no host for one."""
        count = self._config.topology().replicas
        for replica in range(count):
            self._place(replica)
        self._tasks = [asyncio.create_task(self._supervise(replica)) for replica in range(count)]

    async def stop(self) -> None:
        """End every replica."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(h.stop() for h in self._handles.values()), return_exceptions=True)

    def _place(self, replica: int) -> Host:
        hosts = self._launcher.hosts()
        self._cluster.hosts = tuple(h.name for h in hosts)
        self._placed.pop(replica, None)
        ranks_on = Counter(h.host_id for h in self._placed.values())
        host = self._placed[replica] = choose(hosts, ranks_on, need_bytes=self._weights_bytes)
        self._show(replica, Stage.STARTING.value)
        return host

    async def _supervise(self, replica: int) -> None:
        failures = 0
        while self.failure is None:
            ended = await self._run(replica)
            came_up = self._came_up(replica)
            self._cluster.lost(OwnerKey(replica, 0))
            failures = 1 if came_up else failures + 1
            log.warning("replica %d ended: %s", replica, ended.reason)
            self._show(replica, "failed", problem=ended.reason)
            if failures == 1 and not came_up:
                self.failure = self.failure or Failure(ended.reason, ended.operator)
                return
            await asyncio.sleep(backoff_s(failures))
            await self._place_again(replica)

    async def _place_again(self, replica: int) -> None:
        while True:
            try:
                self._place(replica)
            except OperatorError as exc:
                self._show(replica, "failed", problem=str(exc))
                await asyncio.sleep(BACKOFF_S[0])
            else:
                return

    async def _run(self, replica: int) -> Ended:
        """One life of a replica, and why it ended, whatever broke."""
        try:
            return await self._live(replica)
        except Exception as exc:
            log.exception("replica %d cannot run", replica)
            return Ended(f"starting it failed: {type(exc).__name__}: {exc}")

    def _came_up(self, replica: int) -> bool:
        """Whether it loaded and registered: then its end is an accident, not a model or a flag that is wrong."""
        registered = self._cluster.members.at(OwnerKey(replica, 0)) is not None
        return registered or self._cluster.replica_views[replica].stage == Stage.READY.value

    async def _live(self, replica: int) -> Ended:
        self._starts += 1
        name = f"pomona-worker-{replica}-{self._starts}"
        handle = await self._launcher.start(self._spec(replica), self._placed[replica], name)
        self._handles[replica] = handle
        progress = asyncio.create_task(self._follow(replica, handle))
        try:
            ended = await handle.ended()
        finally:
            progress.cancel()
            await asyncio.gather(progress, return_exceptions=True)
        await handle.stop()
        return ended

    async def _follow(self, replica: int, handle: Handle) -> None:
        """Show how far the start is, until it is ready."""
        while True:
            progress = await handle.progress()
            self._show(replica, progress.stage.value, progress.done, progress.total)
            if progress.stage is Stage.READY:
                return
            await asyncio.sleep(PROGRESS_INTERVAL_S)

    def _show(self, replica: int, stage: str, done: int = 0, total: int = 0, problem: str | None = None) -> None:
        host = self._placed.get(replica)
        self._cluster.replica_views[replica] = ReplicaView(
            replica, stage, host.name if host else None, done, total, problem
        )

    def _spec(self, replica: int) -> WorkerSpec:
        config, host = self._config, self._placed[replica]
        sharing = sum(h.host_id == host.host_id for h in self._placed.values())
        aux = config.max_mamba_cache_size
        return WorkerSpec(
            model=self._cluster.model,
            source=config.model,
            replica=replica,
            owner=0,
            host=host.name,
            bind_host=bind_host(host, self._launcher.hosts()),
            registry_address=self._registry,
            token=self._token,
            aux_slots=None if aux is None else part(aux, 1)[0],
            aux_slots_per_request=config.limits.aux_slots_per_request,
            ranks_on_host=sharing,
            mem_fraction_static=config.mem_fraction_static,
            mamba_full_memory_ratio=config.mamba_full_memory_ratio,
            max_total_tokens=config.max_total_tokens,
            context_length=config.context_length,
            chunked_prefill_size=config.chunked_prefill_size,
            max_step_s=config.max_step_s,
            kv_bits=config.kv_bits,
            max_queued_requests=config.max_queued_requests,
            prefix_cache=not config.disable_radix_cache,
            dtype=config.dtype,
            trust_remote_code=config.trust_remote_code,
        )
