"""The scheduler's door: who is taken, in which order, with how many tokens; and what new limits change."""

import pytest

from pomona.workers.engine.base import Admitted, Failed, FinishReason, StepResult
from pomona.workers.engine.scheduler import Booked
from pomona.workers.errors import Overloaded, RequestError, Unavailable
from scheduling import request, result, scheduler, started, step, submit_all, token, used

# -- order ----------------------------------------------------------------------------------------------------


def test_first_come_first_served():
    engine = scheduler(requests=2)
    submit_all(engine, request("a"), request("b"), request("c"))
    assert started(engine.plan()) == ["a", "b"]
    engine.commit(result(token("b", FinishReason.STOP)))
    assert started(engine.plan()) == ["c"]


def test_nobody_overtakes_a_request_that_does_not_fit_yet():
    engine = scheduler(kv_tokens=30)
    submit_all(engine, request("running", 5, 15), request("big", 5, 20), request("small", 1, 1))
    assert started(engine.plan()) == ["running"]
    assert started(engine.plan()) == []
    engine.cancel("running")
    assert started(engine.plan()) == ["big", "small"]


def test_a_higher_priority_goes_first_and_within_one_the_earlier_arrival():
    engine = scheduler(requests=1)
    asked = [request("low", priority=-1), request("a"), request("b"), request("high", priority=2)]
    submit_all(engine, *asked)
    order = []
    while engine.has_work():
        order += started(engine.plan())
        engine.commit(result(token(order[-1], FinishReason.STOP)))
    assert order == ["high", "a", "b", "low"]


def test_a_higher_priority_makes_nobody_leave_who_runs():
    engine = scheduler(requests=1)
    engine.submit(request("a"))
    step(engine, "a")
    engine.submit(request("high", priority=9))
    assert step(engine, "a").leave == ()


def test_any_place_of_a_long_queue_can_be_cancelled():
    engine = scheduler(requests=1)
    submit_all(engine, *(request(str(n), priority=n % 3) for n in range(300)))
    assert all(engine.cancel(str(n)) for n in range(0, 300, 2))
    engine.check_invariants()
    assert engine.drain_queue()[:2] == ("5", "11")


def test_a_cancelled_head_lets_the_next_one_in():
    engine = scheduler(kv_tokens=30)
    submit_all(engine, request("running", 5, 15), request("big", 5, 20), request("small", 1, 1))
    engine.plan()
    engine.cancel("big")
    assert started(engine.plan()) == ["small"]


# -- admission ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes",
    [
        {"requests": 1, "kv_tokens": 1000, "aux_slots": 100},
        {"requests": 10, "kv_tokens": 19, "aux_slots": 100},
        {"requests": 10, "kv_tokens": 1000, "aux_slots": 5},
    ],
    ids=["requests", "kv_tokens", "aux_slots"],
)
def test_each_of_the_three_pools_holds_back_the_second_request(sizes):
    engine = scheduler(aux_each=3, **sizes)
    submit_all(engine, request("a"), request("b"))
    assert started(engine.plan()) == ["a"]
    assert (engine.running, engine.waiting) == (1, 1)


def test_a_running_request_holds_its_slots_its_prompt_and_an_answer_that_is_short():
    engine = scheduler(aux_each=3, aux_slots=6)
    engine.submit(request("a", prompt=5, max_tokens=7))
    assert used(engine) == (0, 0, 0)
    engine.plan()
    assert used(engine) == (1, 12, 3)
    engine.commit(result(token("a", FinishReason.STOP)))
    assert used(engine) == (0, 0, 0)


@pytest.mark.parametrize("limit", [1, 3, 8])
def test_with_twice_the_limit_waiting_exactly_the_limit_runs(limit):
    engine = scheduler(requests=limit, kv_tokens=10_000)
    submit_all(engine, *(request(str(i)) for i in range(2 * limit)))
    seen = []
    for _ in range(2):
        plan = engine.plan()
        seen += started(plan)
        assert len(plan.start) == engine.running == limit
        assert started(engine.plan()) == []
        engine.commit(result(*(token(r, FinishReason.LENGTH) for r in started(plan))))
    assert seen == [str(i) for i in range(2 * limit)]
    assert (engine.running, engine.waiting, engine.has_work()) == (0, 0, False)


