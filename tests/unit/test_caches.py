"""Quantised keys and values: which caches become so, which models refuse, and the same tokens as mlx-lm one by one."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from pomona.workers.engine.base import Admitted, Chunk, EngineRequest, StepPlan, TokenOut
from pomona.workers.engine.rows import unbatchable
from pomona.workers.engine.runner import ModelRunner
from pomona.workers.errors import OperatorError
from pomona.workers.models import caches, loading
from tiny import make

Opener = Callable[..., Any]

# head_dim 32 is the least that mlx-lm can quantise; llama's follows from its width.
WIDE = {
    "llama": {"hidden_size": 128},
    "qwen3_moe": {"head_dim": 32},
    "qwen3_next": {"head_dim": 32},
    "falcon_h1": {"head_dim": 32},
    "gemma3_text": {"head_dim": 32, "query_pre_attn_scalar": 32},
}


@pytest.fixture
def opened(tmp_path: Path) -> Opener:
    """`opened(kind, **config)` is a tiny model, its weights not read yet."""

    def open_one(kind: str, **config: Any) -> Any:
        folder = make(kind, tmp_path / kind, **config)
        return loading.open_model(folder, trust_remote_code=False, dtype="float32")[0]

    return open_one


def described(made: list[Any]) -> list[Any]:
    """Each cache as the name of its class, quantised ones as (group size, bits)."""
    return [(c.group_size, c.bits) if type(c) is QuantizedKVCache else type(c).__name__ for c in caches.flatten(made)]


def attention(keys: int, values: int, *, decode_fails: bool = False) -> Any:
    """A model of one attention layer with keys and values of these widths."""

    def forward(tokens: Any, cache: list[Any]) -> Any:
        length = tokens.shape[1]
        if decode_fails and length == 1 and hasattr(cache[0], "bits"):
            raise TypeError("tuple")
        queries = mx.ones((1, 2, length, keys))
        k, v = cache[0].update_and_fetch(queries, mx.ones((1, 2, length, values)))
        return scaled_dot_product_attention(queries, k, v, cache[0], 1.0, None)

    forward.make_cache = lambda: [KVCache()]  # type: ignore[attr-defined]
    return forward


def from_config(kind: str, **config: Any) -> Any:
    """A model that tests/tiny.py does not know, with weights as they are made."""
    module = import_module(f"mlx_lm.models.{kind}")
    small = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-5,
    }
    return module.Model(module.ModelArgs.from_dict({"model_type": kind} | small | heads | config))


def with_sinks() -> Any:
    return from_config("gpt_oss", num_local_experts=2, num_experts_per_tok=1, sliding_window=16, rope_scaling=None)


def with_latent_attention() -> Any:
    heads = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
    return from_config("deepseek_v3", first_k_dense_replace=2, **heads)


def refusal(model: Any, bits: int = 8) -> str:
    with pytest.raises(OperatorError) as caught:
        caches.maker(model, bits)
    return str(caught.value)


def test_without_bits_the_caches_are_mlx_lms_own(opened: Opener) -> None:
    assert described(caches.maker(opened("qwen3_next"))()) == ["ArraysCache", "KVCache", "ArraysCache", "KVCache"]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("width", "group"), [(32, 32), (64, 64), (96, 32), (128, 64)])
def test_a_group_is_the_largest_that_divides_the_width(opened: Opener, bits: int, width: int, group: int) -> None:
    made = caches.maker(opened("llama", head_dim=width), bits)()
    assert described(made) == [(group, bits)] * 2


@pytest.mark.parametrize(("keys", "values", "group"), [(64, 128, 64), (64, 32, 32), (96, 64, 32)])
def test_a_group_divides_both_keys_and_values(keys: int, values: int, group: int) -> None:
    assert described(caches.maker(attention(keys, values), 8)()) == [(group, 8)]


def test_sliding_windows_and_states_stay_as_they_are(opened: Opener) -> None:
    quantized = (32, 8)
    gemma = caches.maker(opened("gemma3_text", **WIDE["gemma3_text"]), 8)()
    assert described(gemma) == ["RotatingKVCache", quantized] * 2
    hybrid = caches.maker(opened("qwen3_next", **WIDE["qwen3_next"]), 8)()
    assert described(hybrid) == ["ArraysCache", quantized] * 2


def test_caches_inside_a_list_are_quantised_there(opened: Opener) -> None:
    made = caches.maker(opened("falcon_h1", **WIDE["falcon_h1"]), 4)()
    assert all(type(cache) is CacheList for cache in made)
    assert described(made) == ["ArraysCache", (32, 4)] * 4


def test_every_set_is_fresh(opened: Opener) -> None:
    model = opened("llama", hidden_size=128)
    make_caches = caches.maker(model, 8)
    caches.fill(model, make_caches())
    assert [cache.offset for cache in make_caches()] == [0, 0]


def test_trying_a_model_reads_no_weights(opened: Opener) -> None:
    model = opened("llama", vocab=8000, hidden_size=256)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    caches.maker(model, 8)
    assert mx.get_peak_memory() - before < 200_000


def test_heads_that_no_group_divides_are_refused_with_their_width(opened: Opener) -> None:
    text = refusal(opened("llama"))
    assert text.startswith("--kv-bits 8 cannot be used with this model: ")
    assert "keys and values are 16 and 16 wide" in text
    assert "64 and 48 wide" in refusal(attention(64, 48))
    assert "64 and 0 wide" in refusal(attention(64, 0))


def test_a_model_without_plain_keys_and_values_is_refused_with_what_it_has(opened: Opener) -> None:
    assert "keeps its context in ArraysCache, which mlx-lm cannot quantise" in refusal(opened("mamba2"), 4)


def test_attention_sinks_are_refused_in_mlx_lms_words() -> None:
    assert "(Quantized SDPA does not support attention sinks)" in refusal(with_sinks())


@pytest.mark.parametrize("model", [with_latent_attention, lambda: attention(64, 64, decode_fails=True)])
def test_attention_that_reads_keys_itself_is_refused_in_one_sentence(model: Callable[[], Any]) -> None:
    text = refusal(model(), 4)
    assert text == (
        "--kv-bits 4 cannot be used with this model: mlx-lm computes its attention on plain keys and values only; "
        "leave the flag out."
    )


def test_flattening_opens_lists_of_caches_in_their_place() -> None:
    state, window = ArraysCache(2), RotatingKVCache(max_size=8)
    found = caches.flatten([CacheList(state, CacheList(window)), state])
    assert list(found) == [state, window, state]


class Driver:
    """A runner and the answers it has given so far."""

    def __init__(self, model: Any, make_caches: Callable[[], list[Any]]) -> None:
        self._runner = ModelRunner(model, make_caches, eos=(), vocab_size=512)
        self.answers: dict[str, list[TokenOut]] = {}

    def step(self, **plan: Any) -> None:
        result = self._runner.step(StepPlan(cache_tokens=400, cache_slots=8, **plan))
        assert not result.failed
        for out in result.tokens:
            self.answers.setdefault(out.request_id, []).append(out)

    def answer(self, prompts: dict[str, list[int]], tokens: int) -> dict[str, list[int]]:
        """Greedy answers; each prompt starts a step after the one before, so that rows of unequal length join."""
        admitted = [Admitted(EngineRequest(name, tuple(p), max_tokens=tokens), tokens) for name, p in prompts.items()]
        for one in admitted:
            # In two chunks: the second meets quantised keys of the first.
            self.step(start=(one,), prefill=(Chunk(one.request.request_id, 7),))
            self.step(prefill=(Chunk(one.request.request_id, 512),))
        for _ in range(tokens):
            self.step()
        return {name: [out.token for out in self.answers[name]] for name in prompts}


def one_by_one(model: Any, make_caches: Callable[[], list[Any]], prompt: list[int], tokens: int) -> list[int]:
    """mlx-lm's own greedy answer with quantised caches of the same kind."""
    steps = generate_step(mx.array(prompt), model, max_tokens=tokens, prompt_cache=make_caches())
    return [int(token) for token, _ in steps]


