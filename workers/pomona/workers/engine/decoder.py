"""All sequences that decode, in the batches that cost least."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any

from .base import Failed, TokenOut
from .batch import Batch, DecodeBatch, SoloBatch
from .blas_threads import BlasThreads
from .rows import unbatchable
from .sampling import Sampled
from .sequence import Sequence
from .split import StepCost, best_split, shape_of, worth_changing

log = logging.getLogger(__name__)

# A split is also looked at when nobody comes or goes, since costs are learnt.
REVIEW_STEPS = 64

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


class Decoder:
    """Batches of rows, split by length where padding would cost more than another pass over the weights."""

    def __init__(self, model: Any, like: list[Any], blas: BlasThreads, cost: StepCost) -> None:
        self._model = model
        self._like = like
        self._solo = bool(unbatchable(like))
        self._blas = blas
        self._cost = cost
        self._batches: list[Any] = []
        self._steps_to_review = 0

    def __len__(self) -> int:
        return sum(len(batch.sequences) for batch in self._batches)

    def join(self, sequence: Sequence) -> None:
        """Take a sequence whose prompt is whole out of mlx-lm's caches into a row."""
        caches, sequence.caches = sequence.caches, None
        assert caches is not None, "its prompt was computed"
        if self._solo:
            self._batches.append(SoloBatch(self._model, sequence, caches))
            return
        self._home_of(sequence).join(sequence, caches)
        self._steps_to_review = 0

    def leave(self, sequence: Sequence) -> None:
        batch = self.batch_of(sequence)
        batch.leave(sequence)
        self._steps_to_review = 0
        self._drop_empty()

    def batch_of(self, sequence: Sequence) -> Any:
        """The batch (batch.Batch) it decodes in. Raises StopIteration."""
        return next(batch for batch in self._batches if sequence in batch.sequences)

    def holds(self, sequence: Sequence) -> bool:
        return any(sequence in batch.sequences for batch in self._batches)

    def step(self) -> Decoded:
        """Everybody's next token. A batch that fails takes its own sequences with it, and nobody else."""
        decoded = Decoded()
        if not self._batches:
            return decoded
        self._review()
        self._blas.decode(len(self))
        shape = shape_of([batch.lengths for batch in self._batches])
        started = time.perf_counter()
        for batch in list(self._batches):
            try:
                self._step(batch, decoded)
            except Exception as exc:  # whatever a model or device raises, the others have to go on
                log.exception("a decode step of %d sequences failed", len(batch.sequences))
                reason = f"a decode step failed ({type(exc).__name__}: {exc})"
                decoded.failed.extend(Failed(s.request_id, reason) for s in batch.sequences)
                self._batches.remove(batch)
        decoded.seconds = time.perf_counter() - started
        self._blas.decoded(decoded.seconds)
        if not decoded.failed:
            self._cost.observe(shape, decoded.seconds)
        return decoded

    def clear(self) -> None:
        self._batches.clear()

    def _step(self, batch: Batch, decoded: Decoded) -> None:
        sampled = batch.step()
        tokens: list[Any] = sampled.tokens.tolist()  # type: ignore[assignment]  # a list: one a row
        bad: list[Any] = sampled.bad().tolist()  # type: ignore[assignment]
        batch.advance()
        for row, (sequence, token) in enumerate(zip(list(batch.sequences), tokens, strict=True)):
            if bad[row]:
                decoded.failed.append(Failed(sequence.request_id, NOT_A_NUMBER))
                continue
            out = token_out(sequence, token, sampled, row)
            decoded.tokens.append(out)
            if out.finish is not None:
                decoded.ended.append(sequence)

    # -- which batch --------------------------------------------------------------------------------------------

    def _home_of(self, sequence: Sequence) -> DecodeBatch:
        """The batch where one more row of this length costs least; perhaps a new one."""
        present = [batch.lengths for batch in self._batches]
        options = [[*present[:i], [*present[i], sequence.position], *present[i + 1 :]] for i in range(len(present))]
        costs = [self._cost.of(shape_of(option)) for option in [*options, [*present, [sequence.position]]]]
        best = min(range(len(costs)), key=costs.__getitem__)
        if best == len(present):
            self._batches.append(DecodeBatch(self._model, self._like, sequence.position + 1))
        home: DecodeBatch = self._batches[best]
        return home

    def _review(self) -> None:
        """Move rows where another split would save enough."""
        self._steps_to_review -= 1
        if self._solo or self._steps_to_review > 0:
            return
        self._steps_to_review = REVIEW_STEPS
        sequences = [sequence for batch in self._batches for sequence in batch.sequences]
        split = best_split([sequence.position for sequence in sequences], self._cost)
        wanted = [[sequences[i] for i in part] for part in split]
        lengths = [[sequence.position for sequence in part] for part in wanted]
        if worth_changing([batch.lengths for batch in self._batches], lengths, self._cost):
            self._regroup(wanted)

    def _regroup(self, wanted: list[list[Sequence]]) -> None:
        """Each part goes to the batch that has most of it already."""
        free = list(self._batches)
        for part in wanted:
            home = max(free, key=lambda batch: sum(s in part for s in batch.sequences), default=None)
            if home is None or not any(s in part for s in home.sequences):
                home = DecodeBatch(self._model, self._like, max(s.position for s in part) + 1)
                self._batches.append(home)
            else:
                free.remove(home)
            for sequence in part:
                if sequence not in home.sequences:
                    home.take_over(sequence, self.batch_of(sequence))
        self._drop_empty()

    def _drop_empty(self) -> None:
        self._batches = [batch for batch in self._batches if batch.sequences]


def token_out(sequence: Sequence, token: int, sampled: Sampled, row: int) -> TokenOut:
    """Book a sampled token; says what goes to the client."""
    finish = sequence.add(token)
    scores = sampled.scores(row)
    chosen, top = scores if scores is not None else (None, ())
    return TokenOut(sequence.request_id, token, finish, chosen, tuple(top), sequence.cached)
