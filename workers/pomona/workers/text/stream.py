"""From token ids to text, one request at a time: incremental detokenisation, then what the text says."""

from __future__ import annotations

from ..engine.base import Piece
from .answer import Answer
from .detokenizer import Detokenizer

_NOTHING = Piece()


class TextStream:
    """The text of one answer as it grows (engine.base.Text)."""

    def __init__(self, detokenizer: Detokenizer, answer: Answer | None = None) -> None:
        """Without `answer` all text is content, as it comes."""
        self._detokenizer = detokenizer
        self._answer = answer

    def push(self, token: int) -> Piece:
        """Add a token (never EOS, nor a stop token); returns what it made certain."""
        self._detokenizer.add_token(token)
        text = self._detokenizer.last_segment
        if self._answer is not None:
            return self._answer.push(text)
        return Piece(text) if text else _NOTHING

    def finish(self) -> Piece:
        """The answer ended; returns what was held back, and whether that still held a stop string."""
        self._detokenizer.finalize()
        # What finalize adds may be part of a character that the token limit cut: it is no text.
        text = self._detokenizer.last_segment.rstrip("\ufffd")
        return self._answer.finish(text) if self._answer is not None else Piece(text)
