"""One token a row from its distribution: temperature, then top_k, top_p and min_p, then one uniform number.

A filter keeps every token at least as probable as its last one, so equals stand or fall together, as in vLLM and
Hugging Face's top_k. Nothing mixes rows: a row's token depends on its own logits, settings and number.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from .base import Sampling

SHORTLIST = 256  # tokens that the cheap way ranks; a longer nucleus needs the whole row sorted
BLOCK = 16  # about sqrt(vocabulary / SHORTLIST): as much work among the blocks as inside the best of them
SUM_BLOCK = 128  # float32 sums of a whole vocabulary stay exact to some 1e-7 when added up in two levels
MIN_TEMPERATURE = 1e-6  # float32 cannot divide by less


class Choice(Enum):
    """Ways to choose, by what they cost over the vocabulary."""

    GREEDY = "argmax"
    WHOLE = "exp"
    SHORT = "the best blocks only"
    NUCLEUS = "exp and the best blocks, a sort where these do not suffice; waits for the logits"
    RANKED = "exp and sort"


class Filter(NamedTuple):
    """One row's settings; hashable, since rows keep theirs for many steps. top_k 0 and top_p infinite are off."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float

    @staticmethod
    def of(sampling: Sampling, vocab_size: int) -> Filter:
        return Filter(
            max(sampling.temperature, MIN_TEMPERATURE),
            sampling.top_p if sampling.top_p < 1 else math.inf,
            sampling.top_k if 0 < sampling.top_k < vocab_size else 0,
            sampling.min_p,
        )


def choice_for(sampling: Sampling, vocab_size: int) -> Choice:
    """The cheapest exact way. A GPU sorts faster than its queue can wait for the host to look."""
    keep = Filter.of(sampling, vocab_size)
    if sampling.temperature == 0:
        return Choice.GREEDY
    if keep.top_k == 0 and keep.top_p == math.inf:
        return Choice.WHOLE
    if 0 < keep.top_k <= SHORTLIST:
        return Choice.SHORT
    return Choice.RANKED if keep.top_k or on_gpu() else Choice.NUCLEUS


def draw(logits: mx.array, choice: Choice, filters: tuple[Filter, ...], uniforms: list[float]) -> mx.array:
    """[n, V] float32 logits, a number in [0, 1) a row -> [n] uint32 tokens. Lazy, but for Choice.NUCLEUS.

    A token of probability 0 is never chosen; a row without any other (all -inf, or NaN) gives an arbitrary one.
    """
    rows, points = _stacked(filters), mx.array(uniforms)[:, None]
    if choice is Choice.SHORT:
        short = Shortlist.of(logits, SHORTLIST, fill=-math.inf)
        weights = _weights(short.values, rows.temperature)
        limit = _limit(_descending(weights, SHORTLIST), rows, _total(weights))
        return short.tokens(_pick(_cut(weights, limit), points))[:, 0]
    weights = _weights(logits, rows.temperature)
    if choice is Choice.NUCLEUS:
        return _nucleus(weights, rows, points)
    if choice is Choice.RANKED:
        weights = _cut(weights, _limit(mx.sort(weights, axis=-1)[:, ::-1], rows, _total(weights)))
    elif any(row.min_p for row in filters):
        weights = _cut(weights, rows.min_p)
    return _pick(weights, points)[:, 0]


def log_total(logits: mx.array) -> mx.array:
    """logsumexp [n, 1] of float32 [n, V]."""
    top = logits.max(axis=-1, keepdims=True)
    return top + mx.log(_total(_exp(logits - top)))


