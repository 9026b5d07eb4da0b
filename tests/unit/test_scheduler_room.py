"""Who makes room for whom: answers grow, the lowest rank is preempted, the prefix cache has what is left."""

import pytest

from pomona.workers.engine.base import (
    Admitted,
    Chunk,
    EngineRequest,
    Failed,
    FinishReason,
    Prefilled,
    StepPlan,
    StepResult,
    TokenOut,
)
from pomona.workers.engine.pools import PoolView
from pomona.workers.engine.scheduler import Booked
from pomona.workers.errors import RequestError
from scheduling import request, result, scheduler, started, step, submit_all, token

# -- growth and preemption ------------------------------------------------------------------------------------


def test_a_long_answer_reserves_its_beginning_and_grows_by_blocks():
    engine = scheduler(context=10_000, kv_tokens=10_000)
    engine.submit(request("a", prompt=10, max_tokens=400))
    reserved = []
    for _ in range(400):
        step(engine, "a")
        reserved.append(engine.pools.kv_tokens.used)
    assert reserved[0] == 10 + 256
    assert sorted(set(reserved)) == [266, 330, 394, 410]
    assert reserved.index(330) == 255, "two tokens before its reservation ends"


def test_before_every_step_there_is_room_for_two_tokens_more_than_are_known():
    engine = scheduler(ahead=2, growth=1)
    engine.submit(request("a", prompt=10, max_tokens=6))
    reserved = []
    for _ in range(6):
        engine.plan()
        reserved.append(engine.pools.kv_tokens.used)
        engine.commit(result(token("a")))
    assert reserved == [12, 13, 14, 15, 16, 16]


def test_growth_takes_what_is_left_before_it_takes_from_others():
    engine = scheduler(ahead=2, growth=8, kv_tokens=15)
    engine.submit(request("a", prompt=5, max_tokens=10))
    engine.submit(request("b", prompt=5, max_tokens=10))
    step(engine, "a", "b")
    plan = step(engine, "a", "b")
    assert (plan.leave, engine.preemptions) == (("b",), 1), "one token was left, and it was for the elder"


def two_in_a_full_pool(**second):
    engine = scheduler(ahead=4, growth=4, kv_tokens=18, requests=3)
    submit_all(engine, request("a", prompt=5, max_tokens=10), request("b", prompt=5, max_tokens=10, **second))
    step(engine, "a", "b")
    step(engine, "a", "b")
    step(engine, "a", "b")
    return engine


@pytest.mark.parametrize(
    ("priority", "leaves"), [(0, "b"), (1, "a"), (-1, "b")], ids=["the youngest", "the elder", "the lower"]
)
def test_where_there_is_no_room_the_lowest_rank_makes_some(priority, leaves):
    engine = two_in_a_full_pool(priority=priority)
    assert engine.preemptions == 0
    plan = step(engine, "a", "b")
    assert (plan.leave, engine.preemptions, engine.running, engine.waiting) == ((leaves,), 1, 1, 1)


def test_a_preempted_request_keeps_what_it_said_and_goes_on_after_it():
    engine = scheduler(ahead=4, growth=4, kv_tokens=18)
    asked = request("b", prompt=5, max_tokens=10)
    submit_all(engine, request("a", prompt=5, max_tokens=10), asked)
    for n in range(3):
        engine.plan()
        engine.commit(result(token("a"), token("b", value=n)))
    assert engine.plan().leave == ("b",)
    late = engine.commit(result(token("a"), token("b", value=99)))
    assert late == Booked((token("a"),)), "what was on its way is said again later"
    engine.cancel("a")
    plan = engine.plan()
    assert plan.start == (Admitted(asked, 10, (0, 1, 2)),)
    assert plan.prefill == (Chunk("b", 8),), "the answer so far is computed again too"


def test_a_preempted_request_waits_before_all_that_came_after_it():
    engine = two_in_a_full_pool()
    submit_all(engine, request("c", 1, 1), request("high", 1, 1, priority=1))
    step(engine, "a")
    engine.cancel("a")
    assert started(engine.plan()) == ["high", "b", "c"]


def test_nobody_is_admitted_in_a_plan_that_preempts():
    engine = two_in_a_full_pool()
    engine.submit(request("small", 1, 1, priority=1))
    plan = step(engine, "a")
    assert (plan.leave, plan.start) == (("b",), ())
    assert started(step(engine, "a")) == ["small"]


def test_a_request_preempted_while_it_prefills_starts_over():
    engine = scheduler(ahead=4, growth=4, kv_tokens=40)
    submit_all(engine, request("a", prompt=5, max_tokens=20), request("b", prompt=25, max_tokens=10))
    engine.plan()
    engine.commit(StepResult((token("a"),), (Prefilled("b", 20, 0),)))
    while not (plan := engine.plan()).leave:
        engine.commit(result(token("a")))
    assert plan.leave == ("b",)
    engine.commit(result(token("a")))
    engine.cancel("a")
    plan = engine.plan()
    assert (plan.start, plan.prefill) == ((Admitted(request("b", 25, 10), 10),), (Chunk("b", 25),))


def test_the_lowest_rank_preempts_itself_when_it_is_the_one_that_grows():
    engine = scheduler(ahead=2, growth=1, kv_tokens=17)
    submit_all(engine, request("a", prompt=5, max_tokens=4), request("b", prompt=5, max_tokens=10))
    step(engine, "a", "b")
    step(engine, "a", "b")
    assert (step(engine, "a", "b").leave, engine.running, engine.waiting) == (("b",), 1, 1)


