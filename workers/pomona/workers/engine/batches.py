"""Which sequences decode together, and what is allocated for them: the cheapest split that fits the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .batch import DecodeBatch, Size, SoloBatch
from .rows import unbatchable
from .sequence import Sequence
from .split import StepCost, best_split, shape_of, worth_changing

# A split is also looked at when nobody comes or goes, since costs are learnt.
REVIEW_STEPS = 64


class Batches:
    """`most_cells` bounds what is allocated, in KV tokens, and may change between steps. It has to hold all sequences
    in batches of their own. `coming` tells the lengths of those that will be added."""

    def __init__(
        self,
        model: Any,
        like: list[Any],
        cost: StepCost,
        most_cells: int,
        coming: Callable[[], Iterable[int]] = tuple,
    ) -> None:
        self._model = model
        self._like = like
        self._solo = bool(unbatchable(like))
        self._cost = cost
        self.most_cells = most_cells
        self._coming = coming
        self._batches: list[Any] = []
        self._steps_to_review = 0

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._batches))

    @property
    def rows(self) -> int:
        return sum(len(batch.sequences) for batch in self._batches)

    @property
    def cells(self) -> int:
        """What is allocated, in KV tokens."""
        return sum(batch.size.cells for batch in self._batches)

    def lengths(self) -> list[list[int]]:
        return [batch.lengths for batch in self._batches]

    def add(self, sequence: Sequence, caches: list[Any]) -> None:
        """Take a sequence whose prompt is whole out of mlx-lm's caches."""
        if self._solo:
            self._batches.append(SoloBatch(self._model, sequence, caches))
            return
        home = self._home_of(sequence)
        self._allocate(home, home.needed(sequence.position))
        home.join(sequence, caches)
        self._steps_to_review = 0

    def remove(self, sequence: Sequence) -> None:
        self.of(sequence).leave(sequence)
        self._drop_empty()
        self._steps_to_review = 0

    def discard(self, batch: Any) -> None:
        """The batch failed: its sequences and all they held are gone."""
        self._batches.remove(batch)

    def of(self, sequence: Sequence) -> Any:
        """The batch (batch.Batch) it decodes in. Raises StopIteration."""
        return next(batch for batch in self._batches if sequence in batch.sequences)

    def holds(self, sequence: Sequence) -> bool:
        return any(sequence in batch.sequences for batch in self._batches)

    def clear(self) -> None:
        self._batches.clear()

    def prepare(self) -> None:
        """Before a step: move rows where another split is worth it, and make room for everybody's next token."""
        if self._solo:
            return
        self._steps_to_review -= 1
        if self._steps_to_review <= 0:
            self._steps_to_review = REVIEW_STEPS
            self._review()
        for batch in self._batches:
            self._allocate(batch, batch.needed())
        if self.cells > self.most_cells:
            self._squeeze()

    # -- which batch --------------------------------------------------------------------------------------------

    def _home_of(self, sequence: Sequence) -> DecodeBatch:
        """The batch where one more row of this length costs least; perhaps a new one."""
        present = self.lengths()
        options = [[*present[:i], [*present[i], sequence.position], *present[i + 1 :]] for i in range(len(present))]
        options.append([*present, [sequence.position]])
        shapes = [shape_of(option) for option in options]
        best = min(range(len(options)), key=lambda i: (shapes[i].cells > self.most_cells, self._cost.of(shapes[i])))
        if best == len(present):
            self._batches.append(DecodeBatch(self._model, self._like))
        home: DecodeBatch = self._batches[best]
        return home

    def _review(self) -> None:
        wanted = self._wanted()
        lengths = [[sequence.position for sequence in part] for part in wanted]
        if worth_changing(self.lengths(), lengths, self._cost):
            self._regroup(wanted)

    def _wanted(self) -> list[list[Sequence]]:
        """The best split of the sequences that are here."""
        sequences = [sequence for batch in self._batches for sequence in batch.sequences]
        split = best_split([sequence.position for sequence in sequences], self._cost, self.most_cells)
        return [[sequences[i] for i in part] for part in split]

    def _regroup(self, wanted: list[list[Sequence]]) -> None:
        """Each part goes to the batch that has most of it already."""
        free = list(self._batches)
        for part in wanted:
            home = max(free, key=lambda batch: sum(s in part for s in batch.sequences), default=None)
            if home is None or not any(s in part for s in home.sequences):
                home = DecodeBatch(self._model, self._like)
                self._batches.append(home)
            else:
                free.remove(home)
            coming = [sequence for sequence in part if sequence not in home.sequences]
            self._allocate(home, home.needed(*[sequence.position for sequence in coming]))
            for sequence in coming:
                home.take_over(sequence, self.of(sequence))
        self._drop_empty()

    def _drop_empty(self) -> None:
        self._batches = [batch for batch in self._batches if batch.sequences]

    # -- memory -------------------------------------------------------------------------------------------------

    def _allocate(self, batch: DecodeBatch, needed: Size) -> None:
        """Room for `needed`; some to spare where that fits, since growing copies the batch."""
        if batch.size.holds(needed):
            return
        room = self.most_cells - (self.cells - batch.size.cells)
        # Much shorter ones may go elsewhere.
        coming = sum(1 for length in self._coming() if 2 * length >= needed.columns)
        sizes = (batch.size.grown(needed, coming), batch.size.grown(needed))
        batch.resize(next((size for size in sizes if size.cells <= room), needed.tight()))

    def _squeeze(self) -> None:
        """More is allocated than there is: nothing to spare any more, then less padding."""
        for batch in self._batches:
            batch.resize(batch.needed().tight())
        if self.cells > self.most_cells:
            self._regroup(self._wanted())
            for batch in self._batches:
                batch.resize(batch.needed().tight())
