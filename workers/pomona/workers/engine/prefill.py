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

    def step(self, chunks: Ordered[tuple[Sequence, Chunk]]) -> Computed:
        done = Computed()
        # One in a pass begins when the one before it is computed: it may begin with what that leaves in the cache.
        for together in [chunks] if self._joint else [[chunk] for chunk in chunks]:
            parts = []
            for sequence, chunk in together:
                with failing(done, [sequence]):
                    parts.append(self._part(sequence, chunk))
            for group in passes([part.end - part.sequence.position for part in parts]):
                with failing(done, [parts[i].sequence for i in group]):
                    self._pass([parts[i] for i in group], done)
        return done

    def _part(self, sequence: Sequence, chunk: Chunk) -> _Part:
        if chunk.cut:
            self._kept.cut(sequence, chunk.cut)
        if sequence.caches is None:
            self._kept.begin(sequence)
        start, end = sequence.position, min(sequence.position + chunk.tokens, len(sequence.tokens))
        return _Part(sequence, min((cut for cut in sequence.cuts if start < cut < end), default=end))

    def _pass(self, parts: Ordered[_Part], done: Computed) -> None:
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
