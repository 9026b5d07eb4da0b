"""The capacity algebra: worked cases, and every invariant as a property."""

import heapq
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pomona.cluster.capacity import Bound, Limits, OwnerMemory, divide, fill_fewest_first, part
from pomona.workers.errors import CapacityError

CASES = json.loads((Path(__file__).parent.parent / "cases" / "capacity.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["name"])
def test_worked_case(case):
    limits = Limits(
        case["max_running_requests"], case["max_mamba_cache_size"], case["slots_per_request"], case["hybrid"]
    )
    memory = [OwnerMemory(t) for t in case["kv_tokens"]]
    assert len(memory) == case["attn_dp_size"]
    expect = case["expect"]
    if "error" in expect:
        with pytest.raises(CapacityError) as caught:
            divide(limits, memory)
        assert caught.value.kind == expect["error"]
        assert caught.value.at_least == expect.get("at_least")
        return
    capacity = divide(limits, memory)
    assert [o.max_running_requests for o in capacity.owners] == expect["resolved"]
    assert [o.aux_slots for o in capacity.owners] == expect["aux_pool"]
    assert capacity.unallocated == expect["unallocated"]


owners_memory = st.lists(
    st.builds(OwnerMemory, st.integers(2, 5000), st.one_of(st.none(), st.integers(4, 500))), min_size=1, max_size=8
)


@st.composite
def feasible(draw):
    """Limits and memory that leave every owner something."""
    memory = draw(owners_memory)
    each = draw(st.sampled_from([1, 4]))
    hybrid = draw(st.booleans())
    requests = draw(st.one_of(st.none(), st.integers(len(memory), 3000)))
    aux = draw(st.one_of(st.none(), st.integers(each * len(memory), 3000)))
    return Limits(requests, aux, each, hybrid), memory


@given(feasible())
def test_nothing_is_lost_and_nothing_invented(given_):
    limits, memory = given_
    capacity = divide(limits, memory)
    got = [o.max_running_requests for o in capacity.owners]
    assert all(n >= 1 for n in got)
    if limits.max_running_requests is not None:
        assert sum(got) + capacity.unallocated == limits.max_running_requests
        assert capacity.unallocated >= 0
        if capacity.unallocated:
            assert all(o.max_running_requests == o.cap for o in capacity.owners)
    if limits.aux_limit is not None:
        assert sum(o.aux_slots for o in capacity.owners) == limits.aux_limit
    for share, held in zip(capacity.owners, memory, strict=True):
        assert share.max_running_requests * 2 <= held.kv_tokens
        if limits.hybrid:
            assert share.max_running_requests * limits.aux_slots_per_request <= share.aux_slots
            if limits.aux_limit is None and held.aux_slots is not None:
                assert share.aux_slots <= held.aux_slots
        else:
            assert share.aux_slots == 0


@given(feasible())
def test_equal_owners_differ_by_at_most_one(given_):
    limits, memory = given_
    capacity = divide(limits, [memory[0]] * len(memory))
    got = [o.max_running_requests for o in capacity.owners]
    assert max(got) - min(got) <= 1


@given(st.integers(1, 4096))
def test_pure_dp_with_room_keeps_exactly_the_full_limit(requests):
    capacity = divide(Limits(requests), [OwnerMemory(2 * 4096)])
    assert [o.max_running_requests for o in capacity.owners] == [requests]
    assert capacity.owners[0].bound is Bound.REQUESTED


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_part_is_exact_and_even(total, owners):
    parts = part(total, owners)
    assert sum(parts) == total
    assert max(parts) - min(parts) <= 1
    assert list(parts) == sorted(parts, reverse=True)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=6), st.integers(0, 200))
def test_filling_by_level_equals_handing_out_one_by_one(pairs, extra):
    start, caps = [min(p) for p in pairs], [max(p) for p in pairs]
    heap = [(have, i) for i, have in enumerate(start)]
    heapq.heapify(heap)
    one_by_one, rest = list(start), extra
    while rest and heap:
        _, i = heapq.heappop(heap)
        if one_by_one[i] < caps[i]:
            one_by_one[i] += 1
            rest -= 1
            heapq.heappush(heap, (one_by_one[i], i))
    assert fill_fewest_first(start, caps, extra) == one_by_one


@given(feasible())
def test_the_bound_is_the_limit_that_would_give_more_if_raised(given_):
    limits, memory = given_
    for share in divide(limits, memory).owners:
        if share.bound is Bound.REQUESTED:
            continue
        assert share.max_running_requests == share.cap
        aux_cap = share.cap if share.bound is Bound.AUX else None
        kv_cap = memory[share.owner].kv_tokens // 2
        assert share.cap == (aux_cap if share.bound is Bound.AUX else kv_cap)


def test_a_reduction_names_from_to_and_what_binds():
    capacity = divide(Limits(100), [OwnerMemory(40), OwnerMemory(4000)])
    (warning,) = capacity.reductions()
    assert "owner 0" in warning
    assert "from 50 to 20 by kv" in warning


def test_an_auxiliary_pool_that_memory_cannot_hold_for_one_request_is_refused():
    with pytest.raises(CapacityError, match="memory for 3 auxiliary-state slot") as caught:
        divide(Limits(8, None, 4, True), [OwnerMemory(1000, 3)])
    assert caught.value.kind == "aux"


def test_auxiliary_memory_binds_a_hybrid_without_an_explicit_limit():
    (share,) = divide(Limits(8, None, 4, True), [OwnerMemory(1000, 9)]).owners
    assert (share.max_running_requests, share.aux_slots, share.bound) == (2, 8, Bound.AUX)
