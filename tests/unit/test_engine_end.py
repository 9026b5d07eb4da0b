"""However the engine ends, everybody is answered, and its thread with it."""

import pytest

from engines import ENDLESS, NOTHING, WAIT_S, held
from pomona.workers.engine.base import EngineRequest, Share
from pomona.workers.engine.engine import Engine
from pomona.workers.errors import EngineError, Unavailable


def test_stop_answers_what_runs_and_what_waits_and_ends_the_thread(bench):
    b = bench().start(requests=1)
    running = b.submit("running", max_tokens=ENDLESS)
    b.wait_plan(1)
    waiting = b.submit("waiting")
    assert not b.engine.stop(timeout_s=0), "a step is still running"
    b.open()
    assert b.engine.stop(WAIT_S)
    for deltas in (running, waiting):
        assert type(deltas[-1].error) is Unavailable
    assert b.runners[0].closed
    assert b.exits == [None]
    assert b.loads[-1].counters.failed_requests == 2


def test_stop_before_any_share_ends_the_thread(bench):
    b = bench()
    b.engine.start()
    assert b.engine.stop(WAIT_S)
    assert b.exits == [None]


def test_stop_before_start_has_nothing_to_wait_for(bench):
    b = bench()
    assert b.engine.stop(WAIT_S)
    assert b.exits == []
    b.refused("a", Unavailable)


def test_a_request_after_stop_is_refused(bench):
    b = bench().start()
    b.open()
    assert b.engine.stop(WAIT_S)
    assert "stopped" in str(b.refused("late", Unavailable))


def test_a_request_that_comes_between_stop_and_the_end_of_the_step_is_refused(bench):
    b = bench().start()
    b.submit("a", max_tokens=ENDLESS)
    b.wait_plan(1)
    assert not b.engine.stop(timeout_s=0)
    assert "stopped" in str(b.refused("late", Unavailable))
    assert b.stepping


def test_a_cancel_between_stop_and_the_end_of_the_step_frees_at_once(bench):
    b = bench().start()
    b.submit("a", max_tokens=ENDLESS)
    b.wait_plan(1)
    assert not b.engine.stop(timeout_s=0)
    b.cancel("a")
    assert held(b.loads[-1]) == NOTHING
    assert b.stepping


def refuse_to_set_up():
    raise RuntimeError("no such model")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("set_up", [refuse_to_set_up, lambda: None], ids=["raises", "gives up"])
def test_after_a_set_up_that_fails_requests_are_refused(set_up):
    published = []
    engine = Engine(set_up, lambda *publication: published.append(publication), clock=lambda: 42.0)
    engine.start()
    engine.allocate(Share(1, 2, 100, 8, 2))
    with pytest.raises(Unavailable):
        engine.submit(EngineRequest("a", (1,)), published.append)
    engine.cancel("a")
    assert engine.stop(WAIT_S)
    with pytest.raises(Unavailable):
        engine.submit(EngineRequest("a", (1,)), published.append)
    assert published == []


# -- without a runner ------------------------------------------------------------------------------------------


def test_when_the_first_runner_cannot_be_made_everybody_is_answered_and_the_engine_ends(bench):
    b = bench(no_runner=RuntimeError("out of memory"), exits_with=EngineError).start(requests=1)
    answers = [b.submit("running"), b.submit("queued")]
    b.open()
    b.wait(lambda: b.exits)
    for deltas in answers:
        assert [type(delta.error) for delta in deltas] == [EngineError]
    assert "RuntimeError: out of memory" in str(b.exits[0])
    assert b.loads[-1].counters.failed_requests == 2
    assert "stopped" in str(b.refused("late", Unavailable))


def test_when_no_new_runner_can_be_made_everybody_is_answered_and_the_engine_ends(bench):
    b = bench(failures=[RuntimeError("metal gave up")], exits_with=EngineError).start(requests=1)
    running = b.submit("running", max_tokens=ENDLESS)
    b.wait_plan(1)
    queued = b.submit("queued")
    b.no_runner = RuntimeError("out of memory")
    b.open()
    b.wait(lambda: b.exits)
    assert ["metal gave up" in str(delta.error) for delta in running] == [True]
    assert ["out of memory" in str(delta.error) for delta in queued] == [True]
    assert {type(deltas[-1].error) for deltas in (running, queued)} == {EngineError}
    b.refused("late", Unavailable)


def test_a_request_that_was_cancelled_before_the_runner_could_not_be_made_gets_nothing(bench):
    b = bench(no_runner=RuntimeError("out of memory"), exits_with=EngineError).start()
    b.submit("a")
    b.cancel("a")
    b.submit("b")
    b.open()
    b.wait(lambda: b.exits)
    assert [type(delta.error) for delta in b.answers["b"]] == [EngineError]
