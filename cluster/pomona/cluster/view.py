"""The cluster at one moment: the plan with live pools. One value that metrics, `/cluster` and `status` are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pomona.workers.engine.pools import PoolView

from .membership import Load, Phase
from .plan import OwnerPlan, Plan


@dataclass(frozen=True, slots=True)
class OwnerView:
    """An owner with a share, and what it last said."""

    plan: OwnerPlan
    worker_id: str
    address: str
    phase: Phase
    load: Load
    report_age_s: float

    def to_json(self) -> dict[str, Any]:
        return {
            **self.plan.to_json(),
            "worker_id": self.worker_id,
            "address": self.address,
            "phase": self.phase.value,
            "running_requests": self.load.running,
            "waiting_requests": self.load.waiting,
            "preempted_requests": self.load.preempted,
            "pools": {
                "request_slots": pool_json(PoolView(self.load.max_running, self.load.running)),
                "kv_tokens": pool_json(self.load.kv),
                "aux_state_slots": pool_json(self.load.aux),
            },
            "active_bytes": self.load.active_bytes,
            "cache_bytes": self.load.cache_bytes,
            "limit_bytes": self.load.limit_bytes,
            "report_age_s": round(self.report_age_s, 3),
        }


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica that is wanted: where it is placed and how far it is."""

    replica: int
    stage: str
    host: str | None
    done: int = 0
    total: int = 0
    problem: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {"replica": self.replica, "stage": self.stage, "host": self.host, "problem": self.problem}


@dataclass(frozen=True, slots=True)
class ClusterView:
    """Everything that is shown. `addresses` are for people: name -> URL."""

    plan: Plan
    owners: tuple[OwnerView, ...]
    replicas: tuple[ReplicaView, ...]
    hosts: tuple[str, ...]
    addresses: tuple[tuple[str, str], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The plan's own object (plan.Plan.to_json), its owners with live pools."""
        return {
            **self.plan.to_json(),
            "owners": [owner.to_json() for owner in self.owners],
            "replica_states": [replica.to_json() for replica in self.replicas],
            "hosts": list(self.hosts),
            "addresses": dict(self.addresses),
        }


def pool_json(pool: PoolView) -> dict[str, int]:
    """used + evictable + free == capacity."""
    return {"capacity": pool.capacity, "used": pool.used, "evictable": pool.evictable, "free": pool.free}
