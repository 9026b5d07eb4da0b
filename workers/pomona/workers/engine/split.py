"""Which rows decode in one pass: a batch pads to its longest row, and a second batch pays for the weights again.

A step's seconds are modelled as `passes * pass_s + rows * row_s + cells * cell_s`, cells being the columns that
attention reads over all rows, padding included. The three are fitted to measured steps. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

# Old steps count less: by half after about seventy.
FORGETTING = 0.99
# A faint pull to zero, in proportion: what was never varied explains nothing, and the equations have one solution.
PULL = 1e-9
# Splitting or joining has to save so much of a step; else batches would change at every noise.
WORTH = 0.05
# How many times a cell counts where memory is short.
WEIGHTS = (1, 4, 16, 64, 256)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a step runs: model passes, rows over all of them, and columns that attention reads."""

    passes: int
    rows: int
    cells: int


def shape_of(batches: Sequence[Sequence[int]]) -> Shape:
    """The shape of a step over batches of rows, given as the tokens each row holds."""
    return Shape(len(batches), sum(map(len, batches)), sum(len(batch) * max(batch) for batch in batches if batch))


class StepCost:
    """Seconds of a decode step, by least squares over the steps seen. Knows nothing before the first `observe`."""

    def __init__(self) -> None:
        # Normal equations.
        self._a = np.zeros((3, 3))
        self._b = np.zeros(3)
        self._seconds: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def observe(self, shape: Shape, seconds: float) -> None:
        # Relative errors: a long step is not worth more than a short one.
        x = np.array([shape.passes, shape.rows, shape.cells / 1000]) / seconds
        self._a = FORGETTING * self._a + np.outer(x, x)
        self._b = FORGETTING * self._b + x
        self._seconds = _not_negative(self._a + PULL * np.trace(self._a) * np.eye(3), self._b)

    @property
    def pass_s(self) -> float:
        """What a pass over the weights takes."""
        return self._seconds[0]

    def of(self, shape: Shape) -> float:
        a, b, c = self._seconds
        return a * shape.passes + b * shape.rows + c * shape.cells / 1000


def _not_negative(a: np.ndarray, b: np.ndarray) -> tuple[float, float, float]:
    """The least-squares solution with nothing below zero: parameters that would be are left out, worst first."""
    kept = [0, 1, 2]
    while kept:
        solved = np.linalg.solve(a[np.ix_(kept, kept)], b[kept])
        worst = int(np.argmin(solved))
        if solved[worst] >= 0:
            values = dict(zip(kept, solved.tolist(), strict=True))
            return values.get(0, 0.0), values.get(1, 0.0), values.get(2, 0.0)
        del kept[worst]
    return 0.0, 0.0, 0.0


def best_split(lengths: Sequence[int], cost: StepCost, most_cells: int | None = None) -> list[list[int]]:
    """The cheapest batches of rows with these lengths, as indices; the longest rows first.

    Where padding would take more than `most_cells`, cells count more and more; at last only equal rows go together.
    """
    for weight in WEIGHTS:
        split = _split(lengths, cost, weight)
        if most_cells is None or shape_of([[lengths[i] for i in part] for part in split]).cells <= most_cells:
            return split
    order = _longest_first(lengths)
    runs = _runs([lengths[i] for i in order])
    return [order[start:end] for start, end in pairwise(runs)]


def _split(lengths: Sequence[int], cost: StepCost, weight: int) -> list[list[int]]:
    """The cheapest split, cells counted `weight` times.

    Rows that go together are neighbours in length, so it is enough to choose where to cut the sorted list: dynamic
    programming over the cuts, O(distinct lengths squared) after rounding lengths up to the model's resolution.
    """
    order = _longest_first(lengths)
    if not order or _padding_is_cheap(lengths, cost, weight):
        return [order] if order else []
    runs = _runs([_rounded(lengths[i]) for i in order])

    def of(start: int, end: int) -> float:
        """Seconds of one batch of the runs [start, end)."""
        rows, longest = runs[end] - runs[start], lengths[order[runs[start]]]
        return cost.of(Shape(1, rows, rows * longest * weight))

    # For each end: the least seconds up to there, and where its last batch begins.
    best: list[tuple[float, int]] = [(0.0, 0)]
    for end in range(1, len(runs)):
        best.append(min((best[start][0] + of(start, end), start) for start in range(end)))
    cuts, end = [], len(runs) - 1
    while end:
        cuts.append((runs[best[end][1]], runs[end]))
        end = best[end][1]
    return [order[start:stop] for start, stop in reversed(cuts)]


def worth_changing(present: Sequence[Sequence[int]], best: Sequence[Sequence[int]], cost: StepCost) -> bool:
    """Whether the batches `best` (lengths of rows) save enough over the present ones."""
    now = cost.of(shape_of(present))
    return now - cost.of(shape_of(best)) > WORTH * now


def _padding_is_cheap(lengths: Sequence[int], cost: StepCost, weight: int) -> bool:
    padding = len(lengths) * max(lengths) - sum(lengths)
    return cost.of(Shape(0, 0, padding * weight)) <= cost.of(Shape(1, 0, 0))


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: -lengths[i])


def _rounded(length: int) -> int:
    return -(-length // 64) * 64


def _runs(values: Sequence[int]) -> list[int]:
    """Where runs of equal values begin, and the end."""
    starts = [i for i in range(len(values)) if i == 0 or values[i] != values[i - 1]]
    return [*starts, len(values)]
