"""Samplers over mlx-lm's filters: log probabilities in, token ids out. Lives on the engine thread."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, greedy_sampler

from .base import Sampling
from .lean_batch import greedy_with_logprobs

Sampler = Callable[[Any], Any]  # [rows, vocab] log probabilities -> [rows] token ids


def sampler_for(sampling: Sampling, vocab_size: int) -> Sampler:
    """Rows with equal settings share one sampler object, so that they are sampled in one call; a seed is one's own."""
    if sampling.temperature == 0:
        return greedy_sampler if sampling.top_logprobs is None else greedy_with_logprobs
    if sampling.seed is not None:
        return SeededSampler(sampling, vocab_size)
    return _shared(sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, vocab_size)


@functools.lru_cache(maxsize=256)
def _shared(temperature: float, top_p: float, top_k: int, min_p: float, vocab_size: int) -> Sampler:
    keep = _filter(Sampling(temperature, top_p, top_k, min_p), vocab_size)
    return lambda logprobs: mx.random.categorical(keep(logprobs) * (1 / temperature))


class SeededSampler:
    """The same seed gives the same choices, alone and in any batch: each position has a key of its own."""

    def __init__(self, sampling: Sampling, vocab_size: int) -> None:
        self._keep = _filter(sampling, vocab_size)
        self._scale = 1 / sampling.temperature
        self._key = mx.random.key((sampling.seed or 0) & (2**63 - 1))

    def __call__(self, logprobs: Any) -> Any:
        self._key, now = mx.random.split(self._key)
        return mx.random.categorical(self._keep(logprobs) * self._scale, key=now)


def _filter(sampling: Sampling, vocab_size: int) -> Sampler:
    """top_p, then min_p, then top_k, as mlx-lm orders them; settings that keep everything cost nothing."""
    steps: list[Sampler] = []
    if sampling.top_p < 1:
        steps.append(lambda x: apply_top_p(x, sampling.top_p))
    if sampling.min_p > 0:
        steps.append(lambda x: apply_min_p(x, sampling.min_p))
    if 0 < sampling.top_k < vocab_size:
        steps.append(lambda x: apply_top_k(x, sampling.top_k))
    return lambda logprobs: functools.reduce(lambda x, step: step(x), steps, logprobs)
