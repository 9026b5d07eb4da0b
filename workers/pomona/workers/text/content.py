"""What an answer says beside its reasoning and tool calls: whitespace around those, then stop strings."""

from __future__ import annotations

from enum import Enum

from .stops import StopMatcher


class Before(Enum):
    """What stands before content that is about to begin."""

    NOTHING = "nothing"
    CALL = "call"
    REASONING = "reasoning"


class Content:
    """Holds back the whitespace that content begins with, until it is known what follows.

    Models put newlines between reasoning, calls and content, and clients compare the content of a call to null.
    Whitespace after reasoning goes nowhere; elsewhere it goes out with the text that follows, never before a call or
    reasoning, and at the end of the answer only if nothing else was said.
    """

    def __init__(self, stops: StopMatcher, before: Before | None) -> None:
        """`before` None: the whitespace is content, as in an answer without sections."""
        self._stops = stops
        self._before = before
        self._whitespace = ""

    def begin(self, before: Before) -> None:
        """Content ended or is about to begin after this; whitespace that nothing followed goes nowhere."""
        self._before, self._whitespace = before, ""

    def push(self, text: str) -> tuple[str, bool]:
        """Add text; returns (text that is safe to send, whether a stop string ended the answer)."""
        if self._before is not None:
            text = self._whitespace + text
            if not text or text.isspace():
                self._whitespace = text
                return "", False
            if self._before is Before.REASONING:
                text = text.lstrip()
            self._before, self._whitespace = None, ""
        return self._stops.push(text)

    def flush(self) -> tuple[str, bool]:
        """The answer ended; returns what was held back, and whether that still held a stop string."""
        text, stopped = self._stops.push(self._whitespace if self._before is Before.NOTHING else "")
        if stopped:
            return text, True
        rest, stopped = self._stops.flush()
        return text + rest, stopped
