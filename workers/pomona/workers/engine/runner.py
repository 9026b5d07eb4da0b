"""Carries out step plans with MLX: prompts by chunks in mlx-lm's caches, answers in rows. One thread owns it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from typing import Any

import mlx.core as mx

from . import blas_threads
from .base import Admitted, Chunk, Failed, Prefilled, StepPlan, StepResult, StepTimes, TokenOut
from .batches import Batches
from .decoder import NOT_A_NUMBER, Decoder, token_out
from .kept import Kept
from .sampling import sample
from .sequence import Sequence
from .split import StepCost

log = logging.getLogger(__name__)


class ModelRunner:
    """Runs one model. `make_caches` makes mlx-lm's caches of one sequence; `kv_tokens` is what memory holds of them."""

    def __init__(
        self,
        model: Any,
        make_caches: Callable[[], list[Any]],
        *,
        eos: Collection[int],
        vocab_size: int,
        kv_tokens: int = 1 << 62,
        cost: StepCost | None = None,
    ) -> None:
        self._model = model
        self._eos = frozenset(eos)
        self._vocab_size = vocab_size
        self._blas = blas_threads.of_this_process()
        self._kv_tokens = kv_tokens
        self._kept = Kept(make_caches)
        self._cost = cost or StepCost()
        self._batches = Batches(model, make_caches(), self._cost, kv_tokens)
        self._decoder = Decoder(self._batches, self._blas, self._cost)
        self._prompts: dict[str, Sequence] = {}  # not whole yet
        self._answers: dict[str, Sequence] = {}  # in a batch

    def step(self, plan: StepPlan) -> StepResult:
        for request_id in plan.leave:
            self._drop(request_id)
        refused = [failed for admitted in plan.start for failed in self._start(admitted)]
        self._batches.most_cells = self._kv_tokens - sum(len(s.tokens) for s in self._prompts.values())
        self._kept.begin_step(plan, self._batches.most_cells - self._batches.cells)
        decoded = self._decoder.step()
        for failed in decoded.failed:
            self._lose(failed.request_id)
        for sequence in decoded.ended:
            self._retire(sequence)
        started = time.perf_counter()
        chunks = [self._chunk(chunk) for chunk in plan.prefill if chunk.request_id in self._prompts]
        return StepResult(
            tokens=(*decoded.tokens, *(token for chunk in chunks for token in chunk.tokens)),
            prefilled=tuple(p for chunk in chunks for p in chunk.prefilled),
            failed=(*refused, *decoded.failed, *(failed for chunk in chunks for failed in chunk.failed)),
            prompt_tokens=sum(chunk.prompt_tokens for chunk in chunks),
            cached_tokens=self._kept.tokens,
            cached_slots=self._kept.slots,
            times=StepTimes(decoded.seconds, time.perf_counter() - started if chunks else 0.0, self._cost.pass_s),
        )

    def close(self) -> None:
        self._prompts.clear()
        self._answers.clear()
        self._batches.clear()
        self._kept.clear()
        mx.clear_cache()

    # -- coming and going ---------------------------------------------------------------------------------------

    def _start(self, admitted: Admitted) -> list[Failed]:
        request_id = admitted.request.request_id
        try:
            self._prompts[request_id] = Sequence(admitted, eos=self._eos, vocab_size=self._vocab_size)
        except ValueError as exc:  # a grammar that is over its limits
            return [Failed(request_id, str(exc))]
        return []

    def _drop(self, request_id: str) -> None:
        """Somebody left, or was preempted; what was computed may be kept."""
        if self._prompts.pop(request_id, None) is None and request_id in self._answers:
            self._retire(self._answers[request_id])

    def _retire(self, sequence: Sequence) -> None:
        self._kept.keep_row(sequence, self._batches.of(sequence))
        self._batches.remove(sequence)
        del self._answers[sequence.request_id]

    def _lose(self, request_id: str) -> None:
        """A sequence failed: nothing of it can be trusted."""
        sequence = self._answers.pop(request_id)
        if self._batches.holds(sequence):
            self._batches.remove(sequence)

    # -- prompts ------------------------------------------------------------------------------------------------

    def _chunk(self, chunk: Chunk) -> StepResult:
        """Compute some of one prompt; a failure is this request's alone."""
        sequence = self._prompts[chunk.request_id]
        try:
            if chunk.cut:
                self._kept.cut(sequence, chunk.cut)
            return self._computed(sequence, chunk.tokens)
        except Exception as exc:  # whatever a model or device raises, the others have to go on
            log.exception("a prompt chunk of %s failed", chunk.request_id)
            return self._failed(sequence, f"computing the prompt failed ({type(exc).__name__}: {exc})")

    def _computed(self, sequence: Sequence, most: int) -> StepResult:
        if sequence.caches is None:
            self._kept.begin(sequence)
        self._blas.prefill()
        start, end = sequence.position, min(sequence.position + most, len(sequence.tokens))
        end = min((cut for cut in sequence.cuts if start < cut < end), default=end)
        logits = self._model(mx.array([sequence.tokens[start:end]]), cache=sequence.caches)
        whole = end == len(sequence.tokens)
        last = logits[:, -1, :] if whole else mx.zeros((1, 1))
        del logits
        mx.eval([cache.state for cache in sequence.caches or ()], last)
        sequence.position = end
        if mx.isnan(last).any().item():
            return self._failed(sequence, NOT_A_NUMBER)
        self._kept.keep_chunk(sequence)
        tokens = (self._first_token(sequence, last),) if whole else ()
        done = Prefilled(sequence.request_id, end, sequence.cached)
        return StepResult(tokens=tokens, prefilled=(done,), prompt_tokens=end - start)

    def _first_token(self, sequence: Sequence, logits: Any) -> TokenOut:
        masks = None if sequence.matcher is None else [sequence.matcher.mask()]
        sampled = sample(logits, [sequence.sampler], masks)
        mx.eval(sampled.arrays())
        out = token_out(sequence, sampled.tokens.tolist()[0], sampled, 0)  # type: ignore[index,arg-type]
        del self._prompts[sequence.request_id]
        if out.finish is None:
            caches, sequence.caches = sequence.caches, None
            self._batches.add(sequence, caches or [])
            self._answers[sequence.request_id] = sequence
        return out

    def _failed(self, sequence: Sequence, reason: str) -> StepResult:
        self._prompts.pop(sequence.request_id, None)
        self._answers.pop(sequence.request_id, None)
        if self._batches.holds(sequence):
            self._batches.remove(sequence)
        return StepResult(failed=(Failed(sequence.request_id, reason),))