def test_a_limit_lowered_below_what_is_used_takes_from_the_lowest_rank_once_somebody_grows():
    engine = scheduler(ahead=4, growth=4, kv_tokens=100)
    submit_all(engine, *(request(r, prompt=5, max_tokens=10) for r in "abcd"))
    step(engine, *"abcd")
    engine.resize(requests=4, kv_tokens=20, aux_slots=0)
    assert step(engine, *"abcd").leave == ()
    assert step(engine, *"abcd").leave == ()
    assert step(engine, *"a").leave == ("d", "c", "b")
    assert engine.pools.kv_tokens.used <= 20


def test_a_request_that_lowered_limits_can_no_longer_hold_fails_instead_of_waiting_for_ever():
    engine = scheduler(ahead=4, growth=4, kv_tokens=100, requests=1)
    submit_all(engine, request("a", prompt=5, max_tokens=50), request("small", prompt=5, max_tokens=2))
    step(engine, "a")
    engine.resize(requests=1, kv_tokens=15, aux_slots=0)
    while not (plan := engine.plan()).leave:
        engine.commit(result(token("a")))
    assert plan == StepPlan(leave=("a",))
    with pytest.raises(RequestError, match="already in use"):
        engine.submit(request("a"))
    booked = engine.commit(result(token("a")))
    assert booked == Booked((), (Failed("a", "this owner's share became too small for the request"),))
    assert engine.preemptions == 0
    assert started(engine.plan()) == ["small"]


@pytest.mark.parametrize("how", ["cancel", "fail_running"])
def test_what_lowered_limits_ended_can_still_be_cancelled_or_lost_before_it_is_told(how):
    engine = scheduler(ahead=2, growth=1, kv_tokens=100)
    engine.submit(request("a", prompt=5, max_tokens=50))
    step(engine, "a")
    engine.resize(requests=1, kv_tokens=7, aux_slots=0)
    assert engine.plan().leave == ("a",)
    if how == "cancel":
        assert engine.cancel("a")
    else:
        assert engine.fail_running() == ("a",)
    engine.submit(request("a", 1, 1))
    assert engine.commit(StepResult()) == Booked()


# -- the prefix cache's room ----------------------------------------------------------------------------------


def test_kept_prefixes_are_evictable_and_give_way_to_whoever_needs_the_room():
    engine = scheduler(cache=True, requests=2, kv_tokens=20)
    engine.submit(EngineRequest("a", (1,) * 8, max_tokens=2))
    assert engine.plan().cache_tokens == 10
    engine.commit(StepResult((TokenOut("a", 5, FinishReason.LENGTH),), cached_tokens=9))
    assert engine.pools.kv_tokens.view() == PoolView(20, 0, 9)
    engine.submit(EngineRequest("b", (1,) * 8, max_tokens=8))
    plan = engine.plan()
    assert [a.request.request_id for a in plan.start] == ["b"]
    assert plan.cache_tokens == 4
    assert engine.pools.kv_tokens.view() == PoolView(20, 16, 4)
    engine.check_invariants()


def test_growth_takes_from_the_cache_before_it_takes_from_requests():
    engine = scheduler(cache=True, ahead=4, growth=4, kv_tokens=20)
    engine.submit(request("a", prompt=5, max_tokens=10))
    engine.plan()
    engine.commit(StepResult((token("a"),), cached_tokens=11))
    assert engine.pools.kv_tokens.view() == PoolView(20, 9, 11)
    step(engine, "a")
    step(engine, "a")
    assert engine.plan().cache_tokens == 7
    assert engine.preemptions == 0


def test_running_requests_lend_the_cache_all_their_auxiliary_slots_but_the_one_they_live_in():
    engine = scheduler(cache=True, aux_each=4, aux_slots=14, requests=3)
    submit_all(engine, request("a"), request("b"))
    assert engine.plan().cache_slots == 6 + 2 * 3
    engine.commit(StepResult(cached_slots=9))
    assert engine.pools.aux_slots.view() == PoolView(14, 8, 3)
    engine.plan()
    engine.commit(StepResult((token("a", FinishReason.STOP),), cached_slots=9))
    assert engine.pools.aux_slots.view() == PoolView(14, 4, 6), "what was lent is now kept"
    engine.plan()
    engine.commit(StepResult(cached_slots=2))
    assert engine.pools.aux_slots.view() == PoolView(14, 4, 0)


@pytest.mark.parametrize(("cache", "aux_each"), [(False, 4), (True, 0)], ids=["no cache", "no auxiliary state"])
def test_there_are_no_snapshots_without_a_cache_or_without_auxiliary_state(cache, aux_each):
    engine = scheduler(cache=cache, aux_each=aux_each, aux_slots=8)
    engine.submit(request("a"))
    assert engine.plan().cache_slots == 0


def test_a_failed_runner_has_lost_its_cache_too():
    engine = scheduler(cache=True, aux_each=2, aux_slots=8)
    engine.submit(request("a"))
    engine.plan()
    engine.commit(StepResult(cached_tokens=50, cached_slots=3))
    engine.fail_running()
    assert engine.pools.kv_tokens.view() == PoolView(1000, 0, 0)
    assert engine.pools.aux_slots.view() == PoolView(8, 0, 0)
