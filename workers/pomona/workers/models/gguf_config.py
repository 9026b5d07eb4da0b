"""From GGUF metadata of the llama architecture to the config.json that mlx-lm's llama reads. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import pi
from typing import Any

from ..errors import ModelError

Metadata = dict[str, Any]

# Texts that end a turn in the chat formats we know; llama.cpp treats the same ones as end of generation.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|end_of_text|>", "<|endoftext|>", "</s>")
_CONTROL = 3


@dataclass(frozen=True, slots=True)
class Heads:
    """The attention layout that the row permutation and the config share."""

    query: int
    key_value: int
    dim: int


def heads(metadata: Metadata) -> Heads:
    """The head counts and size; ModelError when mlx-lm's llama cannot express them."""
    query = _whole(metadata, "llama.attention.head_count")
    dim = _whole(metadata, "llama.attention.key_length", _whole(metadata, "llama.embedding_length") // query)
    if dim % 2:
        raise ModelError(f"Heads are {dim} wide in this GGUF, but rotary positions need an even width.")
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if _whole(metadata, key, dim) != dim:
            raise ModelError(f"{key} is {metadata[key]} but heads are {dim} wide, which mlx-lm's llama cannot express.")
    key_value = _whole(metadata, "llama.attention.head_count_kv", query)
    if query % key_value:
        raise ModelError(f"This GGUF has {query} heads over {key_value} key-value heads, which do not share evenly.")
    return Heads(query, key_value, dim)


def layer_count(metadata: Metadata) -> int:
    """How many blocks the metadata announces."""
    return _whole(metadata, "llama.block_count")


def model_config(metadata: Metadata, *, vocab: int, tied: bool, rope_factors: Sequence[float] | None) -> dict[str, Any]:
    """config.json for mlx-lm's llama; `rope_factors` are the values of `rope_freqs.weight`, [head_dim / 2]."""
    if _whole(metadata, "llama.expert_count", 0, least=0) > 0:
        raise ModelError("This GGUF is a mixture of experts (llama.expert_count), which is not supported as GGUF.")
    layout = heads(metadata)
    theta = _number(metadata, "llama.rope.freq_base", 10000.0)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _whole(metadata, "llama.embedding_length"),
        "num_hidden_layers": layer_count(metadata),
        "intermediate_size": _whole(metadata, "llama.feed_forward_length"),
        "num_attention_heads": layout.query,
        "num_key_value_heads": layout.key_value,
        "head_dim": layout.dim,
        "rms_norm_eps": _number(metadata, "llama.attention.layer_norm_rms_epsilon", 1e-5),
        "vocab_size": vocab,
        "max_position_embeddings": _whole(metadata, "llama.context_length"),
        "rope_theta": theta,
        "rope_traditional": False,
        "rope_scaling": rope_scaling(metadata) or llama3_scaling(rope_factors, theta, layout.dim),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
    }
    return config | _end_tokens(metadata)


def rope_scaling(metadata: Metadata) -> dict[str, Any] | None:
    """`llama.rope.scaling.*` as mlx-lm's rope_scaling; ModelError for a kind that it does not have."""
    kind = metadata.get("llama.rope.scaling.type", "none")
    factor = _number(metadata, "llama.rope.scaling.factor", _number(metadata, "llama.rope.scale_linear", 1.0))
    if "llama.rope.scale_linear" in metadata and kind == "none":
        kind = "linear"
    if kind == "none" or factor == 1.0:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = _whole(metadata, "llama.rope.scaling.original_context_length")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise ModelError(f"llama.rope.scaling.type is {kind!r}, but only linear and yarn are supported as GGUF.")


def llama3_scaling(factors: Sequence[float] | None, theta: float, dim: int) -> dict[str, Any] | None:
    """Recovers Llama 3's rope_scaling from the factors it was turned into; ModelError when they are not of that kind.

    GGUF keeps one divisor a frequency; mlx-lm computes them from four numbers. Llama 3.1 to 3.3 share three of the
    four, and the fourth is the largest divisor, so the guess can be checked exactly.
    """
    if factors is None or all(abs(f - 1.0) < 1e-6 for f in factors):
        return None
    factor = max(factors)
    expected = llama3_factors(theta, dim, factor)
    if len(expected) != len(factors) or any(abs(e - f) > 1e-3 * e for e, f in zip(expected, factors, strict=True)):
        raise ModelError("rope_freqs.weight does not follow Llama 3's rule, and mlx-lm cannot take it as it is.")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def llama3_factors(theta: float, dim: int, factor: float) -> list[float]:
    """The divisor of each of the `dim / 2` rope frequencies under Llama 3's rule (llama.cpp, convert_hf_to_gguf.py)."""
    return [_llama3_factor(2 * pi * theta ** (i / dim), factor) for i in range(0, dim, 2)]


def _llama3_factor(wavelength: float, factor: float) -> float:
    low, high, original = 1.0, 4.0, 8192
    if wavelength < original / high:
        return 1.0
    if wavelength > original / low:
        return factor
    smooth = (original / wavelength - low) / (high - low)
    return 1.0 / ((1.0 - smooth) / factor + smooth)


def _end_tokens(metadata: Metadata) -> dict[str, Any]:
    """bos and every id that ends a generation: eos, eot, eom, and control tokens known to end a turn."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    named = [f"tokenizer.ggml.{key}" for key in keys if f"tokenizer.ggml.{key}" in metadata]
    ends = [_whole(metadata, key, least=0) for key in named]
    tokens, types = metadata.get("tokenizer.ggml.tokens", []), metadata.get("tokenizer.ggml.token_type", [])
    ends += [i for i, (t, kind) in enumerate(zip(tokens, types, strict=False)) if kind == _CONTROL and t in _TURN_ENDS]
    found: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(ends))} if ends else {}
    bos = "tokenizer.ggml.bos_token_id"
    return found | {"bos_token_id": _whole(metadata, bos, least=0)} if bos in metadata else found


def _whole(metadata: Metadata, key: str, default: int | None = None, *, least: int = 1) -> int:
    value = metadata.get(key, default)
    if isinstance(value, list):
        raise ModelError(f"{key} differs from layer to layer in this GGUF, which mlx-lm's llama cannot express.")
    if value is None:
        raise ModelError(f"This GGUF has no {key}, which every llama model needs; fetch or convert the file again.")
    if not isinstance(value, int) or value < least:
        raise ModelError(f"{key} is {value!r} in this GGUF, which is no count; fetch or convert the file again.")
    return value


def _number(metadata: Metadata, key: str, default: float) -> float:
    value = metadata.get(key, default)
    if not isinstance(value, int | float):
        raise ModelError(f"{key} is {value!r} in this GGUF, which is no number; fetch or convert the file again.")
    return float(value)
