"""Caches for a decode batch: every sequence has a preallocated row, and joins or leaves without its neighbours moving.

mlx-lm's own batch caches are right-aligned and copied whole whenever somebody comes or goes. Here token p of a sequence
lies in column p of its row (p % window in a sliding window), so a join writes one row and a leave moves at most one.
The models see what they always see: `offset`, `make_mask`, `update_and_fetch`, or indexed state arrays.

Only decode steps (one token a row) run on rows; prompts are computed in mlx-lm's own caches and put into a row whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache, RotatingKVCache

Planes = tuple[Any, ...]  # the arrays that hold keys and values: two, or six where they are quantised


class Positions:
    """Where a batch's rows stand, shared by all its caches: index and mask are made once a step, not once a layer."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self._made: dict[Any, Any] = {}

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths, default=0)

    @property
    def level(self) -> bool:
        """Whether all rows hold equally many tokens."""
        return self.lengths.count(self.lengths[0]) == len(self.lengths)

    def moved(self) -> None:
        """Lengths changed: what was made from them is stale."""
        self._made.clear()

    def advance(self) -> None:
        self.lengths = [length + 1 for length in self.lengths]
        self.moved()

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def offset(self, ahead: int = 0) -> Any:
        """[rows] int32, or an int for a single row: the position of each row's next token."""
        if len(self.lengths) == 1:
            return self.lengths[0] + ahead
        return self.once(("offset", ahead), lambda: mx.array(self.lengths) + ahead)


class Rows(Protocol):
    """What a batch does with each of its caches; `native` is mlx-lm's cache of one sequence."""

    def begin(self) -> None:
        """A step begins."""

    def resize(self, rows: int, columns: int) -> None:
        """Allocate so many rows and columns: at least those in use."""

    def put(self, native: Any) -> None:
        """Add a row at the end that holds what `native` holds."""

    def append(self, planes: Planes) -> None:
        """Add a row at the end that holds what `row` of the same kind of rows returned."""

    def row(self, index: int) -> Planes:
        """A copy of what the row holds (lazy)."""

    def replace(self, index: int, planes: Planes) -> None:
        """Overwrite a row with what `row` returned for the last one, before `pop`."""

    def wipe(self, index: int) -> None:
        """What the row holds may be NaN: leave nothing of it to whoever comes after."""

    def pop(self) -> None:
        """Drop the last row."""

    def arrays(self) -> list[Any]: ...


