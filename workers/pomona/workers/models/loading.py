"""From a model folder to weights in memory, a layer at a time.

mlx and mlx-lm are imported inside the functions: only a worker process, with its environment set, may import them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from ..errors import ModelError

log = logging.getLogger(__name__)

DTYPES = ("auto", "float32", "bfloat16", "float16")

# What a config without any length is given: models that old were trained on 2,048 to 8,192 tokens.
DEFAULT_CONTEXT_TOKENS = 8192

_CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "max_context_length",
    "model_max_length",
    "seq_length",
    "n_ctx",
)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run: `tokenizer` is mlx-lm's TokenizerWrapper, `weights_bytes` what the parameters hold."""

    model: Any
    tokenizer: Any
    config: dict[str, Any]
    weights_bytes: int
    context_tokens: int


def load(
    source_path: Path, *, trust_remote_code: bool, dtype: str, progress: Callable[[int, int], None]
) -> LoadedModel:
    """Loads model and tokenizer, calling `progress(done_bytes, total_bytes)` after each layer.

    `dtype` is "auto" or a float type that unquantised weights are cast to. "auto" keeps them as they are on a GPU
    and casts halves to float32 on a CPU, where that is 2 to 4 times faster. Quantised weights stay quantised.
    Raises ModelError when the folder cannot be loaded.
    """
    model, config = open_model(source_path, trust_remote_code=trust_remote_code, dtype=dtype)
    tokenizer = open_tokenizer(source_path, config, trust_remote_code=trust_remote_code)
    _warn_if_slow(model, source_path)
    weights_bytes = _read_weights(model, progress)
    return LoadedModel(model, tokenizer, config, weights_bytes, context_tokens(config))


def open_model(source_path: Path, *, trust_remote_code: bool, dtype: str) -> tuple[Any, dict[str, Any]]:
    """The model with lazy weights, cast as `load` promises, and its config; no weight is read."""
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not known; use one of {', '.join(DTYPES)}.")
    from mlx_lm.utils import load_model

    try:
        model, config = load_model(source_path, lazy=True, trust_remote_code=trust_remote_code)
    # What mlx-lm raises for a config or weights that do not fit its model code.
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as exc:
        raise ModelError(f"{source_path} cannot be loaded by mlx-lm: {sentence(exc)}") from exc
    cast(model, dtype)
    return model, config


def open_tokenizer(source_path: Path, config: dict[str, Any], *, trust_remote_code: bool) -> Any:
    """The folder's tokenizer; its code is run only with `trust_remote_code`. Raises ModelError."""
    from mlx_lm.utils import load_tokenizer

    extra = {"trust_remote_code": trust_remote_code}  # always said: left out, parts of mlx-lm take it for granted
    try:
        return load_tokenizer(source_path, extra, eos_token_ids=config.get("eos_token_id"))
    # transformers raises whatever its tokenizer classes raise; all of it means that this folder has no usable one.
    except Exception as exc:
        raise ModelError(f"{source_path} has a tokenizer that cannot be loaded: {sentence(exc)}") from exc


def context_tokens(config: dict[str, Any]) -> int:
    """The longest context the config allows, in tokens; of a nested text model when the outer level has none."""
    for level in (config, config.get("text_config"), config.get("language_config"), config.get("llm_config")):
        named = level if isinstance(level, dict) else {}
        for key in _CONTEXT_KEYS:
            value = named.get(key)
            if isinstance(value, int) and value > 0:
                return value
    return DEFAULT_CONTEXT_TOKENS


def weights_bytes(model: Any) -> int:
    """What the parameters hold once evaluated, from shapes and types alone."""
    from mlx.utils import tree_flatten

    return sum(int(array.nbytes) for _, array in tree_flatten(model.parameters()))


def on_cpu() -> bool:
    """Whether MLX computes on the CPU here."""
    import mlx.core as mx

    return bool(mx.default_device().type == mx.cpu)


def is_quantized(model: Any) -> bool:
    """Whether any layer of the model holds packed weights."""
    return any(hasattr(module, "bits") for module in model.modules())


def cast(model: Any, dtype: str) -> None:
    """Casts floating parameters outside quantised layers, lazily; those the model wants kept stay as they are."""
    import mlx.core as mx
    from mlx.utils import tree_map_with_path

    if dtype == "auto" and (is_quantized(model) or not on_cpu()):
        return
    target = mx.float32 if dtype == "auto" else getattr(mx, dtype)
    packed = tuple(f"{name}." for name, module in model.named_modules() if hasattr(module, "bits"))
    wanted = getattr(model, "cast_predicate", lambda _: True)

    def one(name: str, array: Any) -> Any:
        keep = name.startswith(packed) or not mx.issubdtype(array.dtype, mx.floating)
        return array if keep or not (wanted(name) or target == mx.float32) else array.astype(target)

    model.update(tree_map_with_path(one, model.parameters()))


def _read_weights(model: Any, progress: Callable[[int, int], None]) -> int:
    """Evaluates the parameters layer by layer, so that memory holds each once and progress can be seen."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    total, done = weights_bytes(model), 0
    progress(0, total)
    for _, layer in groupby(tree_flatten(model.parameters()), key=lambda item: _layer(item[0])):
        arrays = [array for _, array in layer]
        mx.eval(arrays)
        done += sum(int(array.nbytes) for array in arrays)
        progress(done, total)
    mx.clear_cache()
    return total


def _layer(name: str) -> tuple[str, ...]:
    """`model.layers.3.mlp.up.weight` -> (model, layers, 3): the name up to its first number, or all but the end."""
    parts = name.split(".")
    end = next((i + 1 for i, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return tuple(parts[:end])


def _warn_if_slow(model: Any, name: object) -> None:
    if on_cpu() and is_quantized(model):
        log.warning(
            "%s is quantised and MLX runs on the CPU here, where that is unusably slow (under one token a second); "
            "use a float32 model.",
            name,
        )


def sentence(error: Exception) -> str:
    """The error's text on one line, cut to a length that a person reads."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = f"missing {text}" if isinstance(error, KeyError) else text
    return f"{text[:300]}…" if len(text) > 300 else text.rstrip(".") + "."
