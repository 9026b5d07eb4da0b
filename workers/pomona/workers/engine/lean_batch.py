"""A generation batch that works over the vocabulary only for those who need it.

mlx-lm normalises every row of every step (a log-sum-exp over the vocabulary) whether or not anyone reads it; where all
rows are greedy, an argmax of the logits is the same token.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationBatch
from mlx_lm.sample_utils import greedy_sampler


def greedy_with_logprobs(logprobs: Any) -> Any:
    """As greedy_sampler, for rows whose log probabilities are read: another function, so that steps are normalised."""
    return greedy_sampler(logprobs)


class LeanBatch(GenerationBatch):  # type: ignore[misc]  # mlx-lm is untyped
    """Greedy steps without log probabilities; any other step is mlx-lm's own."""

    _next_tokens: Any
    _next_logprobs: list[Any]

    def _step(self) -> tuple[list[int], list[Any]]:
        if not all(sampler is greedy_sampler for sampler in self.samplers) or any(self.logits_processors):
            return super()._step()  # type: ignore[no-any-return]
        inputs, logprobs = self._next_tokens, self._next_logprobs
        self._current_tokens, self._current_logprobs = inputs, logprobs
        logits = self.model(inputs[:, None], cache=self.prompt_cache)
        self._next_tokens = mx.argmax(logits[:, -1, :], axis=-1)
        self._next_logprobs = [_UNREAD] * len(self.uids)
        # The next step computes while this one's tokens are read and turned into text.
        mx.async_eval(self._next_tokens)  # type: ignore[no-untyped-call]
        tokens: list[int] = inputs.tolist()
        for held, token in zip(self.tokens, tokens, strict=True):
            held.append(token)
        return tokens, logprobs


_UNREAD = mx.array(0.0)
