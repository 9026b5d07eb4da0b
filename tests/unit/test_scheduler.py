"""The scheduler: who runs, in which order, with how many tokens; and that it never loses or leaks a request."""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pomona.workers.engine.base import Admitted, EngineRequest, FinishReason, StepPlan, StepResult, TokenOut
from pomona.workers.engine.pools import Need, Pools, PoolView
from pomona.workers.engine.scheduler import LEGAL_MOVES, IllegalMove, Live, Phase, Rules, Scheduler
from pomona.workers.errors import Overloaded, RequestError, Unavailable


def scheduler(*, context=1000, aux_each=0, queue=1024, requests=4, kv_tokens=1000, aux_slots=0):
    return Scheduler(
        Rules(context, aux_each, queue, prefix_cache=False),
        Pools(requests=requests, kv_tokens=kv_tokens, aux_slots=aux_slots),
    )


def request(request_id, prompt=5, max_tokens=5, **fields):
    return EngineRequest(request_id, tuple(range(prompt)), max_tokens, **fields)


def submit_all(engine, *requests):
    for each in requests:
        engine.submit(each)


def started(plan):
    return [admitted.request.request_id for admitted in plan.start]


def used(engine):
    return engine.pools.requests.used, engine.pools.kv_tokens.used, engine.pools.aux_slots.used


def token(request_id, finish=None):
    return TokenOut(request_id, 7, finish)


def result(*tokens):
    return StepResult(tuple(tokens))


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


def test_a_running_request_holds_its_prompt_its_whole_answer_and_its_slots():
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
        assert engine.plan() == StepPlan()
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


# -- cancel ---------------------------------------------------------------------------------------------------


def test_cancel_while_waiting_never_reaches_the_runner():
    engine = scheduler()
    engine.submit(request("a"))
    assert engine.cancel("a")
    assert (engine.waiting, engine.has_work(), engine.plan()) == (0, False, StepPlan())


@pytest.mark.parametrize("decoding", [False, True], ids=["prefilling", "decoding"])
def test_cancel_while_running_frees_at_once_and_tells_the_runner_in_the_next_plan(decoding):
    engine = scheduler(requests=1, aux_each=2, aux_slots=2)
    submit_all(engine, request("a"), request("b"))
    engine.plan()
    if decoding:
        engine.commit(result(token("a")))
    assert engine.cancel("a")
    assert used(engine) == (0, 0, 0)
    plan = engine.plan()
    assert plan.cancel == ("a",)
    assert started(plan) == ["b"]
    assert engine.plan().cancel == ()


def test_the_runner_is_told_of_a_cancel_even_when_nothing_else_is_left():
    engine = scheduler()
    engine.submit(request("a"))
    engine.plan()
    engine.cancel("a")
    assert engine.has_work()
    assert engine.plan() == StepPlan(cancel=("a",))
    assert not engine.has_work()


def test_an_id_that_was_cancelled_may_come_back_in_the_same_plan():
    engine = scheduler()
    engine.submit(request("a"))
    engine.plan()
    engine.cancel("a")
    engine.submit(request("a"))
    plan = engine.plan()
    assert (plan.cancel, started(plan)) == (("a",), ["a"])


def test_cancel_of_an_ended_or_unknown_request_is_no_error():
    engine = scheduler()
    engine.submit(request("a"))
    engine.plan()
    engine.commit(result(token("a", FinishReason.STOP)))
    assert not engine.cancel("a")
    assert not engine.cancel("never seen")
    assert engine.plan() == StepPlan()


# -- steps ----------------------------------------------------------------------------------------------------


def test_tokens_of_requests_that_left_are_dropped():
    engine = scheduler()
    submit_all(engine, request("a"), request("b"))
    engine.plan()
    engine.cancel("a")
    assert engine.commit(result(token("a"), token("b"), token("never seen"))) == (token("b"),)


def test_a_request_may_end_with_its_first_token():
    engine = scheduler()
    engine.submit(request("a"))
    engine.plan()
    assert engine.commit(result(token("a", FinishReason.STOP))) == (token("a", FinishReason.STOP),)
    assert not engine.has_work()


def test_a_stop_string_frees_at_once_and_tells_the_runner():
    engine = scheduler()
    engine.submit(request("a"))
    engine.plan()
    engine.commit(result(token("a")))
    assert engine.finish("a")
    assert used(engine) == (0, 0, 0)
    assert engine.plan() == StepPlan(cancel=("a",))
    assert not engine.finish("a")


