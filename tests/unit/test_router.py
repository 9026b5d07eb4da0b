"""The routing table: who gets the next request."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pomona.cluster.router import Assignment, OwnerPhase, OwnerRoute, RoutingTable

CASES = {
    case["id"]: case
    for case in map(
        json.loads, (Path(__file__).parents[1] / "cases" / "cluster.jsonl").read_text(encoding="utf-8").splitlines()
    )
}


def owner(worker_id: str, **changes: object) -> OwnerRoute:
    route = OwnerRoute(
        worker_id=worker_id,
        model="M",
        replica=0,
        owner=0,
        host=f"host-{worker_id}",
        incarnation="1",
        address=f"{worker_id}:1",
        phase=OwnerPhase.READY,
        max_running_requests=16,
        running=0,
        waiting=0,
        seq=1,
        context_tokens=4096,
    )
    return replace(route, **changes)  # type: ignore[arg-type]


def table(*routes: OwnerRoute) -> RoutingTable:
    made = RoutingTable()
    made.apply(True, routes)
    return made


def give(routes: RoutingTable, count: int, model: str = "M") -> list[Assignment]:
    given_out = [routes.assign(model) for _ in range(count)]
    routes.check_invariants()
    return [assignment for assignment in given_out if assignment is not None]


def spread(assignments: list[Assignment]) -> Counter[str]:
    return Counter(assignment.worker_id for assignment in assignments)


def test_a_burst_to_two_idle_owners_is_split_evenly() -> None:
    """Case burst-two-idle: assignments count before the next report arrives."""
    assert "8 and 8" in CASES["burst-two-idle"]["right"]
    assert spread(give(table(owner("a"), owner("b")), 16)) == {"a": 8, "b": 8}


@pytest.mark.parametrize("reported", [False, True])
def test_reports_between_requests_leave_the_spread_even(reported: bool) -> None:
    """Case round-robin-reset: neither short requests nor reports with changed fields restart the order."""
    assert "even" in CASES["round-robin-reset"]["right"]
    names = "abcd"
    routes = table(*map(owner, names))
    seen: Counter[str] = Counter()
    for turn in range(40):
        (assignment,) = give(routes, 1)
        seen[assignment.worker_id] += 1
        busy = {assignment.worker_id} if reported else set()
        routes.apply(False, [owner(name, seq=turn + 2, running=int(name in busy)) for name in names])
        routes.release(assignment)
    assert seen == dict.fromkeys(names, 10)


def test_a_suspect_owner_gets_nothing_however_idle_it_looked() -> None:
    """Case stale-report: a missing report means unknown, never idle."""
    assert "never treated as idle" in CASES["stale-report"]["right"]
    routes = table(owner("a", phase=OwnerPhase.SUSPECT), owner("b", running=15))
    assert spread(give(routes, 20)) == {"b": 20}


@pytest.mark.parametrize("phase", [OwnerPhase.LOADING, OwnerPhase.SUSPECT, OwnerPhase.DRAINING])
def test_only_ready_owners_are_given_requests(phase: OwnerPhase) -> None:
    """No other phase admits work, even when nobody else does."""
    routes = table(owner("a", phase=phase))
    assert routes.assign("M") is None
    assert not routes.ready("M")
    assert routes.models() == ["M"]


def test_full_owners_queue_where_there_is_least_to_wait_for() -> None:
    """Without room anywhere the owner with the most, least negative, is picked."""
    routes = table(owner("a", running=16, waiting=5), owner("b", running=16, waiting=1))
    assert spread(give(routes, 1)) == {"b": 1}


def test_excluded_owners_and_other_models_are_never_picked() -> None:
    """A retry goes elsewhere, and a model's requests stay with the model's owners."""
    routes = table(owner("a"), owner("b"), owner("x", model="other", max_running_requests=99))
    second = routes.assign("M", frozenset({"a"}))
    assert second is not None
    assert second.worker_id == "b"
    assert routes.assign("M", frozenset({"a", "b"})) is None
    assert routes.assign("nope") is None


def test_others_requests_are_what_a_report_holds_beyond_our_own() -> None:
    """4 reported with 2 of ours are 2 of others; ending ours frees room before the next report."""
    routes = table(owner("a"), owner("b", running=3))
    ours = give(routes, 2)
    assert spread(ours) == {"a": 2}
    routes.apply(False, [owner("a", running=4, seq=2)])
    for assignment in ours:
        routes.release(assignment)
    assert spread(give(routes, 1)) == {"a": 1}  # 2 others at a, 3 at b


def test_a_route_without_a_new_report_does_not_count_our_requests_as_others() -> None:
    """A phase that changes repeats the old report, which says nothing of requests sent since."""
    routes = table(owner("a", running=4), owner("b", running=5))
    ours = give(routes, 2)
    routes.apply(True, [owner("a", running=4), owner("b", running=5)])
    for assignment in ours:
        routes.release(assignment)
    assert spread(give(routes, 3)) == {"a": 2, "b": 1}


def test_an_owner_that_returns_under_a_new_worker_id_starts_clean() -> None:
    """In-flight counts of the old life neither leak nor burden the new one."""
    routes = table(owner("a"), owner("b"))
    old = give(routes, 8)
    routes.apply(False, [owner("a2", incarnation="2")], removed=["a"])
    assert routes.in_flight("a2") == 0
    for assignment in old:
        routes.release(assignment)
        routes.check_invariants()
    assert [routes.in_flight(name) for name in ("a", "a2", "b")] == [0, 0, 0]
    assert spread(give(routes, 8)) == {"a2": 4, "b": 4}


def test_a_head_that_forgets_an_owner_for_a_moment_loses_none_of_our_counts() -> None:
    """After a head's restart the same worker is back while our streams there went on."""
    routes = table(owner("a"), owner("b"))
    give(routes, 8)
    routes.apply(True, [])
    assert routes.assign("M") is None
    routes.apply(True, [owner("a", seq=9, running=4)])
    assert routes.in_flight("a") == 4
    assert routes.models() == ["M"]
    routes.check_invariants()


