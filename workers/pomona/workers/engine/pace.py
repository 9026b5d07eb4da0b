"""How many prompt tokens the next step may compute, from what the last steps took. Pure: no clock of its own."""

from __future__ import annotations

import math

from .base import StepTimes

MIN_CHUNK_TOKENS = 16  # one prompt's share of a step, where several want one
CAUTIOUS_TOKENS = 64  # a step's prompt tokens while nothing has been measured
# A chunk is worth the pass over the weights that it needs when it takes so many times that pass.
WORTH_PASSES = 10
SMOOTHING = 0.25  # how much of a new sample goes into the average
FORGETTING = 0.8  # how much a chunk still tells when the next is known
MARGIN = 0.9  # of the time there is: steps vary


class Pace:
    """Keeps steps short while somebody watches tokens arrive, and long while nobody does.

    No running stream waits longer than about `max_step_s` for a step. Where decoding leaves less of that than a chunk
    needs to be worth its pass over the weights, such a chunk is computed all the same: prompts come forward, at a price
    that pays. `chunk_tokens` is the operator's cap.
    """

    def __init__(self, max_step_s: float, chunk_tokens: int) -> None:
        if max_step_s <= 0 or chunk_tokens < 1:
            raise ValueError(f"a step of {max_step_s} s and {chunk_tokens} prompt tokens does nothing")
        self._max_step_s = max_step_s
        self._chunk_tokens = chunk_tokens
        # Prompt tokens and what they took, of the last steps that had any.
        self._tokens = self._seconds = 0.0
        self._decode_s: float | None = None
        self._pass_s = 0.0

    def observe(self, times: StepTimes, prompt_tokens: int, decoding: int) -> None:
        """A step took `times`, computed `prompt_tokens` and decoded `decoding` rows."""
        self._pass_s = times.pass_s or self._pass_s
        if prompt_tokens > 0 and times.prefill_s > 0:
            self._tokens = FORGETTING * self._tokens + prompt_tokens
            self._seconds = FORGETTING * self._seconds + times.prefill_s
        # What many rows took says nothing about the few that come after them.
        self._decode_s = _smooth(self._decode_s, times.decode_s) if decoding else None

    def budget(self, streams: bool) -> int:
        """Prompt tokens for the next step, in which `streams` says whether rows decode; at least 1."""
        if not streams:
            return self._chunk_tokens
        if not self._seconds:
            return min(CAUTIOUS_TOKENS, self._chunk_tokens)
        left_s = max((self._max_step_s - (self._decode_s or 0.0)) * MARGIN, WORTH_PASSES * self._pass_s)
        tokens = math.floor(left_s * self._tokens / self._seconds)
        return min(max(tokens, MIN_CHUNK_TOKENS), self._chunk_tokens)


def _smooth(average: float | None, sample: float) -> float:
    return sample if average is None else average + SMOOTHING * (sample - average)
