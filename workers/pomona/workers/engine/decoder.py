"""A decode step over all batches: who gets which token, who has ended, who failed."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any

from .base import Failed, TokenOut
from .batch import Batch
from .batches import Batches
from .blas_threads import BlasThreads
from .sampling import Sampled
from .sequence import Sequence
from .split import StepCost, shape_of

log = logging.getLogger(__name__)

NOT_A_NUMBER = (
    "the model's output for this request is not a number (NaN): its weights are broken, or its activations overflow in "
    "this data type"
)


@dataclass(slots=True)
class Decoded:
    """What a step of all batches gave."""

    tokens: list[TokenOut] = field(default_factory=list)
    ended: list[Sequence] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, other: Decoded) -> None:
        self.tokens += other.tokens
        self.ended += other.ended
        self.failed += other.failed


class Decoder:
    """Steps the batches."""

    def __init__(self, batches: Batches, blas: BlasThreads, cost: StepCost) -> None:
        self._batches = batches
        self._blas = blas
        self._cost = cost

    def step(self) -> Decoded:
        """Everybody's next token. A batch that fails takes its own sequences with it, and nobody else."""
        decoded = Decoded()
        if not self._batches.rows:
            return decoded
        self._batches.prepare()
        shape = shape_of(self._batches.lengths())
        started = time.perf_counter()
        with self._blas.decode(self._batches.rows):
            for batch in self._batches:
                self._step_or_fail(batch, decoded)
        decoded.seconds = time.perf_counter() - started
        if not decoded.failed:
            self._cost.observe(shape, decoded.seconds)
        return decoded

    def _step_or_fail(self, batch: Batch, decoded: Decoded) -> None:
        try:
            decoded.add(self._step(batch))
        except Exception as exc:  # whatever a model or device raises, the others have to go on
            log.exception("a decode step of %d sequences failed", len(batch.sequences))
            reason = f"a decode step failed ({type(exc).__name__}: {exc})"
            decoded.failed.extend(Failed(s.request_id, reason) for s in batch.sequences)
            self._batches.discard(batch)

    def _step(self, batch: Batch) -> Decoded:
        decoded = Decoded()
        sampled = batch.step()
        tokens: list[Any] = sampled.tokens.tolist()  # type: ignore[assignment]  # a list: one a row
        bad: list[Any] = sampled.bad().tolist()  # type: ignore[assignment]
        batch.advance()
        for row, (sequence, token) in enumerate(zip(list(batch.sequences), tokens, strict=True)):
            if bad[row]:
                batch.wipe(sequence)
                decoded.failed.append(Failed(sequence.request_id, NOT_A_NUMBER))
                continue
            try:
                out = token_out(sequence, token, sampled, row)
            except ValueError as exc:
                decoded.failed.append(Failed(sequence.request_id, str(exc)))
                continue
            decoded.tokens.append(out)
            if out.finish is not None:
                decoded.ended.append(sequence)
        return decoded


def token_out(sequence: Sequence, token: int, sampled: Sampled, row: int) -> TokenOut:
    """Book a sampled token; says what goes to the client. Raises ValueError for a grammar that is over its limits."""
    finish = sequence.add(token)
    scores = sampled.scores(row)
    chosen, top = scores if scores is not None else (None, ())
    return TokenOut(sequence.request_id, token, finish, chosen, tuple(top), sequence.cached)
