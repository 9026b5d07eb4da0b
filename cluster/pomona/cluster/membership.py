"""Membership: which owners the head knows, what they last said, and what that makes of them. Pure; time is an argument.

A missing report means unknown, never idle: after `SUSPECT_S` an owner gets no new work, after `LEASE_S` it is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from pomona.workers.engine.pools import PoolView

from .capacity import OwnerShare

SUSPECT_S = 3.0
LEASE_S = 10.0
# A chunk of prefill may take long; an engine that finished no step for so long hangs.
STEP_HUNG_S = 15.0


class Phase(Enum):
    """What the head makes of an owner."""

    LOADING = "loading"
    READY = "ready"
    SUSPECT = "suspect"
    DRAINING = "draining"


class UnknownWorker(LookupError):
    """A report from a worker (or an incarnation) that is not a member: it has to register anew."""


@dataclass(frozen=True, slots=True, order=True)
class OwnerKey:
    """Names an owner across incarnations."""

    replica: int
    owner: int


@dataclass(frozen=True, slots=True)
class Identity:
    """Who registers."""

    model: str
    key: OwnerKey
    incarnation: str
    host: str
    address: str


@dataclass(frozen=True, slots=True)
class Memory:
    """What the owner's memory holds (tokens, slots, bytes), as measured after loading."""

    kv_tokens: int
    hybrid: bool = False
    aux_slots: int | None = None
    kv_bytes_per_token: int = 0
    aux_bytes_per_slot: int = 0
    weights_bytes: int = 0
    reserve_bytes: int = 0
    budget_bytes: int = 0
    context_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """An owner's last snapshot. `step_age_s` is as of the report; preemptions count since its process started."""

    epoch: int = 0
    seq: int = 0
    step_age_s: float = 0.0
    running: int = 0
    waiting: int = 0
    max_running: int = 0
    kv: PoolView = field(default_factory=PoolView)
    aux: PoolView = field(default_factory=PoolView)
    active_bytes: int = 0
    cache_bytes: int = 0
    limit_bytes: int = 0
    preempted: int = 0


@dataclass(frozen=True, slots=True)
class Allocation:
    """A share with the epoch it belongs to."""

    epoch: int
    share: OwnerShare


@dataclass(slots=True)
class Member:
    """One registered owner."""

    worker_id: str
    identity: Identity
    memory: Memory
    heard_at: float
    load: Load = field(default_factory=Load)
    allocation: Allocation | None = None
    draining: bool = False

    def age_s(self, now: float) -> float:
        """Seconds since the last word from it."""
        return now - self.heard_at

    def phase(self, now: float) -> Phase:
        if self.allocation is None or self.load.epoch < self.allocation.epoch:
            return Phase.LOADING
        if self.age_s(now) > SUSPECT_S or self.load.step_age_s + self.age_s(now) > STEP_HUNG_S:
            return Phase.SUSPECT
        return Phase.DRAINING if self.draining else Phase.READY


class Members:
    """All owners of one model. One member a key; a new incarnation replaces the old one, whole."""

    def __init__(self, new_id: Callable[[OwnerKey, str], str] | None = None) -> None:
        self._by_key: dict[OwnerKey, Member] = {}
        self._new_id = new_id or (lambda key, incarnation: f"{key.replica}.{key.owner}.{incarnation[:8]}")
        self.epoch = 0

    def register(self, identity: Identity, memory: Memory, now: float) -> Member:
        """Admit an incarnation. Registering again keeps a share already given to the same incarnation."""
        known = self._by_key.get(identity.key)
        if known is not None and known.identity.incarnation == identity.incarnation:
            known.heard_at = now
            return known
        member = Member(self._new_id(identity.key, identity.incarnation), identity, memory, now)
        self._by_key[identity.key] = member
        self._withdraw(identity.key.replica)
        return member

    def report(self, worker_id: str, incarnation: str, load: Load, now: float) -> Member:
        """Take a snapshot. Raises UnknownWorker; a snapshot older than the last is ignored."""
        member = self.get(worker_id)
        if member is None or member.identity.incarnation != incarnation:
            raise UnknownWorker(worker_id)
        if load.seq >= member.load.seq:
            member.load, member.heard_at = load, now
        return member

    def rise_above(self, epoch: int) -> None:
        """The next plan's number will be higher than `epoch`."""
        self.epoch = max(self.epoch, epoch)

    def allocate(self, shares: Mapping[OwnerKey, OwnerShare]) -> int:
        """Put shares in force under a new epoch, which is returned."""
        self.epoch += 1
        for key, share in shares.items():
            self._by_key[key].allocation = Allocation(self.epoch, share)
        return self.epoch

    def drain(self, key: OwnerKey, draining: bool = True) -> None:
        self._by_key[key].draining = draining

    def expire(self, now: float) -> tuple[Member, ...]:
        """Drop and return whoever's lease ran out."""
        gone = tuple(m for m in self._by_key.values() if m.age_s(now) > LEASE_S)
        for member in gone:
            self.remove(member.worker_id)
        return gone

    def remove(self, worker_id: str) -> Member | None:
        """Drop a member; the other owners of its replica lose their shares, since the replica is no longer whole."""
        member = self.get(worker_id)
        if member is not None:
            del self._by_key[member.identity.key]
            self._withdraw(member.identity.key.replica)
        return member

    def _withdraw(self, replica: int) -> None:
        for key, member in self._by_key.items():
            if key.replica == replica:
                member.allocation = None

    def get(self, worker_id: str) -> Member | None:
        return next((m for m in self._by_key.values() if m.worker_id == worker_id), None)

    def at(self, key: OwnerKey) -> Member | None:
        return self._by_key.get(key)

    def all(self) -> tuple[Member, ...]:
        """In order of replica and owner."""
        return tuple(self._by_key[key] for key in sorted(self._by_key))

    def due(self, owners: int) -> tuple[int, ...]:
        """Replicas whose `owners` owners have all registered and have no share yet."""
        replicas = sorted({key.replica for key in self._by_key})
        return tuple(r for r in replicas if self._is_due(r, owners))

    def _is_due(self, replica: int, owners: int) -> bool:
        members = [self._by_key.get(OwnerKey(replica, owner)) for owner in range(owners)]
        return all(m is not None and m.allocation is None for m in members)

    def check_invariants(self) -> None:
        ids = [m.worker_id for m in self._by_key.values()]
        assert len(ids) == len(set(ids))
        assert all(key == m.identity.key for key, m in self._by_key.items())
        assert all(m.allocation is None or m.allocation.epoch <= self.epoch for m in self._by_key.values())
