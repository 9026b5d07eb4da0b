"""The engine thread: every request is answered, in order, and what it held is free again."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import NoneType

import pytest

from pomona.workers.engine.base import (
    Counters,
    Delta,
    EngineRequest,
    FinishReason,
    Logprob,
    Sampling,
    Share,
    StepPlan,
    StepResult,
    TokenLogprobs,
    TokenOut,
    Usage,
)
from pomona.workers.engine.engine import Engine, EngineParts
from pomona.workers.errors import EngineError, Overloaded, RequestError, Unavailable
from pomona.workers.text.stops import StopMatcher

WAIT_S = 5.0
EOS = 0
CONTEXT = 10_000
ENDLESS = 5_000  # tokens of an answer that a test never sees the end of


class FakeText:
    """A token is a character."""

    def __init__(self, stops):
        self._stops = StopMatcher(stops)

    def push(self, token):
        return self._stops.push(chr(token))

    def finish(self):
        return self._stops.flush()


class Gate:
    """Lets steps through one by one, or all of them once it is open."""

    def __init__(self):
        self._permits = threading.Semaphore(0)
        self._open = False

    def enter(self):
        if not self._open:
            assert self._permits.acquire(timeout=WAIT_S), "the test let no step through"

    def release(self):
        self._permits.release()

    def open(self):
        self._open = True
        self._permits.release()  # for the step that waits already


class ScriptedRunner:
    """Says each request's script, a token a step for everything that is in; EOS or max_tokens ends it.

    A step that `gate` does not let through waits, with its plan already in `plans`.
    """

    def __init__(self, bench):
        self._bench = bench
        self._inside = {}
        self.plans = []
        self.closed = False

    def step(self, plan):
        self._bench.entered(self, plan)
        self._bench.gate.enter()
        self._bench.stepping = False
        if self._bench.failures:
            raise self._bench.failures.pop(0)
        for request_id in plan.cancel:
            self._inside.pop(request_id, None)
        for admitted in plan.start:
            self._inside[admitted.request.request_id] = [admitted, 0]
        tokens = tuple(self._next(request_id) for request_id in list(self._inside))
        return StepResult(tokens, sum(len(a.request.prompt) for a in plan.start))

    def _next(self, request_id):
        admitted, said = self._inside[request_id]
        script = self._bench.scripts.get(request_id)
        token = ord("x") if script is None else [*map(ord, script), EOS][said]
        self._inside[request_id][1] = said + 1
        finish = None
        if token == EOS:
            finish = FinishReason.STOP
        elif said + 1 == admitted.max_tokens:
            finish = FinishReason.LENGTH
        if finish is not None:
            del self._inside[request_id]
        if admitted.request.sampling.top_logprobs is None:
            return TokenOut(request_id, token, finish)
        return TokenOut(request_id, token, finish, -0.5, (Logprob(token, -0.5),))

    def close(self):
        self.closed = True


@dataclass
class Bench:
    """An engine over scripted runners, and everything that it published.

    `no_runner` is what making a runner raises, once the gate lets it. `exits_with` is what the engine is to end with.
    """

    scripts: dict[str, str] = field(default_factory=dict)
    failures: list[Exception] = field(default_factory=list)
    max_queued_requests: int = 1024
    new_text: Callable[[tuple[str, ...]], FakeText] = FakeText
    no_runner: Exception | None = None
    exits_with: type = NoneType

    def __post_init__(self):
        self.gate = Gate()
        self.changed = threading.Condition()
        self.runners, self.loads, self.answers, self.exits = [], [], {}, []
        self.every_answer, self.cancelled = [], []
        self.stepping = False  # a step is under way and the gate has not let it through
        self.publishers = []
        self.foreign_calls = []  # what should have been called on the engine thread, and was not
        self.engine = Engine(
            self.set_up,
            self.publish,
            clock=lambda: 42.0,
            on_exit=self.on_exit,
            max_queued_requests=self.max_queued_requests,
            prefix_cache=False,
        )

    # -- on the engine thread

    def set_up(self):
        self.on_engine_thread("set up")
        return EngineParts(self.make_runner, self.new_text, lambda: (10, 100), CONTEXT)

    def make_runner(self):
        self.on_engine_thread("make_runner")
        if self.no_runner is not None:
            self.gate.enter()
            raise self.no_runner
        runner = ScriptedRunner(self)
        with self.changed:
            self.runners.append(runner)
            self.changed.notify_all()
        return runner

    def on_exit(self, failure):
        self.on_engine_thread("on_exit")
        with self.changed:
            self.exits.append(failure)
            self.changed.notify_all()

    def on_engine_thread(self, what):
        if threading.current_thread() is not self.engine._thread:
            self.foreign_calls.append(what)

    def entered(self, runner, plan):
        self.on_engine_thread("step")
        with self.changed:
            self.stepping = True
            runner.plans.append(plan)
            self.changed.notify_all()

    # -- on any thread

    def publish(self, batch, load):
        with self.changed:
            for sink, delta in batch:
                sink(delta)
            self.publishers.append(threading.current_thread())
            if load is not None:
                self.loads.append(load)
            self.changed.notify_all()

    # -- in the test

    def start(self, **share):
        """Until a share is in force. As the head does, repeats it: before the set-up is done it is not heard."""
        self.engine.start()
        deadline = time.monotonic() + WAIT_S
        while not self.loads:
            assert time.monotonic() < deadline, "no share came into force"
            self.share(**share)
            with self.changed:
                self.changed.wait_for(lambda: self.loads, 0.005)
        return self

    def share(self, epoch=1, requests=2, kv_tokens=20_000, aux_slots=8, aux_each=2):
        self.engine.allocate(Share(epoch, requests, kv_tokens, aux_slots, aux_each))

    def submit(self, request_id, prompt=3, **fields):
        """The list that the answer's deltas come into; raises what refuses the request."""
        deltas = []
        self.engine.submit(EngineRequest(request_id, tuple(range(1, prompt + 1)), **fields), deltas.append)
        self.answers[request_id] = deltas
        self.every_answer.append(deltas)
        return deltas

    def refused(self, request_id, error, **fields):
        """Submit what has to be refused with exactly this error; returns it."""
        with pytest.raises(error) as caught:
            self.submit(request_id, **fields)
        assert caught.type is error
        return caught.value

    def cancel(self, request_id):
        """Nothing may come for the request from here on."""
        self.engine.cancel(request_id)
        deltas = self.answers[request_id]
        self.cancelled.append((deltas, list(deltas)))

    def open(self):
        self.gate.open()

    def wait(self, true):
        """Until `true()`; fails after WAIT_S, or as soon as the engine thread has died."""
        deadline = time.monotonic() + WAIT_S
        with self.changed:
            while not true():
                assert time.monotonic() < deadline, "it never came true"
                alive = self.engine._thread.is_alive()
                assert self.changed.wait(0.02) or alive, "the engine thread has died"

    def wait_next_load(self):
        """The first snapshot that is made from here on."""
        seen = len(self.loads)
        self.wait(lambda: len(self.loads) > seen)
        return self.loads[seen]

    def wait_last(self, *request_ids):
        self.wait(lambda: all(self.answers[r] and self.answers[r][-1].last for r in request_ids))

    def wait_plan(self, number, runner=0):
        """Until the runner is in its step `number` (from 1); returns that step's plan."""
        self.wait(lambda: len(self.runners) > runner and len(self.runners[runner].plans) >= number)
        return self.runners[runner].plans[number - 1]

    def one_step(self, runner=0):
        """Let the step that waits at the gate through, and wait for the next one's plan."""
        done = len(self.runners[runner].plans)
        self.gate.release()
        return self.wait_plan(done + 1, runner)

    def check(self):
        """What holds of every run: snapshots add up, every answer ends once and last, nothing stays in use."""
        self.open()
        assert self.engine.stop(WAIT_S)
        assert self.foreign_calls == []
        assert [type(failure) for failure in self.exits] == [self.exits_with] * (self.engine._thread.ident is not None)
        for load in self.loads:
            for pool in (load.requests, load.kv_tokens, load.aux_slots):
                assert pool.used + pool.evictable + pool.free == pool.capacity
                assert min(pool.used, pool.evictable, pool.free) >= 0
            assert load.requests.used == load.running
            assert load.aux_slots.used == load.running * load.aux_slots_per_request
            assert load.stepped_at == 42.0
        if self.loads:
            last = self.loads[-1]
            assert (last.running, last.waiting, last.kv_tokens.used, last.aux_slots.used) == (0, 0, 0, 0)
        for deltas in self.every_answer:
            assert not any(delta.last for delta in deltas[:-1])
            ended = bool(deltas) and deltas[-1].last
            assert ended or any(deltas is those for those, _ in self.cancelled), (
                "a dropped request is an answered error"
            )
        for deltas, at_cancel in self.cancelled:
            assert deltas == at_cancel, "tokens of a cancelled request are dropped"
        assert all(runner.closed for runner in self.runners)
        assert self.engine._answers == {}, "no sink outlives its request"


