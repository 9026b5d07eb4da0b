"""From bytes to KV tokens and state slots, and from models to bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from pomona.workers.errors import CapacityError, ModelError, OperatorError
from pomona.workers.models import caches, loading, profile
from pomona.workers.models.profile import StateShape, kv_pool
from tiny import KINDS, make

DENSE = StateShape(kv_bytes_per_token=100, aux_bytes_per_slot=0)
HYBRID = StateShape(kv_bytes_per_token=100, aux_bytes_per_slot=1000)
PURE = StateShape(kv_bytes_per_token=0, aux_bytes_per_slot=1000)

# By hand from tests/tiny.py, float32: KV is 2 x heads x width x 4 bytes a layer, state is conv rows and recurrence.
SHAPES = {
    "llama": StateShape(2 * (2 * 2 * 16 * 4), 0),
    "qwen3_moe": StateShape(4 * (2 * 2 * 16 * 4), 0),
    "qwen3_next": StateShape(2 * (2 * 2 * 16 * 4), 2 * 4 * (3 * (2 * 64 + 64) + 4 * 16 * 32)),
    "lfm2": StateShape(2 * (2 * 2 * 16 * 4), 2 * 4 * (2 * 64)),
    "mamba2": StateShape(0, 4 * 4 * (3 * (128 + 32) + 8 * 16 * 16)),
    "falcon_h1": StateShape(4 * (2 * 2 * 16 * 4), 4 * 4 * (3 * (128 + 32) + 8 * 16 * 16)),
    "granitemoehybrid": StateShape(2 * (2 * 2 * 16 * 4), 2 * 4 * (3 * (128 + 32) + 8 * 16 * 16)),
    "gemma3_text": StateShape(4 * (2 * 2 * 16 * 4), 0),
}


def pool(budget: int, shape: StateShape, **more: Any) -> profile.MemoryProfile:
    given_limits: dict[str, Any] = {
        "aux_slots": None,
        "mamba_full_memory_ratio": 0.9,
        "max_total_tokens": None,
        "context_tokens": 512,
    }
    return kv_pool(budget, 1000, 500, shape, **(given_limits | more))


def test_a_dense_model_turns_all_that_is_left_into_tokens() -> None:
    found = pool(1500 + 12_345, DENSE)
    assert (found.kv_tokens, found.hybrid, found.aux_slots) == (123, False, None)


def test_a_dense_model_ignores_auxiliary_slots() -> None:
    assert pool(11_500, DENSE, aux_slots=7) == pool(11_500, DENSE)


def test_a_hybrid_splits_state_to_kv_by_the_ratio() -> None:
    found = pool(1500 + 190_000, HYBRID)
    assert (found.aux_slots, found.kv_tokens) == (90, 1000)


def test_auxiliary_slots_are_paid_first_when_set() -> None:
    found = pool(1500 + 190_000, HYBRID, aux_slots=10)
    assert (found.aux_slots, found.kv_tokens) == (10, 1800)


def test_auxiliary_slots_that_do_not_fit_are_told_how_many_would() -> None:
    with pytest.raises(CapacityError, match="at most 9") as error:
        pool(1500 + 10_000, HYBRID, aux_slots=10)
    assert error.value.kind == "aux"
    assert pool(1500 + 10_000, HYBRID, aux_slots=9).aux_slots == 9


def test_max_total_tokens_lowers_and_never_raises() -> None:
    assert pool(1500 + 100_000, DENSE, max_total_tokens=50).kv_tokens == 50
    assert pool(1500 + 100_000, DENSE, max_total_tokens=5000).kv_tokens == 1000


def test_a_model_without_kv_is_not_bounded_by_memory_in_tokens() -> None:
    found = pool(1500 + 5500, PURE)
    assert (found.aux_slots, found.kv_tokens) == (5, 4096 * 512)
    assert pool(1500 + 5500, PURE, max_total_tokens=77).kv_tokens == 77


@pytest.mark.parametrize("budget", [0, 1500, 1500 + 199])
def test_no_room_for_two_tokens_names_weights_budget_and_fix(budget: int) -> None:
    with pytest.raises(
        CapacityError, match=r"budget is .*, one of 3 ranks.*weights take 1000 bytes.*--tp-size"
    ) as error:
        pool(budget, DENSE, ranks_on_host=3)
    assert error.value.kind == "kv"


def test_too_few_total_tokens_is_said_of_that_flag() -> None:
    with pytest.raises(CapacityError, match="--max-total-tokens 1 is"):
        pool(10_000, DENSE, max_total_tokens=1)


def test_a_single_slot_that_does_not_fit_is_an_aux_error() -> None:
    with pytest.raises(CapacityError, match="mamba-full-memory-ratio") as error:
        pool(1500 + 1900, HYBRID)
    assert error.value.kind == "aux"


@given(
    budget=st.integers(0, 1 << 40),
    weights=st.integers(0, 1 << 36),
    reserve=st.integers(0, 1 << 32),
    kv=st.integers(0, 1 << 20),
    aux=st.integers(0, 1 << 26),
    slots=st.none() | st.integers(0, 5000),
    ratio=st.floats(0.01, 10),
    limit=st.none() | st.integers(0, 1 << 20),
)
def test_what_is_promised_always_fits_in_the_budget(
    budget: int, weights: int, reserve: int, kv: int, aux: int, slots: int | None, ratio: float, limit: int | None
) -> None:
    limits = {"aux_slots": slots, "mamba_full_memory_ratio": ratio, "max_total_tokens": limit, "context_tokens": 2048}
    try:
        found = kv_pool(budget, weights, reserve, StateShape(kv, aux), **limits)  # type: ignore[arg-type]
    except CapacityError:
        return
    assert found.pool_bytes + weights + reserve <= budget
    assert found.kv_tokens >= 2
    assert limit is None or found.kv_tokens <= limit
    assert found.hybrid == (found.aux_slots is not None)
    assert slots is None or not found.hybrid or found.aux_slots == slots


@pytest.mark.parametrize("kind", KINDS)
def test_the_shape_of_every_tiny_model_is_that_computed_by_hand(kind: str, tmp_path: Path) -> None:
    assert profile.peek(make(kind, tmp_path / kind), dtype="float32").shape == SHAPES[kind]


def test_halves_need_half_the_cache(tmp_path: Path) -> None:
    folder = make("llama", tmp_path / "llama")
    assert profile.peek(folder, dtype="float16").shape.kv_bytes_per_token == SHAPES["llama"].kv_bytes_per_token // 2


@pytest.mark.parametrize("kind", KINDS)
def test_peeking_agrees_with_loading(kind: str, tmp_path: Path) -> None:
    folder = make(kind, tmp_path / kind)
    shape, weights_bytes, context_tokens = profile.peek(folder)
    loaded = loading.load(folder, trust_remote_code=False, dtype="auto", progress=lambda *_: None)
    assert (weights_bytes, context_tokens) == (loaded.weights_bytes, loaded.context_tokens)
    assert shape == profile.state_shape(loaded.model)


@pytest.mark.parametrize("kind", ["llama", "qwen3_next", "gemma3_text"])
def test_peeking_reads_no_weights(kind: str, tmp_path: Path) -> None:
    folder = make(kind, tmp_path / kind, vocab=8000, hidden_size=256, block_dim=256)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    peek = profile.peek(folder)
    assert peek.weights_bytes > 10_000_000
    assert mx.get_peak_memory() - before < 200_000


def test_the_reserve_grows_with_the_tokens_and_covers_the_logits(tmp_path: Path) -> None:
    folder = make("llama", tmp_path / "llama")
    model = loading.load(folder, trust_remote_code=False, dtype="float32", progress=lambda *_: None).model
    small, large = (profile.measure_reserve(model, tokens) for tokens in (16, 256))
    assert large > small > 0
    assert large >= 256 * 512 * 4
    assert large < 100 * 256 * 512 * 4


def test_each_kind_of_cache_is_counted_for_what_it_holds() -> None:
    def filled(cache: Any) -> Any:
        cache.update_and_fetch(mx.zeros((1, 2, 3, 64)), mx.zeros((1, 2, 3, 32)))
        return cache

    state: Any = ArraysCache(2)
    state[0] = mx.zeros((1, 3, 10))
    per_token = 2 * (64 + 32) * 4
    assert profile._cache_shape(filled(KVCache())) == StateShape(per_token, 0)
    assert profile._cache_shape(filled(RotatingKVCache(max_size=8))) == StateShape(per_token, 0)
    assert profile._cache_shape(state) == StateShape(0, 120)
    quantised = QuantizedKVCache(group_size=32, bits=8)
    assert profile._cache_shape(filled(quantised)) == StateShape(2 * (96 + 3 * 4 + 3 * 4), 0)
    assert profile._cache_shape(KVCache()) == StateShape(0, 0)


def test_an_unknown_cache_is_refused_by_name_before_the_model_meets_it() -> None:
    class Strange:
        pass

    def model(*_: Any, **__: Any) -> None:
        pytest.fail("the model ran")

    with pytest.raises(ModelError, match="Strange"):
        profile.state_shape(model, lambda: [KVCache(), Strange()])


@pytest.mark.parametrize("cache", [lambda: ChunkedKVCache(8), ConcatenateKVCache, lambda: RotatingKVCache(8, keep=4)])
def test_caches_that_do_not_batch_are_counted_by_the_token_too(cache: Any, tmp_path: Path) -> None:
    model = loading.open_model(make("llama", tmp_path / "m"), trust_remote_code=False, dtype="float32")[0]
    assert profile.state_shape(model, lambda: [cache() for _ in range(2)]) == SHAPES["llama"]


# 32 numbers of so many bits, and a float32 scale and bias: instead of 32 x 4 bytes.
QUANTIZED_GROUP_BYTES = {4: 16 + 8, 8: 32 + 8}


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_keys_and_values_are_counted_with_their_scales(bits: int, tmp_path: Path) -> None:
    folder = make("llama", tmp_path / "llama", hidden_size=128)
    shape = profile.peek(folder, dtype="float32", kv_bits=bits).shape
    assert shape == StateShape(2 * (2 * 2 * QUANTIZED_GROUP_BYTES[bits]), 0)


def test_quantising_makes_keys_and_values_smaller_and_state_stays(tmp_path: Path) -> None:
    folder = make("qwen3_next", tmp_path / "m", head_dim=32)
    plain, quantized = (profile.peek(folder, dtype="float32", kv_bits=bits).shape for bits in (None, 8))
    assert quantized.aux_bytes_per_slot == plain.aux_bytes_per_slot == SHAPES["qwen3_next"].aux_bytes_per_slot
    assert quantized.kv_bytes_per_token * 128 == plain.kv_bytes_per_token * QUANTIZED_GROUP_BYTES[8]
    model = loading.open_model(folder, trust_remote_code=False, dtype="float32")[0]
    assert profile.state_shape(model, caches.maker(model, 8)) == quantized


def test_peeking_refuses_bits_that_the_model_cannot_use(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="--kv-bits 8 cannot be used with this model"):
        profile.peek(make("llama", tmp_path / "narrow"), kv_bits=8)


def test_the_budget_is_a_part_of_the_working_set_shared_by_ranks() -> None:
    whole = profile.working_set_bytes()
    assert whole > 1 << 28
    assert profile.budget(0.5, 2) == int(whole * 0.5) // 2
    with pytest.raises(CapacityError, match=r"mem-fraction-static 1\.5"):
        profile.budget(1.5)


def test_sizes_read_as_a_person_would_write_them() -> None:
    assert [profile.size(n) for n in (10, 2048, 3 << 20, 3 << 29, 2000 << 30)] == [
        "10 bytes", "2.0 KiB", "3.0 MiB", "1.5 GiB", "2000.0 GiB",
    ]  # fmt: skip
