"""One model's cluster as the head keeps it: members, shares and what is shown. No Ray, no sockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pomona.workers.engine.base import Clock
from pomona.workers.errors import CapacityError

from .capacity import Limits, OwnerMemory, ReplicaCapacity, divide
from .membership import Identity, Load, Member, Members, Memory, OwnerKey
from .plan import Plan, assemble
from .topology import Topology
from .view import ClusterView, OwnerView, ReplicaView

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shares:
    """What a replica was given, and to whom."""

    capacity: ReplicaCapacity
    worker_ids: tuple[str, ...]


class Cluster:
    """Members in, shares out: a replica gets its shares once all its owners have registered."""

    def __init__(self, model: str, topology: Topology, limits: Limits, clock: Clock) -> None:
        self.model = model
        self.topology = topology
        self.members = Members()
        self.refused: CapacityError | None = None
        self.replica_views: dict[int, ReplicaView] = {}
        self.hosts: tuple[str, ...] = ()
        self.addresses: tuple[tuple[str, str], ...] = ()
        self._limits = limits
        self._shares: dict[int, Shares] = {}
        self._clock = clock
        self._watchers: set[asyncio.Event] = set()

    # -- events -----------------------------------------------------------------------------------------------

    def expects(self, model: str, replica: int, owner: int) -> bool:
        return model == self.model and replica < self.topology.replicas and owner < self.topology.attn_dp_size

    def register(self, identity: Identity, memory: Memory, epoch: int = 0) -> Member:
        """`epoch` is that of the share the worker still has, from before this head's time: new ones go above it."""
        member = self.members.register(identity, memory, self._clock())
        self.members.rise_above(epoch)
        self._allocate()
        self._changed()
        return member

    def report(self, worker_id: str, incarnation: str, load: Load) -> Member:
        """Raises UnknownWorker."""
        member = self.members.report(worker_id, incarnation, load, self._clock())
        self._changed()
        return member

    def deregister(self, worker_id: str, incarnation: str) -> None:
        member = self.members.get(worker_id)
        if member is not None and member.identity.incarnation == incarnation:
            self._gone(member, "left")

    def lost(self, key: OwnerKey, incarnation: str | None = None) -> None:
        """The process behind an owner ended. `incarnation` None means whichever is there."""
        member = self.members.at(key)
        if member is not None and incarnation in (None, member.identity.incarnation):
            self._gone(member, "its process ended")

    def tick(self) -> None:
        """Drop whoever's lease ran out."""
        for member in self.members.expire(self._clock()):
            self._forget(member, "its lease ran out")

    # -- decisions --------------------------------------------------------------------------------------------

    def _allocate(self) -> None:
        for replica in self.members.due(self.topology.attn_dp_size):
            members = self._replica(replica)
            limits = replace(self._limits, hybrid=members[0].memory.hybrid)
            try:
                capacity = divide(limits, [_owner_memory(m.memory, limits) for m in members])
            except CapacityError as exc:
                log.error("replica %d gets no shares: %s", replica, exc)  # noqa: TRY400  the message is the whole story
                self.refused = exc
                continue
            self._limits = limits
            self._shares[replica] = Shares(capacity, tuple(m.worker_id for m in members))
            self.members.allocate({m.identity.key: share for m, share in zip(members, capacity.owners, strict=True)})
            for line in capacity.reductions():
                log.warning("%s replica %d, %s", self.model, replica, line)

    def _replica(self, replica: int) -> list[Member]:
        keys = (OwnerKey(replica, owner) for owner in range(self.topology.attn_dp_size))
        return [m for m in map(self.members.at, keys) if m is not None]

    def _gone(self, member: Member, why: str) -> None:
        self.members.remove(member.worker_id)
        self._forget(member, why)

    def _forget(self, member: Member, why: str) -> None:
        key = member.identity.key
        log.info("owner %d.%d on %s: %s", key.replica, key.owner, member.identity.host, why)
        self._shares.pop(key.replica, None)
        self._changed()

    # -- what is shown ----------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        return self.members.epoch

    def now(self) -> float:
        return self._clock()

    def plan(self) -> Plan:
        """The plan in force: the replicas whose owners all have shares."""
        replicas: dict[int, tuple[ReplicaCapacity, Sequence[Memory], Sequence[str | None]]] = {}
        for replica, shares in self._shares.items():
            members = self._replica(replica)
            if tuple(m.worker_id for m in members) == shares.worker_ids:
                replicas[replica] = (
                    shares.capacity,
                    [m.memory for m in members],
                    [m.identity.host for m in members],
                )
        return assemble(self.model, self.topology, self._limits, replicas, epoch=self.epoch)

    def view(self) -> ClusterView:
        plan, now = self.plan(), self._clock()
        owners = []
        for owner in plan.owners:
            member = self.members.at(OwnerKey(owner.replica, owner.share.owner))
            if member is not None and member.load.epoch:
                owners.append(
                    OwnerView(
                        plan=owner,
                        worker_id=member.worker_id,
                        address=member.identity.address,
                        phase=member.phase(now),
                        load=member.load,
                        report_age_s=member.age_s(now),
                    )
                )
        replicas = tuple(self.replica_views[r] for r in sorted(self.replica_views))
        return ClusterView(plan, tuple(owners), replicas, self.hosts, self.addresses)

    @contextlib.contextmanager
    def changes(self) -> Iterator[asyncio.Event]:
        """An event that is set whenever something changed."""
        event = asyncio.Event()
        self._watchers.add(event)
        try:
            yield event
        finally:
            self._watchers.discard(event)

    def _changed(self) -> None:
        for event in self._watchers:
            event.set()


def _owner_memory(memory: Memory, limits: Limits) -> OwnerMemory:
    """With an explicit limit the slots are already paid; what memory holds binds only without one."""
    return OwnerMemory(memory.kv_tokens, None if limits.aux_limit is not None else memory.aux_slots)
