"""An engine over runners that say what the test wrote, and everything that it published."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import NoneType

import pytest

from pomona.workers.engine.base import (
    EngineRequest,
    Failed,
    FinishReason,
    Logprob,
    MemoryUse,
    Piece,
    Prefilled,
    Share,
    StepResult,
    TokenOut,
)
from pomona.workers.engine.engine import Engine, EngineParts
from pomona.workers.text.stops import StopMatcher

WAIT_S = 5.0
EOS = 0
CONTEXT = 10_000
ENDLESS = 5_000  # tokens of an answer that a test never sees the end of
NOTHING = (0, 0, 0, 0)


class FakeText:
    """A token is a character."""

    def __init__(self, request):
        self._stops = StopMatcher(request.stop)

    def push(self, token):
        text, stopped = self._stops.push(chr(token))
        return Piece(text, stopped=stopped)

    def finish(self):
        text, stopped = self._stops.flush()
        return Piece(text, stopped=stopped)


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


class Line:
    """One request inside a scripted runner."""

    def __init__(self, admitted, reused):
        self.request_id, self.max_tokens = admitted.request.request_id, admitted.max_tokens
        self.scored = admitted.request.sampling.top_logprobs is not None
        self.known = len(admitted.request.prompt) + len(admitted.generated)
        self.said = len(admitted.generated)
        self.cached = self.position = min(reused, self.known - 1)

    @property
    def whole(self):
        return self.position == self.known

    def next(self, script):
        token = ord("x") if script is None else [*map(ord, script), EOS][self.said]
        self.said += 1
        finish = FinishReason.LENGTH if self.said == self.max_tokens else None
        if token == EOS:
            finish = FinishReason.STOP
        scores = (-0.5, (Logprob(token, -0.5),)) if self.scored else (None, ())
        return TokenOut(self.request_id, token, finish, *scores, self.cached)


class ScriptedRunner:
    """Says each request's script once its prompt is in; EOS or max_tokens ends it.

    A step that `gate` does not let through waits, with its plan already in `plans`.
    """

    def __init__(self, bench):
        self._bench = bench
        self._lines = {}
        self.plans = []
        self.closed = False

    def step(self, plan):
        self._bench.entered(self, plan)
        self._bench.gate.enter()
        self._bench.stepping = False
        if self._bench.failures:
            raise self._bench.failures.pop(0)
        for request_id in plan.leave:
            self._lines.pop(request_id, None)
        for admitted in plan.start:
            assert admitted.request.request_id not in self._lines
            self._lines[admitted.request.request_id] = Line(admitted, self._bench.reused_tokens)
        failed = self._failed()
        tokens = [self._next(line) for line in list(self._lines.values()) if line.whole]
        prefilled, computed = [], 0
        for chunk in plan.prefill:
            if line := self._lines.get(chunk.request_id):
                computed += self._compute(line, chunk.tokens)
                prefilled.append(Prefilled(line.request_id, line.position, line.cached))
                tokens += [self._next(line)] if line.whole else []
        kept = min(self._bench.kept_tokens, plan.cache_tokens)
        return StepResult(tuple(tokens), tuple(prefilled), failed, computed, kept)

    def _failed(self):
        broken = {r: self._bench.broken.pop(r) for r in list(self._lines) if r in self._bench.broken}
        for request_id in broken:
            del self._lines[request_id]
        return tuple(Failed(request_id, reason) for request_id, reason in broken.items())

    def _compute(self, line, most):
        tokens = min(most, line.known - line.position)
        line.position += tokens
        return tokens

    def _next(self, line):
        token = line.next(self._bench.scripts.get(line.request_id))
        if token.finish is not None:
            del self._lines[line.request_id]
        return token

    def close(self):
        self.closed = True


@dataclass
class Bench:
    """An engine over scripted runners.

    `failures` are what the next steps raise; `broken` names the requests that the next step cannot go on with, and why.
    A request that starts finds `reused_tokens` in the prefix cache; after each step that holds `kept_tokens`, as far as
    the plan lets it. `no_runner` is what making a runner raises, once the gate lets it. `exits_with` is what the engine
    is to end with.
    """

    scripts: dict[str, str] = field(default_factory=dict)
    failures: list[Exception] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)
    reused_tokens: int = 0
    kept_tokens: int = 0
    max_queued_requests: int = 1024
    chunk_tokens: int = 512
    new_text: Callable[[EngineRequest], FakeText] = FakeText
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
            prefix_cache=self.kept_tokens > 0,
            chunk_tokens=self.chunk_tokens,
        )

    # -- on the engine thread

    def set_up(self):
        self.on_engine_thread("set up")
        return EngineParts(self.make_runner, self.new_text, lambda: MemoryUse(10, 5, 100), CONTEXT)

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

    # -- afterwards

    def check(self):
        """What holds of every run: snapshots add up, every answer ends once and last, nothing stays in use."""
        self.open()
        assert self.engine.stop(WAIT_S)
        assert self.foreign_calls == []
        assert [type(failure) for failure in self.exits] == [self.exits_with] * (self.engine._thread.ident is not None)
        self._check_loads()
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

    def _check_loads(self):
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


def text_of(deltas):
    return "".join(delta.text for delta in deltas)


def ids_of(deltas):
    return [token for delta in deltas for token in delta.ids]


def held(load):
    """What a snapshot says is in use: requests, request slots, KV tokens, auxiliary slots."""
    return load.running, load.requests.used, load.kv_tokens.used, load.aux_slots.used


def started(plan):
    return [admitted.request.request_id for admitted in plan.start]


def all_started(bench, runner=0):
    return [request_id for plan in bench.runners[runner].plans for request_id in started(plan)]


def was_told_to_leave(bench, request_id, runner=0):
    return any(request_id in plan.leave for plan in bench.runners[runner].plans)
