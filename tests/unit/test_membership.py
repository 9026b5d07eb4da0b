"""Membership: who is there, what they last said, and what that makes of them; the fake clock is an argument."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pomona.cluster.capacity import Bound, OwnerShare
from pomona.cluster.membership import (
    LEASE_S,
    STEP_HUNG_S,
    SUSPECT_S,
    Identity,
    Load,
    Member,
    Members,
    Memory,
    OwnerKey,
    Phase,
    PoolView,
    UnknownWorker,
)

MEMORY = Memory(kv_tokens=1000)


def identity(replica: int = 0, owner: int = 0, life: str = "a", host: str = "mac1") -> Identity:
    return Identity("M", OwnerKey(replica, owner), f"{life * 8}-{replica}-{owner}", host, f"10.0.0.1:{9000 + owner}")


def share(owner: int = 0, running: int = 2) -> OwnerShare:
    return OwnerShare(owner, running, 500, running, 1000, 0, 0, Bound.REQUESTED)


def ready(members: Members, now: float = 0.0, **where: object) -> Member:
    """A registered owner with a share that it has confirmed."""
    who = identity(**where)  # type: ignore[arg-type]
    member = members.register(who, MEMORY, now)
    epoch = members.allocate({who.key: share(who.key.owner)})
    members.report(member.worker_id, who.incarnation, Load(epoch, seq=1, max_running=2), now)
    return member


def test_an_owner_is_loading_until_it_reports_under_the_epoch_of_its_share():
    members = Members()
    member = members.register(identity(), MEMORY, 0.0)
    assert member.phase(0.0) is Phase.LOADING
    epoch = members.allocate({member.identity.key: share()})
    members.report(member.worker_id, member.identity.incarnation, Load(epoch - 1, seq=1), 0.0)
    assert member.phase(0.0) is Phase.LOADING
    members.report(member.worker_id, member.identity.incarnation, Load(epoch, seq=2), 0.0)
    assert member.phase(0.0) is Phase.READY


def test_stale_report_an_owner_that_was_idle_and_fell_silent_is_suspect_after_3_s_and_gone_after_10():
    members = Members()
    member = ready(members)
    assert member.load.running == 0
    assert member.phase(SUSPECT_S) is Phase.READY
    assert member.phase(SUSPECT_S + 0.01) is Phase.SUSPECT
    assert members.expire(LEASE_S) == ()
    assert members.expire(LEASE_S + 0.01) == (member,)
    assert members.all() == ()


def test_the_limits_are_those_of_the_design():
    assert (SUSPECT_S, LEASE_S) == (3.0, 10.0)


def test_frozen_worker_is_refused_on_waking_and_counted_once_after_registering_anew():
    members = Members()
    member = ready(members)
    old_epoch = members.epoch
    assert members.expire(30.0) == (member,)
    with pytest.raises(UnknownWorker):
        members.report(member.worker_id, member.identity.incarnation, Load(old_epoch, seq=2), 30.0)
    again = members.register(member.identity, MEMORY, 30.1)
    assert members.all() == (again,)
    members.report(again.worker_id, again.identity.incarnation, Load(old_epoch, seq=3), 30.2)
    assert again.phase(30.2) is Phase.LOADING  # no share: what it has is of the past
    epoch = members.allocate({again.identity.key: share()})
    assert epoch > old_epoch
    members.report(again.worker_id, again.identity.incarnation, Load(old_epoch, seq=4), 30.3)
    assert again.phase(30.3) is Phase.LOADING
    members.report(again.worker_id, again.identity.incarnation, Load(epoch, seq=5), 30.4)
    assert again.phase(30.4) is Phase.READY


def test_quick_rejoin_counts_a_host_once_however_often_it_comes_back():
    members = Members()
    ghosts = [ready(members, now=float(i), life=life) for i, life in enumerate("abcd")]
    assert members.all() == (ghosts[-1],)
    for ghost in ghosts[:-1]:
        assert members.get(ghost.worker_id) is None
        with pytest.raises(UnknownWorker):
            members.report(ghost.worker_id, ghost.identity.incarnation, Load(99, seq=99), 4.0)
        assert members.remove(ghost.worker_id) is None  # a late death notice of a ghost ends nobody else
    assert members.all() == (ghosts[-1],)
    assert ghosts[-1].phase(4.0) is Phase.READY


def test_engine_hung_while_reports_go_on_makes_the_owner_suspect():
    members = Members()
    member = ready(members)
    for now in range(1, 17):
        load = Load(members.epoch, seq=1 + now, step_age_s=float(now), running=1)
        members.report(member.worker_id, member.identity.incarnation, load, float(now))
    assert member.age_s(16.0) == 0
    assert member.phase(16.0) is Phase.SUSPECT


def test_the_age_of_a_step_goes_on_between_reports():
    members = Members()
    member = ready(members)
    load = Load(members.epoch, seq=2, step_age_s=STEP_HUNG_S - 1)
    members.report(member.worker_id, member.identity.incarnation, load, 1.0)
    assert member.phase(2.0) is Phase.READY
    assert member.phase(2.1) is Phase.SUSPECT


def test_busy_not_dead_a_30_s_prefill_whose_steps_progress_stays_ready():
    members = Members()
    member = ready(members)
    for tenth in range(1, 301):  # chunks of 2 s, reports ten a second
        now = tenth / 10
        load = Load(members.epoch, seq=1 + tenth, step_age_s=now % 2.0, running=1)
        members.report(member.worker_id, member.identity.incarnation, load, now)
        assert member.phase(now) is Phase.READY
        assert members.expire(now) == ()


def test_a_suspect_owner_is_ready_again_with_its_next_report():
    members = Members()
    member = ready(members)
    assert member.phase(5.0) is Phase.SUSPECT
    members.report(member.worker_id, member.identity.incarnation, Load(members.epoch, seq=2), 5.0)
    assert member.phase(5.0) is Phase.READY


def test_a_snapshot_older_than_the_last_changes_nothing_not_even_the_age():
    members = Members()
    member = ready(members)
    new = Load(members.epoch, seq=9, running=2)
    members.report(member.worker_id, member.identity.incarnation, new, 1.0)
    members.report(member.worker_id, member.identity.incarnation, Load(members.epoch, seq=8), 2.0)
    assert member.load == new
    assert member.age_s(2.0) == 1.0


def test_a_report_of_another_incarnation_under_a_known_id_is_refused():
    members = Members()
    member = ready(members)
    with pytest.raises(UnknownWorker):
        members.report(member.worker_id, "another", Load(1, seq=2), 0.0)


def test_registering_again_with_the_same_incarnation_keeps_share_and_id():
    members = Members()
    member = ready(members)
    given = member.allocation
    again = members.register(member.identity, MEMORY, 9.0)
    assert again is member
    assert again.allocation == given
    assert again.age_s(9.0) == 0


@pytest.mark.parametrize("how", ["remove", "expire", "replace"])
def test_an_owner_that_goes_takes_the_shares_of_its_whole_replica_and_of_no_other(how):
    members = Members()
    here, beside, elsewhere = (ready(members, replica=r, owner=o) for r, o in ((0, 0), (0, 1), (1, 0)))
    if how == "remove":
        members.remove(here.worker_id)
    elif how == "expire":
        for member in (beside, elsewhere):
            members.report(member.worker_id, member.identity.incarnation, Load(members.epoch, seq=2), 10.5)
        assert members.expire(10.5) == (here,)
    else:
        members.register(identity(life="b"), MEMORY, 1.0)
    assert beside.allocation is None
    assert elsewhere.allocation is not None


def test_a_replica_is_due_when_all_its_owners_are_there_and_none_has_a_share():
    members = Members()
    assert members.due(2) == ()
    members.register(identity(owner=1), MEMORY, 0.0)
    assert members.due(2) == ()
    members.register(identity(owner=0), MEMORY, 0.0)
    members.register(identity(replica=3, owner=0), MEMORY, 0.0)
    assert members.due(2) == (0,)
    assert members.due(1) == (0, 3)
    members.allocate({OwnerKey(0, 0): share(0), OwnerKey(0, 1): share(1)})
    assert members.due(2) == ()


def test_draining_shows_only_where_the_owner_would_be_ready():
    members = Members()
    member = ready(members)
    members.drain(member.identity.key)
    assert member.phase(0.0) is Phase.DRAINING
    assert member.phase(4.0) is Phase.SUSPECT
    members.drain(member.identity.key, False)
    assert member.phase(0.0) is Phase.READY


def test_what_is_free_of_a_pool_is_what_is_neither_used_nor_evictable():
    assert PoolView(capacity=10, used=3, evictable=2).free == 5


KEYS = st.builds(OwnerKey, st.integers(0, 1), st.integers(0, 1))


class Life(RuleBasedStateMachine):
    """Owners come, speak, fall silent and go in any order; the clock only goes forward."""

    def __init__(self) -> None:
        super().__init__()
        self.members = Members()
        self.now = 0.0
        self.lives = itertools.count()
        self.seq = itertools.count(1)
        self.heard: dict[str, float] = {}  # what the model of this test says of worker ids that must be there
        self.gone: list[tuple[str, str]] = []
        self.epoch_before = 0

    def everyone(self) -> tuple[Member, ...]:
        return self.members.all()

    def forget(self, member: Member) -> None:
        del self.heard[member.worker_id]
        self.gone.append((member.worker_id, member.identity.incarnation))

    @rule(key=KEYS)
    def register(self, key: OwnerKey) -> None:
        before = self.members.at(key)
        who = Identity("M", key, f"{next(self.lives):08d}", "mac1", "10.0.0.1:1")
        member = self.members.register(who, MEMORY, self.now)
        if before is not None:
            self.forget(before)
        self.heard[member.worker_id] = self.now
        assert member.allocation is None
        assert member.phase(self.now) is Phase.LOADING

    @precondition(lambda self: self.everyone())
    @rule(data=st.data())
    def register_again(self, data: st.DataObject) -> None:
        member = data.draw(st.sampled_from(self.everyone()))
        assert self.members.register(member.identity, MEMORY, self.now) is member
        self.heard[member.worker_id] = self.now

    @precondition(lambda self: self.everyone())
    @rule(data=st.data(), confirms=st.booleans(), hangs=st.sampled_from([0.0, 5.0, 20.0]))
    def report(self, data: st.DataObject, confirms: bool, hangs: float) -> None:
        member = data.draw(st.sampled_from(self.everyone()))
        epoch = member.allocation.epoch if member.allocation is not None and confirms else member.load.epoch
        load = Load(epoch, next(self.seq), hangs)
        self.members.report(member.worker_id, member.identity.incarnation, load, self.now)
        assert member.load == load
        self.heard[member.worker_id] = self.now

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def report_of_a_ghost(self, data: st.DataObject) -> None:
        worker_id, incarnation = data.draw(st.sampled_from(self.gone))
        with pytest.raises(UnknownWorker):
            self.members.report(worker_id, incarnation, Load(99, next(self.seq)), self.now)

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.9, 3.1, 9.9, 10.1]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        silent = {worker_id for worker_id, at in self.heard.items() if self.now - at > LEASE_S}
        expired = self.members.expire(self.now)
        assert {m.worker_id for m in expired} == silent
        for member in expired:
            self.forget(member)

    @precondition(lambda self: self.everyone())
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        member = data.draw(st.sampled_from(self.everyone()))
        assert self.members.remove(member.worker_id) is member
        self.forget(member)
        others = (m for m in self.everyone() if m.identity.key.replica == member.identity.key.replica)
        assert all(m.allocation is None for m in others)

    @rule()
    def allocate(self) -> None:
        for replica in self.members.due(2):
            before = self.members.epoch
            shares = {OwnerKey(replica, owner): share(owner) for owner in (0, 1)}
            assert self.members.allocate(shares) == before + 1
            assert replica not in self.members.due(2)

    @precondition(lambda self: self.everyone())
    @rule(data=st.data(), draining=st.booleans())
    def drain(self, data: st.DataObject, draining: bool) -> None:
        member = data.draw(st.sampled_from(self.everyone()))
        self.members.drain(member.identity.key, draining)
        assert (member.phase(self.now) is Phase.DRAINING) <= draining

    @invariant()
    def holds_together(self) -> None:
        self.members.check_invariants()

    @invariant()
    def exactly_those_who_registered_and_did_not_go_are_there(self) -> None:
        assert {m.worker_id for m in self.everyone()} == self.heard.keys()

    @invariant()
    def epochs_only_rise(self) -> None:
        assert self.members.epoch >= self.epoch_before
        self.epoch_before = self.members.epoch

    @invariant()
    def shares_are_given_and_withdrawn_to_a_replica_as_a_whole(self) -> None:
        for replica in (0, 1):
            owners = [m for m in self.everyone() if m.identity.key.replica == replica]
            epochs = {m.allocation.epoch if m.allocation else None for m in owners}
            assert len(epochs) <= 1
            assert epochs <= {None} or len(owners) == 2

    @invariant()
    def only_who_spoke_lately_and_has_a_share_in_force_takes_work(self) -> None:
        for member in self.everyone():
            assert member.heard_at == self.heard[member.worker_id]
            if member.phase(self.now) in (Phase.READY, Phase.DRAINING):
                assert member.allocation is not None
                assert member.load.epoch >= member.allocation.epoch
                assert member.age_s(self.now) <= SUSPECT_S
                assert member.load.step_age_s + member.age_s(self.now) <= STEP_HUNG_S


Life.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyOrderOfEventsKeepsTheInvariants = Life.TestCase