def test_a_failed_runner_ends_what_ran_and_keeps_the_queue():
    engine = scheduler(requests=2)
    submit_all(engine, *(request(r) for r in "abcd"))
    engine.plan()
    engine.cancel("a")
    assert engine.fail_running() == ("b",)
    assert used(engine) == (0, 0, 0)
    plan = engine.plan()
    assert (plan.cancel, started(plan)) == ((), ["c", "d"]), "the new runner never heard of the old requests"


def test_draining_ends_the_queue_and_leaves_what_runs():
    engine = scheduler(requests=1)
    submit_all(engine, *(request(r) for r in "abc"))
    engine.plan()
    assert engine.drain_queue() == ("b", "c")
    assert (engine.running, engine.waiting) == (1, 0)


def test_a_token_after_the_last_one_in_the_same_step_is_dropped():
    engine = scheduler()
    engine.submit(request("a"))
    engine.plan()
    assert engine.commit(result(token("a", FinishReason.STOP), token("a"))) == (token("a", FinishReason.STOP),)


# -- phases ---------------------------------------------------------------------------------------------------

LEGAL = {
    (Phase.WAITING, Phase.PREFILLING),
    (Phase.WAITING, Phase.ABORTED),
    (Phase.PREFILLING, Phase.DECODING),
    (Phase.PREFILLING, Phase.ABORTED),
    (Phase.DECODING, Phase.FINISHED),
    (Phase.DECODING, Phase.ABORTED),
}


@pytest.mark.parametrize(("before", "after"), [*itertools.product(Phase, Phase)], ids=lambda phase: phase.value)
def test_only_the_legal_moves_are_made_and_an_illegal_one_changes_nothing(before, after):
    live = Live(Admitted(request("a"), 5), Need(10, 0), phase=before)
    if (before, after) in LEGAL:
        live.move(after)
        assert live.phase is after
    else:
        with pytest.raises(IllegalMove, match=f"a: {before.value} -> {after.value}"):
            live.move(after)
        assert live.phase is before


def test_every_phase_has_its_row_in_the_table():
    assert set(LEGAL_MOVES) == set(Phase)


def test_finishing_what_has_no_token_yet_raises_and_changes_nothing():
    engine = scheduler()
    engine.submit(request("a"))
    engine.plan()
    before = used(engine)
    with pytest.raises(IllegalMove, match="prefilling -> finished"):
        engine.finish("a")
    engine.check_invariants()
    assert (engine.running, used(engine), engine.plan()) == (1, before, StepPlan())


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
    assert engine.plan() == StepPlan(), "the runner never heard of the refused"
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


# -- everything at once ---------------------------------------------------------------------------------------

SIZES = {"requests": 3, "kv_tokens": 60, "aux_slots": 5}
CONTEXT, AUX_EACH, QUEUE = 40, 2, 6
ids = st.sampled_from("abcdefghij")


