"""Sequences that decode in one pass, each in a row of its own."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from .rows import Planes, Positions, leaves, rows_like
from .sampling import Sampled, sample
from .segments import KvSegment, Snapshot, is_state
from .sequence import Sequence

# A batch that grows gets so many columns more than it needs where there is room, and where there is none.
SPARE_COLUMNS = 128
TIGHT_COLUMNS = 8


@dataclass(frozen=True, slots=True)
class Size:
    """What a batch has allocated."""

    rows: int = 0
    columns: int = 0

    @property
    def cells(self) -> int:
        """KV tokens' worth of memory."""
        return self.rows * self.columns

    def holds(self, other: Size) -> bool:
        return self.rows >= other.rows and self.columns >= other.columns

    def grown(self, needed: Size, coming: int = 0) -> Size:
        """With room to spare in what has to grow, for `coming` rows and others: growing copies the batch, and stops
        everybody in it, so it has to be rare."""
        wanted = needed.rows + coming
        rows = self.rows if self.rows >= needed.rows else wanted + max(1, wanted // 2)
        spare = max(SPARE_COLUMNS, needed.columns // 4)
        return Size(rows, self.columns if self.columns >= needed.columns else needed.columns + spare)

    def tight(self) -> Size:
        return Size(self.rows, self.columns + TIGHT_COLUMNS)


class Batch(Protocol):
    """Sequences that take a step together."""

    sequences: list[Sequence]

    @property
    def size(self) -> Size: ...

    @property
    def lengths(self) -> list[int]: ...

    def leave(self, sequence: Sequence) -> None: ...

    def wipe(self, sequence: Sequence) -> None:
        """What the sequence holds may be NaN: leave nothing of it to whoever comes after."""
        ...

    def step(self) -> Sampled:
        """Everybody's next token."""
        ...

    def advance(self) -> None:
        """After a step: every sequence holds one more token."""
        ...

    def kept(self, sequence: Sequence, start: int) -> KvSegment | None: ...

    def snapshot(self, sequence: Sequence) -> Snapshot: ...


class SoloBatch:
    """One sequence in mlx-lm's own caches: for models whose caches rows cannot hold."""

    def __init__(self, model: Any, sequence: Sequence, caches: Ordered[Any]) -> None:
        self._model = model
        self._caches = list(caches)
        self.sequences = [sequence]

    @property
    def size(self) -> Size:
        return Size(1, sum(self.lengths))

    @property
    def lengths(self) -> list[int]:
        return [sequence.position for sequence in self.sequences]

    def leave(self, sequence: Sequence) -> None:
        self.sequences.remove(sequence)
        self._caches.clear()

    def wipe(self, sequence: Sequence) -> None:
        pass  # its caches go with it

    def step(self) -> Sampled:
        sampled = _launched(self._model, self.sequences, self._caches)
        mx.eval(sampled.arrays(), [cache.state for cache in self._caches])
        return sampled

    def advance(self) -> None:
        self.sequences[0].position += 1

    def kept(self, sequence: Sequence, start: int) -> KvSegment | None:
        return None

    def snapshot(self, sequence: Sequence) -> Snapshot:
        return ()


def _launched(model: Any, sequences: Ordered[Sequence], caches: Ordered[Any]) -> Sampled:
    tokens = mx.array([sequence.tokens[-1] for sequence in sequences])
    logits = model(tokens[:, None], cache=caches)[:, -1, :]
    masks = [s.matcher.mask() if s.matcher is not None else None for s in sequences]
    return sample(logits, [s.sampler for s in sequences], masks if any(m is not None for m in masks) else None)


class DecodeBatch:
    """A batch of rows. `like` is a set of the model's caches, for their kinds."""

    def __init__(self, model: Any, like: Ordered[Any]) -> None:
        self._model = model
        self.positions = Positions()
        self.sequences: list[Sequence] = []
        self.size = Size()
        self._caches = rows_like(like, self.positions)
        self._leaves = list(leaves(self._caches))

    @property
    def lengths(self) -> list[int]:
        return self.positions.lengths

    def needed(self, *more: int) -> Size:
        """The least that the next step needs, with rows of `more` tokens each beside those that are here."""
        lengths = [*self.lengths, *more]
        return Size(len(lengths), max(lengths, default=0) + 1)

    def resize(self, size: Size) -> None:
        """Allocate `size`, which has to hold what is needed."""
        self.size = size
        for rows in self._leaves:
            rows.resize(size.rows, size.columns)

    def join(self, sequence: Sequence, caches: Ordered[Any]) -> None:
        """Put a sequence whose prompt is whole into a row at the end: its caches are copied, nobody else's."""
        self._admit(sequence)
        for rows, native in zip(self._leaves, leaves(caches), strict=True):
            rows.put(native)
        # The next write has to find the row's arrays unshared, or it would copy the batch.
        mx.eval(self._arrays())

    def take_over(self, sequence: Sequence, other: DecodeBatch) -> None:
        """Move a sequence here from another batch."""
        moved = other._row(other.sequences.index(sequence))
        other.leave(sequence)
        self._admit(sequence)
        for rows, row in zip(self._leaves, moved, strict=True):
            rows.append(row)
        mx.eval(self._arrays())

    def leave(self, sequence: Sequence) -> None:
        """Free the row; the last one moves into it."""
        index, last = self.sequences.index(sequence), len(self.sequences) - 1
        if index != last:
            for rows, row in zip(self._leaves, self._row(last), strict=True):
                rows.replace(index, row)
            self.sequences[index] = self.sequences[last]
            self.positions.lengths[index] = self.positions.lengths[last]
        for rows in self._leaves:
            rows.pop()
        del self.sequences[last], self.positions.lengths[last]
        self.positions.moved()

    def wipe(self, sequence: Sequence) -> None:
        index = self.sequences.index(sequence)
        for rows in self._leaves:
            rows.wipe(index)

    def _admit(self, sequence: Sequence) -> None:
        self.sequences.append(sequence)
        self.positions.lengths.append(sequence.position)
        self.positions.moved()

    def _row(self, index: int) -> list[Planes]:
        """Copies of what a row holds, computed: rows that lazy copies share could not be written in place."""
        row = [rows.row(index) for rows in self._leaves]
        mx.eval(row)
        return row

    def step(self) -> Sampled:
        for rows in self._leaves:
            rows.begin()
        sampled = _launched(self._model, self.sequences, self._caches)
        mx.eval(sampled.arrays(), self._arrays())
        return sampled

    def advance(self) -> None:
        self.positions.advance()
        for sequence in self.sequences:
            sequence.position += 1

    def kept(self, sequence: Sequence, start: int) -> KvSegment | None:
        """Copies of a row's tokens from `start` on; None where a sliding window no longer holds them."""
        index, end = self.sequences.index(sequence), sequence.position
        layers = [rows.tokens(index, start, end) for rows in self._leaves if not is_state(rows)]
        if any(layer is None for layer in layers):
            return None
        mx.eval(layers)
        return KvSegment(end - start, tuple(layer for layer in layers if layer is not None))

    def snapshot(self, sequence: Sequence) -> Snapshot:
        """Copies of a row's recurrent state."""
        index = self.sequences.index(sequence)
        state = tuple(rows.row(index) for rows in self._leaves if is_state(rows))
        mx.eval(state)
        return state

    def _arrays(self) -> list[Any]:
        return [array for rows in self._leaves for array in rows.arrays()]
