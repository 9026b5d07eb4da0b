"""What fails is told to those whom it concerns, and to nobody else."""

import pytest

from engines import ENDLESS, NOTHING, FakeText, held, started, text_of, was_told_to_leave
from pomona.workers.engine.base import EngineRequest
from pomona.workers.errors import EngineError

# -- a step ----------------------------------------------------------------------------------------------------


def test_a_failed_step_fails_what_ran_and_the_queue_runs_on_a_new_runner(bench):
    b = bench(scripts={"c": "fine"}).start(requests=2)
    running = [b.submit("a", max_tokens=ENDLESS), b.submit("b", max_tokens=ENDLESS)]
    b.wait_plan(1)
    queued = b.submit("c")
    b.one_step()
    b.one_step()
    b.failures.append(RuntimeError("metal gave up"))
    b.open()
    b.wait_last("a", "b", "c")
    for deltas in running:
        assert isinstance(deltas[-1].error, EngineError)
        assert "RuntimeError: metal gave up" in str(deltas[-1].error)
    assert text_of(queued) == "fine"
    old, new = b.runners
    assert old.closed
    assert [r for plan in new.plans for r in started(plan)] == ["c"]
    assert new.plans[0].leave == ()
    counters = b.loads[-1].counters
    assert (counters.failed_requests, counters.finished_requests) == (2, 1)


def test_a_step_that_fails_after_a_cancel_fails_only_those_who_stayed(bench):
    b = bench(scripts={"c": "fine"}).start(requests=2)
    cancelled, stayed = b.submit("a", max_tokens=ENDLESS), b.submit("b", max_tokens=ENDLESS)
    b.wait_plan(1)
    b.one_step()
    b.cancel("a")
    queued = b.submit("c")
    assert b.stepping
    b.failures.append(RuntimeError("metal gave up"))
    b.open()
    b.wait_last("b", "c")
    assert not any(delta.last for delta in cancelled)
    assert isinstance(stayed[-1].error, EngineError)
    assert text_of(queued) == "fine"
    old, new = b.runners
    assert old.closed
    assert (new.plans[0].leave, started(new.plans[0])) == ((), ["c"]), "the new runner never heard of the old requests"
    counters = b.loads[-1].counters
    assert (counters.failed_requests, counters.finished_requests) == (1, 1)


def test_a_step_that_fails_after_everybody_was_cancelled_fails_nobody(bench):
    b = bench().start()
    b.submit("a", max_tokens=ENDLESS)
    b.wait_plan(1)
    b.cancel("a")
    b.failures.append(RuntimeError("metal gave up"))
    b.gate.release()
    b.wait(lambda: b.runners[0].closed)
    assert held(b.wait_next_load()) == NOTHING
    assert len(b.runners) == 1, "nobody needs a new one yet"
    again = b.submit("a", max_tokens=2)
    b.open()
    b.wait_last("a")
    assert (text_of(again), len(b.runners)) == ("xx", 2)
    assert b.runners[1].plans[0].leave == ()
    counters = b.loads[-1].counters
    assert (counters.failed_requests, counters.finished_requests) == (0, 1)


def test_a_runner_that_fails_again_and_again_answers_everybody(bench):
    b = bench(failures=[RuntimeError("one"), RuntimeError("two"), RuntimeError("three")]).start(requests=1)
    b.open()
    for request_id in "abc":
        b.submit(request_id)
    b.wait_last(*"abc")
    assert [type(b.answers[r][-1].error) for r in "abc"] == [EngineError] * 3
    fine = b.submit("d", max_tokens=2)
    b.wait_last("d")
    assert text_of(fine) == "xx"
    assert len(b.runners) == 4


def test_what_was_kept_is_gone_with_a_failed_step(bench):
    b = bench(kept_tokens=100).start()
    b.submit("a", max_tokens=ENDLESS)
    b.wait_plan(1)
    b.one_step()
    assert b.loads[-1].kv_tokens.evictable == 100
    b.failures.append(RuntimeError("metal gave up"))
    b.gate.release()
    b.wait_last("a")
    assert b.loads[-1].kv_tokens.evictable == 0


# -- one request -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [3, 100], ids=["while it answers", "in the middle of its prompt"])
def test_a_request_that_a_step_cannot_go_on_with_ends_alone(bench, prompt):
    b = bench(chunk_tokens=16).start()
    fine = b.submit("fine", max_tokens=5)
    broken = b.submit("broken", prompt=prompt, max_tokens=ENDLESS)
    b.wait_plan(1)
    b.one_step()
    b.broken["broken"] = "its output is not a number"
    assert b.one_step().leave == (), "the runner has nothing of it any more"
    assert type(broken[-1].error) is EngineError
    assert str(broken[-1].error) == "its output is not a number"
    assert held(b.loads[-1]) == (1, 1, 8, 2)
    b.open()
    b.wait_last("fine")
    assert text_of(fine) == "xxxxx"
    counters = b.loads[-1].counters
    assert (counters.failed_requests, counters.finished_requests, len(b.runners)) == (1, 1, 1)


def test_what_fails_in_the_step_in_which_its_client_leaves_is_told_to_nobody(bench):
    b = bench(scripts={"again": "fine"}).start()
    b.submit("a", max_tokens=ENDLESS)
    b.wait_plan(1)
    b.one_step()
    b.broken["a"] = "its output is not a number"
    b.cancel("a")
    again = b.submit("again")
    b.open()
    b.wait_last("again")
    assert text_of(again) == "fine"
    assert b.broken == {}
    assert b.loads[-1].counters.failed_requests == 0


# -- a text ----------------------------------------------------------------------------------------------------


class BrokenText(FakeText):
    """Breaks at the first token, or where the answer ends, as its request's stop string says."""

    def __init__(self, request):
        super().__init__(EngineRequest("without stop strings", ()))
        (self._where,) = request.stop

    def push(self, token):
        if self._where == "push":
            raise KeyError(token)
        return super().push(token)

    def finish(self):
        raise KeyError("finish")


@pytest.mark.parametrize(("where", "told"), [("push", True), ("finish", False)])
def test_an_answer_whose_text_breaks_ends_alone(bench, where, told):
    b = bench(new_text=lambda request: (BrokenText if request.stop else FakeText)(request)).start()
    broken = b.submit("broken", stop=(where,), max_tokens=2)
    fine = b.submit("fine", max_tokens=5)
    b.open()
    b.wait_last("broken", "fine")
    assert isinstance(broken[-1].error, EngineError)
    assert "KeyError" in str(broken[-1].error)
    assert text_of(fine) == "xxxxx"
    assert was_told_to_leave(b, "broken") == told
    counters = b.loads[-1].counters
    assert (counters.failed_requests, counters.finished_requests, len(b.runners)) == (1, 1, 1)


class UnmakeableText(FakeText):
    def __init__(self, request):
        if request.stop:
            raise KeyError(request.stop)
        super().__init__(request)


def test_a_request_whose_text_cannot_be_made_is_its_callers_error_alone(bench):
    b = bench(new_text=UnmakeableText).start()
    with pytest.raises(KeyError):
        b.submit("a", stop=("break",))
    assert b.loads[-1].waiting == 0
    fine = b.submit("a", max_tokens=3)
    b.open()
    b.wait_last("a")
    assert text_of(fine) == "xxx"
