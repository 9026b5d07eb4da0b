"""A step's prompt chunks, alone or several short ones in a pass. A prompt that is whole gets its first token."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Ordered
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from . import joint
from .base import Chunk, Failed, Prefilled, TokenOut
from .blas_threads import BlasThreads
from .decoder import NOT_A_NUMBER, token_out
from .kept import Kept
from .pace import MIN_CHUNK_TOKENS
from .prefill_order import OVERRUN_TOKENS
from .rows import leaves, planes
from .sampling import sample
from .segments import is_state
from .sequence import Sequence

log = logging.getLogger(__name__)

# A chunk of more tokens uses a pass over the weights well enough, and so do so many together.
SHORT_TOKENS = 128
PASS_TOKENS = 512
# Padding is computed too: of the tokens of a pass it may be so many.
MOST_PADDING = 1 / 8


@dataclass(slots=True)
class Computed:
    """What a step of all chunks gave. `whole` have their first token and go on, `ended` end with it."""

    tokens: list[TokenOut] = field(default_factory=list)
    prefilled: list[Prefilled] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    whole: list[Sequence] = field(default_factory=list)
    ended: list[Sequence] = field(default_factory=list)
    prompt_tokens: int = 0

    def fail(self, sequences: Iterable[Sequence], reason: str) -> None:
        self.failed += [Failed(sequence.request_id, reason) for sequence in sequences]


@dataclass(frozen=True, slots=True)
class _Part:
    """A sequence's tokens up to `end` are to be computed."""

    sequence: Sequence
    end: int

    @property
    def tokens(self) -> list[int]:
        return self.sequence.tokens[self.sequence.position : self.end]

    @property
    def ends(self) -> bool:
        return self.end == len(self.sequence.tokens)


Given = Ordered[tuple[Sequence, Chunk]]


def passes(lengths: Ordered[int]) -> list[list[int]]:
    """Which chunks, as indices, go together in a pass: short ones of about the same length. Pure."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        group = groups[-1] if groups else []
        longest = lengths[group[0]] if group else 0
        padded = longest * (len(group) + 1)
        padding = padded - sum(lengths[i] for i in group) - lengths[index]
        if group and longest <= SHORT_TOKENS and padded <= PASS_TOKENS and padding <= MOST_PADDING * padded:
            group.append(index)
        else:
            groups.append([index])
    return groups


class Prefill:
    """Computes prompts by chunks. A chunk that fails takes those of its pass with it, and nobody else."""

    def __init__(self, model: Any, make_caches: Callable[[], list[Any]], kept: Kept, blas: BlasThreads) -> None:
        self._model = model
        self._kept = kept
        self._blas = blas
        self._joint = joint.possible(model, make_caches)

    def step(self, chunks: Given, spare: Given = ()) -> Computed:
        done = Computed()
        parts = self._parts(chunks, spare, done)
        if not self._joint:  # each begins when the one before it is computed, and may reuse that
            for part in parts:
                self._pass([part], done)
            return done
        together = list(parts)
        for group in passes([len(part.tokens) for part in together]):
            self._pass([together[i] for i in group], done)
        return done

    def _parts(self, chunks: Given, spare: Given, done: Computed) -> Iterator[_Part]:
        """What to compute. What a chunk does not need, because the cache holds it, goes to the next of `spare`."""
        saved = 0
        for sequence, chunk in chunks:
            if part := self._part(sequence, chunk, chunk.tokens, done):
                saved += chunk.tokens - len(part.tokens)
                yield part
        for sequence, chunk in spare:
            if saved < MIN_CHUNK_TOKENS:
                break
            if part := self._part(sequence, chunk, saved, done, overrun=min(OVERRUN_TOKENS, saved // 2)):
                saved -= len(part.tokens)
                yield part

    def _part(self, sequence: Sequence, chunk: Chunk, tokens: int, done: Computed, overrun: int = 0) -> _Part | None:
        """The next `tokens` of a sequence, or `overrun` more where that ends its prompt."""
        with failing(done, [sequence]):
            if chunk.cut:
                self._kept.cut(sequence, chunk.cut)
            if sequence.caches is None:
                self._kept.begin(sequence)
            start, whole = sequence.position, len(sequence.tokens)
            end = whole if whole - start <= tokens + overrun else start + tokens
            return _Part(sequence, min((cut for cut in sequence.cuts if start < cut < end), default=end))
        return None

    def _pass(self, parts: Ordered[_Part], done: Computed) -> None:
        with failing(done, [part.sequence for part in parts]):
            self._compute(parts, done)

    def _compute(self, parts: Ordered[_Part], done: Computed) -> None:
        tokens, caches = [part.tokens for part in parts], [part.sequence.caches or [] for part in parts]
        with self._blas.prefill(len(tokens) * max(map(len, tokens))):
            logits = joint.run(self._model, tokens, caches)
            logits = logits if any(part.ends for part in parts) else mx.zeros((len(parts), 1))
            mx.eval([cache.state for held in caches for cache in held], logits)
        bad: Any = mx.isnan(logits).any(axis=-1).tolist()
        ending = []
        for row, part in enumerate(parts):
            sequence = part.sequence
            sequence.position = part.end
            if bad[row] or (not part.ends and _broken(sequence.caches)):
                done.fail([sequence], NOT_A_NUMBER)
                continue
            self._kept.keep_chunk(sequence)
            done.prefilled.append(Prefilled(sequence.request_id, part.end, sequence.cached))
            done.prompt_tokens += len(tokens[row])
            if part.ends:
                ending.append(row)
        if ending:
            self._first_tokens([parts[row].sequence for row in ending], logits[mx.array(ending)], done)

    def _first_tokens(self, sequences: Ordered[Sequence], logits: Any, done: Computed) -> None:
        masks = [None if s.matcher is None else s.matcher.mask() for s in sequences]
        sampled = sample(logits, [s.sampler for s in sequences], masks if any(m is not None for m in masks) else None)
        mx.eval(sampled.arrays())
        chosen: Any = sampled.tokens.tolist()
        for row, sequence in enumerate(sequences):
            with failing(done, [sequence]):
                out = token_out(sequence, chosen[row], sampled, row)
                done.tokens.append(out)
                (done.whole if out.finish is None else done.ended).append(sequence)


def _broken(caches: Any) -> bool:
    """Whether a chunk that has no logits left NaN: it would be in the last layer, and must not be kept for others."""
    last = list(leaves(caches))[-1]
    arrays = last.cache if is_state(last) else planes(last)
    floats = [array for array in arrays if array is not None and mx.issubdtype(array.dtype, mx.floating)]
    return any(mx.isnan(array).any().item() for array in floats)


@contextmanager
def failing(done: Computed, sequences: Ordered[Sequence]) -> Iterator[None]:
    """Whatever a model or a device raises, the others have to go on."""
    try:
        yield
    except Exception as exc:
        names = ", ".join(sequence.request_id for sequence in sequences)
        log.exception("computing the prompt of %s failed", names)
        done.fail(sequences, f"computing the prompt failed ({type(exc).__name__}: {exc})")
