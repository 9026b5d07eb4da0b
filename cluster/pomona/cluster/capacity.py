"""The capacity algebra (DESIGN 3): how one replica's limits become shares of its attention-DP owners.

`max_running_requests` and `max_mamba_cache_size` are limits of ONE replica. They are split among its
`attn_dp_size` owners, never by `dp_size`: under pure data parallelism each replica is one owner and keeps the
full limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from pomona.workers.errors import CapacityError

# What an owner admits when the operator names no limit and memory is ample; SGLang's default cap.
DEFAULT_MAX_RUNNING_REQUESTS = 4096
AUX_SLOTS_WITH_PREFIX_CACHE = 4
AUX_SLOTS_WITHOUT_PREFIX_CACHE = 1


class Bound(Enum):
    """The limit that decides how many requests an owner admits."""

    REQUESTED = "requested"
    KV = "kv"
    AUX = "aux"


@dataclass(frozen=True, slots=True)
class Limits:
    """What the operator asked of one replica. Requests, slots."""

    max_running_requests: int | None = None
    max_mamba_cache_size: int | None = None
    aux_slots_per_request: int = AUX_SLOTS_WITH_PREFIX_CACHE
    hybrid: bool = False

    @property
    def aux_limit(self) -> int | None:
        """`max_mamba_cache_size` where it means something: a dense model ignores it."""
        return self.max_mamba_cache_size if self.hybrid else None


@dataclass(frozen=True, slots=True)
class OwnerMemory:
    """What one owner's memory holds: T_i KV tokens, and M_i auxiliary slots where that is known."""

    kv_tokens: int
    aux_slots: int | None = None


@dataclass(frozen=True, slots=True)
class OwnerShare:
    """What one owner gets, and why not more. `wanted` is its part of the request limit, None when that is unset."""

    owner: int
    wanted: int | None
    cap: int
    max_running_requests: int
    kv_tokens: int
    aux_slots: int
    aux_slots_per_request: int
    bound: Bound

    def explain(self) -> str:
        """One sentence for people: what binds, with its numbers."""
        if self.bound is Bound.KV:
            return f"{self.kv_tokens} KV tokens hold {self.cap} requests (2 tokens each at least)"
        if self.bound is Bound.AUX:
            return f"auxiliary-state slots hold {self.cap} requests ({self.aux_slots_per_request} slots each)"
        if self.wanted is None:
            return f"no limit was asked for: the default of {DEFAULT_MAX_RUNNING_REQUESTS} applies"
        return f"the requested limit gives this owner {self.max_running_requests}"


@dataclass(frozen=True, slots=True)
class ReplicaCapacity:
    """The shares of one replica's owners. `unallocated` is what of `max_running_requests` nobody could take."""

    limits: Limits
    owners: tuple[OwnerShare, ...]
    unallocated: int

    @property
    def max_running_requests(self) -> int:
        """What the owners admit together."""
        return sum(owner.max_running_requests for owner in self.owners)

    def reductions(self) -> tuple[str, ...]:
        """One warning for each owner that got less than its part of the request limit, from and to."""
        return tuple(
            f"attention-DP owner {o.owner}: max_running_requests reduced from {o.wanted} to {o.max_running_requests} "
            f"by {o.bound.value}: {o.explain()}"
            for o in self.owners
            if o.wanted is not None and o.max_running_requests < o.wanted
        )


