"""Which prompts get a step's tokens: the shortest first, nobody starves, and what is shared is computed once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pomona.workers.engine.base import Chunk, EngineRequest, Failed, FinishReason, Prefilled, StepResult, StepTimes
from pomona.workers.engine.pace import MIN_CHUNK_TOKENS, Pace
from pomona.workers.engine.pools import Pools
from pomona.workers.engine.prefill_order import OVERRUN_TOKENS, STARVED_STEPS, common_prefix, find_hold, share, spare
from pomona.workers.engine.requests import Live, Phase
from pomona.workers.engine.scheduler import Rules, Scheduler
from scheduling import chunked, request, result, scheduler, started, step, submit_all, token


def prompt(request_id, tokens, *, arrival=0, priority=0, served_step=0):
    asked = EngineRequest(request_id, (1,) * tokens, 5, priority=priority)
    return Live(asked, 5, arrival, phase=Phase.PREFILLING, served_step=served_step)


# -- a step's budget ------------------------------------------------------------------------------------------


def test_the_shortest_goes_first_and_leaves_the_rest_to_the_next():
    prompts = [prompt("long", 300), prompt("short", 20), prompt("middle", 50)]
    assert share(100, prompts, step=1) == (Chunk("short", 20), Chunk("middle", 50), Chunk("long", 30))


def test_of_equally_long_ones_the_higher_rank_goes_first():
    prompts = [prompt("late", 50, arrival=2), prompt("early", 50, arrival=1), prompt("high", 50, arrival=3, priority=1)]
    assert [chunk.request_id for chunk in share(150, prompts, step=1)] == ["high", "early", "late"]


def test_what_counts_is_what_remains():
    nearly_done = prompt("nearly done", 500)
    nearly_done.position = 490
    assert share(16, [prompt("short", 20), nearly_done], step=1) == (Chunk("nearly done", 10),)


def test_crumbs_of_a_budget_are_not_handed_out():
    assert share(60, [prompt("a", 50), prompt("b", 500)], step=1) == (Chunk("a", 50),)


def test_crumbs_that_end_a_prompt_are():
    assert share(60, [prompt("a", 50), prompt("b", 500), prompt("c", 10)], step=1) == (Chunk("c", 10), Chunk("a", 50))


def test_a_prompt_that_a_chunk_nearly_ends_is_ended():
    assert share(64, [prompt("a", 90)], step=1) == (Chunk("a", 90),)
    assert share(64, [prompt("a", 97)], step=1) == (Chunk("a", 64),)


def test_a_budget_below_the_least_chunk_goes_to_one():
    assert share(5, [prompt("a", 50), prompt("b", 60)], step=1) == (Chunk("a", 5),)


def test_a_starved_prompt_gets_a_quarter_before_the_shortest_goes_on():
    prompts = [prompt("long", 500, served_step=1), prompt("short", 400, served_step=5)]
    assert share(100, prompts, step=5) == (Chunk("short", 100),)
    prompts[1].served_step = 5
    assert share(100, prompts, step=6) == (Chunk("long", 25), Chunk("short", 75))


def test_of_two_starved_prompts_the_one_without_for_longer_goes_first():
    prompts = [prompt("b", 500, served_step=2), prompt("a", 900, served_step=1), prompt("short", 400, served_step=9)]
    assert [share(32, prompts, step)[0] for step in (10, 11)] == [Chunk("a", 16), Chunk("b", 16)]


@given(st.lists(st.integers(1, 400), min_size=1, max_size=8), st.integers(1, 600), st.integers(0, 9))
def test_a_budget_is_kept_and_no_chunk_is_tiny_without_need(sizes, budget, step):
    prompts = [prompt(str(n), size, arrival=n, served_step=n % 3) for n, size in enumerate(sizes)]
    chunks = share(budget, prompts, step)
    assert 0 < sum(chunk.tokens for chunk in chunks) <= budget + min(OVERRUN_TOKENS, budget // 2)
    assert len({chunk.request_id for chunk in chunks}) == len(chunks)
    for chunk in chunks:
        size = sizes[int(chunk.request_id)]
        assert chunk.tokens == size or min(MIN_CHUNK_TOKENS, budget) <= chunk.tokens < size
    left = budget - sum(chunk.tokens for chunk in chunks)
    assert left < MIN_CHUNK_TOKENS or sum(chunk.tokens for chunk in chunks) == sum(sizes)


@given(st.lists(st.tuples(st.integers(1, 40), st.lists(st.integers(1, 120), max_size=3)), min_size=1, max_size=60))
def test_every_prompt_gets_a_chunk_in_any_starved_steps_and_as_many_as_there_are_prompts(steps):
    prompts, alone_for = [], {}
    for number, (budget, arrivals) in enumerate(steps, start=1):
        prompts += [
            prompt(f"{number}/{n}", size, arrival=10 * number + n, priority=n, served_step=number - 1)
            for n, size in enumerate(arrivals)
        ]
        most = len(prompts)
        given_now = {chunk.request_id: chunk.tokens for chunk in share(budget, prompts, number)}
        for live in prompts:
            live.position += given_now.get(live.request_id, 0)
            waited, seen = alone_for.get(live, (0, 0))
            alone_for[live] = (0, 0) if live.request_id in given_now else (waited + 1, max(seen, most))
            assert alone_for[live][0] < STARVED_STEPS + max(1, alone_for[live][1])
        prompts = [live for live in prompts if live.remaining_tokens]


# -- shared beginnings ----------------------------------------------------------------------------------------


@given(st.integers(0, 300), st.lists(st.integers(0, 2), max_size=300), st.lists(st.integers(0, 2), max_size=300))
def test_the_common_prefix_is_what_a_loop_would_find(shared, one, other):
    one, other = (*[5] * shared, *one), (*[5] * shared, *other)
    pairs = zip(one, other, strict=False)
    expected = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
    assert common_prefix(one, other) == expected


def live(tokens, position=0):
    return Live(EngineRequest("x", tuple(tokens), 5), 5, phase=Phase.PREFILLING, position=position)


@pytest.mark.parametrize(
    ("shared", "own", "waits"),
    [(32, 10, True), (31, 10, False), (100, 200, True), (100, 201, False)],
    ids=["long enough", "too short", "a third", "less than a third"],
)
def test_waiting_is_worth_it_for_32_tokens_and_a_third_of_the_prompt(shared, own, waits):
    source = live([*range(shared), -1])
    hold = find_hold((*range(shared), *[-2] * own), [source])
    assert (hold is not None) == waits
    if hold is not None:
        assert (hold.source, hold.tokens) == (source, shared)


def test_of_several_the_one_that_shares_most_is_waited_for():
    others = [live([*range(50), -1]), live([*range(80), -1]), live([*range(80), -2]), live([*range(60), -1])]
    hold = find_hold((*range(100), 7), others)
    assert hold is not None
    assert (hold.source, hold.tokens) == (others[1], 80)


def test_nobody_waits_for_what_is_computed_already():
    assert find_hold(tuple(range(100)), [live(range(100), position=100)]) is None
    assert find_hold(tuple(range(100)), [live([*range(80), -1], position=80), live([*range(80), -2])]) is None


def test_equal_prompts_share_all_but_the_last_token_which_each_computes_for_its_own_answer():
    hold = find_hold(tuple(range(100)), [live(range(100), position=98)])
    assert hold is not None
    assert hold.tokens == 99
    assert find_hold(tuple(range(100)), [live(range(100), position=99)]) is None


def test_a_prompt_is_told_to_be_cut_where_others_wait_for_it():
    engine = scheduler(cache=True)
    for name, own in (("a", 1), ("b", 2), ("c", 3)):
        engine.submit(EngineRequest(request_id=name, prompt=(*range(100), *[own] * (10 * own)), max_tokens=4))
    assert engine.plan().prefill == (Chunk("a", 110, cut=100),)
    engine.commit(StepResult(prefilled=(Prefilled("a", 100, 0),)))
    assert [(chunk.request_id, chunk.cut) for chunk in engine.plan().prefill] == [("a", 0), ("b", 0), ("c", 0)]


def test_whoever_has_no_chunk_is_spare_the_shortest_first():
    prompts = [prompt("long", 500), prompt("a", 60), prompt("b", 50), prompt("c", 40)]
    chunks = share(90, prompts, step=1)
    assert chunks == (Chunk("c", 40), Chunk("b", 50))
    assert spare(chunks, prompts) == (Chunk("a", 60), Chunk("long", 500))


# -- in the scheduler -----------------------------------------------------------------------------------------


def test_a_prompt_alone_gets_the_operators_whole_chunk_until_it_is_in():
    engine = scheduler(context=2000, kv_tokens=2000)
    engine.submit(request("a", prompt=1200))
    chunks = []
    for position in (512, 1024, 1200):
        chunks += engine.plan().prefill
        engine.commit(StepResult(prefilled=(Prefilled("a", position, 0),)))
    assert chunks == [Chunk("a", 512), Chunk("a", 512), Chunk("a", 176)]


def test_what_the_runner_reused_need_not_be_computed():
    engine = scheduler()
    engine.submit(request("a", prompt=700))
    engine.plan()
    engine.commit(StepResult(prefilled=(Prefilled("a", 690, 650),)))
    assert engine.plan().prefill == (Chunk("a", 10),)


def test_beside_a_stream_prompts_get_what_the_measured_pace_allows():
    pace, same = Pace(max_step_s=0.1, chunk_tokens=512), Pace(max_step_s=0.1, chunk_tokens=512)
    engine = Scheduler(Rules(1000), Pools(requests=2, kv_tokens=2000), pace)
    engine.submit(request("a", prompt=40, max_tokens=50))
    engine.plan()
    took = StepTimes(0.0, 0.05)
    engine.commit(StepResult((token("a"),), (Prefilled("a", 40, 0),), prompt_tokens=40, times=took))
    same.observe(took, prompt_tokens=40, decoding=0)
    engine.submit(request("b", prompt=600))
    assert engine.plan().prefill == (Chunk("b", same.budget(streams=True)),)
    engine.commit(StepResult((token("a"),), times=StepTimes(0.05, 0.0)))
    same.observe(StepTimes(0.05, 0.0), prompt_tokens=0, decoding=1)
    assert engine.plan().prefill == (Chunk("b", same.budget(streams=True)),)


def sharing(*prompts, **sizes):
    """A scheduler with these prompts submitted as "0", "1" …"""
    engine = scheduler(cache=True, context=5000, kv_tokens=20_000, requests=8, **sizes)
    submit_all(engine, *(EngineRequest(str(n), tuple(prompt), 5) for n, prompt in enumerate(prompts)))
    return engine


SYSTEM = range(1000, 1600)


def test_of_several_that_share_a_long_beginning_only_the_first_computes_it():
    engine = sharing([*SYSTEM, 1], [*SYSTEM, 2], [*SYSTEM, 3], [7] * 10)
    assert chunked(engine.plan()) == ["3", "0"]
    engine.commit(StepResult((token("3"),), prefilled=(Prefilled("0", 550, 0),)))
    engine.check_invariants()
    assert chunked(engine.plan()) == ["0"]
    engine.commit(StepResult((token("0"), token("3"))))
    engine.check_invariants()
    assert engine.plan().prefill == (Chunk("1", 1), Chunk("2", 1)), "the cache has the rest"


def test_the_wait_ends_where_the_shared_part_ends():
    engine = sharing([*SYSTEM, *[1] * 400], [*SYSTEM, 2])
    assert chunked(engine.plan()) == ["0"]
    engine.commit(StepResult(prefilled=(Prefilled("0", 599, 0),)))
    assert chunked(engine.plan()) == ["0"]
    engine.commit(StepResult(prefilled=(Prefilled("0", 600, 0),)))
    assert engine.plan().prefill[0] == Chunk("1", 1)


def test_what_the_cache_lost_meanwhile_is_computed_after_all():
    engine = sharing([*SYSTEM, 1], [*SYSTEM, 2])
    engine.plan()
    engine.commit(result(token("0", FinishReason.STOP)))
    assert engine.plan().prefill == (Chunk("1", 1),)
    engine.commit(StepResult(prefilled=(Prefilled("1", 1, 0),)))
    assert engine.plan().prefill == (Chunk("1", 512),)


@pytest.mark.parametrize("how", ["cancel", "fail"])
def test_the_wait_ends_when_the_one_it_waits_for_leaves(how):
    engine = sharing([*SYSTEM, 1], [*SYSTEM, 2])
    engine.plan()
    if how == "cancel":
        engine.cancel("0")
    engine.commit(StepResult(failed=(Failed("0", "broken"),)))
    assert chunked(engine.plan()) == ["1"]


def test_nobody_waits_for_one_that_was_preempted_and_came_back_behind_it():
    engine = scheduler(cache=True, ahead=2, growth=1, kv_tokens=112)
    shared = tuple(range(100, 150))
    submit_all(engine, request("old", 4, 50, priority=2), EngineRequest("source", (*shared, 1), 1))
    step(engine, "old")
    engine.submit(EngineRequest("held", (*shared, 2), 1, priority=1))
    assert chunked(step(engine, "old")) == ["source"]
    while not (plan := step(engine, "old")).leave:
        assert chunked(plan) == ["source"]
    assert (plan.leave, chunked(plan)) == (("source",), ["held"])
    engine.finish("old")
    plan = step(engine)
    assert (started(plan), chunked(plan)) == (["source"], ["held"]), "now it is the other way round"


def test_without_a_prefix_cache_nobody_waits():
    engine = scheduler(context=5000, kv_tokens=20_000)
    submit_all(engine, EngineRequest("0", (*SYSTEM, 1), 5), EngineRequest("1", (*SYSTEM, 2), 5))
    seen = set()
    for _ in range(8):
        seen.update(chunked(step(engine)))
    assert seen == {"0", "1"}