def test_lowering_the_limits_stops_admission_and_ends_nobody():
    engine = scheduler(requests=3)
    submit_all(engine, *(request(r) for r in "abcd"))
    engine.plan()
    assert engine.resize(requests=1, kv_tokens=1000, aux_slots=0) == ()
    assert (engine.running, engine.waiting) == (3, 1)
    engine.check_invariants()
    engine.commit(result(token("a", FinishReason.STOP), token("b", FinishReason.STOP)))
    assert started(engine.plan()) == []
    engine.commit(result(token("c", FinishReason.STOP)))
    assert started(engine.plan()) == ["d"]


# -- the token limit ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "context", "pool", "settled"),
    [
        (20, 100, 200, 20),
        (95, 100, 200, 90),
        (None, 100, 200, 90),
        (None, 200, 100, 90),
        (500, 200, 100, 90),
        (0, 100, 200, 1),
        (None, 11, 200, 1),
    ],
    ids=["the ask", "ask over context", "context", "KV pool", "ask over pool", "at least one", "room for one"],
)
def test_max_tokens_is_the_least_of_ask_context_and_pool(asked, context, pool, settled):
    engine = scheduler(context=context, kv_tokens=pool)
    ask = request("a", prompt=10, max_tokens=asked)
    assert engine.submit(ask) == settled
    assert engine.plan().start == (Admitted(ask, settled),)
    assert engine.pools.kv_tokens.used == 10 + settled


@pytest.mark.parametrize("param", ["prompt", "messages"])
@pytest.mark.parametrize(("context", "pool"), [(10, 500), (500, 10)], ids=["context", "KV pool"])
def test_a_prompt_that_leaves_no_answer_names_both_numbers_and_the_clients_parameter(context, pool, param):
    engine = scheduler(context=context, kv_tokens=pool)
    with pytest.raises(RequestError, match=r"prompt has 12 tokens.* 10 tokens") as caught:
        engine.submit(request("a", prompt=12, prompt_param=param))
    error = caught.value
    assert (error.code, error.status, error.param) == ("context_length_exceeded", 400, param)
    assert not engine.has_work()


def test_a_prompt_as_long_as_the_context_leaves_no_token_to_answer_with():
    with pytest.raises(RequestError, match="prompt has 10 tokens"):
        scheduler(context=10).submit(request("a", prompt=10, max_tokens=1))


@pytest.mark.parametrize("param", ["prompt", "messages"])
def test_an_empty_prompt_is_the_clients_mistake(param):
    with pytest.raises(RequestError, match="no tokens") as caught:
        scheduler().submit(request("a", prompt=0, prompt_param=param))
    assert caught.value.param == param


# -- refusals -------------------------------------------------------------------------------------------------


def test_a_full_queue_is_overloaded_and_what_waits_still_runs():
    engine = scheduler(queue=2, requests=2)
    submit_all(engine, request("a"), request("b"), request("c"), request("d"))
    with pytest.raises(Overloaded, match="2 requests wait"):
        engine.submit(request("e"))
    assert started(engine.plan()) == ["a", "b"]
    with pytest.raises(Overloaded, match="2 requests wait"):
        engine.submit(request("e"))
    engine.cancel("a")
    engine.submit(request("e"))
    assert started(engine.plan()) == ["c"]


def test_a_burst_that_fits_the_free_slots_is_not_a_queue():
    engine = scheduler(queue=1, requests=4)
    submit_all(engine, *(request(str(n)) for n in range(5)))
    with pytest.raises(Overloaded, match="1 requests wait"):
        engine.submit(request("5"))


