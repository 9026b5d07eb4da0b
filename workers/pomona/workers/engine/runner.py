"""Carries out step plans with MLX: prompts by chunks in mlx-lm's caches, answers in rows. One thread owns it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

import mlx.core as mx

from . import blas_threads
from .base import Admitted, Failed, StepPlan, StepResult, StepTimes
from .batches import Batches
from .decoder import Decoder
from .kept import Kept
from .prefill import Prefill, failing
from .sequence import Sequence
from .split import StepCost


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
        blas = blas_threads.of_this_process()
        self._eos = frozenset(eos)
        self._vocab_size = vocab_size
        self._kv_tokens = kv_tokens
        self._kept = Kept(make_caches)
        self._cost = cost or StepCost()
        self._prompts: dict[str, Sequence] = {}  # not whole yet
        self._batches = Batches(model, make_caches(), self._cost, kv_tokens, self._prompt_lengths)
        self._decoder = Decoder(self._batches, blas, self._cost)
        self._prefill = Prefill(model, make_caches, self._kept, blas)
        self._answers: dict[str, Sequence] = {}  # in a batch

    def step(self, plan: StepPlan) -> StepResult:
        for request_id in plan.leave:
            self._drop(request_id)
        refused = [failed for admitted in plan.start for failed in self._start(admitted)]
        self._batches.most_cells = self._kv_tokens - sum(self._prompt_lengths())
        self._kept.begin_step(plan, self._batches.most_cells - self._batches.cells)
        decoded = self._decoder.step()
        for failed in decoded.failed:
            self._lose(failed.request_id)
        for sequence in decoded.ended:
            self._retire(sequence)
        started = time.perf_counter()
        chunks, spare = (
            [(self._prompts[chunk.request_id], chunk) for chunk in some if chunk.request_id in self._prompts]
            for some in (plan.prefill, plan.spare)
        )
        computed = self._prefill.step(chunks, spare)
        for sequence in computed.ended:
            del self._prompts[sequence.request_id]
        for sequence in computed.whole:
            with failing(computed, [sequence]):
                self._place(sequence)
        for failed in computed.failed:
            self._lose(failed.request_id)
        return StepResult(
            tokens=(*decoded.tokens, *computed.tokens),
            prefilled=tuple(computed.prefilled),
            failed=(*refused, *decoded.failed, *computed.failed),
            prompt_tokens=computed.prompt_tokens,
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

    def _place(self, sequence: Sequence) -> None:
        """A prompt is whole and has its first token: a row for the rest."""
        self._answers[sequence.request_id] = self._prompts.pop(sequence.request_id)
        caches, sequence.caches = sequence.caches, None
        self._batches.add(sequence, caches or [])

    def _prompt_lengths(self) -> list[int]:
        return [len(sequence.tokens) for sequence in self._prompts.values()]

    def _lose(self, request_id: str) -> None:
        """A sequence failed: nothing of it can be trusted."""
        sequence = self._prompts.pop(request_id, None) or self._answers.pop(request_id, None)
        if sequence is not None and self._batches.holds(sequence):
            self._batches.remove(sequence)
