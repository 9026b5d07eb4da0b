"""Which rows decode together: no way is cheaper, and costs are learnt from what steps took."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from owner import FixedCost
from pomona.workers.engine.split import WORTH, Shape, StepCost, best_split, shape_of, worth_changing

costs = st.builds(FixedCost, st.floats(0, 2000), st.floats(0.001, 10))
some_lengths = st.lists(st.integers(1, 700), max_size=6)


def partitions(rows: list[int]) -> Iterator[list[list[int]]]:
    """All ways to divide the rows into batches."""
    if not rows:
        yield []
        return
    first, *rest = rows
    for parts in partitions(rest):
        yield [[first], *parts]
        for i, part in enumerate(parts):
            yield [*parts[:i], [first, *part], *parts[i + 1 :]]


def batches(lengths: Sequence[int], split: list[list[int]]) -> list[list[int]]:
    return [[lengths[i] for i in part] for part in split]


def least(lengths: Sequence[int], cost: StepCost) -> float:
    return min(cost.of(shape_of(batches(lengths, parts))) for parts in partitions(list(range(len(lengths)))))


@given(lengths=st.lists(st.integers(1, 12).map(lambda n: 64 * n), max_size=6), cost=costs)
def test_no_other_split_is_cheaper(lengths: list[int], cost: StepCost) -> None:
    split = best_split(lengths, cost)
    assert cost.of(shape_of(batches(lengths, split))) <= least(lengths, cost) * (1 + 1e-9)


@given(lengths=some_lengths, cost=costs)
def test_rounding_lengths_costs_no_more_than_the_cells_that_it_adds(lengths: list[int], cost: StepCost) -> None:
    split = best_split(lengths, cost)
    spared = cost.of(Shape(0, 0, 63 * len(lengths)))
    assert cost.of(shape_of(batches(lengths, split))) <= (least(lengths, cost) + spared) * (1 + 1e-9)


@given(
    lengths=some_lengths, cost=st.one_of(costs, st.builds(StepCost)), spare=st.one_of(st.none(), st.integers(0, 900))
)
def test_everybody_is_in_one_batch_and_what_is_padded_fits_the_memory(
    lengths: list[int], cost: StepCost, spare: int | None
) -> None:
    most = None if spare is None else sum(lengths) + spare
    split = best_split(lengths, cost, most)
    assert sorted(i for part in split for i in part) == list(range(len(lengths)))
    assert all(split)
    assert most is None or shape_of(batches(lengths, split)).cells <= most


def test_rows_that_differ_little_go_together_and_a_long_one_goes_alone() -> None:
    lengths = [10, 900, 12, 880, 8, 11]
    split = best_split(lengths, FixedCost(100, 1))
    assert [sorted(part) for part in split] == [[1, 3], [0, 2, 4, 5]]
    assert best_split(lengths, FixedCost(10_000, 1)) == [[1, 3, 2, 5, 0, 4]]


@given(lengths=st.lists(st.integers(1, 100_000), min_size=1))
def test_without_a_step_seen_nothing_is_split(lengths: list[int]) -> None:
    assert len(best_split(lengths, StepCost())) == 1


# -- what steps cost -------------------------------------------------------------------------------------------------

SECONDS = (0.01, 0.0004, 2e-6)  # of a pass, a row, a cell


def taken(shape: Shape, seconds: tuple[float, float, float] = SECONDS) -> float:
    return shape.passes * seconds[0] + shape.rows * seconds[1] + shape.cells * seconds[2]


def any_shape(rng: random.Random) -> Shape:
    return shape_of([[rng.randrange(1, 3000) for _ in range(rng.randrange(1, 20))] for _ in range(rng.randrange(1, 4))])


def learnt(rng: random.Random, steps: int, cost: StepCost, seconds: tuple[float, float, float] = SECONDS) -> StepCost:
    for _ in range(steps):
        shape = any_shape(rng)
        cost.observe(shape, taken(shape, seconds) * rng.uniform(0.9, 1.1))
    return cost


def test_a_step_costs_what_noisy_steps_have_cost() -> None:
    rng = random.Random(1)
    cost = learnt(rng, 300, StepCost())
    assert cost.of(Shape(1, 0, 0)) == pytest.approx(SECONDS[0], rel=0.1)
    # A row costs less than the noise of a step does; nothing is chosen by it either.
    assert cost.of(Shape(0, 1, 0)) == pytest.approx(SECONDS[1], abs=SECONDS[1])
    assert cost.of(Shape(0, 0, 1)) == pytest.approx(SECONDS[2], rel=0.1)
    for _ in range(50):
        shape = any_shape(rng)
        assert cost.of(shape) == pytest.approx(taken(shape), rel=0.05)


def test_what_steps_cost_now_counts_for_more_than_what_they_once_cost() -> None:
    rng = random.Random(2)
    slower = (0.03, 0.0001, 4e-6)
    cost = learnt(rng, 400, learnt(rng, 400, StepCost()), slower)
    for _ in range(50):
        shape = any_shape(rng)
        assert cost.of(shape) == pytest.approx(taken(shape, slower), rel=0.1)


def test_steps_of_one_shape_cost_what_they_took() -> None:
    cost = StepCost()
    for _ in range(20):
        cost.observe(Shape(1, 8, 8 * 300), 0.02)
    assert cost.of(Shape(1, 8, 8 * 300)) == pytest.approx(0.02, rel=0.05)


shapes = st.builds(
    lambda rows, passes, each: Shape(min(rows, passes), rows, rows * each),
    st.integers(1, 300),
    st.integers(1, 20),
    st.integers(1, 100_000),
)


@given(steps=st.lists(st.tuples(shapes, st.floats(1e-5, 100)), min_size=1, max_size=30))
def test_no_pass_row_or_cell_ever_costs_less_than_nothing(steps: list[tuple[Shape, float]]) -> None:
    cost = StepCost()
    for shape, seconds in steps:
        cost.observe(shape, seconds)
        assert min(cost.of(one) for one in (Shape(1, 0, 0), Shape(0, 1, 0), Shape(0, 0, 1))) >= 0


# -- when it is worth it ---------------------------------------------------------------------------------------------


def test_batches_change_only_where_that_saves_enough() -> None:
    cost = FixedCost(0, 1)
    present = [[1000] * 100]
    enough = int(100_000 * WORTH)
    for saved, worth in ((enough - 100, False), (enough, False), (enough + 100, True)):
        assert worth_changing(present, [[1000 - saved // 100] * 100], cost) is worth


def test_batches_do_not_change_back_and_forth() -> None:
    """Where one of two is worth changing to, the other is not worth changing back to."""
    cost = FixedCost(300, 1)
    together, apart = [[900, 100, 100]], [[900], [100, 100]]
    assert worth_changing(together, apart, cost)
    assert not worth_changing(apart, together, cost)


@given(one=st.lists(st.lists(st.integers(1, 900), min_size=1), min_size=1, max_size=4))
def test_without_a_step_seen_no_change_is_worth_it(one: list[list[int]]) -> None:
    assert not worth_changing(one, [[max(map(max, one))]], StepCost())
