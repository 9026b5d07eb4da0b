"""The cluster as the head keeps it: members in, shares out. A fake clock, no sockets."""

from __future__ import annotations

import asyncio
import itertools
import logging

import pytest

from pomona.cluster.capacity import Limits
from pomona.cluster.cluster import Cluster
from pomona.cluster.membership import Identity, Load, Member, Memory, OwnerKey, Phase, UnknownWorker
from pomona.cluster.topology import Topology, resolve
from pomona.workers.engine.pools import PoolView

DP_ATTENTION = resolve(tp_size=4, dp_size=4, enable_dp_attention=True)
DENSE = Memory(kv_tokens=1000, context_tokens=512)
HYBRID = Memory(kv_tokens=1000, hybrid=True, aux_slots=100)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A cluster with its clock, and owners that speak when told to."""

    def __init__(self, topology: Topology = DP_ATTENTION, limits: Limits | None = None) -> None:
        self.clock = Clock()
        self.cluster = Cluster("M", topology, limits or Limits(8), self.clock)
        self._lives = itertools.count()
        self._seq = itertools.count(1)

    def join(self, replica: int = 0, owner: int = 0, memory: Memory = DENSE, life: str = "") -> Member:
        incarnation = life or f"{next(self._lives):08d}"
        address = f"127.0.0.1:{9000 + 10 * replica + owner}"
        who = Identity("M", OwnerKey(replica, owner), incarnation, f"mac{owner}", address)
        return self.cluster.register(who, memory)

    def join_all(self, owners: int = 4, memory: Memory = DENSE) -> list[Member]:
        return [self.join(owner=owner, memory=memory) for owner in range(owners)]

    def report(self, member: Member, **load: object) -> Member:
        """A report under the epoch of the member's share, as a worker that has put it in force sends."""
        given = member.allocation
        now = Load(epoch=given.epoch if given else member.load.epoch, seq=next(self._seq), **load)  # type: ignore[arg-type]
        return self.cluster.report(member.worker_id, member.identity.incarnation, now)

    def shares(self) -> list[int | None]:
        return [m.allocation and m.allocation.share.max_running_requests for m in self.cluster.members.all()]


def test_shares_come_only_when_all_owners_of_the_replica_have_registered():
    bench = Bench()
    for owner in (2, 0, 3):
        bench.join(owner=owner)
        assert set(bench.shares()) == {None}
    assert bench.cluster.plan().owners == ()
    bench.join(owner=1)
    assert bench.shares() == [2, 2, 2, 2]
    assert [o.host for o in bench.cluster.plan().owners] == ["mac0", "mac1", "mac2", "mac3"]


def test_owners_of_one_replica_get_their_shares_under_one_epoch():
    bench = Bench()
    epochs = {m.allocation.epoch for m in bench.join_all() if m.allocation}
    assert epochs == {bench.cluster.epoch}


def test_pure_dp_gives_each_replica_the_full_limit_as_it_comes():
    bench = Bench(resolve(dp_size=3))
    bench.join(replica=1)
    assert bench.shares() == [8]
    bench.join(replica=0)
    bench.join(replica=2)
    assert bench.shares() == [8, 8, 8]
    assert bench.cluster.epoch == 3


@pytest.mark.parametrize("how", ["left", "ended", "silent"])
def test_an_owner_that_leaves_withdraws_the_shares_of_its_replica(how):
    bench = Bench()
    members = bench.join_all()
    for member in members:
        bench.report(member)
    gone = members[2]
    if how == "left":
        bench.cluster.deregister(gone.worker_id, gone.identity.incarnation)
    elif how == "ended":
        bench.cluster.lost(gone.identity.key)
    else:
        bench.clock.now += 9.0
        for member in members:
            if member is not gone:
                bench.report(member)
        bench.clock.now += 1.1
        bench.cluster.tick()
    assert bench.shares() == [None, None, None]
    assert bench.cluster.plan().owners == ()
    assert bench.cluster.view().owners == ()
    assert all(m.phase(bench.clock.now) is Phase.LOADING for m in bench.cluster.members.all())


def test_an_owner_that_leaves_leaves_other_replicas_alone():
    bench = Bench(resolve(dp_size=2))
    first, second = bench.join(replica=0), bench.join(replica=1)
    bench.report(first)
    bench.report(second)
    bench.cluster.lost(OwnerKey(0, 0))
    assert [o.plan.replica for o in bench.cluster.view().owners] == [1]
    assert second.phase(bench.clock.now) is Phase.READY


def test_registering_under_a_new_incarnation_gives_all_owners_shares_of_a_higher_epoch():
    bench = Bench()
    members = bench.join_all()
    for member in members:
        bench.report(member)
    before = bench.cluster.epoch
    bench.join(owner=1)
    assert bench.cluster.epoch > before
    now = bench.cluster.members.all()
    assert {m.allocation.epoch for m in now if m.allocation} == {bench.cluster.epoch}
    assert bench.shares() == [2, 2, 2, 2]
    assert members[0].phase(bench.clock.now) is Phase.LOADING  # it has not confirmed the new epoch yet
    bench.report(members[0])
    assert members[0].phase(bench.clock.now) is Phase.READY
    assert len(bench.cluster.plan().owners) == 4


def test_an_owner_that_comes_back_whole_again_gets_the_replica_shares_anew():
    bench = Bench()
    members = bench.join_all()
    before = bench.cluster.epoch
    bench.cluster.lost(OwnerKey(0, 3))
    bench.join(owner=3, life=members[3].identity.incarnation)
    assert bench.shares() == [2, 2, 2, 2]
    assert bench.cluster.epoch > before


