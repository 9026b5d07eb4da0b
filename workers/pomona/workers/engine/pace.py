"""How many prompt tokens the next step may compute, from what the last steps took. Pure: no clock of its own."""

from __future__ import annotations

import math

from .base import StepTimes

MIN_CHUNK_TOKENS = 16  # fewer cost nearly as much as these: a pass over the weights
CAUTIOUS_TOKENS = 64  # a step's prompt tokens while nothing has been measured
SMOOTHING = 0.25  # how much of a new sample goes into the average
FORGETTING = 0.9  # how much an old chunk still tells when the next is known
MARGIN = 0.9  # of the time there is: steps vary
# A chunk is worth its pass over the weights when its tokens cost at least so many times that pass.
WORTH_PASSES = 2.0


class Pace:
    """Keeps steps short while somebody watches tokens arrive, and long while nobody does.

    No running stream waits longer than about `max_step_s` for a step, while that leaves time for a chunk that is worth
    its pass over the weights; where it does not, such a chunk is what prompts get, so that they still come forward
    (a step is then decoding and about three passes). `chunk_tokens` is the operator's cap.

    A chunk's seconds are modelled as `pass_s + tokens * token_s`, fitted to the chunks seen.
    """

    def __init__(self, max_step_s: float, chunk_tokens: int) -> None:
        if max_step_s <= 0 or chunk_tokens < 1:
            raise ValueError(f"a step of {max_step_s} s and {chunk_tokens} prompt tokens does nothing")
        self._max_step_s = max_step_s
        self._chunk_tokens = chunk_tokens
        # Weighted sums over the chunks seen: 1, tokens, tokens squared, seconds, tokens * seconds.
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)
        self._decode_s: float | None = None

    def observe(self, times: StepTimes, prompt_tokens: int, decoding: int, chunks: int = 1) -> None:
        """A step took `times`, computed `prompt_tokens` in so many chunks and decoded `decoding` rows."""
        if prompt_tokens > 0 and times.prefill_s > 0:
            tokens, seconds = prompt_tokens / max(1, chunks), times.prefill_s / max(1, chunks)
            new = (1.0, tokens, tokens * tokens, seconds, tokens * seconds)
            self._sums = tuple(FORGETTING * old + more for old, more in zip(self._sums, new, strict=True))  # type: ignore[assignment]
        # What many rows took says nothing about the few that come after them.
        self._decode_s = _smooth(self._decode_s, times.decode_s) if decoding else None

    def budget(self, streams: bool, prompts: int) -> int:
        """Prompt tokens for the next step, in which `streams` says whether rows decode; at least 1."""
        if not streams:
            return self._chunk_tokens
        if not self._sums[0]:
            return min(CAUTIOUS_TOKENS, self._chunk_tokens)
        pass_s, token_s = self._chunk_cost()
        left_s = (self._max_step_s - (self._decode_s or 0.0)) * MARGIN - pass_s
        tokens = max(math.floor(left_s / token_s), math.ceil(WORTH_PASSES * pass_s / token_s), MIN_CHUNK_TOKENS)
        return min(tokens, self._chunk_tokens)

    def _chunk_cost(self) -> tuple[float, float]:
        """(pass_s, token_s), neither below zero."""
        n, t, tt, s, ts = self._sums
        spread = n * tt - t * t
        # Chunks of about one size do not tell the two apart: then half of their time counts as the pass.
        if spread < 0.01 * n * tt:
            return s / n / 2, s / t / 2
        token_s = (n * ts - t * s) / spread
        pass_s = (s - token_s * t) / n
        if token_s <= 0:
            return s / n / 2, s / t / 2
        return (pass_s, token_s) if pass_s >= 0 else (0.0, ts / tt)


def _smooth(average: float | None, sample: float) -> float:
    return sample if average is None else average + SMOOTHING * (sample - average)
