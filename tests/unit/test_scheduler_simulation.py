"""The scheduler with a runner that takes all that it may: nothing is lost, leaked, overtaken or said twice."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pomona.workers.engine.base import (
    Admitted,
    EngineRequest,
    Failed,
    FinishReason,
    Prefilled,
    StepPlan,
    StepResult,
    StepTimes,
    TokenOut,
)
from pomona.workers.engine.pace import Pace
from pomona.workers.engine.pools import Need, Pools
from pomona.workers.engine.scheduler import Booked, IllegalMove, Rules, Scheduler
from pomona.workers.errors import Overloaded, RequestError, Unavailable

CONTEXT, QUEUE, AHEAD, GROWTH, CHUNK = 120, 6, 3, 2, 24


@dataclass(eq=False)
class Row:
    admitted: Admitted
    said: list[int]
    position: int = 0

    @property
    def known(self):
        return len(self.admitted.request.prompt) + len(self.said)

    @property
    def to_prefill(self):
        return len(self.admitted.request.prompt) + len(self.admitted.generated)


@dataclass
class FakeRunner:
    """Obeys the contract and no more: a row holds two tokens more than it has told, the cache all that it may.

    An answer counts: its token number n is n, so that one that goes on after a preemption is seen to go on.
    """

    rows: dict[str, Row] = field(default_factory=dict)
    cache_tokens: int = 0
    cache_slots: int = 0

    def step(self, plan: StepPlan, capacity: Need, reuse=0, stop=(), fail=()) -> StepResult:
        for request_id in plan.leave:
            self.rows.pop(request_id, None)
        self.cache_tokens, self.cache_slots = plan.cache_tokens, plan.cache_slots
        for admitted in plan.start:
            assert admitted.request.request_id not in self.rows, "still here under this id"
            self.rows[admitted.request.request_id] = Row(admitted, list(admitted.generated))
        failed = tuple(Failed(r, "broken") for r in fail if self.rows.pop(r, None) is not None)
        decoding = [row for row in self.rows.values() if row.position >= row.to_prefill]
        held = sum(min(len(r.admitted.request.prompt) + r.admitted.max_tokens, r.known + 2) for r in decoding)
        prefilled, computed = self.prefill([c for c in plan.prefill if c.request_id in self.rows], reuse)
        held += sum(row.position for row in self.rows.values() if row not in decoding)
        assert held + self.cache_tokens <= capacity.kv_tokens, "more KV than there is"
        assert not plan.cache_slots or len(self.rows) + self.cache_slots <= capacity.aux_slots, (
            "more state than there is"
        )
        done = [self.rows[p.request_id] for p in prefilled if p.position == self.rows[p.request_id].to_prefill]
        tokens = tuple(self.say(row, stop) for row in [*decoding, *done])
        times = StepTimes(0.01 * len(decoding), 0.001 * computed)
        return StepResult(tokens, prefilled, failed, computed, self.cache_tokens, self.cache_slots, times)

    def prefill(self, chunks, reuse):
        computed, prefilled = 0, []
        for chunk in chunks:
            row = self.rows[chunk.request_id]
            assert row.position < row.to_prefill, "a chunk for a prompt that is whole"
            cached = min(reuse, row.to_prefill - 1) if row.position == 0 else 0
            start = row.position + cached
            row.position = min(start + chunk.tokens, row.to_prefill)
            computed += row.position - start
            prefilled.append(Prefilled(chunk.request_id, row.position, cached))
        return tuple(prefilled), computed

    def say(self, row, stop):
        request_id, number = row.admitted.request.request_id, len(row.said)
        row.said.append(number)
        finish = FinishReason.STOP if request_id in stop else None
        if len(row.said) == row.admitted.max_tokens:
            finish = FinishReason.LENGTH
        if finish is not None:
            del self.rows[request_id]
            self.cache_tokens += row.known
            self.cache_slots += 1 if self.cache_slots else 0
        return TokenOut(request_id, number, finish)


def new_scheduler(aux_each, **sizes):
    rules = Rules(CONTEXT, aux_each, QUEUE, admit_ahead_tokens=AHEAD, growth_tokens=GROWTH)
    return Scheduler(rules, Pools(**sizes), Pace(max_step_s=0.05, chunk_tokens=CHUNK))


def capacity(scheduler):
    return Need(scheduler.pools.kv_tokens.capacity, scheduler.pools.aux_slots.capacity)


def some_request(chance):
    """A prompt, a token limit and a priority. Prompts of one family begin alike, so that one waits for another."""
    family, mark = chance.randint(1, 2), chance.randint(3, 6)
    prompt = (family,) * chance.choice([0, 40, 40, 40]) + (mark,) * chance.randint(1, 40)
    return prompt, chance.choice([1, 3, 10, 20, 40]), chance.choice([-1, 0, 0, 0, 1])


seeds = st.integers(0, 2**32)


@settings(deadline=None, max_examples=60)
@given(seeds)
def test_however_often_they_make_room_all_say_all_that_they_were_asked_for(seed):
    chance = random.Random(seed)
    requests = [some_request(chance) for _ in range(QUEUE)]
    slots, aux_each, reuse = chance.randint(1, 5), chance.randint(0, 3), chance.choice([0, 30])
    sizes = {"requests": slots, "kv_tokens": chance.randint(CONTEXT, 200), "aux_slots": slots * aux_each}
    scheduler = new_scheduler(aux_each, **sizes)
    limits = {
        str(n): scheduler.submit(EngineRequest(str(n), prompt, max_tokens, priority=priority))
        for n, (prompt, max_tokens, priority) in enumerate(requests)
    }
    runner, said = FakeRunner(), {request_id: [] for request_id in limits}
    for _ in range(2000):
        if not scheduler.has_work():
            break
        result = runner.step(scheduler.plan(), capacity(scheduler), reuse)
        for token in scheduler.commit(result).tokens:
            said[token.request_id].append(token.token)
        scheduler.check_invariants()
    assert said == {request_id: list(range(limit)) for request_id, limit in limits.items()}
    assert not runner.rows
    assert scheduler.pools.kv_tokens.used == 0


@dataclass
class Asked:
    """A request as the model knows it."""

    prompt: tuple[int, ...]
    max_tokens: int
    rank: tuple[int, int]
    said: list[int] = field(default_factory=list)

    @property
    def whole(self):
        return len(self.prompt) + self.max_tokens


AUX_EACH, IDS = 3, "abcdefgh"
FULL = {"requests": 4, "kv_tokens": 160, "aux_slots": 14}


class Day:
    """A scheduler and its runner beside a model of who waits and who runs."""

    def __init__(self):
        self.scheduler = new_scheduler(AUX_EACH, **FULL)
        self.limits = dict(FULL)
        self.runner = FakeRunner()
        self.arrivals = 0
        self.waiting: dict[str, Asked] = {}
        self.running: dict[str, Asked] = {}
        self.decoding: set[str] = set()
        self.told_to_leave: set[str] = set()
        self.doomed: list[str] = []
        self.result: StepResult | None = None
        self.lowered = False  # what was over a lowered limit is only now given up

    def fits(self, each):
        slots = self.limits["requests"] >= 1 and self.limits["aux_slots"] >= AUX_EACH
        return slots and each.whole <= self.limits["kv_tokens"]

    def forget(self, request_id):
        self.decoding.discard(request_id)
        return self.running.pop(request_id)

    # -- from outside, at any time ----------------------------------------------------------------------------

    def submit(self, request_id, prompt, max_tokens, priority):
        request = EngineRequest(request_id, prompt, max_tokens, priority=priority)
        left = min(CONTEXT, self.limits["kv_tokens"]) - len(prompt)
        new = Asked(prompt, min(max_tokens, left), (-priority, self.arrivals))
        if request_id in self.waiting or request_id in self.running or request_id in self.doomed or left < 1:
            error = RequestError
        elif not self.fits(new):
            error = Unavailable
        elif len(self.waiting) - max(0, self.limits["requests"] - len(self.running)) >= QUEUE:
            error = Overloaded
        else:
            assert self.scheduler.submit(request) == new.max_tokens
            self.arrivals += 1
            self.waiting[request_id] = new
            return
        with pytest.raises(error):
            self.scheduler.submit(request)

    def cancel(self, request_id):
        here = request_id in self.waiting or request_id in self.running or request_id in self.doomed
        assert self.scheduler.cancel(request_id) == here
        self.waiting.pop(request_id, None)
        if request_id in self.running:
            self.forget(request_id)
            self.told_to_leave.add(request_id)
        self.doomed = [r for r in self.doomed if r != request_id]

    def finish(self, request_id):
        if request_id in self.running and request_id not in self.decoding:
            with pytest.raises(IllegalMove):
                self.scheduler.finish(request_id)
            return
        assert self.scheduler.finish(request_id) == (request_id in self.running)
        if request_id in self.running:
            self.forget(request_id)
            self.told_to_leave.add(request_id)

    def resize(self, sizes):
        self.limits, self.lowered = sizes, True
        refused = [r for r in self.in_order(self.waiting) if not self.fits(self.waiting[r])]
        assert self.scheduler.resize(**sizes) == tuple(refused)
        for request_id in refused:
            del self.waiting[request_id]

    def in_order(self, requests):
        return sorted(requests, key=lambda request_id: requests[request_id].rank)

    # -- steps ------------------------------------------------------------------------------------------------

    def plan(self, reuse=0, stop=(), fail=()):
        plan = self.scheduler.plan()
        preempted = set(plan.leave) - self.told_to_leave
        assert sorted(plan.leave) == sorted(preempted | self.told_to_leave), "each is told once"
        self.told_to_leave.clear()
        self.make_room(preempted)
        self.admit(plan, preempted)
        assert {chunk.request_id for chunk in plan.prefill} <= self.running.keys()
        self.result = self.runner.step(plan, capacity(self.scheduler), reuse, stop, fail)
        pools = self.scheduler.pools
        self.lowered = any(pool.used > pool.limit for pool in (pools.kv_tokens, pools.aux_slots))
        assert self.runner.rows.keys() <= self.running.keys(), "the runner holds only what the scheduler runs"

    def make_room(self, preempted):
        lowest = self.in_order(self.running)[::-1][: len(preempted)]
        assert preempted == set(lowest), "the lowest ranks make room"
        for request_id in lowest:
            each = self.forget(request_id)
            if self.fits(each):
                self.waiting[request_id] = each
            else:
                self.doomed.append(request_id)

    def admit(self, plan, preempted):
        order = self.in_order(self.waiting)
        assert [a.request.request_id for a in plan.start] == order[: len(plan.start)], "nobody overtakes"
        for admitted in plan.start:
            each = self.waiting.pop(admitted.request.request_id)
            assert (admitted.max_tokens, list(admitted.generated)) == (each.max_tokens, each.said)
            self.running[admitted.request.request_id] = each
        assert not (preempted and plan.start)
        if self.waiting and not preempted:
            head = self.waiting[self.in_order(self.waiting)[0]]
            need = Need(min(len(head.prompt) + len(head.said) + AHEAD, head.whole), AUX_EACH)
            assert not self.scheduler.pools.has_room(need), "the head could have started"

    def commit(self):
        result, self.result = self.result, None
        doomed = tuple(Failed(r, "this owner's share became too small for the request") for r in self.doomed)
        self.doomed.clear()
        expected = Booked(
            tuple(t for t in result.tokens if t.request_id in self.running),
            doomed + tuple(f for f in result.failed if f.request_id in self.running),
        )
        assert self.scheduler.commit(result) == expected
        for failure in expected.failed[len(doomed) :]:
            self.forget(failure.request_id)
        for token in expected.tokens:
            self.book(token)
        if not self.lowered:
            self.nothing_is_held_that_the_pools_do_not_know()

    def book(self, token):
        each = self.running[token.request_id]
        assert token.token == len(each.said), "nothing is lost or said twice"
        each.said.append(token.token)
        self.decoding.add(token.request_id)
        if token.finish is not None:
            assert token.finish is not FinishReason.LENGTH or len(each.said) == each.max_tokens
            self.forget(token.request_id)

    def nothing_is_held_that_the_pools_do_not_know(self):
        kv, aux = self.scheduler.pools.kv_tokens, self.scheduler.pools.aux_slots
        assert kv.evictable == self.runner.cache_tokens
        assert aux.used + aux.evictable >= len(self.running) + self.runner.cache_slots

    def crash(self):
        """The step raised instead of returning."""
        self.result = None
        assert set(self.scheduler.fail_running()) == {*self.running, *self.doomed}
        self.runner = FakeRunner()
        for each in (self.running, self.decoding, self.told_to_leave, self.doomed):
            each.clear()

    def holds(self):
        self.scheduler.check_invariants()
        assert (self.scheduler.waiting, self.scheduler.running) == (len(self.waiting), len(self.running))

    def end(self):
        self.resize(FULL)
        for _ in range(2000):
            if not self.scheduler.has_work():
                break
            self.plan()
            self.commit()
            self.holds()
        assert [*self.waiting, *self.running, *self.doomed, *self.runner.rows] == []
        pools = self.scheduler.pools
        assert (pools.requests.used, pools.kv_tokens.used, pools.aux_slots.used) == (0, 0, 0)


def somebody(chance, odds):
    return (chance.choice(IDS),) if chance.random() < odds else ()


def something_from_outside(day, chance):
    request_id, what = chance.choice(IDS), chance.random()
    if what < 0.75:
        day.submit(request_id, *some_request(chance))
    elif what < 0.85:
        day.cancel(request_id)
    elif what < 0.95:
        day.finish(request_id)
    else:
        low = {
            "requests": chance.randint(0, 4),
            "kv_tokens": chance.randint(20, 160),
            "aux_slots": chance.randint(2, 14),
        }
        day.resize(chance.choice([FULL, low]))
    day.holds()


@settings(deadline=None, max_examples=25)
@given(seeds)
def test_whatever_a_day_brings_nothing_is_lost_leaked_overtaken_or_said_twice(seed):
    chance, day = random.Random(seed), Day()
    for _ in range(150):
        if chance.random() < 0.4:
            something_from_outside(day, chance)
        day.plan(chance.choice([0, 0, 39]), stop=somebody(chance, 0.05), fail=somebody(chance, 0.02))
        if chance.random() < 0.2:
            something_from_outside(day, chance)
        if chance.random() < 0.01:
            day.crash()
        else:
            day.commit()
        day.holds()
    day.end()