@pytest.fixture
def bench():
    made = []

    def make(**fields):
        made.append(Bench(**fields))
        return made[-1]

    yield make
    for each in made:
        each.check()


def text_of(deltas):
    return "".join(delta.text for delta in deltas)


def held(load):
    """What a snapshot says is in use: requests, request slots, KV tokens, auxiliary slots."""
    return load.running, load.requests.used, load.kv_tokens.used, load.aux_slots.used


NOTHING = (0, 0, 0, 0)


def started(plan):
    return [admitted.request.request_id for admitted in plan.start]


# -- answers --------------------------------------------------------------------------------------------------


def test_before_the_first_share_a_request_is_told_to_go_elsewhere(bench):
    b = bench()
    assert "no share" in str(b.refused("a", Unavailable))
    b.engine.start()
    assert "no share" in str(b.refused("a", Unavailable))
    assert (b.loads, b.runners) == ([], [])


def test_no_runner_is_made_before_the_first_step(bench):
    b = bench().start()
    b.share(epoch=2, requests=4)
    b.wait_next_load()
    assert b.runners == []
    b.submit("a", max_tokens=2)
    b.open()
    b.wait_last("a")
    b.submit("b", max_tokens=2)
    b.wait_last("b")
    assert len(b.runners) == 1


def test_an_answer_arrives_in_order_with_its_usage_and_its_end(bench):
    b = bench(scripts={"a": "hello"}).start()
    deltas = b.submit("a", prompt=4)
    b.open()
    b.wait_last("a")
    assert deltas == [
        *(Delta((ord(c),), c) for c in "hello"),
        Delta((EOS,), "", (), FinishReason.STOP, Usage(prompt_tokens=4, completion_tokens=6)),
    ]