def test_an_assignment_is_released_once() -> None:
    """A second release is a bug of the caller and changes nothing."""
    routes = table(owner("a"))
    (assignment,) = give(routes, 1)
    routes.release(assignment)
    with pytest.raises(AssertionError, match="twice"):
        routes.release(assignment)
    routes.check_invariants()


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(0, 60))
def test_a_burst_never_queues_while_anybody_has_room(shares: list[int], count: int) -> None:
    """What the router sends at once equals what the engines admit, up to their sum."""
    routes = table(*(owner(f"w{i}", max_running_requests=share) for i, share in enumerate(shares)))
    seen = spread(give(routes, min(count, sum(shares))))
    assert all(seen[f"w{i}"] <= share for i, share in enumerate(shares))


@given(st.integers(1, 6), st.integers(0, 60))
def test_equal_owners_differ_by_at_most_one(owners: int, count: int) -> None:
    """A burst to equal owners is even whatever its size."""
    seen = spread(give(table(*(owner(f"w{i}") for i in range(owners))), count))
    numbers = [seen[f"w{i}"] for i in range(owners)]
    assert max(numbers) - min(numbers) <= 1


class Routing(RuleBasedStateMachine):
    """Owners come, report, change phase and go in any order while requests start and end."""

    def __init__(self) -> None:
        super().__init__()
        self.table = RoutingTable()
        self.known: dict[str, OwnerRoute] = {}
        self.live: list[Assignment] = []
        self.seq = 0

    @rule(name=st.sampled_from("abc"), phase=st.sampled_from(OwnerPhase), load=st.integers(0, 20), full=st.booleans())
    def report(self, name: str, phase: OwnerPhase, load: int, full: bool) -> None:
        self.seq += 1
        route = owner(name, phase=phase, running=load, seq=self.seq)
        self.known = {name: route} if full else self.known | {name: route}
        self.table.apply(full, [route])

    @rule(name=st.sampled_from("abc"))
    def remove(self, name: str) -> None:
        self.known.pop(name, None)
        self.table.apply(False, [], [name])

    @rule(exclude=st.frozensets(st.sampled_from("abc"), max_size=2))
    def assign(self, exclude: frozenset[str]) -> None:
        allowed = {n for n, route in self.known.items() if route.phase is OwnerPhase.READY} - exclude
        assignment = self.table.assign("M", exclude)
        assert (assignment is not None) == bool(allowed)
        if assignment is not None:
            assert assignment.worker_id in allowed
            self.live.append(assignment)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.table.release(self.live.pop(data.draw(st.integers(0, len(self.live) - 1))))

    @invariant()
    def counts_match(self) -> None:
        self.table.check_invariants()
        counts = spread(self.live)
        assert all(self.table.in_flight(name) == counts[name] for name in "abc")


Routing.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRouting = Routing.TestCase
