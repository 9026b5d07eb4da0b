"""Rows of a decode batch see exactly what mlx-lm's cache of each sequence alone sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from pomona.workers.engine.rows import Positions, RowKV, RowRing, RowState, leaves, planes, rows_like, unbatchable

HEADS, WIDTH, WINDOW = 2, 32, 8
Make = Callable[[], Any]
# A cache of one sequence, and the window that its layer asks masks for.
CACHES: dict[str, tuple[Make, int | None]] = {
    "plain": (KVCache, None),
    "plain in a window": (KVCache, 6),
    "quantised": (lambda: QuantizedKVCache(group_size=32, bits=8), None),
    "ring": (lambda: RotatingKVCache(WINDOW), None),
    "ring in a smaller window": (lambda: RotatingKVCache(WINDOW), 5),
}


@pytest.fixture(params=CACHES)
def case(request: pytest.FixtureRequest) -> tuple[Make, int | None]:
    return CACHES[request.param]


def random(*shape: int) -> Any:
    return mx.random.normal(shape)


def attended(cache: Any, queries: Any, keys: Any, values: Any, window: int | None) -> Any:
    mask = cache.make_mask(1, return_array=False, window_size=window)
    keys, values = cache.update_and_fetch(keys, values)
    return scaled_dot_product_attention(queries, keys, values, cache, 0.2, mask)


def equal(one: Any, other: Any) -> bool:
    return all(mx.allclose(a, b, rtol=1e-5, atol=1e-5).item() for a, b in zip(one, other, strict=True))


class Layer:
    """Rows, and beside them mlx-lm's own cache of each sequence alone."""

    def __init__(self, make: Make, window: int | None) -> None:
        self._make, self._window = make, window
        self.positions = Positions()
        self.rows = rows_like([make()], self.positions)[0]
        self.alone: list[Any] = []

    def resize(self, rows: int, columns: int) -> None:
        self.rows.resize(rows, columns)

    def join(self, tokens: int) -> None:
        native = self._make()
        native.update_and_fetch(random(1, HEADS, tokens, WIDTH), random(1, HEADS, tokens, WIDTH))
        self._admit(tokens, native)
        self.rows.put(native)

    def _admit(self, tokens: int, native: Any) -> None:
        self.alone.append(native)
        self.positions.lengths.append(tokens)
        self.positions.moved()

    def leave(self, index: int) -> None:
        last = len(self.alone) - 1
        if index != last:
            self.rows.replace(index, self.rows.row(last))
            self.alone[index], self.positions.lengths[index] = self.alone[last], self.positions.lengths[last]
        self.rows.pop()
        del self.alone[last], self.positions.lengths[last]
        self.positions.moved()

    def take_over(self, other: Layer, index: int) -> None:
        planes, tokens, native = other.rows.row(index), other.positions.lengths[index], other.alone[index]
        other.leave(index)
        self._admit(tokens, native)
        self.rows.append(planes)

    def step(self) -> None:
        """One token more for everybody; its attention is the same in the batch and alone."""
        rows = len(self.alone)
        queries, keys, values = (random(rows, heads, 1, WIDTH) for heads in (2 * HEADS, HEADS, HEADS))
        self.rows.begin()
        together = attended(self.rows, queries + 0, keys, values, self._window)
        self.positions.advance()
        for i, native in enumerate(self.alone):
            one = slice(i, i + 1)
            alone = attended(native, queries[one] + 0, keys[one], values[one], self._window)
            assert mx.allclose(together[one], alone, rtol=1e-4, atol=1e-5).item(), f"row {i} of {rows}"


@pytest.mark.parametrize("lengths", [(3, 3, 3), (1, 4, 9), (8, 7, 20), (5,)])
def test_every_row_attends_to_what_its_sequence_attends_to_alone(case: Any, lengths: tuple[int, ...]) -> None:
    """Level and unlevel, before the window is full, while it fills, and when it has wrapped around more than once."""
    layer = Layer(*case)
    layer.resize(3, 48)
    for tokens in lengths:
        layer.join(tokens)
    for _ in range(20):
        layer.step()


