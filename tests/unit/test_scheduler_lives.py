"""The lives of requests in the scheduler: cancels, steps, failures, and the moves that a phase allows."""

import itertools

import pytest

from pomona.workers.engine.base import Chunk, Failed, FinishReason, Prefilled, StepPlan, StepResult
from pomona.workers.engine.scheduler import LEGAL_MOVES, Booked, IllegalMove, Live, Phase
from scheduling import request, result, scheduler, started, submit_all, token, used

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
    assert plan.leave == ("a",)
    assert started(plan) == ["b"]
    assert engine.plan().leave == ()


def test_the_runner_is_told_of_a_cancel_even_when_nothing_else_is_left():
    engine = scheduler()
    engine.submit(request("a"))
    engine.plan()
    engine.cancel("a")
    assert engine.has_work()
    assert engine.plan() == StepPlan(leave=("a",))
    assert not engine.has_work()


def test_an_id_that_was_cancelled_may_come_back_in_the_same_plan():
    engine = scheduler()
    engine.submit(request("a"))
    engine.plan()
    engine.cancel("a")
    engine.submit(request("a"))
    plan = engine.plan()
    assert (plan.leave, started(plan)) == (("a",), ["a"])


def test_tokens_of_a_cancelled_request_are_not_for_the_one_that_waits_under_its_id():
    engine = scheduler()
    engine.submit(request("a"))
    engine.plan()
    engine.cancel("a")
    engine.submit(request("a"))
    late = StepResult((token("a"),), (Prefilled("a", 5, 0),), (Failed("a", "broken"),))
    assert engine.commit(late) == Booked()
    engine.check_invariants()
    plan = engine.plan()
    assert (plan.leave, started(plan), plan.prefill) == (("a",), ["a"], (Chunk("a", 5),))


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
    assert engine.commit(result(token("a"), token("b"), token("never seen"))) == Booked((token("b"),))


def test_a_request_may_end_with_its_first_token():
    engine = scheduler()
    engine.submit(request("a"))
    engine.plan()
    assert engine.commit(result(token("a", FinishReason.STOP))) == Booked((token("a", FinishReason.STOP),))
    assert not engine.has_work()


def test_a_stop_string_frees_at_once_and_tells_the_runner():
    engine = scheduler()
    engine.submit(request("a"))
    engine.plan()
    engine.commit(result(token("a")))
    assert engine.finish("a")
    assert used(engine) == (0, 0, 0)
    assert engine.plan() == StepPlan(leave=("a",))
    assert not engine.finish("a")


def test_a_failed_runner_ends_what_ran_and_keeps_the_queue():
    engine = scheduler(requests=2)
    submit_all(engine, *(request(r) for r in "abcd"))
    engine.plan()
    engine.cancel("a")
    assert engine.fail_running() == ("b",)
    assert used(engine) == (0, 0, 0)
    plan = engine.plan()
    assert (plan.leave, started(plan)) == ((), ["c", "d"]), "the new runner never heard of the old requests"


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
    booked = engine.commit(result(token("a", FinishReason.STOP), token("a")))
    assert booked == Booked((token("a", FinishReason.STOP),))


# -- phases ---------------------------------------------------------------------------------------------------

LEGAL = {
    (Phase.WAITING, Phase.PREFILLING),
    (Phase.WAITING, Phase.ABORTED),
    (Phase.PREFILLING, Phase.DECODING),
    (Phase.PREFILLING, Phase.WAITING),
    (Phase.PREFILLING, Phase.ABORTED),
    (Phase.DECODING, Phase.FINISHED),
    (Phase.DECODING, Phase.WAITING),
    (Phase.DECODING, Phase.ABORTED),
}


@pytest.mark.parametrize(("before", "after"), [*itertools.product(Phase, Phase)], ids=lambda phase: phase.value)
def test_only_the_legal_moves_are_made_and_an_illegal_one_changes_nothing(before, after):
    live = Live(request("a"), max_tokens=5, phase=before)
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
    assert (engine.running, used(engine), engine.plan().leave) == (1, before, ())
