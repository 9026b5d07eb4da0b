"""The first runner: mlx-lm's BatchGenerator behind the Runner protocol. One thread owns it and all MLX state."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator, StopSequences

from .base import Admitted, FinishReason, Logprob, Sampling, StepPlan, StepResult, TokenOut
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
        self._uids: dict[str, int] = {}
        self._live: dict[int, Admitted] = {}
        self._prefilling: set[int] = set()

    def step(self, plan: StepPlan) -> StepResult:
        self._drop(plan.cancel)
        self._take(plan.start)
        if not self._live:
            return StepResult()
        together = max(1, min(PREFILL_BATCH, len(self._prefilling)))
        self._generator.prefill_step_size = max(MIN_CHUNK_TOKENS, self._chunk_tokens // together)
        _, responses = self._generator.next()
        return self._book(responses)

    def close(self) -> None:
        self._generator.close()
        self._live.clear()
        mx.clear_cache()

    def _drop(self, request_ids: Collection[str]) -> None:
        gone = [self._uids.pop(r) for r in request_ids if r in self._uids]
        if gone:
            self._generator.remove(gone)
        for uid in gone:
            self._live.pop(uid, None)
            self._prefilling.discard(uid)

    def _take(self, start: Collection[Admitted]) -> None:
        if not start:
            return
        uids = self._generator.insert(
            [list(a.request.prompt) for a in start],
            max_tokens=[a.max_tokens for a in start],
            samplers=[sampler_for(a.request.sampling, self._vocab_size) for a in start],
            stop_sequences=[self._stop_never if a.request.ignore_eos else self._stop_at_eos for a in start],
        )
        for uid, admitted in zip(uids, start, strict=True):
            self._uids[admitted.request.request_id] = uid
            self._live[uid] = admitted
            self._prefilling.add(uid)

    def _book(self, responses: Collection[Any]) -> StepResult:
        prompt_tokens = sum(
            len(self._live[r.uid].request.prompt)
            for r in responses
            if r.uid in self._live and r.uid in self._prefilling
        )
        tokens = tuple(self._token(r) for r in responses if r.uid in self._live)
        self._prefilling.difference_update(r.uid for r in responses)
        for r in responses:
            if r.finish_reason is not None and r.uid in self._live:
                self._uids.pop(self._live.pop(r.uid).request.request_id, None)
        return StepResult(tokens, prompt_tokens)

    def _token(self, response: Any) -> TokenOut:
        request = self._live[response.uid].request
        finish = FinishReason(response.finish_reason) if response.finish_reason else None
        if request.sampling.top_logprobs is None:
            return TokenOut(request.request_id, response.token, finish)
        chosen, top = _logprobs(response.logprobs, response.token, request.sampling)
        return TokenOut(request.request_id, response.token, finish, chosen, top)


def _logprobs(row: Any, token: int, sampling: Sampling) -> tuple[float, tuple[Logprob, ...]]:
    """The sampled token's log probability and the `top_logprobs` likeliest, best first. row: [vocab], normalised."""
    count = sampling.top_logprobs or 0
    if count == 0:
        return float(row[token].item()), ()
    best = mx.argpartition(-row, kth=count - 1)[:count]
    pairs = zip(np.array(best).tolist(), np.array(row[best]).tolist(), strict=True)
    top = sorted((Logprob(token, value) for token, value in pairs), key=lambda p: (-p.logprob, p.token))
    return float(row[token].item()), tuple(top)
