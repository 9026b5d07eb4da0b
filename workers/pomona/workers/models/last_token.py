"""Logits of the last token only: a prompt chunk's other logits are read by nobody, and cost a tenth of the chunk.

mlx-lm's models end in an output layer, `lm_head` or the embedding used backwards (`as_linear`). Its class is replaced
by a subclass that looks at the last token; weights, quantisation and everything else about the layer stay as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)


def only_last_token(model: Any) -> bool:
    """Make the model compute logits [batch, 1, vocab]; False, and nothing changed, where that is not possible."""
    layers = [
        (module, "__call__" if name.endswith("lm_head") else "as_linear")
        for name, module in model.named_modules()
        if name.endswith("lm_head") or hasattr(module, "as_linear")
    ]
    classes = [type(layer) for layer, _ in layers]
    for layer, method in layers:
        layer.__class__ = _narrowed(type(layer), method)
    if _says_one_token(model):
        return True
    for (layer, _), original in zip(layers, classes, strict=True):
        layer.__class__ = original
    log.info("every token's logits are computed in prompts: this model's output layer is not known")
    return False


def _narrowed(kind: type, method: str) -> type:
    whole: Callable[[Any, Any], Any] = getattr(kind, method)

    def last(self: Any, x: Any) -> Any:
        return whole(self, x[:, -1:])

    return type(f"LastToken{kind.__name__}", (kind,), {method: last})


def _says_one_token(model: Any) -> bool:
    """From the shape of a pass that is never evaluated."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    try:
        logits = model(mx.zeros((1, 3), dtype=mx.int32), cache=make_prompt_cache(model))
    except Exception:  # whatever a model's code raises where it did not expect one token
        return False
    return bool(logits.shape[:2] == (1, 1))
