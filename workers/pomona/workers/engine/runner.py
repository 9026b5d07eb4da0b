"""The first runner: mlx-lm's BatchGenerator behind the Runner protocol. One thread owns it and all MLX state."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, StopSequences
from mlx_lm.models.cache import KVCache, make_prompt_cache, trim_prompt_cache
from mlx_lm.sample_utils import greedy_sampler

from . import blas_threads
from .base import Admitted, FinishReason, Logprob, Sampling, StepPlan, StepResult, TokenOut
from .lean_batch import LeanBatch
from .prefix_cache import PrefixCache
from .sampling import sampler_for

# Prompts that prefill together. More does not help: prefill is bound by compute, not by reading weights.
PREFILL_BATCH = 8
MIN_CHUNK_TOKENS = 16
# The scheduler's pools say how many run; the generator is not to have a limit of its own.
UNBOUNDED = 1 << 20


class BatchRunner:
    """Continuous batching by mlx-lm. `chunk_tokens` bounds the prompt tokens of one step, over all prompts."""

    def __init__(self, model: Any, *, eos: Collection[int], vocab_size: int, chunk_tokens: int) -> None:
        self._eos = frozenset(eos)
        self._vocab_size = vocab_size
        self._chunk_tokens = chunk_tokens
        self._stop_at_eos = StopSequences([(token,) for token in sorted(self._eos)])
        self._stop_never = StopSequences()
        self._generator = BatchGenerator(
            model,
            completion_batch_size=UNBOUNDED,
            prefill_batch_size=PREFILL_BATCH,
            prefill_step_size=chunk_tokens,
        )
        # mlx-lm has no hook for this; every request joins this batch after its first token.
        self._generator._generation_batch = LeanBatch.empty(model, greedy_sampler)
        self._uids: dict[str, int] = {}
        self._live: dict[int, Admitted] = {}
        self._prefilling: set[int] = set()
        self._reused: dict[int, int] = {}
        self._blas = blas_threads.of_this_process()
        self._prefixes: PrefixCache[list[Any]] = PrefixCache()
        # Only plain KV can be cut at any token; state and sliding windows cannot.
        self._reusable = all(type(cache) is KVCache for cache in make_prompt_cache(model))

    def step(self, plan: StepPlan) -> StepResult:
        room = plan.cache_tokens if self._reusable else 0
        self._drop(plan.cancel)
        self._prefixes.shrink(room)
        self._take(plan.start)
        if not self._live:
            return StepResult(cached_tokens=self._prefixes.size)
        together = max(1, min(PREFILL_BATCH, len(self._prefilling)))
        self._generator.prefill_step_size = max(MIN_CHUNK_TOKENS, self._chunk_tokens // together)
        self._blas.before(len(self._live), prefilling=bool(self._prefilling))
        _, responses = self._generator.next()
        self._blas.after()
        return self._book(responses, room)

    def close(self) -> None:
        self._generator.close()
        self._live.clear()
        self._prefixes.shrink(0)
        mx.clear_cache()

    def _drop(self, request_ids: Collection[str]) -> None:
        gone = [self._uids.pop(r) for r in request_ids if r in self._uids]
        if gone:
            self._generator.remove(gone)
        for uid in gone:
            self._live.pop(uid, None)
            self._prefilling.discard(uid)
            self._reused.pop(uid, None)

    def _take(self, start: Collection[Admitted]) -> None:
        if not start:
            return
        prefixes = [self._prefix(admitted.request.prompt) for admitted in start]
        uids = self._generator.insert(
            [list(a.request.prompt[length:]) for a, (_, length) in zip(start, prefixes, strict=True)],
            max_tokens=[a.max_tokens for a in start],
            caches=[caches for caches, _ in prefixes],
            all_tokens=[list(a.request.prompt[:length]) for a, (_, length) in zip(start, prefixes, strict=True)],
            samplers=[sampler_for(a.request.sampling, self._vocab_size) for a in start],
            stop_sequences=[self._stop_never if a.request.ignore_eos else self._stop_at_eos for a in start],
        )
        for uid, admitted, (_, length) in zip(uids, start, prefixes, strict=True):
            self._uids[admitted.request.request_id] = uid
            self._live[uid] = admitted
            self._reused[uid] = length
            self._prefilling.add(uid)

    def _prefix(self, prompt: tuple[int, ...]) -> tuple[list[Any] | None, int]:
        """Caches that hold the longest kept prefix of `prompt`, and its length.

        The arrays are shared with the kept entry: BatchGenerator's merge copies what it reads and writes elsewhere.
        """
        found = self._prefixes.longest(prompt)
        if found is None:
            return None, 0
        kept, length = found
        caches = [copy.copy(cache) for cache in kept]
        trim_prompt_cache(caches, caches[0].offset - length)
        return caches, length

    def _book(self, responses: Collection[Any], room: int) -> StepResult:
        responses = [r for r in responses if r.uid in self._live]
        tokens = tuple(self._token(r) for r in responses)
        first = [r.uid for r in responses if r.uid in self._prefilling]
        computed = sum(len(self._live[uid].request.prompt) - self._reused[uid] for uid in first)
        self._prefilling.difference_update(first)
        for response in responses:
            if response.finish_reason is not None:
                room += self._end(response, room)
        return StepResult(tokens, computed, self._prefixes.size)

    def _end(self, response: Any, room: int) -> int:
        """Forget a finished request, keep its KV where there is room; returns the KV tokens it had reserved."""
        admitted = self._live.pop(response.uid)
        del self._uids[admitted.request.request_id], self._reused[response.uid]
        reserved = len(admitted.request.prompt) + admitted.max_tokens
        # Evaluated, a row is a copy of its own; until then it would hold the whole batch.
        if room and self._prefixes.add(response.all_tokens, response.prompt_cache, room + reserved):
            mx.eval([cache.state[:2] for cache in response.prompt_cache])
        return reserved

    def _token(self, response: Any) -> TokenOut:
        request = self._live[response.uid].request
        finish = FinishReason(response.finish_reason) if response.finish_reason else None
        if request.sampling.top_logprobs is None:
            return TokenOut(request.request_id, response.token, finish, cached_tokens=self._reused[response.uid])
        chosen, top = _logprobs(response.logprobs, response.token, request.sampling)
        return TokenOut(request.request_id, response.token, finish, chosen, top, self._reused[response.uid])


def _logprobs(row: Any, token: int, sampling: Sampling) -> tuple[float, tuple[Logprob, ...]]:
    """The sampled token's log probability and the `top_logprobs` likeliest, best first. row: [vocab], normalised."""
    count = min(sampling.top_logprobs or 0, row.shape[0])
    if count == 0:
        return float(row[token].item()), ()
    best: Any = mx.argpartition(-row, kth=count - 1)[:count]
    pairs = zip(best.tolist(), row[best].tolist(), strict=True)
    top = sorted((Logprob(token, value) for token, value in pairs), key=lambda p: (-p.logprob, p.token))
    return float(row[token].item()), tuple(top)
