"""Stop strings over a stream of text: the earliest match in the text wins, wherever the chunks break.

"Earliest" is by where a match begins. While an earlier match may still complete, later text is held back, so the
result never depends on how the text was cut into chunks.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Holds back only what may still become part of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(s for s in stops if s)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Add text; returns (text that is safe to send, whether a stop string ended the stream)."""
        if not self._stops:
            return text, False
        return self._scan(self._held + text, more_may_come=True)

    def flush(self) -> tuple[str, bool]:
        """The stream ended: whatever was held back goes out, up to the first whole match in it."""
        return self._scan(self._held, more_may_come=False)

    def _scan(self, text: str, *, more_may_come: bool) -> tuple[str, bool]:
        for start in range(len(text)):
            if any(text.startswith(stop, start) for stop in self._stops):
                self._held = ""
                return text[:start], True
            tail = text[start:]
            if more_may_come and any(stop.startswith(tail) for stop in self._stops):
                self._held = tail
                return text[:start], False
        self._held = ""
        return text, False
