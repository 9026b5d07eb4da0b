"""The model that a GGUF file will be once converted, its shapes and types without its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import ModelError
from . import gguf
from .gguf_config import Metadata, layer_count
from .gguf_header import check_gguf, read_header
from .gguf_kinds import check_tensors, placeholders
from .gguf_tensors import check_complete


def skeleton(path: Path, dtype: str) -> tuple[Any, dict[str, Any]]:
    """The model and config that `gguf.convert` to `dtype` and `loading.open_model` would give, from the header alone.

    The parameters are lazy zeros: evaluating the model is of no use. Raises ModelError as `gguf.convert` does, but
    for what only the values of tensors and the tokenizer tell.
    """
    check_gguf(path)
    header = read_header(path)
    check_tensors(header, path)
    tensors = placeholders(header)
    check_complete(tensors, layer_count(header.metadata))
    tensors.pop("rope_freqs.weight", None)  # its values decide angles, not sizes
    try:
        return _model(tensors, header.metadata, dtype)
    # What mlx and mlx-lm raise for shapes and numbers that do not fit each other.
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, ArithmeticError) as exc:
        raise ModelError(f"{path} does not fit mlx-lm's llama ({exc}); fetch the file again.") from exc


def _model(tensors: dict[str, Any], metadata: Metadata, dtype: str) -> tuple[Any, dict[str, Any]]:
    """As `mlx_lm.utils.load_model` does it, which takes only a folder."""
    from mlx_lm.models.llama import Model, ModelArgs

    weights, config = gguf.weights_and_config(tensors, metadata, dtype)
    model = Model(ModelArgs.from_dict(config))
    if (packing := config.get("quantization")) is not None:
        _pack(model, weights, packing)
    model.load_weights(list(model.sanitize(weights).items()))
    return model, config


def _pack(model: Any, weights: dict[str, Any], packing: dict[str, Any]) -> None:
    """Gives the layers that come packed their packed form: the usual bits, or the layer's own entry."""
    from mlx import nn

    def wanted(name: str, module: Any) -> Any:
        return packing.get(name) or (hasattr(module, "to_quantized") and f"{name}.scales" in weights)

    nn.quantize(model, group_size=packing["group_size"], bits=packing["bits"], class_predicate=wanted)