def largest(logits: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """The `count` largest of each row, largest first: values and ids, [n, count] each (less where V is less)."""
    short = Shortlist.of(logits, count, fill=-math.inf)
    order = mx.argsort(-short.values, axis=-1)[:, : min(count, logits.shape[-1])]
    return mx.take_along_axis(short.values, order, axis=-1), short.tokens(order)


@dataclass(frozen=True, slots=True)
class Shortlist:
    """The `count` blocks of BLOCK neighbours with the largest maxima: the `count` largest values are among them.

    values [n, m] in the vocabulary's order, blocks [n, count], floor [n, 1]: whatever is larger is in the list.
    """

    values: mx.array
    blocks: mx.array
    floor: mx.array

    @staticmethod
    def of(rows: mx.array, count: int, fill: float) -> Shortlist:
        blocks = _blocked(rows, BLOCK, fill)
        maxima = blocks.max(axis=-1)
        n, spare = rows.shape[0], maxima.shape[-1] - count
        if spare <= 0:
            everything = mx.broadcast_to(mx.arange(maxima.shape[-1], dtype=mx.uint32), maxima.shape)
            return Shortlist(blocks.reshape(n, -1), everything, mx.full((n, 1), -math.inf))
        best = mx.sort(mx.argpartition(maxima, kth=spare, axis=-1)[:, spare:], axis=-1)
        floor = mx.take_along_axis(maxima, best, axis=-1).min(axis=-1, keepdims=True)
        values = blocks[mx.arange(n)[:, None], best].reshape(n, -1)
        return Shortlist(values, best, floor)

    def tokens(self, indices: mx.array) -> mx.array:
        """Positions in `values` -> ids, uint32."""
        return mx.take_along_axis(self.blocks, indices // BLOCK, axis=-1) * BLOCK + indices % BLOCK


@dataclass(frozen=True, slots=True)
class _Rows:
    """The filters of n rows, [n, 1] each."""

    temperature: mx.array
    top_p: mx.array
    top_k: mx.array
    min_p: mx.array

    def take(self, rows: mx.array) -> _Rows:
        return _Rows(self.temperature[rows], self.top_p[rows], self.top_k[rows], self.min_p[rows])


@functools.lru_cache(maxsize=64)
def _stacked(filters: tuple[Filter, ...]) -> _Rows:
    def column(values: tuple[float, ...], dtype: type) -> mx.array:
        # without an MLX operation: a lazy array in a cache would belong to the thread that made it
        return mx.array(np.array(values, dtype=dtype)[:, None])

    temperature, top_p, top_k, min_p = zip(*filters, strict=True)
    return _Rows(
        temperature=column(temperature, np.float32),
        top_p=column(top_p, np.float32),
        top_k=column(top_k, np.int32),
        min_p=column(min_p, np.float32),
    )


def _nucleus(weights: mx.array, rows: _Rows, points: mx.array) -> mx.array:
    """top_p and min_p from the shortlist where it holds the nucleus, by a sort where it does not."""
    total = _total(weights)
    short = Shortlist.of(weights, SHORTLIST, fill=0)
    ranked = _descending(short.values, SHORTLIST)
    limit = _limit(ranked, rows, total)
    tokens = short.tokens(_pick(_cut(short.values, limit), points))[:, 0]
    enough = (ranked.sum(axis=-1, keepdims=True) >= rows.top_p * total) & (limit > short.floor)
    uncovered = np.flatnonzero(~np.array(enough[:, 0]))
    if len(uncovered):
        some = mx.array(uncovered)
        whole = weights[some]
        # numpy sorts ten times as fast as MLX's CPU back end
        ranked = mx.array(np.sort(np.array(whole), axis=-1))[:, ::-1]
        limit = _limit(ranked, rows.take(some), total[some])
        tokens[some] = _pick(_cut(whole, limit), points[some])[:, 0]
    return tokens


def _limit(ranked: mx.array, rows: _Rows, total: mx.array) -> mx.array:
    """The least weight that stays, [n, 1], from the weights in descending order and each row's total weight."""
    last = ranked.shape[-1] - 1
    kth = mx.take_along_axis(ranked, mx.clip(rows.top_k - 1, 0, last), axis=-1)
    kth = mx.where(rows.top_k > 0, kth, 0)
    kept = _cut(ranked, kth)
    total = mx.where(rows.top_k > 0, _total(kept), total)
    count = (_before(kept) < rows.top_p * total).sum(axis=-1, keepdims=True)
    pth = mx.take_along_axis(ranked, mx.clip(count.astype(mx.int32) - 1, 0, last), axis=-1)
    return mx.maximum(mx.maximum(kth, pth), rows.min_p * ranked[:, :1])


def _pick(weights: mx.array, points: mx.array) -> mx.array:
    """Inverse distribution function: [n, m] weights, [n, 1] numbers in [0, 1) -> [n, 1] index of a weight above 0."""
    blocks = _blocked(weights, SUM_BLOCK, 0)
    sums = blocks.sum(axis=-1)
    target = points * sums.sum(axis=-1, keepdims=True)
    block, before = _reach(sums, target)
    inside = mx.take_along_axis(blocks, block[:, :, None], axis=1)[:, 0]
    index, _ = _reach(inside, target - before)
    return block * SUM_BLOCK + index


def _reach(weights: mx.array, target: mx.array) -> tuple[mx.array, mx.array]:
    """The last index with a weight above 0 and no more than `target` before it, and how much is before it."""
    before = mx.cumsum(weights, axis=-1, inclusive=False)
    here = (before <= target) & (weights > 0)
    index = (here * mx.arange(weights.shape[-1], dtype=mx.uint32)).max(axis=-1, keepdims=True)
    return index, mx.take_along_axis(before, index, axis=-1)


def _weights(logits: mx.array, temperature: mx.array) -> mx.array:
    """Probabilities but for a factor: the largest is exactly 1."""
    return _exp((logits - logits.max(axis=-1, keepdims=True)) / temperature)


def _cut(weights: mx.array, limit: mx.array) -> mx.array:
    return weights * (weights >= limit)


def _descending(values: mx.array, count: int) -> mx.array:
    """The `count` largest of each row in descending order."""
    spare = values.shape[-1] - count
    if spare > 0:
        values = mx.partition(values, kth=spare, axis=-1)[:, spare:]
    return mx.sort(values, axis=-1)[:, ::-1]


def _total(weights: mx.array) -> mx.array:
    return _blocked(weights, SUM_BLOCK, 0).sum(axis=-1).sum(axis=-1, keepdims=True)


def _before(weights: mx.array) -> mx.array:
    """For each weight the sum of those before it."""
    blocks = _blocked(weights, SUM_BLOCK, 0)
    earlier = mx.cumsum(blocks.sum(axis=-1), axis=-1, inclusive=False)[:, :, None]
    sums = (earlier + mx.cumsum(blocks, axis=-1, inclusive=False)).reshape(weights.shape[0], -1)
    return sums[:, : weights.shape[-1]]


def _blocked(rows: mx.array, size: int, fill: float) -> mx.array:
    """[n, V] -> [n, ceil(V / size), size]."""
    n, width = rows.shape
    if missing := -width % size:
        rows = mx.pad(rows, [(0, 0), (0, missing)], constant_values=fill)
    return rows.reshape(n, -1, size)


def _exp(values: mx.array) -> mx.array:
    if on_gpu():
        return mx.exp(values)
    # MLX's exp on x86 takes two to three times as long as its power, which is the C library's
    return mx.power(2.0, values * math.log2(math.e))


def on_gpu() -> bool:
    return bool(mx.default_device().type == mx.DeviceType.gpu)