class RowKV:
    """Keys and values that grow: [rows, heads, columns, width], one array a plane."""

    def __init__(self, positions: Positions, like: Any) -> None:
        self._positions = positions
        self._size = (0, 0)
        self._planes: list[Any] = []
        self.offset: Any = 0
        if isinstance(like, QuantizedKVCache):  # mlx-lm asks hasattr(cache, "bits")
            self.bits, self.group_size = like.bits, like.group_size

    # -- what models call ---------------------------------------------------------------------------------------

    def make_mask(self, _: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """None where every column that `update_and_fetch` returns is to be seen, else [rows, 1, 1, columns] bool."""
        positions = self._positions
        if positions.level and (window_size is None or positions.longest < window_size):
            return None
        return positions.once(("mask", window_size), lambda: self._mask(window_size))

    def _mask(self, window_size: int | None) -> Any:
        columns = mx.arange(self._width())
        last = mx.array(self._positions.lengths)[:, None, None, None]
        seen = columns <= last
        return seen if window_size is None else seen & (columns > last - window_size)

    def update_and_fetch(self, keys: Any, values: Any) -> Any:
        """Write one token a row; returns views of all rows up to the longest."""
        new = self._planes_of(keys, values)
        self._planes = [self._write(plane, token) for plane, token in zip(self._planes, new, strict=True)]
        self.offset = self._positions.offset(1)
        return self.keys_and_values()

    def keys_and_values(self) -> Any:
        """What the last `update_and_fetch` returned: layers that share keys and values read them again."""
        views = [plane[: len(self._positions), :, : self._width()] for plane in self._planes]
        half = len(views) // 2
        return (views[0], views[1]) if half == 1 else (tuple(views[:half]), tuple(views[half:]))

    def _width(self) -> int:
        return self._positions.longest + 1

    # -- what the batch calls -----------------------------------------------------------------------------------

    def begin(self) -> None:
        self.offset = self._positions.offset()

    def resize(self, rows: int, columns: int) -> None:
        self._size = (rows, columns)
        for i, plane in enumerate(self._planes):
            self._planes[i] = _resized(plane, rows, columns)
            del plane
            mx.eval(self._planes[i])  # one plane at a time is held twice, not all of them

    def put(self, native: Any) -> None:
        length = native.offset
        self.append(tuple(plane[:, :, :length] for plane in planes(native)))

    def append(self, planes: Planes) -> None:
        # The positions have the new row already.
        index, length = len(self._positions) - 1, planes[0].shape[2]
        if not self._planes:
            rows, columns = self._size
            self._planes = [mx.zeros((rows, p.shape[1], columns, p.shape[3]), dtype=p.dtype) for p in planes]
        for plane, part in zip(self._planes, planes, strict=True):
            plane[index : index + 1, :, :length] = part

    def row(self, index: int) -> Planes:
        length = min(self._positions.lengths[index], self._planes[0].shape[2])
        return tuple(mx.contiguous(plane[index : index + 1, :, :length]) for plane in self._planes)

    def replace(self, index: int, planes: Planes) -> None:
        for plane, part in zip(self._planes, planes, strict=True):
            plane[index : index + 1, :, : part.shape[2]] = part

    def wipe(self, index: int) -> None:
        # Attention gives hidden columns a weight of 0, and 0 times NaN is NaN.
        for plane in self._planes:
            plane[index : index + 1] = 0

    def pop(self) -> None:
        pass  # the row is free; whoever comes next overwrites it

    def tokens(self, index: int, start: int, end: int) -> Planes | None:
        """Copies (lazy) of the row's tokens [start, end)."""
        return tuple(mx.contiguous(plane[index : index + 1, :, start:end]) for plane in self._planes)

    def arrays(self) -> list[Any]:
        return list(self._planes)

    # -- storage ------------------------------------------------------------------------------------------------

    def _column(self, length: int) -> int:
        return length

    def _write(self, plane: Any, token: Any) -> Any:
        """`token` [rows, heads, 1, width] into each row's next column, in place: nobody else may hold `plane`."""
        rows, heads, columns, width = plane.shape
        positions = self._positions
        if positions.level:
            column = self._column(positions.lengths[0])
            plane[: len(positions), :, column : column + 1] = token
            return plane
        index = positions.once((heads, columns, type(self)), lambda: self._index(heads, columns))
        flat = plane.reshape(-1, width)
        flat[index] = token.reshape(-1, width)
        return flat.reshape(rows, heads, columns, width)

    def _index(self, heads: int, columns: int) -> Any:
        """[rows * heads] int32: where each row's next token goes in [rows * heads * columns, width]."""
        starts = mx.arange(len(self._positions) * heads) * columns
        at = mx.array([self._column(length) for length in self._positions.lengths])
        return starts + mx.repeat(at, heads)

    def _planes_of(self, keys: Any, values: Any) -> list[Any]:
        if not hasattr(self, "bits"):
            return [keys, values]
        return [
            part for array in (keys, values) for part in mx.quantize(array, group_size=self.group_size, bits=self.bits)
        ]


class RowRing(RowKV):
    """Keys and values of a sliding window: token p lies in column p % window. Attention does not mind the order."""

    def __init__(self, positions: Positions, like: Any) -> None:
        self._window = int(like.max_size)
        super().__init__(positions, like)

    def resize(self, rows: int, columns: int) -> None:
        super().resize(rows, min(columns, self._window))

    def make_mask(self, _: int, return_array: bool = False, window_size: int | None = None) -> Any:
        positions, window = self._positions, min(window_size or self._window, self._window)
        whole = window == self._window and min(positions.lengths) >= self._window - 1
        if whole or (positions.level and positions.longest < window):
            return None
        return positions.once(("ring", self._window, window), lambda: self._ring_mask(window))

    def _ring_mask(self, window: int) -> Any:
        columns = mx.arange(self._width())
        last = mx.array(self._positions.lengths)[:, None, None, None]
        age = mx.remainder(last - columns, self._window)
        return (age <= last) & (age < window)

    def _width(self) -> int:
        return min(self._positions.longest + 1, self._window)

    def put(self, native: Any) -> None:
        held = min(native.offset, self._window)
        ordered = [native._temporal_order(plane)[..., -held:, :] for plane in planes(native)]
        turned = native.offset % self._window if held == self._window else 0
        self.append(tuple(mx.roll(plane, turned, 2) if turned else plane for plane in ordered))

    def tokens(self, index: int, start: int, end: int) -> Planes | None:
        """None where the window no longer holds them all."""
        if start < self._positions.lengths[index] - self._window:
            return None
        columns = mx.array([p % self._window for p in range(start, end)])
        return tuple(mx.take(plane[index : index + 1], columns, axis=2) for plane in self._planes)

    def _column(self, length: int) -> int:
        return length % self._window


class RowState(ArraysCache):  # type: ignore[misc]  # mlx-lm is untyped
    """Recurrent state: exactly one entry a row, since models replace the arrays whole at every step."""

    def __init__(self, positions: Positions, like: Any) -> None:
        super().__init__(len(like.cache))
        self.cache: list[Any]
        self._rows = 0

    def begin(self) -> None:
        pass

    def resize(self, rows: int, columns: int) -> None:
        pass  # it is never larger than its rows

    def put(self, native: Any) -> None:
        self.append(tuple(native.cache))

    def append(self, planes: Planes) -> None:
        held = [None if self._rows == 0 else array for array in self.cache]
        self.cache = [new if old is None else mx.concatenate([old, new]) for old, new in zip(held, planes, strict=True)]
        self._rows += 1

    def row(self, index: int) -> Planes:
        return tuple(mx.contiguous(array[index : index + 1]) for array in self.cache)

    def replace(self, index: int, planes: Planes) -> None:
        for array, part in zip(self.cache, planes, strict=True):
            array[index : index + 1] = part

    def wipe(self, index: int) -> None:
        pass  # nobody reads another row's state

    def pop(self) -> None:
        self._rows -= 1
        self.cache = [array[: self._rows] for array in self.cache]

    def arrays(self) -> list[Any]:
        return [array for array in self.cache if array is not None]


ROWS_OF: dict[type, type[Any]] = {
    KVCache: RowKV,
    QuantizedKVCache: RowKV,
    RotatingKVCache: RowRing,
    ArraysCache: RowState,
}


def leaves(caches: Sequence[Any]) -> Iterator[Any]:
    """The caches in order, lists of caches opened."""
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from leaves(cache.caches)
        else:
            yield cache


def unbatchable(caches: Sequence[Any]) -> list[str]:
    """The kinds among a model's caches that rows cannot hold."""
    return sorted({type(leaf).__name__ for leaf in leaves(caches) if not _fits(leaf)})


def _fits(leaf: Any) -> bool:
    return type(leaf) in ROWS_OF and not getattr(leaf, "keep", 0)


def rows_like(caches: Sequence[Any], positions: Positions) -> list[Any]:
    """Empty rows in the shape of a model's caches."""

    def one(cache: Any) -> Any:
        if isinstance(cache, CacheList):
            return CacheList(*(one(inner) for inner in cache.caches))
        return ROWS_OF[type(cache)](positions, cache)

    return [one(cache) for cache in caches]


def planes(native: Any) -> Planes:
    """The arrays of mlx-lm's cache of keys and values: two, or six where they are quantised."""
    parts = (native.keys, native.values)
    return tuple(array for part in parts for array in (part if isinstance(part, list | tuple) else (part,)))


def _resized(plane: Any, rows: int, columns: int) -> Any:
    """A copy with other numbers of rows and columns; what both have is kept."""
    kept_rows, kept_columns = min(rows, plane.shape[0]), min(columns, plane.shape[2])
    resized = mx.zeros((rows, plane.shape[1], columns, plane.shape[3]), dtype=plane.dtype)
    resized[:kept_rows, :, :kept_columns] = plane[:kept_rows, :, :kept_columns]
    return resized
