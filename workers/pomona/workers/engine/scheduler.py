"""The scheduler: requests in, step plans out. Pure: no device, no clock, no thread.

First come, first served. A request is admitted when a request slot, KV tokens for its prompt and its whole answer,
and its auxiliary slots are free, so nothing that runs can run out. (Growing reservations and preemption come with the
project's own runner.)
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum

from ..errors import Overloaded, RequestError, Unavailable
from .base import Admitted, EngineRequest, StepPlan, StepResult, TokenOut
from .pools import Need, Pools


class Phase(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"
    ABORTED = "aborted"


LEGAL_MOVES: dict[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.PREFILLING, Phase.ABORTED}),
    Phase.PREFILLING: frozenset({Phase.DECODING, Phase.ABORTED}),
    Phase.DECODING: frozenset({Phase.FINISHED, Phase.ABORTED}),
    Phase.FINISHED: frozenset(),
    Phase.ABORTED: frozenset(),
}


class IllegalMove(RuntimeError):
    """A request was told to do what its phase does not allow; nothing was changed."""


@dataclass(slots=True)
class Live:
    """One request between submit and its end."""

    admitted: Admitted
    need: Need
    phase: Phase = Phase.WAITING
    generated: int = 0

    def move(self, phase: Phase) -> None:
        if phase not in LEGAL_MOVES[self.phase]:
            raise IllegalMove(f"{self.admitted.request.request_id}: {self.phase.value} -> {phase.value}")
        self.phase = phase


@dataclass(frozen=True, slots=True)
class Rules:
    """The model's and the operator's bounds. Tokens, slots, requests."""

    context_tokens: int
    aux_slots_per_request: int = 0
    max_queued_requests: int = 1024
    prefix_cache: bool = True


class Scheduler:
    """One owner's queue and running set over its pools."""

    def __init__(self, rules: Rules, pools: Pools) -> None:
        self.rules = rules
        self.pools = pools
        self._waiting: OrderedDict[str, Live] = OrderedDict()
        self._running: dict[str, Live] = {}
        self._cancel: list[str] = []

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._cancel)

    def submit(self, request: EngineRequest) -> int:
        """Queue a request; returns its settled token limit. Raises RequestError, Unavailable or Overloaded."""
        if request.request_id in self._waiting or request.request_id in self._running:
            raise RequestError(f"request id {request.request_id} is already in use", param="request_id")
        max_tokens = self._settle_max_tokens(request)
        need = Need(len(request.prompt) + max_tokens, self.rules.aux_slots_per_request)
        if not self.pools.fits(need):
            raise Unavailable(
                f"a request needs {need.requests} request slot and {need.aux_slots} auxiliary-state slots; this owner "
                f"has {self.pools.requests.limit} and {self.pools.aux_slots.limit}"
            )
        # Those that the next plan will admit only pass through the queue.
        queued = len(self._waiting) - self.pools.requests.room
        if queued >= self.rules.max_queued_requests:
            raise Overloaded(f"the queue is full: {queued} requests wait (--max-queued-requests)")
        self._waiting[request.request_id] = Live(Admitted(request, max_tokens), need)
        return max_tokens

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

    def cancel(self, request_id: str) -> bool:
        """End a request in any phase; its slots are free at once. False when it is not (or no longer) here."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            waiting.move(Phase.ABORTED)
            return True
        return self._leave(request_id, Phase.ABORTED)

    def finish(self, request_id: str) -> bool:
        """End a running request from outside the runner: its text met a stop string."""
        return self._leave(request_id, Phase.FINISHED)

    def _leave(self, request_id: str, phase: Phase) -> bool:
        """Take a running request out, tell the runner with the next plan, and free what it held."""
        live = self._running.get(request_id)
        if live is None:
            return False
        live.move(phase)
        self._release(request_id)
        self._cancel.append(request_id)
        return True

    def _release(self, request_id: str) -> None:
        self.pools.give(self._running.pop(request_id).need)

    def plan(self) -> StepPlan:
        """Admit from the head of the queue while all three pools have room; nobody overtakes."""
        start: list[Admitted] = []
        while self._waiting:
            request_id, live = next(iter(self._waiting.items()))
            if not self.pools.has_room(live.need):
                break
            self.pools.take(live.need)
            del self._waiting[request_id]
            live.move(Phase.PREFILLING)
            self._running[request_id] = live
            start.append(live.admitted)
        cancel, self._cancel = tuple(self._cancel), []
        return StepPlan(tuple(start), cancel, self.pools.kv_tokens.room if self.rules.prefix_cache else 0)

    def commit(self, result: StepResult) -> tuple[TokenOut, ...]:
        """Book a step's tokens; returns those of requests that are still here."""
        booked = []
        for token in result.tokens:
            live = self._running.get(token.request_id)
            if live is None:
                continue
            booked.append(token)
            if live.phase is Phase.PREFILLING:
                live.move(Phase.DECODING)
            live.generated += 1
            if token.finish is not None:
                live.move(Phase.FINISHED)
                self._release(token.request_id)
        self.pools.kv_tokens.keep(result.cached_tokens)
        return tuple(booked)

    def resize(self, *, requests: int, kv_tokens: int, aux_slots: int) -> tuple[str, ...]:
        """Put new limits in force; ends and returns the queued requests that no longer fit them."""
        self.pools.resize(requests=requests, kv_tokens=kv_tokens, aux_slots=aux_slots)
        refused = tuple(r for r, live in self._waiting.items() if not self.pools.fits(live.need))
        for request_id in refused:
            self.cancel(request_id)
        return refused

    def fail_running(self) -> tuple[str, ...]:
        """The runner lost everything: end all running requests, keep the queue."""
        failed = tuple(self._running)
        for request_id in failed:
            self._running[request_id].move(Phase.ABORTED)
            self._release(request_id)
        self._cancel.clear()
        self.pools.kv_tokens.keep(0)
        return failed

    def drain_queue(self) -> tuple[str, ...]:
        """End everything that waits (the engine stops)."""
        queued = tuple(self._waiting)
        for request_id in queued:
            self.cancel(request_id)
        return queued

    def check_invariants(self) -> None:
        """Pools hold exactly what the running requests need; phases fit the place; no id is in two places."""
        needs = [live.need for live in self._running.values()]
        assert self.pools.requests.used == sum(n.requests for n in needs)
        assert self.pools.kv_tokens.used == sum(n.kv_tokens for n in needs)
        assert self.pools.aux_slots.used == sum(n.aux_slots for n in needs)
        assert all(live.phase is Phase.WAITING for live in self._waiting.values())
        assert all(live.phase in (Phase.PREFILLING, Phase.DECODING) for live in self._running.values())
        assert not self._waiting.keys() & self._running.keys()
        assert all(live.generated <= live.admitted.max_tokens for live in self._running.values())
