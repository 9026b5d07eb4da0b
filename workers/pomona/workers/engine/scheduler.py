"""The scheduler: requests in, step plans out. Pure: no device, no clock, no thread.

By rank: higher priority first, then first come, first served; nobody overtakes. A request is admitted when a request
slot, its auxiliary slots and KV tokens for its prompt and the beginning of its answer are free. Its reservation grows
with its answer; where there is no room the lowest rank makes some: it is preempted and waits with what it has said. The
highest rank always finds room, so somebody always comes forward.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import Overloaded, RequestError, Unavailable
from .base import Admitted, EngineRequest, Failed, StepPlan, StepResult, TokenOut
from .pace import Pace
from .pools import Need, Pools
from .prefill_order import find_hold, release_holds, share, spare
from .requests import LEGAL_MOVES, IllegalMove, Live, Phase, WaitingQueue, rank_of

__all__ = ["LEGAL_MOVES", "Booked", "IllegalMove", "Live", "Phase", "Rules", "Scheduler"]

# The runner launches a step ahead of what it has told: a token is on its way while the next is being made.
STEP_AHEAD_TOKENS = 2


@dataclass(frozen=True, slots=True)
class Rules:
    """The model's and the operator's bounds. Tokens, slots, requests.

    An answer starts with room for `admit_ahead_tokens` and gets more by `growth_tokens`.
    """

    context_tokens: int
    aux_slots_per_request: int = 0
    max_queued_requests: int = 1024
    prefix_cache: bool = True
    admit_ahead_tokens: int = 256
    growth_tokens: int = 64

    def __post_init__(self) -> None:
        if self.admit_ahead_tokens < STEP_AHEAD_TOKENS:
            raise ValueError(f"a request that starts may need {STEP_AHEAD_TOKENS} tokens in its first step")


@dataclass(frozen=True, slots=True)
class Booked:
    """What a step brought to requests that are still here, and which of them it ended with an error."""

    tokens: tuple[TokenOut, ...] = ()
    failed: tuple[Failed, ...] = ()


class Scheduler:
    """One owner's queue and running set over its pools."""

    def __init__(self, rules: Rules, pools: Pools, pace: Pace | None = None) -> None:
        self.rules = rules
        self.pools = pools
        self._pace = pace or Pace(max_step_s=0.25, chunk_tokens=512)
        self._queue = WaitingQueue()
        self._running: dict[str, Live] = {}  # in the order of admission
        self._leave: list[str] = []
        self._doomed: dict[str, Failed] = {}  # preempted for good; the next commit tells
        self._arrivals = 0
        self._step = 0
        self._streams = 0
        self._preemptions = 0

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def preemptions(self) -> int:
        """How often a request had to make room and wait again."""
        return self._preemptions

    def has_work(self) -> bool:
        return bool(self._queue or self._running or self._leave)

    # -- in ---------------------------------------------------------------------------------------------------

    def submit(self, request: EngineRequest) -> int:
        """Queue a request; returns its settled token limit. Raises RequestError, Unavailable or Overloaded."""
        request_id = request.request_id
        if request_id in self._queue or request_id in self._running or request_id in self._doomed:
            raise RequestError(f"request id {request_id} is already in use", param="request_id")
        live = Live(request, self._settle_max_tokens(request), self._arrivals)
        if not self._fits(live):
            raise Unavailable(
                f"a request needs 1 request slot and {self.rules.aux_slots_per_request} auxiliary-state slots; this "
                f"owner has {self.pools.requests.limit} and {self.pools.aux_slots.limit}"
            )
        # Those that the next plan will admit only pass through the queue.
        queued = len(self._queue) - self.pools.requests.room
        if queued >= self.rules.max_queued_requests:
            raise Overloaded(f"the queue is full: {queued} requests wait (--max-queued-requests)")
        self._arrivals += 1
        self._queue.add(live)
        return live.max_tokens

    def _settle_max_tokens(self, request: EngineRequest) -> int:
        """min(what was asked, what the context leaves, what the whole KV pool leaves)."""
        prompt = len(request.prompt)
        if prompt == 0:
            raise RequestError("the prompt has no tokens", param=request.prompt_param)
        window, pool = self.rules.context_tokens, self.pools.kv_tokens.limit
        for limit, what in ((window, "the model's context window is"), (pool, "this server's KV pool holds")):
            if prompt + 1 > limit:
                raise RequestError(
                    f"the prompt has {prompt} tokens and an answer needs at least 1, but {what} {limit} tokens",
                    param=request.prompt_param,
                    code="context_length_exceeded",
                )
        left = min(window, pool) - prompt
        return left if request.max_tokens is None else max(1, min(request.max_tokens, left))

    def _fits(self, live: Live) -> bool:
        """Whether the limits in force could ever hold all of it, with everybody else gone."""
        return self.pools.fits(self._need(live.whole_tokens))

    def _need(self, kv_tokens: int) -> Need:
        return Need(kv_tokens, self.rules.aux_slots_per_request)

    # -- out --------------------------------------------------------------------------------------------------

    def cancel(self, request_id: str) -> bool:
        """End a request in any phase; its slots are free at once. False when it is not (or no longer) here."""
        waiting = self._queue.remove(request_id)
        if waiting is not None:
            waiting.move(Phase.ABORTED)
            return True
        doomed = self._doomed.pop(request_id, None)
        return doomed is not None or self._end(request_id, Phase.ABORTED)

    def finish(self, request_id: str) -> bool:
        """End a running request from outside the runner: its text met a stop string."""
        return self._end(request_id, Phase.FINISHED)

    def _end(self, request_id: str, phase: Phase) -> bool:
        """Take a running request out, tell the runner with the next plan, and free what it held."""
        live = self._running.get(request_id)
        if live is None:
            return False
        live.move(phase)
        self._release(live)
        self._leave.append(request_id)
        return True

    def _release(self, live: Live) -> None:
        del self._running[live.request_id]
        self.pools.give(self._need(live.reserved_tokens))
        live.reserved_tokens = 0

    # -- a step -----------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """What the next step does. To be followed by its `commit`, or by `fail_running`."""
        self._step += 1
        preempted = self._grow()
        # Whoever just made room, or one behind it, would only be next to make room again.
        start = () if preempted else self._admit()
        prompts = self._prompts()
        prefill = share(self._pace.budget(self._streams > 0), prompts, self._step)
        leave, self._leave = tuple(self._leave), []
        if not self.rules.prefix_cache:
            return StepPlan(leave, start, prefill)
        slots = self.pools.aux_slots.room + self._lent_slots() if self.rules.aux_slots_per_request else 0
        return StepPlan(leave, start, prefill, self.pools.kv_tokens.room, slots, spare(prefill, prompts))

    def _lent_slots(self) -> int:
        """Running requests' slots that the prefix cache may use: each one's own state takes only one of them."""
        return max(0, self.rules.aux_slots_per_request - 1) * len(self._running)

    def _grow(self) -> bool:
        """Reserve for all that run what the next step may write, by rank; whether somebody had to make room."""
        short = [live for live in self._running.values() if live.reserved_tokens < _due_tokens(live)]
        running = len(self._running)
        for live in sorted(short, key=rank_of):
            self._reserve(live)
        return len(self._running) < running

    def _reserve(self, live: Live) -> None:
        """Grow one reservation, by a block where there is room; preempts from the lowest rank up, itself included."""
        pool = self.pools.kv_tokens
        while live.request_id in self._running:
            missing = _due_tokens(live) - live.reserved_tokens
            if missing <= pool.room:
                more = max(missing, min(self.rules.growth_tokens, pool.room, live.whole_tokens - live.reserved_tokens))
                pool.take(more)
                live.reserved_tokens += more
                return
            self._preempt(max(self._running.values(), key=rank_of))

    def _preempt(self, live: Live) -> None:
        """Send a running request back to the queue, with its answer so far.

        One that lowered limits can no longer hold would block the queue for ever: it fails instead.
        """
        self._release(live)
        self._leave.append(live.request_id)
        if not self._fits(live):
            live.move(Phase.ABORTED)
            reason = "this owner's share became too small for the request"
            self._doomed[live.request_id] = Failed(live.request_id, reason)
            return
        live.move(Phase.WAITING)
        live.position, live.hold = 0, None
        self._queue.add(live)
        self._preemptions += 1

    def _admit(self) -> tuple[Admitted, ...]:
        """Admit from the head of the queue while all three pools have room; nobody overtakes."""
        start: list[Admitted] = []
        while (live := self._queue.head) is not None:
            need = self._need(min(live.known_tokens + self.rules.admit_ahead_tokens, live.whole_tokens))
            if not self.pools.has_room(need):
                break
            self.pools.take(need)
            self._queue.remove(live.request_id)
            live.move(Phase.PREFILLING)
            live.reserved_tokens, live.served_step = need.kv_tokens, self._step - 1
            if self.rules.prefix_cache:
                live.hold = find_hold(live.request.prompt, self._prefilling())
            if live.hold is not None:
                live.hold.source.cuts.add(live.hold.tokens)
            self._running[live.request_id] = live
            start.append(Admitted(live.request, live.max_tokens, tuple(live.generated)))
        return tuple(start)

    def _prefilling(self) -> list[Live]:
        return [live for live in self._running.values() if live.phase is Phase.PREFILLING]

    def _prompts(self) -> list[Live]:
        """Those that may have a chunk in this step."""
        prefilling = self._prefilling()
        self._streams = len(self._running) - len(prefilling)
        return release_holds(prefilling, self._step)

    def commit(self, result: StepResult) -> Booked:
        """Book what a step brought; whatever is for requests that left or were preempted meanwhile is dropped."""
        self._pace.observe(result.times, result.prompt_tokens, self._streams)
        for progress in result.prefilled:
            live = self._running.get(progress.request_id)
            if live is not None and live.phase is Phase.PREFILLING:
                live.position, live.served_step = progress.position, self._step
        tokens = tuple([token for token in result.tokens if self._book(token)])
        failed = (*self._doomed.values(), *[failure for failure in result.failed if self._fail(failure.request_id)])
        self._doomed.clear()
        # After the ends: what they held is the cache's to keep.
        self.pools.kv_tokens.keep(result.cached_tokens)
        self.pools.aux_slots.keep(result.cached_slots - self._lent_slots())
        return Booked(tokens, failed)

    def _book(self, token: TokenOut) -> bool:
        live = self._running.get(token.request_id)
        if live is None:
            return False
        if live.phase is Phase.PREFILLING:
            live.move(Phase.DECODING)
        live.generated.append(token.token)
        if token.finish is not None:
            live.move(Phase.FINISHED)
            self._release(live)
        return True

    def _fail(self, request_id: str) -> bool:
        """End a running request that the runner no longer has."""
        live = self._running.get(request_id)
        if live is None:
            return False
        live.move(Phase.ABORTED)
        self._release(live)
        return True

    # -- all at once ------------------------------------------------------------------------------------------

    def resize(self, *, requests: int, kv_tokens: int, aux_slots: int) -> tuple[str, ...]:
        """Put new limits in force; ends and returns the queued requests that no longer fit them."""
        self.pools.resize(requests=requests, kv_tokens=kv_tokens, aux_slots=aux_slots)
        refused = tuple(live.request_id for live in self._queue if not self._fits(live))
        for request_id in refused:
            self.cancel(request_id)
        return refused

    def fail_running(self) -> tuple[str, ...]:
        """The runner lost everything: end all running requests, keep the queue."""
        failed = (*self._doomed, *self._running)
        for request_id in tuple(self._running):
            self._fail(request_id)
        self._doomed.clear()
        self._leave.clear()
        self.pools.kv_tokens.keep(0)
        self.pools.aux_slots.keep(0)
        return failed

    def drain_queue(self) -> tuple[str, ...]:
        """End everything that waits (the engine stops)."""
        queued = tuple(live.request_id for live in self._queue)
        for request_id in queued:
            self.cancel(request_id)
        return queued

    def check_invariants(self) -> None:
        """Pools hold exactly what running requests reserved, enough of it; phases fit the place; no id is in two."""
        waiting, running = list(self._queue), list(self._running.values())
        pools, need = self.pools, self._need(sum(live.reserved_tokens for live in running))
        assert pools.requests.used == len(running)
        assert pools.kv_tokens.used == need.kv_tokens
        assert pools.aux_slots.used == need.aux_slots * len(running)
        assert all(min(p.evictable, p.free) >= 0 for p in (pools.requests, pools.kv_tokens, pools.aux_slots))
        assert [live.rank for live in waiting] == sorted({live.rank for live in waiting})
        assert len({*(live.request_id for live in waiting), *self._running, *self._doomed}) == (
            len(waiting) + len(running) + len(self._doomed)
        )
        for live in waiting:
            assert live.phase is Phase.WAITING
            assert (live.reserved_tokens, live.position, live.hold) == (0, 0, None)
            assert self._fits(live)
            assert len(live.generated) < live.max_tokens
        for place, live in enumerate(running):
            assert live.phase in (Phase.PREFILLING, Phase.DECODING)
            # Since the plan that reserved it one token may have been told.
            assert live.reserved_tokens >= min(live.whole_tokens, live.known_tokens + STEP_AHEAD_TOKENS - 1)
            assert live.reserved_tokens <= live.whole_tokens
            assert len(live.generated) <= live.max_tokens
            held = live.phase is Phase.PREFILLING and live.hold is not None and not live.hold.over
            assert not held or (live.hold is not None and live.hold.source in running[:place])


def _due_tokens(live: Live) -> int:
    """The least that a running request must have reserved before a step."""
    return min(live.whole_tokens, live.known_tokens + STEP_AHEAD_TOKENS)
