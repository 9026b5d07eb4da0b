"""What a model needs in memory, and how many KV tokens and state slots that leaves.

The arithmetic is pure (`kv_pool`); the functions that ask MLX for shapes and sizes import it when called.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CapacityError, ModelError
from . import caches, loading

MIN_KV_TOKENS = 2

# A model without attention keeps nothing a token, so memory does not bound tokens. This many full contexts
# can never be what binds: 4,096 is the most requests an owner runs when no limit is set (capacity algebra).
PURE_STATE_REQUESTS = 4096


@dataclass(frozen=True, slots=True)
class StateShape:
    """What one token adds to the KV cache, and what one auxiliary slot (recurrent state at one position) holds."""

    kv_bytes_per_token: int
    aux_bytes_per_slot: int

    def __post_init__(self) -> None:
        if self.kv_bytes_per_token < 0 or self.aux_bytes_per_slot < 0:
            raise ValueError(f"sizes cannot be negative: {self}")

    @property
    def hybrid(self) -> bool:
        """Whether the model has auxiliary state."""
        return self.aux_bytes_per_slot > 0


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """What one rank's budget was turned into. `aux_slots` is the slots memory holds; None for a dense model."""

    kv_tokens: int
    hybrid: bool
    aux_slots: int | None
    kv_bytes_per_token: int
    aux_bytes_per_slot: int
    weights_bytes: int
    reserve_bytes: int
    budget_bytes: int
    context_tokens: int

    @property
    def pool_bytes(self) -> int:
        """What KV tokens and auxiliary slots take when all are in use."""
        return self.kv_tokens * self.kv_bytes_per_token + (self.aux_slots or 0) * self.aux_bytes_per_slot


@dataclass(frozen=True, slots=True)
class Peek:
    """What `pomona plan` wants to know of a model without reading its weights."""

    shape: StateShape
    weights_bytes: int
    context_tokens: int

    def __iter__(self) -> Iterator[Any]:
        return iter((self.shape, self.weights_bytes, self.context_tokens))


def kv_pool(
    budget_bytes: int,
    weights_bytes: int,
    reserve_bytes: int,
    shape: StateShape,
    *,
    ranks_on_host: int = 1,
    aux_slots: int | None,
    mamba_full_memory_ratio: float,
    max_total_tokens: int | None,
    context_tokens: int,
) -> MemoryProfile:
    """Turns one rank's budget into KV tokens and auxiliary slots (DESIGN section 3, "Memory to T_i and M_i").

    `budget_bytes` is this rank's own part (see `budget`); `ranks_on_host` only explains it in messages. Without
    `aux_slots` a hybrid's state : KV is `mamba_full_memory_ratio`; with it those slots are paid first. What is left
    over of whole slots goes to KV.
    Raises CapacityError: `kv` when fewer than 2 tokens fit, `aux` when the slots do not.
    """
    rest = budget_bytes - weights_bytes - reserve_bytes
    if rest <= 0:
        raise _no_room(budget_bytes, weights_bytes, reserve_bytes, ranks_on_host)
    slots = _slots(rest, shape, aux_slots, mamba_full_memory_ratio) if shape.hybrid else None
    kv_tokens = _tokens(rest - (slots or 0) * shape.aux_bytes_per_slot, shape, max_total_tokens, context_tokens)
    if kv_tokens < MIN_KV_TOKENS:
        raise _no_room(budget_bytes, weights_bytes, reserve_bytes, ranks_on_host, max_total_tokens)
    return MemoryProfile(
        kv_tokens=kv_tokens,
        hybrid=shape.hybrid,
        aux_slots=slots,
        kv_bytes_per_token=shape.kv_bytes_per_token,
        aux_bytes_per_slot=shape.aux_bytes_per_slot,
        weights_bytes=weights_bytes,
        reserve_bytes=reserve_bytes,
        budget_bytes=budget_bytes,
        context_tokens=context_tokens,
    )


