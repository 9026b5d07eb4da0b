"""Those who call the engine: refused, heard and let go at once, whatever step runs meanwhile."""

import threading

import pytest

from engines import ENDLESS, NOTHING, WAIT_S, all_started, held, started, text_of
from pomona.workers.engine import engine
from pomona.workers.engine.base import Delta, StepPlan
from pomona.workers.errors import Overloaded, RequestError, Unavailable


def test_an_id_in_use_is_refused_and_its_owner_goes_on(bench):
    b = bench(scripts={"a": "hello", "b": "world"}).start(requests=1)
    running, waiting = b.submit("a"), b.submit("b")
    b.wait_plan(1)
    for request_id in "ab":
        assert b.refused(request_id, RequestError).param == "request_id"
    b.open()
    b.wait_last("a", "b")
    assert (text_of(running), text_of(waiting)) == ("hello", "world")
    assert b.loads[-1].counters.failed_requests == 0


def test_a_full_queue_is_overloaded(bench):
    b = bench(max_queued_requests=1).start(requests=1)
    b.submit("running", max_tokens=3)
    b.wait_plan(1)
    b.submit("waiting", max_tokens=3)
    b.refused("refused", Overloaded)
    assert (b.loads[-1].running, b.loads[-1].waiting) == (1, 1)
    b.open()
    b.wait_last("running", "waiting")
    b.submit("refused", max_tokens=1)
    b.wait_last("refused")


@pytest.mark.parametrize("param", ["prompt", "messages"])
def test_a_prompt_that_is_too_long_is_the_clients_error(bench, param):
    b = bench().start(kv_tokens=10)
    error = b.refused("a", RequestError, prompt=10, prompt_param=param)
    assert (error.code, error.param) == ("context_length_exceeded", param)


def test_a_share_that_holds_no_requests_slots_sends_it_elsewhere(bench):
    b = bench().start(aux_slots=1, aux_each=2)
    b.refused("a", Unavailable)
    assert b.runners == []


# -- while a step runs -----------------------------------------------------------------------------------------


def test_submit_and_its_refusals_return_while_a_step_runs(bench):
    b = bench(max_queued_requests=2).start(requests=2)
    b.submit("running", max_tokens=3)
    b.wait_plan(1)
    b.refused("running", RequestError)
    b.refused("empty", RequestError, prompt=0)
    b.submit("one", max_tokens=3)
    b.submit("two", max_tokens=3)
    b.submit("three", max_tokens=3)  # one of the three fits the free slot, two wait
    assert (b.loads[-1].running, b.loads[-1].waiting) == (1, 3)
    b.refused("four", Overloaded)
    assert b.stepping
    assert len(b.runners[0].plans) == 1
    assert started(b.one_step()) == ["one"]
    b.open()
    b.wait_last("running", "one", "two", "three")


def test_cancel_frees_the_pools_while_a_step_runs(bench):
    b = bench().start()
    b.submit("a", prompt=3, max_tokens=10)
    b.wait_plan(1)
    b.one_step()
    assert held(b.loads[-1]) == (1, 1, 13, 2)
    b.cancel("a")
    assert held(b.loads[-1]) == NOTHING
    assert b.stepping
    assert len(b.runners[0].plans) == 2
    assert b.one_step().leave == ("a",)


def test_what_a_cancel_frees_goes_to_the_next_one_with_the_next_step(bench):
    b = bench(scripts={"b": "hi"}).start(requests=1)
    cancelled = b.submit("a", max_tokens=ENDLESS)
    b.submit("b")
    b.wait_plan(1)
    b.one_step()
    b.cancel("a")
    assert (b.loads[-1].running, b.loads[-1].waiting) == (0, 1)
    assert b.stepping
    plan = b.one_step()
    assert (plan.leave, started(plan)) == (("a",), ["b"])
    b.open()
    b.wait_last("b")
    assert cancelled == [Delta((ord("x"),), "x")]


def test_tokens_of_the_step_that_ran_during_a_cancel_are_dropped(bench):
    b = bench(scripts={"b": "hello"}).start()
    cancelled = b.submit("a", max_tokens=1)
    b.submit("b")
    b.wait_plan(1)
    b.cancel("a")
    b.open()
    b.wait_last("b")
    assert cancelled == []
    counters = b.loads[-1].counters
    assert (counters.finished_requests, counters.failed_requests, counters.generation_tokens) == (1, 0, 6)


def test_an_id_that_was_cancelled_while_a_step_runs_may_come_back_at_once(bench):
    b = bench(scripts={"a": "again"}).start(requests=1)
    old = b.submit("a")
    b.wait_plan(1)
    b.cancel("a")
    new = b.submit("a")
    assert b.stepping
    plan = b.one_step()
    assert (plan.leave, started(plan)) == (("a",), ["a"])
    b.open()
    b.wait_last("a")
    assert (old, text_of(new)) == ([], "again")