def test_eos_adds_no_text_but_counts_as_a_token(bench):
    b = bench(scripts={"a": ""}).start()
    deltas = b.submit("a", prompt=4)
    b.open()
    b.wait_last("a")
    assert deltas == [Delta((EOS,), "", (), FinishReason.STOP, Usage(4, 1))]
    assert b.loads[-1].counters == Counters(finished_requests=1, prompt_tokens=4, generation_tokens=1)


def test_the_token_limit_ends_an_answer_with_length(bench):
    b = bench().start()
    deltas = b.submit("a", max_tokens=3)
    b.open()
    b.wait_last("a")
    assert (text_of(deltas), deltas[-1].finish, deltas[-1].usage) == ("xxx", FinishReason.LENGTH, Usage(3, 3))


def test_answers_that_run_together_do_not_mix(bench):
    scripts = {"a": "first", "b": "second answer"}
    b = bench(scripts=scripts).start()
    for request_id in scripts:
        b.submit(request_id)
    b.open()
    b.wait_last("a", "b")
    assert {r: text_of(deltas) for r, deltas in b.answers.items()} == scripts


def test_log_probabilities_come_with_their_token(bench):
    b = bench().start()
    deltas = b.submit("a", max_tokens=1, sampling=Sampling(top_logprobs=1))
    b.open()
    b.wait_last("a")
    x = ord("x")
    assert deltas[0].logprobs == (TokenLogprobs(x, -0.5, (Logprob(x, -0.5),)),)


