"""The caches of one sequence: mlx-lm's, with keys and values quantised where that is asked for.

mlx and mlx-lm are imported inside the functions: only a worker process, with its environment set, may import them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ..errors import OperatorError
from .loading import sentence

GROUP_SIZES = (64, 32)  # the larger one keeps fewer scales


def maker(model: Any, kv_bits: int | None = None) -> Callable[[], list[Any]]:
    """A function that makes a fresh set.

    With `kv_bits` (4 or 8) every plain KVCache, inside a CacheList too, is a QuantizedKVCache of that many bits.
    Sliding windows (RotatingKVCache) and recurrent state (ArraysCache) stay: mlx-lm cannot quantise these.
    Raises OperatorError for a model that cannot work with quantised keys and values; it is tried, but not evaluated.
    """
    from mlx_lm.models.cache import make_prompt_cache

    if kv_bits is None:
        return lambda: make_prompt_cache(model)
    sizes = _group_sizes(model, kv_bits)

    def make() -> list[Any]:
        return _quantized(make_prompt_cache(model), iter(sizes), kv_bits)

    _try(model, make(), kv_bits)
    return make


def flatten(caches: Iterable[Any]) -> Iterator[Any]:
    """The caches themselves, with those inside a CacheList in its place."""
    from mlx_lm.models.cache import CacheList

    for cache in caches:
        if isinstance(cache, CacheList):
            yield from flatten(cache.caches)
        else:
            yield cache


def fill(model: Any, caches: Sequence[Any], tokens: int = 2) -> None:
    """Gives the caches the shapes and types that they have in use, by a forward pass that is never evaluated."""
    import mlx.core as mx

    model(mx.zeros((1, tokens), dtype=mx.int32), cache=caches)


def _group_sizes(model: Any, bits: int) -> list[int | None]:
    """The size of a quantised group in each of the model's caches; None for one that stays as it is."""
    from mlx_lm.models.cache import make_prompt_cache

    caches = make_prompt_cache(model)
    fill(model, caches)
    found = list(flatten(caches))
    sizes = [_group_size(cache, bits) for cache in found]
    if not any(sizes):
        kinds = ", ".join(sorted({type(cache).__name__ for cache in found}))
        raise _cannot(bits, f"it keeps its context in {kinds}, which mlx-lm cannot quantise")
    return sizes


def _group_size(cache: Any, bits: int) -> int | None:
    from mlx_lm.models.cache import KVCache

    if type(cache) is not KVCache or cache.keys is None:
        return None
    widths = (cache.keys.shape[-1], cache.values.shape[-1])
    for size in GROUP_SIZES:
        if all(width > 0 and width % size == 0 for width in widths):
            return size
    raise _cannot(bits, f"its keys and values are {widths[0]} and {widths[1]} wide, not multiples of {GROUP_SIZES[-1]}")


def _quantized(caches: Iterable[Any], sizes: Iterator[int | None], bits: int) -> list[Any]:
    """The caches with those replaced that have a size."""
    from mlx_lm.models.cache import CacheList, QuantizedKVCache

    def one(cache: Any) -> Any:
        if isinstance(cache, CacheList):
            return CacheList(*(one(inner) for inner in cache.caches))
        size = next(sizes)
        return cache if size is None else QuantizedKVCache(group_size=size, bits=bits)

    return [one(cache) for cache in caches]


def _try(model: Any, caches: Sequence[Any], bits: int) -> None:
    """A prompt and an answer's token: some models compute the two differently."""
    try:
        fill(model, caches, 2)
        fill(model, caches, 1)
    # Each model's own code meets the three arrays of quantised keys: whatever it raises means that it cannot use them.
    except Exception as exc:
        said = f" ({sentence(exc).rstrip('.')})" if isinstance(exc, ValueError) else ""
        raise _cannot(bits, f"mlx-lm computes its attention on plain keys and values only{said}") from exc


def _cannot(bits: int, reason: str) -> OperatorError:
    return OperatorError(f"--kv-bits {bits} cannot be used with this model: {reason}; leave the flag out.")
