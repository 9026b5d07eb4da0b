"""The earliest of several strings in a text that is still growing: what stop strings and section marks have in common.

"Earliest" is by where a match begins. While an earlier match may still complete, a later one does not count, so the
result never depends on how the text was cut into chunks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable


class Marks:
    """Strings to look for, shared by many answers. Of two that begin at one place the one named first wins."""

    def __init__(self, marks: Iterable[str]) -> None:
        self._marks = tuple(mark for mark in marks if mark)
        self._heads = re.compile(
            f"[{re.escape(''.join({mark[0] for mark in self._marks}))}]" if self._marks else "(?!)"
        )
        self._longest = max(map(len, self._marks), default=0)

    def may_begin_in(self, text: str) -> bool:
        """Whether the text has a mark's first letter; few have."""
        return self._heads.search(text) is not None

    def first(self, text: str, *, more_may_come: bool) -> tuple[int, str]:
        """Where the first mark begins, and which it is.

        "" if there is none yet: then the text from that place on may still become one, and none before it can.
        """
        start, found = len(text), ""
        if not self.may_begin_in(text):
            return start, found
        for mark in self._marks:
            at = text.find(mark, 0, start + len(mark) - 1)
            if at >= 0:
                start, found = at, mark
        if more_may_come:
            for head in self._heads.finditer(text, max(0, len(text) - self._longest + 1), start):
                if self._may_become(text[head.start() :]):
                    return head.start(), ""
        return start, found

    def _may_become(self, tail: str) -> bool:
        return any(mark.startswith(tail) for mark in self._marks)