def _slots(rest: int, shape: StateShape, wanted: int | None, ratio: float) -> int:
    """The auxiliary slots: as many as asked for, or what state's part of `rest` holds (all of it without KV)."""
    fits = max(0, (rest - MIN_KV_TOKENS * shape.kv_bytes_per_token) // shape.aux_bytes_per_slot)
    if wanted is not None and wanted > fits:
        raise CapacityError(
            "aux",
            f"{wanted:,} auxiliary slots of {size(shape.aux_bytes_per_slot)} do not fit in the {size(rest)} left after "
            f"weights and reserve; lower --max-mamba-cache-size so that each owner gets at most {fits:,}.",
        )
    if wanted is not None:
        return wanted
    part = rest if shape.kv_bytes_per_token == 0 else int(rest * ratio / (1 + ratio))
    slots = min(fits, part // shape.aux_bytes_per_slot)
    if slots < 1:
        raise CapacityError(
            "aux",
            f"One auxiliary slot takes {size(shape.aux_bytes_per_slot)} and state's part of the memory left is "
            f"{size(part)}; raise --mamba-full-memory-ratio or --mem-fraction-static, or use hosts with more memory.",
        )
    return slots


def _tokens(kv_bytes: int, shape: StateShape, max_total_tokens: int | None, context_tokens: int) -> int:
    if shape.kv_bytes_per_token == 0:
        return max_total_tokens if max_total_tokens is not None else PURE_STATE_REQUESTS * context_tokens
    fits = kv_bytes // shape.kv_bytes_per_token
    return fits if max_total_tokens is None else min(fits, max_total_tokens)


def _no_room(budget: int, weights: int, reserve: int, ranks: int, max_total_tokens: int | None = None) -> CapacityError:
    if max_total_tokens is not None and max_total_tokens < MIN_KV_TOKENS:
        return CapacityError("kv", f"--max-total-tokens {max_total_tokens} is too small; use at least {MIN_KV_TOKENS}.")
    shared = f", one of {ranks} ranks on this host" if ranks > 1 else ""
    return CapacityError(
        "kv",
        f"No memory is left for tokens: the budget is {size(budget)}{shared}, weights take {size(weights)} and the "
        f"reserve for activations {size(reserve)}; raise --mem-fraction-static, use a smaller or more quantised model, "
        "or spread it over more hosts with --tp-size.",
    )


def size(count: int) -> str:
    """Bytes as a person reads them: 1.5 GiB."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def working_set_bytes() -> int:
    """What this machine's device may hold without aborting: Metal's recommended working set, else all memory."""
    import mlx.core as mx
    import psutil

    recommended = mx.device_info().get("max_recommended_working_set_size") if mx.metal.is_available() else None
    return int(recommended or psutil.virtual_memory().total)


def budget(fraction: float, ranks_on_host: int = 1) -> int:
    """The bytes one rank may use: `fraction` of the working set, shared equally by the ranks on this host."""
    if not 0 < fraction <= 1:
        raise CapacityError("kv", f"--mem-fraction-static {fraction} cannot be used; it must be above 0 and at most 1.")
    return int(working_set_bytes() * fraction) // ranks_on_host


def state_shape(model: Any, make_caches: Callable[[], list[Any]] | None = None) -> StateShape:
    """What the model's caches (those of `make_caches`, else mlx-lm's) hold, by a forward pass that is never evaluated.

    A sliding-window cache is counted as if it grew without end: that is right for contexts up to the window and
    too much beyond it, never too little. Raises ModelError for a cache class whose arrays we cannot tell apart.
    """
    made = (make_caches or caches.maker(model))()
    leaves = list(caches.flatten(made))
    for cache in leaves:
        _cache_shape(cache)  # one of an unknown kind is refused before the model may do with it what it likes
    caches.fill(model, made)
    shapes = [_cache_shape(cache) for cache in leaves]
    return StateShape(sum(s.kv_bytes_per_token for s in shapes), sum(s.aux_bytes_per_slot for s in shapes))


def _cache_shape(cache: Any) -> StateShape:
    """One cache: keys and values [B, heads, tokens, width] grow with tokens, other arrays are state."""
    if hasattr(cache, "keys") and hasattr(cache, "values"):
        arrays = [array for part in (cache.keys, cache.values) for array in _arrays(part)]
        return StateShape(sum(math.ceil(array.nbytes / (array.shape[0] * array.shape[2])) for array in arrays), 0)
    if isinstance(getattr(cache, "cache", None), list):
        return StateShape(0, sum(array.nbytes // array.shape[0] for array in _arrays(cache.cache)))
    raise ModelError(f"The model keeps its state in a {type(cache).__name__}, whose size pomona cannot tell.")


def _arrays(part: Any) -> list[Any]:
    """The arrays in None, one array, or a sequence of arrays (quantised keys come as three)."""
    if part is None:
        return []
    if isinstance(part, list | tuple):
        return [array for item in part for array in _arrays(item)]
    return [part]


def measure_reserve(model: Any, tokens: int) -> int:
    """The bytes one forward pass of `tokens` tokens needs beyond the weights, logits and its own cache included."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    made = make_prompt_cache(model)
    mx.clear_cache()
    before = int(mx.get_active_memory())
    mx.reset_peak_memory()
    logits = model(mx.zeros((1, tokens), dtype=mx.int32), cache=made)
    mx.eval(logits, [cache.state for cache in made])
    peak = int(mx.get_peak_memory())
    del logits, made
    mx.clear_cache()
    return max(0, peak - before)


def peek(
    source_path: Path, *, dtype: str = "auto", trust_remote_code: bool = False, kv_bits: int | None = None
) -> Peek:
    """Sizes of a model folder from its safetensors headers, with weights cast as `loading.load` would.

    Unpacks as `shape, weights_bytes, context_tokens`. Raises OperatorError as `loading.load` and `caches.maker` do.
    """
    model, config = loading.open_model(source_path, trust_remote_code=trust_remote_code, dtype=dtype)
    return _peek(model, config, kv_bits)


def peek_gguf(path: Path, *, dtype: str = "auto", kv_bits: int | None = None) -> Peek:
    """What `peek` says of the folder that a GGUF is converted to for `dtype` ("auto", or one of `gguf.DTYPES`).

    From the header alone, in the time that importing mlx-lm takes. Raises OperatorError as `gguf.convert` and
    `caches.maker` do.
    """
    from . import gguf
    from .gguf_skeleton import skeleton

    model, config = skeleton(path, gguf.resolve_dtype(dtype))
    loading.cast(model, "auto" if dtype == "quantized" else dtype)
    return _peek(model, config, kv_bits)


def _peek(model: Any, config: dict[str, Any], kv_bits: int | None) -> Peek:
    shape = state_shape(model, caches.maker(model, kv_bits))
    return Peek(shape, loading.weights_bytes(model), loading.context_tokens(config))
