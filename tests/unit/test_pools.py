"""The three pools: nothing is ever counted twice, lost, or given to someone there is no room for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pomona.workers.engine.pools import Need, Pool, Pools, PoolView

amounts = st.integers(-3, 40)
operations = st.lists(st.tuples(st.sampled_from(["take", "give", "resize"]), amounts), max_size=40)


def state(pool):
    return pool.capacity, pool.used, pool.free


def limits(pools):
    return pools.requests.limit, pools.kv_tokens.limit, pools.aux_slots.limit


def states(pools):
    return state(pools.requests), state(pools.kv_tokens), state(pools.aux_slots)


@given(st.integers(0, 40), operations)
def test_used_and_free_are_the_capacity_whatever_is_done(capacity, todo):
    pool = Pool(capacity)
    limit, used = capacity, 0
    for operation, amount in todo:
        before = state(pool)
        allowed = {
            "take": 0 <= amount <= max(0, limit - used),
            "give": 0 <= amount <= used,
            "resize": amount >= 0,
        }[operation]
        if allowed:
            getattr(pool, operation)(amount)
            used += {"take": amount, "give": -amount, "resize": 0}[operation]
            limit = amount if operation == "resize" else limit
        else:
            with pytest.raises(ValueError, match=r"cannot (take|give back|hold)|a pool cannot hold"):
                getattr(pool, operation)(amount)
            assert state(pool) == before
        assert pool.used + pool.free == pool.capacity
        assert (pool.used, pool.free, pool.limit) == (used, max(0, limit - used), limit)
        view = pool.view()
        assert view.used + view.evictable + view.free == view.capacity == pool.capacity


def test_a_limit_lowered_below_use_frees_nothing_until_its_users_leave():
    pool = Pool(10)
    pool.take(8)
    pool.resize(5)
    assert (state(pool), pool.limit) == ((8, 8, 0), 5)
    pool.give(2)
    assert (state(pool), pool.limit) == ((6, 6, 0), 5)
    pool.give(2)
    assert (state(pool), pool.limit) == ((5, 4, 1), 5)


def test_a_raised_limit_is_free_at_once():
    pool = Pool(2)
    pool.take(2)
    pool.resize(5)
    assert state(pool) == (5, 2, 3)


def test_what_can_be_evicted_is_neither_used_nor_free():
    assert PoolView(capacity=10, used=4, evictable=3).free == 3


needs = st.builds(Need, st.integers(0, 12), st.integers(0, 4), st.just(1))


@given(st.integers(0, 4), st.integers(0, 30), st.integers(0, 8), st.lists(needs, max_size=8))
def test_a_need_is_taken_whole_or_not_at_all(requests, kv_tokens, aux_slots, wanted):
    pools = Pools(requests=requests, kv_tokens=kv_tokens, aux_slots=aux_slots)
    empty = states(pools)
    taken = []
    for need in wanted:
        fits = (
            len(taken) + 1 <= requests
            and sum(n.kv_tokens for n in [*taken, need]) <= kv_tokens
            and sum(n.aux_slots for n in [*taken, need]) <= aux_slots
        )
        assert pools.has_room(need) == fits
        if fits:
            pools.take(need)
            taken.append(need)
        else:
            before = states(pools)
            with pytest.raises(ValueError, match="no room for"):
                pools.take(need)
            assert states(pools) == before
    for need in taken:
        pools.give(need)
    assert states(pools) == empty


@pytest.mark.parametrize("full", ["requests", "kv_tokens", "aux_slots"])
def test_one_full_pool_is_enough_to_refuse(full):
    sizes = {"requests": 2, "kv_tokens": 20, "aux_slots": 4}
    pools = Pools(**{**sizes, full: 0})
    assert not pools.has_room(Need(kv_tokens=10, aux_slots=2))
    assert Pools(**sizes).has_room(Need(kv_tokens=10, aux_slots=2))


def test_all_three_are_resized_together():
    pools = Pools(requests=1, kv_tokens=2, aux_slots=3)
    pools.resize(requests=4, kv_tokens=5, aux_slots=6)
    assert states(pools) == ((4, 0, 4), (5, 0, 5), (6, 0, 6))


@given(st.integers(0, 2), st.integers(0, 12), st.integers(0, 4), needs)
def test_a_need_fits_when_it_could_be_taken_with_everybody_gone(requests, kv_tokens, aux_slots, need):
    sizes = {"requests": requests, "kv_tokens": kv_tokens, "aux_slots": aux_slots}
    pools = Pools(requests=2, kv_tokens=12, aux_slots=4)
    pools.take(Need(kv_tokens=12, aux_slots=4, requests=2))
    pools.resize(**sizes)
    assert pools.fits(need) == Pools(**sizes).has_room(need)


def test_what_others_hold_over_a_lowered_limit_makes_nothing_fit():
    pools = Pools(requests=2, kv_tokens=20, aux_slots=4)
    pools.take(Need(kv_tokens=20, aux_slots=4))
    pools.resize(requests=2, kv_tokens=10, aux_slots=4)
    assert pools.fits(Need(kv_tokens=10, aux_slots=4))
    assert not pools.fits(Need(kv_tokens=11, aux_slots=4))
    assert not pools.has_room(Need(kv_tokens=1, aux_slots=0))


@pytest.mark.parametrize(
    "too_much",
    [Need(10, 2, requests=2), Need(11, 2), Need(10, 3)],
    ids=["requests", "kv_tokens", "aux_slots"],
)
def test_giving_back_too_much_of_one_pool_changes_none(too_much):
    pools = Pools(requests=2, kv_tokens=20, aux_slots=4)
    pools.take(Need(kv_tokens=10, aux_slots=2))
    before = states(pools)
    with pytest.raises(ValueError, match="cannot give back"):
        pools.give(too_much)
    assert states(pools) == before


@pytest.mark.parametrize("refusing", ["requests", "kv_tokens", "aux_slots"])
def test_a_resize_that_one_pool_refuses_changes_none(refusing):
    pools = Pools(requests=2, kv_tokens=20, aux_slots=4)
    before = states(pools), limits(pools)
    with pytest.raises(ValueError, match="cannot hold"):
        pools.resize(**{"requests": 9, "kv_tokens": 90, "aux_slots": 9, refusing: -1})
    assert (states(pools), limits(pools)) == before


@pytest.mark.parametrize("negative", ["requests", "kv_tokens", "aux_slots"])
def test_a_negative_need_cannot_be_made(negative):
    with pytest.raises(ValueError, match="is negative"):
        Need(**{"requests": 1, "kv_tokens": 1, "aux_slots": 1, negative: -1})


def test_a_pool_of_negative_size_cannot_be_made():
    with pytest.raises(ValueError, match="cannot hold"):
        Pool(-1)


@pytest.mark.parametrize("negative", ["requests", "kv_tokens", "aux_slots"])
def test_pools_of_negative_size_cannot_be_made(negative):
    with pytest.raises(ValueError, match="cannot hold"):
        Pools(**{negative: -1})
