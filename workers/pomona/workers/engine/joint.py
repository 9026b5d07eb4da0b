"""Several prompts in one pass over the weights: what a model sees as one cache a layer is one of each prompt's.

The rows of such a pass are padded on the left, so that everybody's last token is in the last column. What the model
computes for padding is dropped before it reaches a cache. For models that keep nothing but plain keys and values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache

from .rows import leaves

log = logging.getLogger(__name__)

# What two prompts in a pass may differ by from each alone, in standard deviations of the logits: rounding, no more.
ROUNDING = 0.1


class Layout:
    """Where the tokens of a pass stand, for all layers: row i has `counts[i]` after the `before[i]` in its cache."""

    def __init__(self, before: Sequence[int], counts: Sequence[int]) -> None:
        self.width = max(counts)
        self.pads = [self.width - count for count in counts]
        ends = [held + count for held, count in zip(before, counts, strict=True)]
        self.columns = max(ends)
        self.unused = [self.columns - end for end in ends]
        self._before = list(before)
        self._masks: dict[int | None, Any] = {}

    @property
    def level(self) -> bool:
        return not any(self.pads) and not any(self.unused)

    def offset(self, ahead: int = 0) -> Any:
        """The position of each row's first column, or of the one `ahead`: an int where all are equal, else [rows]."""
        first = [held - pad + ahead for held, pad in zip(self._before, self.pads, strict=True)]
        return first[0] if len(set(first)) == 1 else mx.array(first)

    def mask(self, window_size: int | None) -> Any:
        """[rows, 1, width, columns] bool: the columns that each token sees. Padding sees all, so nothing is NaN."""
        if window_size not in self._masks:
            columns = mx.arange(self.columns)
            queries = mx.arange(self.columns - self.width, self.columns)[:, None]
            unused, pads = (mx.array(each)[:, None, None, None] for each in (self.unused, self.pads))
            seen = (columns <= queries) & (columns >= unused)
            if window_size is not None:
                seen = seen & (columns > queries - window_size)
            self._masks[window_size] = seen | (queries < self.columns - self.width + pads)
        return self._masks[window_size]


class JointKV:
    """One layer's keys and values of several prompts, for one pass."""

    def __init__(self, natives: Sequence[KVCache], layout: Layout) -> None:
        self._natives = natives
        self._layout = layout
        self.offset: Any = layout.offset()

    def make_mask(self, _: int, return_array: bool = False, window_size: int | None = None) -> Any:
        layout = self._layout
        if layout.level and not return_array and (window_size is None or window_size >= layout.columns):
            return "causal"
        return layout.mask(window_size)

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Write each row's own tokens to its cache; returns all rows' keys and values, ends aligned."""
        rows = zip(self._natives, self._layout.pads, self._layout.unused, strict=True)
        parts = [
            [
                _padded(plane, unused)
                for plane in native.update_and_fetch(keys[i : i + 1, :, p:], values[i : i + 1, :, p:])
            ]
            for i, (native, p, unused) in enumerate(rows)
        ]
        self.offset = self._layout.offset(self._layout.width)
        return mx.concatenate([k for k, _ in parts]), mx.concatenate([v for _, v in parts])


def _padded(plane: Any, columns: int) -> Any:
    return mx.pad(plane, [(0, 0), (0, 0), (columns, 0), (0, 0)]) if columns else plane


def run(model: Any, tokens: Sequence[Sequence[int]], caches: Sequence[Sequence[Any]]) -> Any:
    """Compute each prompt's next tokens into its caches; returns the last one's logits, [prompts, vocab] (lazy)."""
    if len(tokens) == 1:
        return model(mx.array([tokens[0]]), cache=caches[0])[:, -1, :]
    layout = Layout([next(leaves(held)).offset for held in caches], [len(each) for each in tokens])
    padded = [[0] * pad + list(each) for pad, each in zip(layout.pads, tokens, strict=True)]
    joined = [_join(layer, layout) for layer in zip(*caches, strict=True)]
    return model(mx.array(padded), cache=joined)[:, -1, :]


def _join(natives: Sequence[Any], layout: Layout) -> Any:
    if isinstance(natives[0], CacheList):
        return CacheList(*(_join(inner, layout) for inner in zip(*(n.caches for n in natives), strict=True)))
    return JointKV(natives, layout)


def possible(model: Any, make_caches: Callable[[], list[Any]]) -> bool:
    """Whether two prompts of unequal lengths and pasts give in one pass what each gives alone. Runs the model."""
    if any(type(leaf) is not KVCache for leaf in leaves(make_caches())):
        return False
    past, tokens = ([3, 1, 4], [1]), ([1, 5], [9, 2, 6, 5])
    try:
        alone = [run(model, [[*one, *other]], [make_caches()]) for one, other in zip(past, tokens, strict=True)]
        caches = [make_caches(), make_caches()]
        for one, held in zip(past, caches, strict=True):
            run(model, [one], [held])
        joint = run(model, tokens, caches)
        apart = mx.abs(joint - mx.concatenate(alone)).max() / mx.std(joint)
        exact = bool((apart <= ROUNDING).item())
    except Exception:  # whatever a model's code raises where it expects one prompt
        exact = False
    if not exact:
        log.info("prompts are computed one in a pass: this model cannot take several that are padded")
    return exact