def test_registering_again_with_the_same_incarnation_changes_no_epoch():
    bench = Bench()
    members = bench.join_all()
    before = bench.cluster.epoch
    bench.join(owner=0, life=members[0].identity.incarnation)
    assert bench.cluster.epoch == before
    assert bench.shares() == [2, 2, 2, 2]


def test_a_late_notice_of_an_earlier_incarnation_ends_nobody():
    bench = Bench(resolve())
    old = bench.join()
    new = bench.join()
    bench.cluster.deregister(old.worker_id, old.identity.incarnation)
    bench.cluster.lost(OwnerKey(0, 0), old.identity.incarnation)
    assert bench.cluster.members.all() == (new,)
    assert bench.shares() == [8]


def test_leaving_needs_the_right_incarnation():
    bench = Bench(resolve())
    member = bench.join()
    bench.cluster.deregister(member.worker_id, "another")
    assert bench.cluster.members.all() == (member,)


def test_refused_limits_are_kept_and_name_the_units_of_the_command_line():
    bench = Bench(limits=Limits(8, 15))
    bench.join_all(memory=HYBRID)
    refused = bench.cluster.refused
    assert refused is not None
    assert refused.kind == "aux"
    assert refused.at_least == 16
    assert "--max-mamba-cache-size 15" in str(refused)
    assert "at least 16" in str(refused)
    assert bench.shares() == [None] * 4
    assert bench.cluster.epoch == 0
    assert bench.cluster.view().owners == ()


def test_a_hybrid_is_known_by_what_its_owners_report():
    bench = Bench(limits=Limits(8, 16))
    assert bench.cluster.plan().to_json()["hybrid"] is False
    bench.join_all(memory=HYBRID)
    plan = bench.cluster.plan().to_json()
    assert plan["hybrid"] is True
    assert [o["aux_slots"] for o in plan["owners"]] == [4, 4, 4, 4]
    assert plan["unallocated_running_requests"] == 4


def test_without_a_slot_limit_what_memory_holds_binds():
    bench = Bench(resolve(), Limits(8))
    bench.join(memory=Memory(kv_tokens=1000, hybrid=True, aux_slots=11))
    owner = bench.cluster.plan().to_json()["owners"][0]
    assert (owner["max_running_requests"], owner["aux_slots"], owner["bound"]) == (2, 8, "aux")


def test_reductions_are_logged_once_for_each_owner(caplog):
    bench = Bench(limits=Limits(8, 16))
    with caplog.at_level(logging.WARNING):
        members = bench.join_all(memory=HYBRID)
        for member in members:
            bench.report(member)
    lines = [r.getMessage() for r in caplog.records if "reduced from 2 to 1" in r.getMessage()]
    assert len(lines) == 4


def test_only_owners_that_are_wanted_are_expected():
    cluster = Bench().cluster
    assert cluster.expects("M", 0, 3)
    assert not cluster.expects("M", 0, 4)
    assert not cluster.expects("M", 1, 0)
    assert not cluster.expects("another", 0, 0)


def test_a_report_of_somebody_unknown_is_refused_and_changes_nothing():
    bench = Bench()
    with pytest.raises(UnknownWorker):
        bench.cluster.report("0.0.nobody", "x", Load(seq=1))
    assert bench.cluster.members.all() == ()


def test_the_view_has_live_pools_phase_and_age_of_owners_that_use_their_share():
    bench = Bench(resolve())
    member = bench.join()
    assert bench.cluster.view().owners == ()  # it has not put its share in force yet
    bench.report(member, running=2, waiting=1, max_running=8, kv=PoolView(1000, 300, 100))
    bench.clock.now += 0.5
    owner = bench.cluster.view().to_json()["owners"][0]
    assert owner["running_requests"] == 2
    assert owner["waiting_requests"] == 1
    assert owner["phase"] == "ready"
    assert owner["report_age_s"] == 0.5
    assert owner["pools"]["kv_tokens"] == {"capacity": 1000, "used": 300, "evictable": 100, "free": 600}
    assert owner["pools"]["request_slots"] == {"capacity": 8, "used": 2, "evictable": 0, "free": 6}


def test_the_view_shows_an_owners_memory_and_preemptions():
    bench = Bench(resolve())
    bench.report(bench.join(), active_bytes=600, cache_bytes=50, limit_bytes=1000, preempted=7)
    owner = bench.cluster.view().to_json()["owners"][0]
    assert [owner[key] for key in ("active_bytes", "cache_bytes", "limit_bytes")] == [600, 50, 1000]
    assert owner["preempted_requests"] == 7


def test_time_alone_makes_an_owner_suspect_in_the_view():
    bench = Bench(resolve())
    bench.report(bench.join())
    bench.clock.now += 3.5
    assert bench.cluster.view().owners[0].phase is Phase.SUSPECT


async def test_watchers_hear_of_every_change_and_of_none_after_they_left():
    bench = Bench(resolve())
    with bench.cluster.changes() as changed:
        for event in (
            bench.join,
            lambda: bench.report(bench.cluster.members.all()[0]),
            lambda: bench.cluster.lost(OwnerKey(0, 0)),
        ):
            changed.clear()
            event()
            assert changed.is_set()
        changed.clear()
        bench.cluster.tick()
        assert not changed.is_set()
    bench.join()
    assert not changed.is_set()
    assert isinstance(changed, asyncio.Event)