class SchedulerMachine(RuleBasedStateMachine):
    """A scheduler beside a model of its queue and of what a runner would hold."""

    def __init__(self):
        super().__init__()
        self.scheduler = scheduler(context=CONTEXT, aux_each=AUX_EACH, queue=QUEUE, **SIZES)
        self.limits = dict(SIZES)
        self.queue = {}  # id -> KV tokens needed, in order
        self.held = {}  # id -> KV tokens needed
        self.inside = {}  # what the runner holds: id -> tokens still to come
        self.decoding = set()

    @rule(request_id=ids, prompt=st.integers(0, 45), max_tokens=st.none() | st.integers(1, 45))
    def submit(self, request_id, prompt, max_tokens):
        reasons = self.reasons_to_refuse(request_id, prompt)
        asked = request(request_id, prompt, max_tokens)
        if reasons:
            with pytest.raises((RequestError, Unavailable)) as caught:
                self.scheduler.submit(asked)
            assert caught.type in reasons
            return
        left = min(CONTEXT, self.limits["kv_tokens"]) - prompt
        settled = left if max_tokens is None else min(max_tokens, left)
        assert self.scheduler.submit(asked) == settled
        self.queue[request_id] = prompt + settled

    def reasons_to_refuse(self, request_id, prompt):
        slots = self.limits["requests"] >= 1 and self.limits["aux_slots"] >= AUX_EACH
        return {
            *([RequestError] if request_id in self.queue or request_id in self.held else []),
            *([RequestError] if not 0 < prompt < min(CONTEXT, self.limits["kv_tokens"]) else []),
            *([Overloaded] if len(self.queue) - self.free_slots() >= QUEUE else []),
            *([Unavailable] if not slots else []),
        }

    def free_slots(self):
        return max(0, self.limits["requests"] - len(self.held))

    @rule(request_id=ids)
    def cancel(self, request_id):
        here = request_id in self.queue or request_id in self.held
        assert self.scheduler.cancel(request_id) == here
        self.leave(request_id)

    def leave(self, request_id):
        self.queue.pop(request_id, None)
        self.held.pop(request_id, None)
        self.decoding.discard(request_id)

    @rule(data=st.data())
    def step(self, data):
        self.run_step(lambda request_id: data.draw(st.sampled_from(["nothing", "token", "token", "stop"])))

    def run_step(self, choose):
        plan = self.scheduler.plan()
        for request_id in plan.cancel:
            del self.inside[request_id]
        order = list(self.queue)
        assert started(plan) == order[: len(plan.start)], "first come, first served"
        for admitted in plan.start:
            request_id = admitted.request.request_id
            assert request_id not in self.inside, "the runner still has this id"
            self.inside[request_id] = admitted.max_tokens
            self.held[request_id] = self.queue.pop(request_id)
        assert self.inside.keys() == self.held.keys(), "the runner holds exactly what the scheduler runs"
        assert not self.queue or not self.fits(next(iter(self.queue.values()))), "the head could have started"
        tokens = [t for t in (self.next_token(r, choose(r)) for r in list(self.inside)) if t is not None]
        assert self.scheduler.commit(result(*tokens)) == tuple(tokens)
        for each in tokens:
            self.decoding.add(each.request_id)
            if each.finish is not None:
                del self.inside[each.request_id]
                self.leave(each.request_id)

    def fits(self, kv_tokens):
        return (
            len(self.held) < self.limits["requests"]
            and sum(self.held.values()) + kv_tokens <= self.limits["kv_tokens"]
            and (len(self.held) + 1) * AUX_EACH <= self.limits["aux_slots"]
        )

    def next_token(self, request_id, choice):
        if choice == "nothing":
            return None
        self.inside[request_id] -= 1
        if choice == "stop":
            return token(request_id, FinishReason.STOP)
        return token(request_id, FinishReason.LENGTH if self.inside[request_id] == 0 else None)

    @rule(request_id=ids)
    def finish(self, request_id):
        if request_id in self.held and request_id not in self.decoding:
            with pytest.raises(IllegalMove):
                self.scheduler.finish(request_id)
            return
        assert self.scheduler.finish(request_id) == (request_id in self.held)
        if request_id in self.held:
            self.leave(request_id)

    @rule()
    def fail_running(self):
        assert self.scheduler.fail_running() == tuple(self.held)
        self.held.clear()
        self.inside.clear()
        self.decoding.clear()

    @rule(
        sizes=st.fixed_dictionaries(
            {"requests": st.integers(0, 4), "kv_tokens": st.integers(0, 80), "aux_slots": st.integers(0, 8)}
        )
    )
    def resize(self, sizes):
        self.limits = sizes
        slots = sizes["requests"] >= 1 and sizes["aux_slots"] >= AUX_EACH
        refused = [r for r, kv_tokens in self.queue.items() if not slots or kv_tokens > sizes["kv_tokens"]]
        assert self.scheduler.resize(**sizes) == tuple(refused)
        for request_id in refused:
            self.leave(request_id)

    @invariant()
    def holds(self):
        self.scheduler.check_invariants()
        assert (self.scheduler.waiting, self.scheduler.running) == (len(self.queue), len(self.held))
        assert used(self.scheduler) == (len(self.held), sum(self.held.values()), AUX_EACH * len(self.held))

    def teardown(self):
        self.resize({"requests": 4, "kv_tokens": 80, "aux_slots": 8})
        while self.scheduler.has_work():
            self.run_step(lambda request_id: "stop")
        assert used(self.scheduler) == (0, 0, 0)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_kept_prefixes_are_evictable_and_give_way_to_whoever_needs_the_room():
    engine = Scheduler(Rules(100), Pools(requests=2, kv_tokens=20, aux_slots=0))
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