def test_a_share_is_put_in_force_while_a_step_runs(bench):
    b = bench().start(requests=1)
    b.submit("a", max_tokens=3)
    b.wait_plan(1)
    b.share(epoch=2, requests=3)
    assert (b.loads[-1].epoch, b.loads[-1].requests.capacity) == (2, 3)
    assert b.stepping


def test_what_a_caller_changes_is_published_on_its_own_thread(bench):
    b = bench().start()
    b.submit("a", max_tokens=ENDLESS)
    b.wait_plan(1)
    for change in (lambda: b.submit("b", max_tokens=3), lambda: b.share(epoch=2), lambda: b.cancel("a")):
        seen = len(b.publishers)
        change()
        assert b.publishers[seen:] == [threading.current_thread()]
    b.one_step()
    assert b.publishers[-1] is b.engine._thread


# -- cancel ----------------------------------------------------------------------------------------------------


def test_cancel_while_waiting_never_reaches_the_runner(bench):
    b = bench(scripts={"c": "hi"}).start(requests=1)
    b.submit("a", max_tokens=3)
    b.wait_plan(1)
    cancelled = b.submit("b")
    b.submit("c")
    b.cancel("b")
    assert b.loads[-1].waiting == 1
    b.open()
    b.wait_last("a", "c")
    assert cancelled == []
    assert all_started(b) == ["a", "c"]
    assert not any(plan.leave for plan in b.runners[0].plans)


def test_cancel_of_the_only_request_is_told_to_the_runner_and_leaves_the_pools_empty(bench):
    b = bench().start()
    b.submit("a", max_tokens=ENDLESS)
    b.wait_plan(1)
    b.cancel("a")
    assert b.one_step() == StepPlan(leave=("a",))
    b.gate.release()
    assert held(b.wait_next_load()) == NOTHING


def test_cancel_of_an_unknown_request_is_no_error(bench):
    b = bench(scripts={"a": "hi"})
    b.engine.cancel("nobody")
    b.start()
    b.engine.cancel("nobody")
    b.open()
    b.submit("a")
    b.wait_last("a")
    b.cancel("a")
    assert b.engine.stop(WAIT_S)
    b.cancel("a")


def test_cancel_in_the_middle_of_a_prompt_is_told_to_the_runner(bench):
    b = bench(chunk_tokens=16).start()
    b.submit("a", prompt=100)
    b.wait_plan(1)
    b.one_step()
    b.cancel("a")
    assert held(b.loads[-1]) == NOTHING
    assert b.one_step() == StepPlan(leave=("a",))


# -- many at once ----------------------------------------------------------------------------------------------


def test_a_burst_that_meets_an_idle_engine_starts_together(bench, monkeypatch):
    monkeypatch.setattr(engine, "GATHER_QUIET_S", 0.3)
    b = bench().start(requests=3)
    for request_id in "abc":
        b.submit(request_id, max_tokens=2)
        with b.changed:  # time enough for a runner, if the engine did not wait
            b.changed.wait_for(lambda: b.runners, 0.01)
    assert started(b.wait_plan(1)) == ["a", "b", "c"]


def test_arrivals_that_do_not_end_hold_up_nobody(bench, monkeypatch):
    monkeypatch.setattr(engine, "GATHER_QUIET_S", WAIT_S)
    monkeypatch.setattr(engine, "GATHER_REQUESTS", 8)
    b = bench().start()
    b.open()
    for number in range(1000):
        b.submit(f"{number}", max_tokens=1)
        with b.changed:
            if b.changed.wait_for(lambda: b.runners, 0.001):
                break
    assert b.runners
    b.wait_last(*b.answers)


def test_callers_on_many_threads_each_get_their_answer_or_their_peace(bench):
    b = bench(failures=[RuntimeError("metal gave up")]).start(requests=3, aux_slots=6)
    b.open()
    errors = []

    def call(caller):
        try:
            for i in range(40):
                request_id = f"{caller}-{i}"
                b.submit(request_id, max_tokens=1 + i % 5)
                if i % 3 == 0:
                    b.cancel(request_id)
                if i % 10 == 0:
                    b.share(epoch=2 + i, requests=1 + i % 4, aux_slots=8)
        except Exception as exc:
            errors.append(exc)

    callers = [threading.Thread(target=call, args=(c,)) for c in "abcd"]
    for each in callers:
        each.start()
    for each in callers:
        each.join(WAIT_S)
    cancelled = [deltas for deltas, _ in b.cancelled]
    b.wait(lambda: all(any(d is c for c in cancelled) or (d and d[-1].last) for d in b.every_answer))
    assert errors == []
    ended = [deltas[-1] for deltas in b.every_answer if deltas and deltas[-1].last]
    counters = b.loads[-1].counters
    assert counters.finished_requests == sum(delta.error is None for delta in ended)
    assert counters.failed_requests == sum(delta.error is not None for delta in ended)
    assert len(b.every_answer) == 160