def test_a_snapshot_names_what_runs_what_waits_and_what_it_holds(bench):
    b = bench().start(epoch=7, requests=1)
    b.submit("a", prompt=3, max_tokens=10)
    b.submit("b")
    b.wait_plan(1)
    b.one_step()
    b.one_step()
    load = b.loads[-1]
    assert (load.epoch, load.running, load.waiting) == (7, 1, 1)
    assert (load.kv_tokens.used, load.aux_slots.used) == (13, 2)
    assert (load.active_bytes, load.limit_bytes) == (10, 100)


def test_an_idle_engine_still_shows_that_it_is_alive(bench):
    b = bench().start()
    b.wait_next_load()
    b.wait_next_load()
    assert b.publishers[-1] is b.engine._thread
    assert b.runners == []


# -- stop strings ---------------------------------------------------------------------------------------------


def test_a_stop_string_ends_the_request_frees_its_pools_and_tells_the_runner(bench):
    b = bench(scripts={"a": "hello world"}).start()
    deltas = b.submit("a", stop=("lo",))
    b.wait_plan(1)
    for _ in range(4):
        assert b.one_step().cancel == ()
    assert b.one_step().cancel == ("a",)
    assert text_of(deltas) == "hel"
    assert (deltas[-1].finish, deltas[-1].usage) == (FinishReason.STOP, Usage(3, 5))
    load = b.loads[-1]
    assert held(load) == NOTHING
    assert load.counters.finished_requests == 1


def test_text_held_back_for_a_stop_string_goes_out_at_the_end(bench):
    b = bench(scripts={"eos": "help", "length": "help me"}).start()
    at_eos = b.submit("eos", stop=("pp",))
    at_length = b.submit("length", stop=("pp",), max_tokens=4)
    b.open()
    b.wait_last("eos", "length")
    assert (text_of(at_eos), at_eos[-1].text, at_eos[-1].finish) == ("help", "p", FinishReason.STOP)
    assert (text_of(at_length), at_length[-1].finish) == ("help", FinishReason.LENGTH)


def test_a_stop_string_met_by_the_last_token_is_a_stop_not_a_length(bench):
    b = bench(scripts={"a": "hello"}).start()
    deltas = b.submit("a", stop=("lo",), max_tokens=5)
    b.open()
    b.wait_last("a")
    assert (text_of(deltas), deltas[-1].finish) == ("hel", FinishReason.STOP)


def test_a_stop_string_found_only_at_the_end_is_a_stop(bench):
    b = bench(scripts={"a": "xabc and more"}).start()
    deltas = b.submit("a", stop=("abcd", "bc"), max_tokens=4)
    b.open()
    b.wait_last("a")
    assert (text_of(deltas), deltas[-1].finish) == ("xa", FinishReason.STOP)


def test_tokens_after_a_stop_string_in_the_same_step_are_dropped(bench, monkeypatch):
    one = ScriptedRunner.step

    def two_at_once(self, plan):
        result = one(self, plan)
        return StepResult((*result.tokens, *result.tokens), result.prompt_tokens)

    monkeypatch.setattr(ScriptedRunner, "step", two_at_once)
    b = bench().start()
    deltas = b.submit("a", stop=("x",))
    b.open()
    b.wait_last("a")
    assert (text_of(deltas), deltas[-1].finish, deltas[-1].usage) == ("", FinishReason.STOP, Usage(3, 1))


# -- refusals -------------------------------------------------------------------------------------------------


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


# -- while a step runs ----------------------------------------------------------------------------------------


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
    assert b.one_step().cancel == ("a",)


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
    assert (plan.cancel, started(plan)) == (("a",), ["b"])
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
    assert (plan.cancel, started(plan)) == (("a",), ["a"])
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


# -- cancel ---------------------------------------------------------------------------------------------------


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
    assert [r for plan in b.runners[0].plans for r in started(plan)] == ["a", "c"]
    assert not any(plan.cancel for plan in b.runners[0].plans)


def test_cancel_of_the_only_request_is_told_to_the_runner_and_leaves_the_pools_empty(bench):
    b = bench().start()
    b.submit("a", max_tokens=ENDLESS)
    b.wait_plan(1)
    b.cancel("a")
    assert b.one_step() == StepPlan(cancel=("a",))
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


# -- failures -------------------------------------------------------------------------------------------------


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
    assert new.plans[0].cancel == ()
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
    assert (new.plans[0].cancel, started(new.plans[0])) == ((), ["c"]), "the new runner never heard of the old requests"
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
    assert b.runners[1].plans[0].cancel == ()
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