def part(total: int, owners: int) -> tuple[int, ...]:
    """Split `total` exactly: equal parts, the remainder one each to the first owners."""
    return tuple(total // owners + (1 if i < total % owners else 0) for i in range(owners))


def divide(limits: Limits, memory: Sequence[OwnerMemory]) -> ReplicaCapacity:
    """Shares of the owners whose memory is given, in order. Raises CapacityError when one would get nothing."""
    check_limits(limits, len(memory))
    _check_memory(limits, memory)
    aux = part(limits.aux_limit, len(memory)) if limits.aux_limit is not None else None
    aux_caps = _aux_caps(limits, memory, aux)
    caps = [m.kv_tokens // 2 if c is None else min(m.kv_tokens // 2, c) for m, c in zip(memory, aux_caps, strict=True)]
    wanted = part(limits.max_running_requests, len(memory)) if limits.max_running_requests is not None else None
    resolved = _resolve(caps, limits.max_running_requests)
    unallocated = 0 if limits.max_running_requests is None else limits.max_running_requests - sum(resolved)
    owners = tuple(
        OwnerShare(
            owner=i,
            wanted=None if wanted is None else wanted[i],
            cap=caps[i],
            max_running_requests=resolved[i],
            kv_tokens=memory[i].kv_tokens,
            aux_slots=_aux_pool(limits, None if aux is None else aux[i], resolved[i]),
            aux_slots_per_request=limits.aux_slots_per_request if limits.hybrid else 0,
            bound=_bound(resolved[i], caps[i], None if wanted is None else wanted[i], aux_caps[i], unallocated),
        )
        for i in range(len(memory))
    )
    return ReplicaCapacity(limits, owners, unallocated)


def check_limits(limits: Limits, owners: int) -> None:
    """The errors that need no memory profile, in the units of the command line."""
    requests, aux, each = limits.max_running_requests, limits.aux_limit, limits.aux_slots_per_request
    if requests is not None and requests < owners:
        raise CapacityError(
            "requests",
            f"--max-running-requests {requests} leaves an attention-DP owner without a request slot "
            f"(attn_dp_size is {owners}): use at least {owners}",
            at_least=owners,
        )
    if aux is not None and aux < each * owners:
        raise CapacityError(
            "aux",
            f"--max-mamba-cache-size {aux} is too small: {owners} attention-DP owner(s) with {each} auxiliary-state "
            f"slot(s) a request need at least {each * owners} (one owner's part would be {aux // owners}, "
            f"which holds {aux // owners // each} requests): use at least {each * owners}",
            at_least=each * owners,
        )


def _check_memory(limits: Limits, memory: Sequence[OwnerMemory]) -> None:
    for i, owner in enumerate(memory):
        if owner.kv_tokens < 2:
            raise CapacityError(
                "kv",
                f"attention-DP owner {i} has memory for {owner.kv_tokens} KV token(s) and a request needs at least 2: "
                "raise --mem-fraction-static or --max-total-tokens, or serve a smaller model",
            )
        held, each = owner.aux_slots, limits.aux_slots_per_request
        if limits.hybrid and limits.aux_limit is None and held is not None and held < each:
            raise CapacityError(
                "aux",
                f"attention-DP owner {i} has memory for {held} auxiliary-state slot(s) and a request needs {each}: "
                "raise --mem-fraction-static or --mamba-full-memory-ratio, "
                "or use --disable-radix-cache (1 slot a request)",
            )


def _aux_caps(limits: Limits, memory: Sequence[OwnerMemory], aux: tuple[int, ...] | None) -> list[int | None]:
    """How many requests each owner's auxiliary slots hold; None where they do not bind."""
    if not limits.hybrid:
        return [None] * len(memory)
    held = aux if aux is not None else [m.aux_slots for m in memory]
    return [None if slots is None else slots // limits.aux_slots_per_request for slots in held]


def _aux_pool(limits: Limits, explicit: int | None, resolved: int) -> int:
    if not limits.hybrid:
        return 0
    return explicit if explicit is not None else resolved * limits.aux_slots_per_request


def _resolve(caps: Sequence[int], requests: int | None) -> list[int]:
    if requests is None:
        return [min(cap, DEFAULT_MAX_RUNNING_REQUESTS) for cap in caps]
    start = [min(want, cap) for want, cap in zip(part(requests, len(caps)), caps, strict=True)]
    return fill_fewest_first(start, caps, requests - sum(start))


def fill_fewest_first(start: Sequence[int], caps: Sequence[int], extra: int) -> list[int]:
    """Hand out `extra`, one at a time, to the owner with the fewest that has room, lowest index first.

    Computed by level, not one by one: everybody below the highest affordable level rises to it, then the rest goes
    one each to the first owners that stand on it.
    """

    def raised(level: int) -> list[int]:
        return [max(s, min(cap, level)) for s, cap in zip(start, caps, strict=True)]

    total = sum(start) + extra
    low, high = 0, max(caps)
    while low < high:
        level = (low + high + 1) // 2
        low, high = (level, high) if sum(raised(level)) <= total else (low, level - 1)
    result = raised(low)
    rest = total - sum(result)
    for i, cap in enumerate(caps):
        if rest > 0 and result[i] == low and cap > low:
            result[i] += 1
            rest -= 1
    return result


def _bound(resolved: int, cap: int, wanted: int | None, aux_cap: int | None, unallocated: int) -> Bound:
    """The limit that, raised alone, would let this owner admit more."""
    at_cap = resolved == cap and (wanted is None or cap < wanted or unallocated > 0)
    if not at_cap:
        return Bound.REQUESTED
    return Bound.AUX if aux_cap is not None and aux_cap == cap else Bound.KV
