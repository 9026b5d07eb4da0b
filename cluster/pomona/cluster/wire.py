"""Protobuf at the head's edge: each message is converted once, here."""

from __future__ import annotations

from pomona.v1 import registry_pb2, telemetry_pb2
from pomona.workers.engine.pools import PoolView

from .capacity import Bound
from .membership import Allocation, Identity, Load, Member, Memory, OwnerKey, Phase

_BOUNDS = {
    Bound.REQUESTED: telemetry_pb2.CAPACITY_BOUND_REQUESTED,
    Bound.KV: telemetry_pb2.CAPACITY_BOUND_KV,
    Bound.AUX: telemetry_pb2.CAPACITY_BOUND_AUX,
}
_PHASES = {
    Phase.LOADING: telemetry_pb2.OWNER_PHASE_LOADING,
    Phase.READY: telemetry_pb2.OWNER_PHASE_READY,
    Phase.SUSPECT: telemetry_pb2.OWNER_PHASE_SUSPECT,
    Phase.DRAINING: telemetry_pb2.OWNER_PHASE_DRAINING,
}


def to_identity(request: registry_pb2.RegisterRequest) -> Identity:
    w = request.worker
    return Identity(w.model, OwnerKey(w.replica, w.owner), w.incarnation, w.host, request.address)


def to_memory(m: telemetry_pb2.MemoryProfile) -> Memory:
    return Memory(
        kv_tokens=m.kv_tokens,
        hybrid=m.hybrid,
        aux_slots=m.aux_slots if m.HasField("aux_slots") else None,
        kv_bytes_per_token=m.kv_bytes_per_token,
        aux_bytes_per_slot=m.aux_bytes_per_slot,
        weights_bytes=m.weights_bytes,
        reserve_bytes=m.reserve_bytes,
        budget_bytes=m.budget_bytes,
        context_tokens=m.context_tokens,
    )


def to_load(r: telemetry_pb2.LoadReport) -> Load:
    return Load(
        epoch=r.epoch,
        seq=r.seq,
        step_age_s=r.step_age_s,
        running=r.running_requests,
        waiting=r.waiting_requests,
        max_running=r.max_running_requests,
        kv=_to_pool(r.kv_tokens),
        aux=_to_pool(r.aux_slots),
        active_bytes=r.active_bytes,
        cache_bytes=r.cache_bytes,
        limit_bytes=r.limit_bytes,
        preempted=r.preempted_requests,
    )


def _to_pool(pool: telemetry_pb2.PoolLoad) -> PoolView:
    return PoolView(pool.capacity, pool.used, pool.evictable)


def from_allocation(allocation: Allocation) -> telemetry_pb2.Allocation:
    share = allocation.share
    return telemetry_pb2.Allocation(
        epoch=allocation.epoch,
        max_running_requests=share.max_running_requests,
        kv_tokens=share.kv_tokens,
        aux_slots=share.aux_slots,
        aux_slots_per_request=share.aux_slots_per_request,
        bound=_BOUNDS[share.bound],
    )


def to_route(member: Member, now: float) -> registry_pb2.Route:
    """A member as gateways need it."""
    i, load = member.identity, member.load
    return registry_pb2.Route(
        worker_id=member.worker_id,
        worker=telemetry_pb2.WorkerIdentity(
            model=i.model, replica=i.key.replica, owner=i.key.owner, incarnation=i.incarnation, host=i.host
        ),
        address=i.address,
        phase=_PHASES[member.phase(now)],
        context_tokens=member.memory.context_tokens,
        load=telemetry_pb2.LoadReport(
            worker_id=member.worker_id,
            incarnation=i.incarnation,
            epoch=load.epoch,
            seq=load.seq,
            step_age_s=load.step_age_s,
            running_requests=load.running,
            waiting_requests=load.waiting,
            max_running_requests=load.max_running,
            kv_tokens=_from_pool(load.kv),
            aux_slots=_from_pool(load.aux),
            active_bytes=load.active_bytes,
            cache_bytes=load.cache_bytes,
            limit_bytes=load.limit_bytes,
            preempted_requests=load.preempted,
        ),
    )


def _from_pool(pool: PoolView) -> telemetry_pb2.PoolLoad:
    return telemetry_pb2.PoolLoad(capacity=pool.capacity, used=pool.used, evictable=pool.evictable)
