"""What the runner keeps of sequences for those that begin alike: the prefix cache over MLX arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx

from .base import StepPlan
from .batch import Batch
from .prefix_cache import Part, PrefixCache
from .rows import leaves, unbatchable
from .segments import KvSegment, Snapshot, computed, is_state, restored, snapshot
from .sequence import Sequence

# State is worth a snapshot at the end of a chunk, unless the last one is nearer than this.
SNAPSHOT_EVERY_TOKENS = 256
# A prompt that shares so much more than there is a snapshot for stops there once, for those that come after it.
WORTH_A_CUT_TOKENS = 16


class Kept:
    """Reuses and keeps keys, values and state, within the room that each step's plan leaves."""

    def __init__(self, make_caches: Callable[[], list[Any]]) -> None:
        caches = make_caches()
        self._make_caches = make_caches
        self._has_state = any(is_state(leaf) for leaf in leaves(caches))
        # Caches that rows cannot hold cannot be cut into tokens either.
        self._possible = not unbatchable(caches)
        self._cache: PrefixCache[KvSegment, Snapshot] = PrefixCache()
        self._room = self._slots = 0

    @property
    def tokens(self) -> int:
        return self._cache.size

    @property
    def slots(self) -> int:
        return self._cache.slots

    def begin_step(self, plan: StepPlan, memory: int) -> None:
        """`memory`: KV tokens not allocated to prompts and rows, of whose padding the plan knows nothing."""
        self._room = max(0, min(plan.cache_tokens, memory)) if self._possible else 0
        self._slots = plan.cache_slots
        self._shrink()

    def freed(self, tokens: int) -> None:
        """A sequence ended: what it held may be kept instead."""
        if self._possible and self._room:
            self._room += tokens

    def begin(self, sequence: Sequence) -> None:
        """Give a sequence its caches: the longest beginning that is kept is in them. At least one token is left."""
        match = self._cache.match(sequence.tokens, len(sequence.tokens) - 1)
        state = match.snapshot if self._has_state else None
        reused = (state.position if state else 0) if self._has_state else match.length
        if match.length - reused >= WORTH_A_CUT_TOKENS:
            self.cut(sequence, match.length)
        # Room for one token more than the prompt: an assignment that fills an array keeps the buffer that was assigned,
        # and that is a whole pass of several prompts.
        capacity = len(sequence.tokens) + 1
        held = _first(match.parts, reused)
        sequence.caches = restored(self._make_caches, held, state.state if state else None, capacity)
        sequence.position = sequence.cached = sequence.snapshot_at = reused

    def cut(self, sequence: Sequence, tokens: int) -> None:
        """The first so many tokens are, or will be, shared with others."""
        if self._has_state and self._slots:
            sequence.cuts.add(tokens)

    def keep_chunk(self, sequence: Sequence) -> None:
        """A chunk of the prompt was computed."""
        if not self._room or sequence.caches is None:
            return
        caches, position = sequence.caches, sequence.position
        self._insert(sequence, lambda start: computed(caches, position - start))
        due = position - sequence.snapshot_at >= SNAPSHOT_EVERY_TOKENS
        if self._has_state and (due or position in {*sequence.cuts, len(sequence.tokens)}):
            self._attach(sequence, snapshot(caches))
        self._shrink()

    def keep_row(self, sequence: Sequence, batch: Batch) -> None:
        """A sequence leaves its row."""
        self.freed(sequence.position)
        if not self._room:
            return
        self._insert(sequence, lambda start: batch.kept(sequence, start))
        if self._has_state:
            self._attach(sequence, batch.snapshot(sequence))
        self._shrink()

    def clear(self) -> None:
        self._cache.clear()

    def _insert(self, sequence: Sequence, segment_from: Callable[[int], KvSegment | None]) -> None:
        def evaluated(start: int) -> KvSegment | None:
            segment = segment_from(start)
            if segment is not None:
                mx.eval(segment.layers)  # until then it would hold the arrays that it is a part of
            return segment

        self._cache.insert(sequence.tokens[: sequence.position], evaluated)

    def _attach(self, sequence: Sequence, state: Snapshot) -> None:
        if self._slots:
            mx.eval(state)
            self._cache.attach(sequence.tokens[: sequence.position], state)
            sequence.snapshot_at = sequence.position

    def _shrink(self) -> None:
        """Within the room. Cutting a leaf copies what stays of it, so more goes at once than has to."""
        room = self._room if self._cache.size <= self._room else self._room - self._room // 16
        self._cache.shrink(room, self._slots)


def _first(parts: Iterable[Part[KvSegment]], tokens: int) -> list[tuple[KvSegment, int]]:
    """The parts of the first `tokens` tokens."""
    first = []
    for part in parts:
        used = min(part.used_tokens, tokens)
        if used:
            first.append((part.segment, used))
        tokens -= used
    return first