moves = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.integers(1, 20)),
        st.tuples(st.just("leave"), st.integers(0, 4)),
        st.tuples(st.just("over"), st.integers(0, 4)),
        st.tuples(st.just("grow"), st.integers(0, 30)),
        st.tuples(st.just("step"), st.integers(1, 4)),
    ),
    min_size=3,
    max_size=14,
)


def test_rows_that_join_leave_move_and_grow_in_any_order_attend_as_if_alone(case: Any) -> None:
    @settings(max_examples=40, deadline=None)
    @given(moves=moves)
    def check(moves: list[tuple[str, int]]) -> None:
        """Two batches: sequences move from the first to the second. What is allocated is just enough, or more."""
        first, second = Layer(*case), Layer(*case)
        for move, number in [("join", 5), *moves, ("step", 1)]:
            for layer in (first, second):
                # one row and one column more than there are: for who comes next, and for the next token
                columns = max([20, *first.positions.lengths, *second.positions.lengths]) + 5
                layer.resize(len(layer.alone) + 1, columns + (number if move == "grow" else 0))
            if move == "join":
                first.join(number)
            elif move == "leave" and first.alone:
                first.leave(number % len(first.alone))
            elif move == "over" and first.alone:
                second.take_over(first, number % len(first.alone))
            elif move == "step":
                for layer in (first, second):
                    for _ in range(number if layer.alone else 0):
                        layer.step()

    check()


@pytest.mark.parametrize("make", [KVCache, CACHES["quantised"][0]])
def test_tokens_of_a_row_are_what_the_sequence_holds_of_them(make: Make) -> None:
    layer = Layer(make, None)
    layer.resize(3, 32)
    for tokens in (9, 4, 12):
        layer.join(tokens)
    layer.step()
    layer.leave(1)
    layer.step()
    held = planes(layer.alone[1])
    for start, end in ((0, 14), (3, 4), (5, 14), (13, 14)):
        assert equal(layer.rows.tokens(1, start, end), [plane[:, :, start:end] for plane in held])


def test_a_ring_gives_the_tokens_that_it_still_holds_in_their_order_and_none_where_one_is_lost() -> None:
    layer = Layer(lambda: RotatingKVCache(WINDOW), None)
    layer.resize(2, 32)
    layer.join(3)
    layer.join(11)
    for _ in range(4):
        layer.step()
    for row, length in ((0, 7), (1, 15)):
        native = layer.alone[row]
        held = [native._temporal_order(plane)[..., -min(length, WINDOW) :, :] for plane in planes(native)]
        first = max(0, length - WINDOW)
        for start, end in ((first, length), (first + 2, length - 1), (length - 1, length)):
            expected = [plane[:, :, start - first : end - first] for plane in held]
            assert equal(layer.rows.tokens(row, start, end), expected)
    assert layer.rows.tokens(1, 15 - WINDOW - 1, 15) is None
    assert layer.rows.tokens(1, 0, 2) is None


def test_a_ring_never_has_more_columns_than_its_window() -> None:
    layer = Layer(lambda: RotatingKVCache(WINDOW), None)
    layer.resize(4, 1000)
    layer.join(3)
    layer.resize(2, 500)
    assert {array.shape for array in layer.rows.arrays()} == {(2, HEADS, WINDOW, WIDTH)}


def test_state_rows_are_the_sequences_states_in_their_order() -> None:
    positions = Positions()
    rows = rows_like([ArraysCache(2)], positions)[0]
    natives = []
    for i in range(4):
        native = ArraysCache(2)
        native[0], native[1] = mx.full((1, 3), i), mx.full((1, 2, 2), 10 * i)
        natives.append(native)
        rows.put(native)
    rows.replace(1, rows.row(3))
    rows.pop()
    assert rows[0][:, 0].tolist() == [0, 3, 2]
    rows[0] = rows[0] + 1  # as a model does it at every step
    for _ in range(3):
        rows.pop()
    rows.put(natives[2])
    assert (rows[0].tolist(), rows[1].tolist()) == ([[2, 2, 2]], [[[20, 20], [20, 20]]])
    other = rows_like([ArraysCache(2)], positions)[0]
    other.append(rows.row(0))
    assert equal(other.arrays(), [natives[2][0], natives[2][1]])


