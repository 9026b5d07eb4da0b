"""One token for each row of a batch, each by its own request's settings. Lives on the engine thread.

Rows that need the same work share one call over the vocabulary; a plain greedy row pays for an argmax, whoever sits
beside it. Order: bias, min_tokens, grammar, penalties, temperature, top_k, top_p, min_p. All of it is lazy, so that the
next step can start from `tokens` before anybody reads them; only on a CPU argmax and top_p look at the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from .base import EngineRequest, Logprob
from .nucleus import Choice, Filter, choice_for, draw, largest, log_total, on_gpu
from .penalties import OFF, Bias, Mask, Penalty, Tally, add_biases, apply_masks, penalise


class RowSampler:
    """One request's settings and state: where its random numbers are, and which tokens it had."""

    __slots__ = (
        "_bias",
        "_first_bias",
        "_generated",
        "_min_tokens",
        "_prompt",
        "_tally",
        "choice",
        "filter",
        "penalty",
        "position",
        "seed",
        "top_logprobs",
    )

    def __init__(
        self,
        request: EngineRequest,
        generated: Sequence[int],
        *,
        vocab_size: int,
        stop_ids: frozenset[int],
        seed: int,
    ) -> None:
        """`generated` is what the answer already has; `stop_ids` are forbidden until it has `min_tokens`."""
        sampling = request.sampling
        self.choice = choice_for(sampling, vocab_size)
        self.filter = Filter.of(sampling, vocab_size)
        self.penalty = Penalty.of(sampling)
        self.top_logprobs = sampling.top_logprobs
        self.seed = seed
        self.position = len(generated)
        self._generated = tuple(generated)
        self._prompt = request.prompt
        self._tally: Tally | None = None
        self._min_tokens = request.min_tokens if stop_ids else 0
        self._bias = Bias(sampling.logit_bias)
        self._first_bias = Bias([*sampling.logit_bias, *((token, -np.inf) for token in sorted(stop_ids))])

    @property
    def bias(self) -> Bias:
        """What is added to single logits at this position."""
        return self._first_bias if self.position < self._min_tokens else self._bias

    def tally(self, width: int) -> Tally:
        if self._tally is None:
            self._tally = Tally(self._prompt, self._generated, width)
        return self._tally

    def uniform(self) -> float:
        """This position's number in [0, 1), of 24 bits: a function of seed and position alone."""
        digest = blake2b(f"{self.seed}:{self.position}".encode(), digest_size=3).digest()
        return int.from_bytes(digest, "big") / 2**24

    def advance(self, tokens: mx.array, index: int) -> None:
        """The token at `index` of the lazy `tokens` was chosen."""
        self.position += 1
        if self._tally is not None:
            self._tally.add(tokens[index])


class Sampled:
    """What one step chose. `tokens` [B] uint32 is lazy; `scores` may be asked once `arrays` are evaluated."""

    __slots__ = ("_bad", "_read", "_scored", "_scores", "tokens")

    def __init__(self, logits: mx.array, tokens: mx.array, rows: Sequence[RowSampler]) -> None:
        self.tokens = tokens
        self._bad = mx.isnan(mx.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0])
        self._scored = {
            row: (place, rows[row].top_logprobs or 0)
            for place, row in enumerate(i for i, sampler in enumerate(rows) if sampler.top_logprobs is not None)
        }
        self._scores = self._score(logits) if self._scored else ()
        self._read: list[Any] | None = None

    def arrays(self) -> list[mx.array]:
        """Everything that reading needs, to be evaluated together."""
        return [self.tokens, self._bad, *self._scores]

    def bad(self) -> mx.array:
        """[B] bool, lazy: the model's logits are NaN where this row's token was chosen."""
        return self._bad

    def scores(self, row: int) -> tuple[float, tuple[Logprob, ...]] | None:
        """Log probability of the row's token and of the likeliest ones, best first; None where nobody asked."""
        if row not in self._scored:
            return None
        if self._read is None:
            self._read = [np.array(array).tolist() for array in self._scores]
        chosen, values, ids = self._read
        place, count = self._scored[row]
        top = zip(ids[place][:count], values[place][:count], strict=True)
        return chosen[place][0], tuple(Logprob(token, logprob) for token, logprob in top)

    def _score(self, logits: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Of the model's own distribution, before any setting: chosen [m, 1], values and ids of the best [m, n]."""
        raw = _rows(logits, list(self._scored)).astype(mx.float32)
        total = log_total(raw)
        chosen = mx.take_along_axis(raw, _rows(self.tokens, list(self._scored))[:, None], axis=-1) - total
        count = max(count for _, count in self._scored.values())
        if count == 0:
            return chosen, chosen[:, :0], chosen[:, :0]
        values, ids = largest(raw, count)
        return chosen, values - total, ids


def sample(logits: mx.array, rows: Sequence[RowSampler], masks: Sequence[Mask | None] | None = None) -> Sampled:
    """A token for each row of [B, V] logits (any float type), and the rows moved on by one."""
    masks = masks or [None] * len(rows)
    groups: dict[_Need, list[int]] = {}
    for index, (row, mask) in enumerate(zip(rows, masks, strict=True)):
        groups.setdefault(_Need.of(row, mask), []).append(index)
    parts = [
        _choose(_rows(logits, members), need, [rows[i] for i in members], [masks[i] for i in members])
        for need, members in groups.items()
    ]
    tokens = parts[0]
    if len(parts) > 1:
        order = [index for members in groups.values() for index in members]
        tokens = mx.concatenate(parts)[mx.array(np.argsort(order))]
    for index, row in enumerate(rows):
        row.advance(tokens, index)
    return Sampled(logits, tokens, rows)


class _Need(NamedTuple):
    """The work that a row needs at this position."""

    choice: Choice
    biased: bool
    masked: bool
    penalised: bool

    @staticmethod
    def of(row: RowSampler, mask: Mask | None) -> _Need:
        return _Need(row.choice, len(row.bias.ids) > 0, mask is not None, row.penalty != OFF)


def _choose(logits: mx.array, need: _Need, rows: list[RowSampler], masks: list[Mask | None]) -> mx.array:
    """Tokens of rows with equal needs."""
    if need.choice is not Choice.GREEDY or need.biased or need.masked or need.penalised:
        logits = logits.astype(mx.float32)
    if need.biased:
        logits = add_biases(logits, [(index, row.bias) for index, row in enumerate(rows)])
    if need.masked:
        logits = apply_masks(logits, [mask for mask in masks if mask is not None])
    if need.penalised:
        tallies = [row.tally(logits.shape[-1]) for row in rows]
        logits = penalise(logits, tuple(row.penalty for row in rows), tallies)
    if need.choice is Choice.GREEDY:
        return _likeliest(logits)
    return draw(logits, need.choice, tuple(row.filter for row in rows), [row.uniform() for row in rows])


def _likeliest(logits: mx.array) -> mx.array:
    """[B] uint32: greedy tokens; where a row has a NaN, its place."""
    if on_gpu() or logits.dtype != mx.float32:
        return mx.argmax(logits, axis=-1)
    # numpy is five times as fast as MLX's CPU back end
    return mx.array(np.argmax(np.array(logits, copy=False), axis=-1).astype(np.uint32))


def _rows(array: mx.array, members: list[int]) -> mx.array:
    return array if len(members) == array.shape[0] else array[mx.array(members)]
