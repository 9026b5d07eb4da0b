"""Tiny random models, made on the spot: `from tiny import make`.

Each is a folder that mlx-lm loads, 64 wide, with a byte-level tokenizer that takes any text. The weights are random but
fixed by the seed, and large enough that greedy output wanders instead of repeating one token. The end token's logit is
always 0, so greedy output runs to its limit; for one that stops, pass `eos_token_id=` a token that the output has.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

START, END = "<|im_start|>", "<|im_end|>"
END_ID = 1
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '')"
    " + '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "head_dim": 16,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,  # transformers insists on heads * width == 2 * hidden_size
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 2},
    "qwen3_moe": _EXPERTS,
    "qwen3_next": _EXPERTS
    | {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "shared_expert_intermediate_size": 32,
        "partial_rotary_factor": 0.5,
        "full_attention_interval": 2,
    },
    "lfm2": {
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 128,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1, 3],
    },
    "mamba2": {
        "num_heads": 8,  # transformers insists on num_heads * head_dim == 2 * hidden_size
        "head_dim": 16,
        "state_size": 16,
        "intermediate_size": 128,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": [0.0, 100.0],
        "time_step_rank": 4,
    },
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 128, "head_dim": 16},
    "granitemoehybrid": _MAMBA
    | {
        "attention_bias": False,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 0.25,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "layer_types": ["mamba", "attention", "mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "intermediate_size": 32,
        "position_embedding_type": "rope",
    },
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 32, "sliding_window_pattern": 2},
}
KINDS = tuple(CONFIGS)


def make(kind: str, out: Path, *, seed: int = 0, vocab: int = 512, context: int = 512, **config: Any) -> Path:
    """Writes a tiny model of `kind` (see KINDS) to the folder `out` and returns it; `config` overrides entries."""
    full = _BASE | {"model_type": kind, "vocab_size": vocab, "max_position_embeddings": context}
    full |= CONFIGS[kind] | {"eos_token_id": END_ID, "bos_token_id": 0} | config
    out.mkdir(parents=True, exist_ok=True)
    _save_json(out / "config.json", full)
    _save_weights(full, out / "model.safetensors", seed)
    write_tokenizer(out, full["vocab_size"], full["max_position_embeddings"])
    return out


def write_tokenizer(out: Path, vocab: int, context: int) -> None:
    """A byte-level BPE of exactly `vocab` tokens: 2 specials, 256 bytes, and merges of letters."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, merges = vocabulary(vocab)
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (START, END)])
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": START,
        "eos_token": END,
        "pad_token": END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "chat_template": CHAT_TEMPLATE,
    }
    _save_json(out / "tokenizer_config.json", config)


def vocabulary(size: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens in order of their ids, and the merges that make those beyond the bytes."""
    from tokenizers import pre_tokenizers

    base = [START, END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    if size < len(base):
        raise ValueError(f"a byte-level vocabulary has at least {len(base)} tokens, not {size}")
    letters = "Ġetaoinshrdlucmfwypvbgkjqxz"
    pairs = list(itertools.product(letters, letters[1:]))
    triples = ((first + second, third) for (first, second), third in itertools.product(pairs, letters[1:]))
    merges = list(itertools.islice(itertools.chain(pairs, triples), size - len(base)))
    return base + [left + right for left, right in merges], merges


def _save_weights(config: dict[str, Any], file: Path, seed: int) -> None:
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.utils import _get_classes

    model_class, arguments_class = _get_classes(config)
    model = model_class(arguments_class.from_dict(config))
    named = tree_flatten(model.parameters())
    keys = mx.random.split(mx.random.key(seed), len(named))
    weights = {name: _random(name, array, key) for (name, array), key in zip(named, keys, strict=True)}
    output = next((name for name in weights if name.startswith("lm_head")), None) or _embedding(weights)
    weights[output][END_ID] = 0.0
    mx.save_safetensors(str(file), weights, {"format": "mlx"})


def _embedding(weights: dict[str, Any]) -> str:
    return next(name for name in weights if "embed" in name)


def _random(name: str, array: Any, key: Any) -> Any:
    """Embeddings of deviation 1; matrices that double what goes in; norms and state constants as they were."""
    import mlx.core as mx

    if name.endswith("A_log"):
        return mx.log(mx.random.uniform(1.0, 8.0, array.shape, key=key))
    if array.ndim < 2:
        return 0.1 * mx.random.normal(array.shape, key=key) if name.endswith("bias") and "dt_" not in name else array
    scale = 1.0 if "embed" in name else 2.0 / array.shape[-1] ** 0.5
    if "conv" in name and array.ndim == 3:
        scale = 1.0 / array.shape[1] ** 0.5
    return scale * mx.random.normal(array.shape, key=key)


def _save_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
