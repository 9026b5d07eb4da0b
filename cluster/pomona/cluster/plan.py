"""The plan: topology, limits and every owner's share as one value that `plan`, `status`, logs and pages all print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .capacity import Limits, OwnerMemory, OwnerShare, ReplicaCapacity, divide
from .membership import Memory
from .topology import Topology


@dataclass(frozen=True, slots=True)
class OwnerPlan:
    """One owner's place and share. `host` is None where no cluster was asked; `memory` is its own."""

    replica: int
    share: OwnerShare
    memory: Memory
    host: str | None = None

    def to_json(self) -> dict[str, Any]:
        s, m = self.share, self.memory
        return {
            "replica": self.replica,
            "owner": s.owner,
            "host": self.host,
            "max_running_requests": s.max_running_requests,
            "wanted_running_requests": s.wanted,
            "cap_running_requests": s.cap,
            "kv_tokens": s.kv_tokens,
            "aux_slots": s.aux_slots,
            "aux_slots_per_request": s.aux_slots_per_request,
            "bound": s.bound.value,
            "why": s.explain(),
            "memory": {
                "budget_bytes": m.budget_bytes,
                "weights_bytes": m.weights_bytes,
                "reserve_bytes": m.reserve_bytes,
                "kv_bytes": s.kv_tokens * m.kv_bytes_per_token,
                "aux_bytes": s.aux_slots * m.aux_bytes_per_slot,
                "kv_bytes_per_token": m.kv_bytes_per_token,
                "aux_bytes_per_slot": m.aux_bytes_per_slot,
            },
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """What one model is served with. `owners` may lack those whose replica is not whole (yet)."""

    model: str
    topology: Topology
    limits: Limits
    owners: tuple[OwnerPlan, ...]
    unallocated: int
    epoch: int = 0
    context_tokens: int = 0
    warnings: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """The object of `pomona plan --json`, `status --json` and `/cluster` (the last two add live pools)."""
        t, limits = self.topology, self.limits
        return {
            "model": self.model,
            "epoch": self.epoch,
            "tp_size": t.tp_size,
            "dp_size": t.dp_size,
            "pp_size": t.pp_size,
            "enable_dp_attention": t.enable_dp_attention,
            "attn_dp_size": t.attn_dp_size,
            "attn_tp_size": t.attn_tp_size,
            "replicas": t.replicas,
            "ranks_per_replica": t.ranks_per_replica,
            "hybrid": limits.hybrid,
            "context_tokens": self.context_tokens,
            "max_running_requests": limits.max_running_requests,
            "max_mamba_cache_size": limits.max_mamba_cache_size,
            "aux_slots_per_request": limits.aux_slots_per_request if limits.hybrid else 0,
            "unallocated_running_requests": self.unallocated,
            "owners": [owner.to_json() for owner in self.owners],
            "warnings": list(self.warnings),
        }


def assemble(
    model: str,
    topology: Topology,
    limits: Limits,
    replicas: Mapping[int, tuple[ReplicaCapacity, Sequence[Memory], Sequence[str | None]]],
    *,
    epoch: int = 0,
) -> Plan:
    """The plan of the replicas that have shares: capacity, memory and host of each owner, in order."""
    owners = tuple(
        OwnerPlan(replica, share, memory, host)
        for replica, (capacity, memories, hosts) in sorted(replicas.items())
        for share, memory, host in zip(capacity.owners, memories, hosts, strict=True)
    )
    warnings = topology.warnings + tuple(
        f"replica {replica}, {line}" for replica, (c, _, _) in sorted(replicas.items()) for line in c.reductions()
    )
    return Plan(
        model=model,
        topology=topology,
        limits=limits,
        owners=owners,
        unallocated=sum(capacity.unallocated for capacity, _, _ in replicas.values()),
        epoch=epoch,
        context_tokens=max((o.memory.context_tokens for o in owners), default=0),
        warnings=warnings,
    )


def foresee(model: str, topology: Topology, limits: Limits, memory: Memory) -> Plan:
    """The plan on equal hosts that each have `memory`. Raises CapacityError when an owner would get nothing."""
    n = topology.attn_dp_size
    held = None if limits.aux_limit is not None else memory.aux_slots
    capacity = divide(limits, [OwnerMemory(memory.kv_tokens, held)] * n)
    one: tuple[ReplicaCapacity, list[Memory], list[str | None]] = (capacity, [memory] * n, [None] * n)
    return assemble(model, topology, limits, dict.fromkeys(range(topology.replicas), one))