# -- in place --------------------------------------------------------------------------------------------------------

LARGE = (8, 2, 2048, 64)
PLANE_BYTES = 4 * 8 * 2 * 2048 * 64


def large(lengths: list[int], rows: int) -> tuple[Positions, RowKV]:
    """Rows of LARGE's columns and so many rows, some taken by sequences of these lengths."""
    positions = Positions()
    held: RowKV = rows_like([KVCache()], positions)[0]
    held.resize(rows, LARGE[2])
    for tokens in lengths:
        positions.lengths.append(tokens)
        held.append((mx.zeros((1, 2, tokens, 64)), mx.zeros((1, 2, tokens, 64))))
    mx.eval(held.arrays())
    return positions, held


def peak_bytes(work: Callable[[], None]) -> int:
    """How far the work raises what is allocated, at its worst."""
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    work()
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("lengths", [[2000] * 8, [2000, 3, 500, 40, 41, 1999, 1, 1024]])
def test_a_step_writes_into_the_rows_that_are_there(lengths: list[int]) -> None:
    positions, rows = large(lengths, 8)

    def step() -> None:
        rows.begin()
        rows.update_and_fetch(mx.ones((8, 2, 1, 64)), mx.ones((8, 2, 1, 64)))
        mx.eval(rows.arrays())
        positions.advance()

    step()
    assert peak_bytes(step) < PLANE_BYTES / 2
    assert all(array.shape == LARGE for array in rows.arrays())


def test_a_join_writes_one_row_and_a_leave_moves_one() -> None:
    positions, rows = large([2000] * 7, 8)
    newcomer = KVCache()
    newcomer.update_and_fetch(mx.ones((1, 2, 1500, 64)), mx.ones((1, 2, 1500, 64)))
    mx.eval(newcomer.state)

    def join() -> None:
        positions.lengths.append(1500)
        positions.moved()
        rows.put(newcomer)
        mx.eval(rows.arrays())

    def leave() -> None:
        row = rows.row(7)
        mx.eval(row)
        rows.replace(2, row)
        rows.pop()
        mx.eval(rows.arrays())

    assert peak_bytes(join) < PLANE_BYTES / 2
    assert peak_bytes(leave) < PLANE_BYTES / 2


def test_growing_holds_one_plane_twice_at_a_time() -> None:
    _, rows = large([1000] * 8, 8)
    assert peak_bytes(lambda: rows.resize(8, LARGE[2] + 64)) < 1.6 * PLANE_BYTES


# -- kinds -----------------------------------------------------------------------------------------------------------


def test_rows_have_the_shape_of_the_models_caches() -> None:
    caches = [CacheList(ArraysCache(2), CacheList(RotatingKVCache(4))), KVCache(), QuantizedKVCache(32, 4)]
    made = rows_like(caches, Positions())
    assert [type(leaf) for leaf in leaves(made)] == [RowState, RowRing, RowKV, RowKV]
    assert [hasattr(leaf, "bits") for leaf in leaves(made)] == [False, False, False, True]
    assert isinstance(made[0], CacheList)
    assert isinstance(made[0][1], CacheList)


def test_caches_that_rows_cannot_hold_are_named() -> None:
    caches = [KVCache(), ConcatenateKVCache(), CacheList(RotatingKVCache(8, keep=4), ConcatenateKVCache())]
    assert unbatchable(caches) == ["ConcatenateKVCache", "RotatingKVCache"]
    assert unbatchable([KVCache(), CacheList(ArraysCache(2), RotatingKVCache(8))]) == []
