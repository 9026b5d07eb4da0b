"""A first idea of what decode steps cost on this machine, measured once at load: a few steps over empty rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from .rows import Planes, Positions, leaves, planes, rows_like, unbatchable
from .segments import is_state
from .split import Shape, StepCost

# (rows, tokens in each): what differs between them tells pass, row and cell apart.
TRIALS = ((1, 32), (8, 32), (4, 768))


def step_cost(model: Any, make_caches: Callable[[], list[Any]]) -> StepCost:
    """What steps of the trials' shapes took. Empty for models whose caches rows cannot hold: they have no choice."""
    cost = StepCost()
    like = make_caches()
    if unbatchable(like):
        return cost
    model(mx.zeros((1, 1), dtype=mx.int32), cache=like)
    mx.eval([cache.state for cache in like])
    for rows, tokens in TRIALS:
        cost.observe(Shape(1, rows, rows * tokens), _seconds(model, make_caches(), like, rows, tokens))
    mx.clear_cache()
    return cost


def _seconds(model: Any, kinds: Sequence[Any], like: Sequence[Any], rows: int, tokens: int) -> float:
    positions = Positions()
    caches = rows_like(kinds, positions)
    for held in leaves(caches):
        held.resize(rows, tokens + 8)
    for _ in range(rows):
        positions.lengths.append(tokens)
        for held, native in zip(leaves(caches), leaves(like), strict=True):
            held.append(_zeros(native, tokens))
    _step(model, caches, positions, rows)  # the first allocates
    started = time.perf_counter()
    _step(model, caches, positions, rows)
    return time.perf_counter() - started


def _zeros(native: Any, tokens: int) -> Planes:
    """A row of so many tokens, in the shape of a cache that holds one."""
    if is_state(native):
        return tuple(native.cache)
    width = min(tokens, getattr(native, "max_size", tokens))
    return tuple(mx.zeros((1, p.shape[1], width, p.shape[3]), dtype=p.dtype) for p in planes(native))


def _step(model: Any, caches: Sequence[Any], positions: Positions, rows: int) -> None:
    held = list(leaves(caches))
    for cache in held:
        cache.begin()
    logits = model(mx.zeros((rows, 1), dtype=mx.int32), cache=caches)
    mx.eval(mx.argmax(logits[:, -1], axis=-1), [array for cache in held for array in cache.arrays()])
    positions.advance()
