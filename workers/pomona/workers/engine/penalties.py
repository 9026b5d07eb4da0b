"""What changes logits before a token is chosen: bias, forbidden ids, grammar masks, penalties for repetition."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .base import Sampling

Mask = npt.NDArray[np.uint32]


class Penalty(NamedTuple):
    """One row's factors; 1, 0 and 0 are off."""

    repetition: float
    presence: float
    frequency: float

    @staticmethod
    def of(sampling: Sampling) -> Penalty:
        return Penalty(sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)


OFF = Penalty(1.0, 0.0, 0.0)


class Tally:
    """Which tokens a request had, and how often in its answer; grows by tokens that nobody has read yet."""

    __slots__ = ("_answer", "_prompt")

    def __init__(self, prompt: Sequence[int], generated: Sequence[int], width: int) -> None:
        self._prompt = mx.array(_counts(prompt, width) > 0)
        self._answer = mx.array(_counts(generated, width))

    def add(self, token: mx.array) -> None:
        self._answer = self._answer.at[token].add(1)

    @property
    def answer(self) -> mx.array:
        """[V] int32: how often the answer has each token."""
        return self._answer

    @property
    def seen(self) -> mx.array:
        """[V] bool: whether prompt or answer have each token."""
        return self._prompt | (self._answer > 0)


def penalise(logits: mx.array, penalties: tuple[Penalty, ...], tallies: Sequence[Tally]) -> mx.array:
    """Repetition as in Hugging Face (CTRL, arXiv 1909.05858), then OpenAI's presence and frequency. -inf stays."""
    repetition, presence, frequency = _stacked(penalties)
    if any(row.repetition != 1 for row in penalties):
        seen = mx.stack([tally.seen for tally in tallies])
        logits = mx.where(seen, mx.where(logits > 0, logits / repetition, logits * repetition), logits)
    if any(row.presence or row.frequency for row in penalties):
        counts = mx.stack([tally.answer for tally in tallies])
        logits = logits - frequency * counts - presence * (counts > 0)
    return logits


def apply_masks(logits: mx.array, masks: Sequence[Mask]) -> mx.array:
    """-inf where a row's grammar forbids the token; ids that a mask is too short for are forbidden."""
    width = logits.shape[-1]
    words = np.zeros((len(masks), -(-width // 32)), dtype="<u4")
    for row, mask in zip(words, masks, strict=True):
        row[: len(mask)] = mask[: len(row)]
    bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")[:, :width]
    return mx.where(mx.array(bits.astype(np.bool_)), logits, -mx.inf)


class Bias:
    """What is added to single logits of one row; -inf forbids."""

    __slots__ = ("ids", "values")

    def __init__(self, pairs: Sequence[tuple[int, float]]) -> None:
        self.ids = np.array([token for token, _ in pairs], dtype=np.int64)
        self.values = np.array([value for _, value in pairs], dtype=np.float32)


def add_biases(logits: mx.array, biases: Sequence[tuple[int, Bias]]) -> mx.array:
    """`biases` are (row, bias) pairs; ids outside the vocabulary count for nothing."""
    rows = np.concatenate([np.full(len(bias.ids), row) for row, bias in biases])
    ids = np.concatenate([bias.ids for _, bias in biases])
    values = np.concatenate([bias.values for _, bias in biases])
    known = (ids >= 0) & (ids < logits.shape[-1])
    return logits.at[mx.array(rows[known]), mx.array(ids[known])].add(mx.array(values[known]))


@functools.lru_cache(maxsize=64)
def _stacked(penalties: tuple[Penalty, ...]) -> tuple[mx.array, ...]:
    """Factors of n rows, [n, 1] each."""
    # made without an MLX operation: a lazy array in a cache would belong to the thread that made it
    return tuple(mx.array(np.array(column, dtype=np.float32)[:, None]) for column in zip(*penalties, strict=True))


def _counts(tokens: Sequence[int], width: int) -> npt.NDArray[Any]:
    ids = np.asarray(tokens, dtype=np.int64)
    return np.bincount(ids[ids < width], minlength=width).astype(np.int32)
