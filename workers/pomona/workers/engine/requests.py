"""Requests between submit and their end: their phases, what each holds, and the queue of those that wait."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from .base import EngineRequest


class Phase(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"
    ABORTED = "aborted"


# Back to WAITING is preemption.
LEGAL_MOVES: dict[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.PREFILLING, Phase.ABORTED}),
    Phase.PREFILLING: frozenset({Phase.DECODING, Phase.WAITING, Phase.ABORTED}),
    Phase.DECODING: frozenset({Phase.FINISHED, Phase.WAITING, Phase.ABORTED}),
    Phase.FINISHED: frozenset(),
    Phase.ABORTED: frozenset(),
}


class IllegalMove(RuntimeError):
    """A request was told to do what its phase does not allow; nothing was changed."""


@dataclass(frozen=True, slots=True)
class Hold:
    """A prompt waits until `source`, admitted before it, has computed the first `tokens` that both share."""

    source: Live
    tokens: int

    @property
    def computed(self) -> bool:
        return self.source.phase in (Phase.DECODING, Phase.FINISHED) or self.source.position >= self.tokens

    @property
    def over(self) -> bool:
        return self.computed or self.source.phase is not Phase.PREFILLING


@dataclass(slots=True, eq=False)
class Live:
    """One request and what it holds. `rank` orders requests: higher priority first, then earlier arrival.

    `reserved_tokens` is its part of the KV pool, `position` how much of prompt and `generated` is in the runner or in
    its cache while it prefills, `served_step` the last step that gave it a chunk or in which it was held, `cuts` the
    prefixes of it that others wait for.
    """

    request: EngineRequest
    max_tokens: int
    arrival: int = 0
    phase: Phase = Phase.WAITING
    generated: list[int] = field(default_factory=list)
    reserved_tokens: int = 0
    position: int = 0
    served_step: int = 0
    hold: Hold | None = None
    cuts: set[int] = field(default_factory=set)
    rank: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.rank = (-self.request.priority, self.arrival)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def whole_tokens(self) -> int:
        """The most it can ever hold."""
        return len(self.request.prompt) + self.max_tokens

    @property
    def known_tokens(self) -> int:
        return len(self.request.prompt) + len(self.generated)

    @property
    def remaining_tokens(self) -> int:
        """What is still to prefill; after a preemption the answer so far is part of it."""
        return self.known_tokens - self.position

    @property
    def next_cut(self) -> int:
        """The shortest of `cuts` that is still to be computed, or 0."""
        return min((cut for cut in self.cuts if cut > self.position), default=0)

    def move(self, phase: Phase) -> None:
        if phase not in LEGAL_MOVES[self.phase]:
            raise IllegalMove(f"{self.request_id}: {self.phase.value} -> {phase.value}")
        self.phase = phase


def rank_of(live: Live) -> tuple[int, int]:
    return live.rank


class WaitingQueue:
    """Those that wait, by rank: whoever comes back after a preemption stands where it stood."""

    def __init__(self) -> None:
        self._by_id: dict[str, Live] = {}
        self._order: list[Live] = []

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def __iter__(self) -> Iterator[Live]:
        return iter(self._order)

    @property
    def head(self) -> Live | None:
        return self._order[0] if self._order else None

    def add(self, live: Live) -> None:
        self._by_id[live.request_id] = live
        insort(self._order, live, key=rank_of)

    def remove(self, request_id: str) -> Live | None:
        """Take a request out of any place of the queue; None when it is not in it."""
        live = self._by_id.pop(request_id, None)
        if live is not None:
            del self._order[bisect_left(self._order, live.rank, key=rank_of)]
        return live
