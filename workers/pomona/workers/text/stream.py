"""From token ids to text, one request at a time: incremental detokenisation, then stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .stops import StopMatcher


class Detokenizer(Protocol):
    """mlx-lm's streaming detokenizers: text comes out only in whole characters."""

    def add_token(self, token: int) -> None: ...

    def finalize(self) -> None: ...

    @property
    def last_segment(self) -> str: ...


class TextStream:
    """The text of one answer as it grows."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._stops = StopMatcher(stops)

    def push(self, token: int) -> tuple[str, bool]:
        """Add a token; returns (new text, whether a stop string ended the answer)."""
        self._detokenizer.add_token(token)
        return self._stops.push(self._detokenizer.last_segment)

    def finish(self) -> tuple[str, bool]:
        """The answer ended; returns what was held back, and whether that still held a stop string."""
        self._detokenizer.finalize()
        # What finalize adds may be part of a character that the token limit cut: it is no text.
        text, stopped = self._stops.push(self._detokenizer.last_segment.rstrip("\ufffd"))
        if stopped:
            return text, True
        rest, stopped = self._stops.flush()
        return text + rest, stopped