class BrokenText(FakeText):
    """Breaks at the first token, or where the answer ends."""

    def __init__(self, stops):
        super().__init__(())
        self._where = stops[0]

    def push(self, token):
        if self._where == "push":
            raise KeyError(token)
        return super().push(token)

    def finish(self):
        raise KeyError("finish")


@pytest.mark.parametrize(("where", "told"), [("push", True), ("finish", False)])
def test_an_answer_whose_text_breaks_ends_alone(bench, where, told):
    b = bench(new_text=lambda stops: BrokenText(stops) if stops else FakeText(stops)).start()
    broken = b.submit("broken", stop=(where,), max_tokens=2)
    fine = b.submit("fine", max_tokens=5)
    b.open()
    b.wait_last("broken", "fine")
    assert isinstance(broken[-1].error, EngineError)
    assert "KeyError" in str(broken[-1].error)
    assert text_of(fine) == "xxxxx"
    assert any("broken" in plan.cancel for plan in b.runners[0].plans) == told
    counters = b.loads[-1].counters
    assert (counters.failed_requests, counters.finished_requests, len(b.runners)) == (1, 1, 1)


class UnmakeableText(FakeText):
    def __init__(self, stops):
        if stops:
            raise KeyError(stops)
        super().__init__(stops)


def test_a_request_whose_text_cannot_be_made_is_its_callers_error_alone(bench):
    b = bench(new_text=UnmakeableText).start()
    with pytest.raises(KeyError):
        b.submit("a", stop=("break",))
    assert b.loads[-1].waiting == 0
    fine = b.submit("a", max_tokens=3)
    b.open()
    b.wait_last("a")
    assert text_of(fine) == "xxx"


# -- shares ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epoch", [1, 4, 5])
def test_a_share_that_is_not_newer_is_refused(bench, epoch):
    b = bench().start(epoch=5, requests=2)
    b.share(epoch=epoch, requests=9)
    b.submit("a", max_tokens=1)
    b.open()
    b.wait_last("a")
    assert {load.epoch for load in b.loads} == {5}
    assert {load.requests.capacity for load in b.loads} == {2}


def test_a_newer_share_resizes_the_pools_and_keeps_what_runs(bench):
    b = bench().start(epoch=1, requests=2)
    b.submit("a", max_tokens=ENDLESS)
    b.submit("b", max_tokens=ENDLESS)
    b.wait_plan(1)
    b.one_step()
    b.share(epoch=2, requests=1, kv_tokens=9_000, aux_slots=2)
    b.one_step()
    b.one_step()
    load = b.loads[-1]
    assert (load.epoch, load.running) == (2, 2)
    assert load.requests.capacity == load.requests.used == 2
    assert len(b.runners) == 1


def test_a_larger_share_lets_in_who_waits(bench):
    b = bench().start(epoch=1, requests=1)
    b.submit("a", max_tokens=ENDLESS)
    b.wait_plan(1)
    b.submit("b", max_tokens=2)
    assert started(b.one_step()) == []
    b.share(epoch=2, requests=2)
    assert started(b.one_step()) == ["b"]


def test_a_smaller_share_sends_away_at_once_who_can_never_fit(bench):
    b = bench().start(epoch=1, requests=1, kv_tokens=100)
    running = b.submit("running", max_tokens=97)
    b.wait_plan(1)
    big, small = b.submit("big", max_tokens=90), b.submit("small", max_tokens=2)
    b.share(epoch=2, requests=1, kv_tokens=20)
    assert [type(delta.error) for delta in big] == [Unavailable]
    assert (b.loads[-1].running, b.loads[-1].waiting, b.loads[-1].counters.failed_requests) == (1, 1, 1)
    assert b.stepping
    b.open()
    b.wait_last("running", "small")
    assert (len(text_of(running)), text_of(small)) == (97, "xx")
    assert not any(plan.cancel for plan in b.runners[0].plans)
    assert b.loads[-1].kv_tokens.capacity == 20


# -- the end --------------------------------------------------------------------------------------------------


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


# -- everything at once ---------------------------------------------------------------------------------------


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
