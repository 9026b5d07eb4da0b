"""From GGUF tensors of the llama architecture to mlx-lm's weights, as lazy arrays.

MLX keeps Q4_0, Q4_1 and Q8_0 as its own affine quantisation in groups of 32 (`X.weight`, `X.scales`, `X.biases`)
and reads every other GGUF type as float16.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import chain
from typing import Any

from ..errors import ModelError
from .gguf_config import Heads

GROUP_SIZE = 32

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|scales|biases)")


def rename(name: str) -> str:
    """`blk.3.attn_q.scales` -> `model.layers.3.self_attn.q_proj.scales`; ModelError for a tensor we do not know."""
    match = _NAME.fullmatch(name)
    if match is not None:
        layer, part, suffix = match.groups()
        target = _TOP.get(part) if layer is None else _BLOCK.get(part)
        if target is not None:
            return f"{target}.{suffix}" if layer is None else f"model.layers.{layer}.{target}.{suffix}"
    raise ModelError(f"This GGUF has a tensor {name!r} that mlx-lm's llama has no place for; use safetensors instead.")


def check_complete(tensors: dict[str, Any], layers: int) -> None:
    """ModelError naming the first tensor that a llama of `layers` layers needs and the file lacks."""
    blocks = (f"blk.{layer}.{part}.weight" for layer in range(layers) for part in _BLOCK)
    missing = next(
        (name for name in chain(("token_embd.weight", "output_norm.weight"), blocks) if name not in tensors), None
    )
    if missing is not None:
        raise ModelError(
            f"This GGUF has no tensor {missing}: it is one part of several, or incomplete; give a file that holds all."
        )


def convert_tensors(tensors: dict[str, Any], layout: Heads, dtype: str) -> dict[str, Any]:
    """All weights under mlx-lm's names, rope rows restored; dequantised to `dtype` unless that is `"quantized"`."""
    weights = {rename(name): _restore(name, array, layout) for name, array in tensors.items()}
    return _to_half(weights) if dtype == "quantized" else _dequantize(weights, dtype)


def quantization(weights: dict[str, Any]) -> dict[str, Any] | None:
    """mlx-lm's `quantization` entry: the commonest number of bits, and an entry for each layer that differs."""
    layers = {name.removesuffix(".scales"): _bits(weights, name) for name in weights if name.endswith(".scales")}
    if not layers:
        return None
    usual = Counter(layers.values()).most_common(1)[0][0]
    others = {layer: {"group_size": GROUP_SIZE, "bits": bits} for layer, bits in layers.items() if bits != usual}
    return {"group_size": GROUP_SIZE, "bits": usual, **others}


def _restore(name: str, array: Any, layout: Heads) -> Any:
    """Undoes the row order that GGUF gives q and k in each head: [dim/2, 2] pairs back to [2, dim/2] halves.

    Rows are whole in weights, scales and biases alike, so the same move is right for all three.
    """
    count = {"attn_q": layout.query, "attn_k": layout.key_value}.get(name.split(".")[-2])
    if count is None:
        return array
    if array.shape[0] != count * layout.dim:
        raise ModelError(f"{name} has {array.shape[0]} rows but {count} heads of {layout.dim} were announced.")
    pairs = array.reshape(count, layout.dim // 2, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def _to_half(weights: dict[str, Any]) -> dict[str, Any]:
    import mlx.core as mx

    return {n: w.astype(mx.float16) if mx.issubdtype(w.dtype, mx.floating) else w for n, w in weights.items()}


def _dequantize(weights: dict[str, Any], dtype: str) -> dict[str, Any]:
    import mlx.core as mx

    target = getattr(mx, dtype)
    plain = {}
    for name, packed in weights.items():
        base = name.removesuffix(".weight")
        if not name.endswith(".weight"):
            continue
        array = packed
        if f"{base}.scales" in weights:
            # In float32, since the GGUF scales are float16 and their products are not.
            scales, biases = (weights[f"{base}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
            array = mx.dequantize(packed, scales, biases, group_size=GROUP_SIZE, bits=_bits(weights, f"{base}.scales"))
        plain[name] = array.astype(target)
    return plain


def _bits(weights: dict[str, Any], scales: str) -> int:
    """Bits a value: a uint32 column holds 32 / bits values, a scales column stands for GROUP_SIZE of them."""
    packed = weights[scales.removesuffix(".scales") + ".weight"]
    return int(packed.shape[-1] * 32 // (weights[scales].shape[-1] * GROUP_SIZE))
