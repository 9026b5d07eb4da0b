"""Between mlx-lm's caches of one sequence and the prefix cache: what is copied out after a chunk, and put back later.

Keys and values of a token do not depend on what comes after it, so any run of tokens can be kept and joined again, also
those of sliding windows. Recurrent state exists only at the position where it was left: a snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, QuantizedKVCache, RotatingKVCache

from .rows import Planes, leaves, planes

Snapshot = tuple[Planes, ...]  # the arrays of each state cache of the model, in order


@dataclass(frozen=True, slots=True)
class KvSegment:
    """Keys and values of `tokens` consecutive tokens: the planes [1, heads, tokens, width] of each attention layer."""

    tokens: int
    layers: tuple[Planes, ...]

    def split(self, at: int) -> tuple[KvSegment, KvSegment]:
        """The first `at` tokens and the rest, each with memory of its own: one may be evicted without the other."""
        head = KvSegment(at, _cut(self.layers, 0, at))
        tail = KvSegment(self.tokens - at, _cut(self.layers, at, self.tokens))
        mx.eval(head.layers, tail.layers)
        return head, tail


def _cut(layers: Sequence[Planes], start: int, end: int) -> tuple[Planes, ...]:
    return tuple(tuple(mx.contiguous(plane[:, :, start:end]) for plane in layer) for layer in layers)


def is_state(leaf: Any) -> bool:
    return isinstance(leaf, ArraysCache)


def computed(caches: Sequence[Any], tokens: int) -> KvSegment | None:
    """Copies (lazy) of the last `tokens` tokens' keys and values; None where a sliding window no longer holds them."""
    layers = [_last(leaf, tokens) for leaf in leaves(caches) if not is_state(leaf)]
    if any(layer is None for layer in layers):
        return None
    return KvSegment(tokens, tuple(layer for layer in layers if layer is not None))


def _last(leaf: Any, tokens: int) -> Planes | None:
    if isinstance(leaf, RotatingKVCache):
        ordered = [leaf._temporal_order(plane) for plane in planes(leaf)]
        if ordered[0].shape[2] < tokens:
            return None
        return tuple(mx.contiguous(plane[..., -tokens:, :]) for plane in ordered)
    return tuple(mx.contiguous(plane[..., leaf.offset - tokens : leaf.offset, :]) for plane in planes(leaf))


def snapshot(caches: Sequence[Any]) -> Snapshot:
    """Copies (lazy) of the state caches: a view would keep the whole chunk's buffers alive."""
    return tuple(tuple(mx.contiguous(a) for a in leaf.cache) for leaf in leaves(caches) if is_state(leaf))


def restored(
    make: Callable[[], list[Any]], held: Sequence[tuple[KvSegment, int]], state: Snapshot | None, capacity: int
) -> list[Any]:
    """Caches that hold the segments' tokens (of each, so many) and the state after them; room for `capacity` tokens."""
    caches = make()
    attention = [leaf for leaf in leaves(caches) if not is_state(leaf)]
    length = sum(used for _, used in held)
    for i, leaf in enumerate(attention):
        _fill(leaf, [[plane[:, :, :used] for plane in segment.layers[i]] for segment, used in held], length, capacity)
    for leaf, arrays in zip((leaf for leaf in leaves(caches) if is_state(leaf)), state or (), strict=False):
        leaf.cache = list(arrays)
    return caches


def _fill(leaf: Any, parts: Sequence[Sequence[Any]], length: int, capacity: int) -> None:
    """`parts`: for each segment its planes."""
    # mlx-lm's caches copy what they hold whenever they grow by a `step`: one is enough.
    if hasattr(leaf, "step") and not isinstance(leaf, RotatingKVCache):
        leaf.step = capacity
    if not length:
        return
    joined = [mx.concatenate(list(plane), axis=2) for plane in zip(*parts, strict=True)]
    leaf.offset = length
    if isinstance(leaf, RotatingKVCache):
        joined = [plane[:, :, -leaf.max_size :] for plane in joined]
        leaf._idx = joined[0].shape[2]
    elif capacity > length:
        joined = [mx.pad(plane, [(0, 0), (0, 0), (0, capacity - length), (0, 0)]) for plane in joined]
    half = len(joined) // 2
    quantized = isinstance(leaf, QuantizedKVCache)
    # mlx-lm assigns to the items of quantised keys and values: they have to be lists.
    leaf.keys, leaf.values = (joined[:half], joined[half:]) if quantized else (joined[0], joined[1])
