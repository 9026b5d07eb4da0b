"""Stop strings over a stream of text: the earliest match in the text wins, wherever the chunks break."""

from __future__ import annotations

from collections.abc import Sequence

from .marks import Marks


class StopMatcher:
    """Holds back only what may still become part of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = Marks(stops) if any(stops) else None
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Add text; returns (text that is safe to send, whether a stop string ended the stream)."""
        return self._scan(text, more_may_come=True)

    def flush(self) -> tuple[str, bool]:
        """The stream ended: whatever was held back goes out, up to the first whole match in it."""
        return self._scan("", more_may_come=False)

    def _scan(self, text: str, *, more_may_come: bool) -> tuple[str, bool]:
        if self._stops is None:
            return text, False
        text = self._held + text
        start, stop = self._stops.first(text, more_may_come=more_may_come)
        self._held = "" if stop else text[start:]
        return text[:start], bool(stop)