def test_an_id_in_use_is_refused_whether_it_waits_or_runs():
    engine = scheduler()
    engine.submit(request("a"))
    with pytest.raises(RequestError, match="already in use"):
        engine.submit(request("a"))
    engine.plan()
    with pytest.raises(RequestError, match="already in use"):
        engine.submit(request("a"))
    assert (engine.running, engine.waiting) == (1, 0)
    engine.commit(result(token("a", FinishReason.STOP)))
    engine.submit(request("a"))
    assert engine.waiting == 1


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"aux_slots": 2}, "needs 1 request slot and 3 auxiliary-state slots; this owner has 4 and 2"),
        ({"aux_slots": 3, "requests": 0}, "needs 1 request slot and 3 auxiliary-state slots; this owner has 0 and 3"),
    ],
    ids=["aux_slots", "requests"],
)
def test_an_owner_whose_limits_never_hold_a_requests_slots_sends_it_elsewhere(sizes, message):
    engine = scheduler(aux_each=3, **sizes)
    with pytest.raises(Unavailable, match=message) as caught:
        engine.submit(request("a"))
    assert type(caught.value) is Unavailable
    assert not engine.has_work()


# -- new limits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "refused"),
    [
        ({}, ()),
        ({"kv_tokens": 20}, ("big",)),
        ({"kv_tokens": 1}, ("big", "small")),
        ({"aux_slots": 1}, ("big", "small")),
        ({"requests": 0}, ("big", "small")),
    ],
    ids=["none", "KV tokens", "no KV tokens", "aux slots", "requests"],
)
def test_a_resize_ends_and_returns_the_queued_requests_that_no_longer_fit(sizes, refused):
    engine = scheduler(requests=1, kv_tokens=100, aux_each=2, aux_slots=4)
    submit_all(engine, request("running", 50, 50), request("big", 50, 50), request("small", 1, 1))
    engine.plan()
    assert engine.resize(**{"requests": 1, "kv_tokens": 100, "aux_slots": 4, **sizes}) == refused
    engine.check_invariants()
    assert (engine.running, engine.waiting) == (1, 2 - len(refused))
    plan = engine.plan()
    assert (plan.leave, plan.start) == ((), ()), "the runner never heard of the refused"
    assert not any(engine.cancel(request_id) for request_id in refused)
    engine.commit(result(token("running", FinishReason.STOP)))
    assert started(engine.plan()) == [r for r in ("big", "small") if r not in refused][:1]


def test_a_request_that_a_lowered_share_can_never_hold_does_not_block_the_queue():
    engine = scheduler(kv_tokens=100)
    submit_all(engine, request("big", 50, 50), request("small", 1, 1))
    assert engine.resize(requests=4, kv_tokens=20, aux_slots=0) == ("big",)
    assert started(engine.plan()) == ["small"]


def test_a_resize_that_is_refused_changes_nothing():
    engine = scheduler(requests=1, kv_tokens=100)
    submit_all(engine, request("running"), request("waiting", 50, 50))
    engine.plan()
    with pytest.raises(ValueError, match="cannot hold"):
        engine.resize(requests=0, kv_tokens=0, aux_slots=-1)
    assert (engine.running, engine.waiting, engine.pools.kv_tokens.limit) == (1, 1, 100)


def test_max_tokens_is_settled_by_the_limit_in_force_not_by_what_is_still_held():
    engine = scheduler(kv_tokens=100)
    engine.submit(request("old", 50, 50))
    engine.plan()
    engine.resize(requests=4, kv_tokens=20, aux_slots=0)
    assert engine.submit(request("new", 10, None)) == 10
    engine.cancel("old")
    assert started(engine.plan()) == ["new"]


def test_a_request_that_fails_in_a_step_is_told_and_frees_what_it_held():
    engine = scheduler(aux_each=2, aux_slots=8)
    submit_all(engine, request("a"), request("b"))
    engine.plan()
    failure = Failed("a", "its grammar broke")
    booked = engine.commit(StepResult((token("b"),), failed=(failure, Failed("gone", "who?"))))
    assert booked == Booked((token("b"),), (failure,))
    engine.check_invariants()
    assert used(engine) == (1, 10, 2)
    assert engine.plan().leave == (), "the runner has nothing of it any more"