def prompt(length: int, seed: int) -> list[int]:
    return [2 + (seed * 31 + i * 17) % 500 for i in range(length)]


@pytest.mark.parametrize(("kind", "bits"), [("llama", 4), *((kind, 8) for kind in WIDE)])
def test_greedy_answers_with_quantised_caches_are_mlx_lms(opened: Opener, kind: str, bits: int) -> None:
    model = opened(kind, **WIDE[kind])
    make_caches = caches.maker(model, bits)
    prompts = {f"r{i}": prompt(length, i) for i, length in enumerate((9, 40, 23))}
    wanted = {name: one_by_one(model, make_caches, p, 16) for name, p in prompts.items()}
    assert Driver(model, make_caches).answer(prompts, 16) == wanted


@pytest.mark.parametrize(
    "cache", [ConcatenateKVCache, lambda: ChunkedKVCache(512), lambda: RotatingKVCache(64, keep=4)]
)
def test_caches_that_do_not_batch_are_served_one_request_at_a_time(opened: Opener, cache: Callable[[], Any]) -> None:
    model = opened("llama")

    def make_caches() -> list[Any]:
        return [cache() for _ in model.layers]

    assert unbatchable(make_caches())
    prompts = {"a": prompt(9, 1), "b": prompt(30, 2)}
    wanted = {name: one_by_one(model, make_caches, p, 8) for name, p in prompts.items()}
    assert Driver(model, make_caches).answer(prompts, 8) == wanted


def test_a_reused_beginning_stays_quantised_and_changes_no_token(opened: Opener) -> None:
    model = opened("llama", hidden_size=128)
    make_caches = caches.maker(model, 8)
    driver = Driver(model, make_caches)
    driver.answer({"first": prompt(40, 1)}, 4)
    longer = prompt(40, 1) + prompt(12, 2)
    assert driver.answer({"second": longer}, 12)["second"] == one_by_one(model, make_caches, longer, 12)
    assert driver.answers["second"][0].cached_tokens == 40


def test_quantising_changes_what_is_kept_and_little_of_what_comes_out(opened: Opener) -> None:
    model = opened("llama", hidden_size=128)
    tokens = mx.array([prompt(30, 3)])
    plain, quantized = (model(tokens, cache=caches.maker(model, bits)()) for bits in (None, 8))
    difference = mx.abs(plain - quantized).max().item()
    assert 0 < difference < 0.1 * mx.abs(plain).max().item()
