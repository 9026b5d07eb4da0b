"""Starting ranks: the seam between the head's decisions and Ray."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any, Protocol

import psutil

from pomona.workers import environment
from pomona.workers.spec import Ended, Progress, WorkerSpec

from .placement import Host, unique_names

STOP_GRACE_S = 5.0
NAMESPACE = "pomona"


class Handle(Protocol):
    """One started rank."""

    async def progress(self) -> Progress: ...

    async def ended(self) -> Ended:
        """Returns when the rank's process ended, with the reason."""
        ...

    async def stop(self) -> None:
        """End it, with grace first; returns when it is gone."""
        ...


class Launcher(Protocol):
    """Where ranks can run, and how they start."""

    def hosts(self) -> list[Host]: ...

    async def start(self, spec: WorkerSpec, host: Host, name: str) -> Handle: ...


def host_facts() -> dict[str, Any]:
    """What a host says of itself; runs on that host."""
    return {
        "cpus": os.cpu_count() or 1,
        "memory_bytes": psutil.virtual_memory().total,
        "openblas": environment.openblas(),
    }


class RayLauncher:
    """Ranks as named detached Ray actors, pinned to the host that the head chose."""

    def __init__(self) -> None:
        self._facts: dict[str, Mapping[str, Any]] = {}

    def hosts(self) -> list[Host]:
        import ray

        return unique_names(
            [
                Host(
                    host_id=node["NodeID"],
                    name=_name(node),
                    address=node["NodeManagerAddress"],
                    memory_bytes=int(
                        node["Resources"].get("memory", 0) + node["Resources"].get("object_store_memory", 0)
                    ),
                    cpus=int(node["Resources"].get("CPU", 1)),
                )
                for node in sorted(ray.nodes(), key=_name)
                if node["Alive"]
            ]
        )

    async def start(self, spec: WorkerSpec, host: Host, name: str) -> RayHandle:
        import ray

        from pomona.workers.actor import WorkerActor

        facts = await self._facts_of(host)
        env = environment.worker_environment(
            openblas_path=facts["openblas"], cpus=facts["cpus"], ranks_on_host=spec.ranks_on_host
        )
        actor = (
            ray.remote(WorkerActor)
            .options(
                name=name,
                namespace=NAMESPACE,
                lifetime="detached",
                max_restarts=0,
                num_cpus=0,
                scheduling_strategy=_pinned(host.host_id),
                runtime_env={"env_vars": env},
            )
            .remote(spec)
        )
        return RayHandle(actor)

    async def _facts_of(self, host: Host) -> Mapping[str, Any]:
        """Asked once a host, on the host itself: paths and sizes are its own."""
        import ray

        if host.host_id == ray.get_runtime_context().get_node_id():
            return host_facts()
        if host.host_id not in self._facts:
            task = ray.remote(host_facts).options(num_cpus=0, scheduling_strategy=_pinned(host.host_id))
            self._facts[host.host_id] = await task.remote()
        return self._facts[host.host_id]


class RayHandle:
    """A started worker actor."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._run = actor.run.remote()

    async def progress(self) -> Progress:
        return await self._actor.progress.remote()  # type: ignore[no-any-return]

    async def ended(self) -> Ended:
        import ray

        try:
            return await self._run  # type: ignore[no-any-return]
        except ray.exceptions.RayError as exc:
            return Ended(f"the worker process ended: {' '.join(str(exc).split())[:300]}")

    async def stop(self) -> None:
        import ray

        try:
            async with asyncio.timeout(STOP_GRACE_S):
                await self._actor.stop.remote()
                await self._run
        except (ray.exceptions.RayError, TimeoutError):
            pass  # it is gone already, or will be now
        ray.kill(self._actor)


def _name(node: Mapping[str, Any]) -> str:
    """The node's given name; without one Ray repeats the address, and the machine's own name says more."""
    given: str = node["NodeName"]
    return given if given != node["NodeManagerAddress"] else node["NodeManagerHostname"]


def _pinned(node_id: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
