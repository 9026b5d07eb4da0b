"""What a client saw of one streamed answer, and what follows from it. Pure: recorded bytes in, values out."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Reads = Sequence[tuple[float, bytes]]


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. Times are seconds on the client's clock; `stamps` is when each piece of text arrived.

    `error` is what the server said, or why the stream is not whole; a stream that we closed has none.
    """

    sent_s: float
    ended_s: float
    stamps: tuple[float, ...] = ()
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    error: str = ""

    @property
    def first_token_s(self) -> float:
        """Seconds from the request to its first text; to its end where it has none."""
        return (self.stamps[0] if self.stamps else self.ended_s) - self.sent_s


def events(reads: Reads) -> Iterator[tuple[float, bytes]]:
    """The data of each server-sent event, with the time at which its line was whole."""
    buffer = b""
    for time_s, data in reads:
        *lines, buffer = (buffer + data).split(b"\n")
        yield from ((time_s, line[5:].strip()) for line in lines if line.startswith(b"data:"))


def has_text(reads: Reads) -> bool:
    return any(_text(json.loads(data)) for _, data in events(reads) if data != b"[DONE]")


def parse(reads: Reads, *, sent_s: float, ended_s: float, closed: bool) -> Answer:
    """The answer in the recorded bytes. `closed`: the client left before the end."""
    stamps: list[float] = []
    pieces: list[str] = []
    usage: dict[str, Any] = {}
    error = "" if closed else "the stream ended without [DONE]"
    for time_s, data in events(reads):
        if data == b"[DONE]":
            error = ""
            continue
        event = json.loads(data)
        if "error" in event:
            error = str(event["error"])
            break
        usage = event.get("usage") or usage
        if text := _text(event):
            stamps.append(time_s)
            pieces.append(text)
    return Answer(
        sent_s,
        ended_s,
        tuple(stamps),
        "".join(pieces),
        prompt_tokens=usage.get("prompt_tokens") or 0,
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        completion_tokens=usage.get("completion_tokens") or 0,
        error=error,
    )


def _text(event: dict[str, Any]) -> str:
    return "".join((choice.get("delta") or {}).get("content") or "" for choice in event.get("choices") or ())


def gaps_s(stamps: Sequence[float], since_s: float, until_s: float) -> list[float]:
    """Seconds between pieces of text: each gap that ended in the window, and the one still open when it closed."""
    ends = [*(stamp for stamp in stamps if stamp <= until_s), until_s]
    return [end - begin for begin, end in itertools.pairwise(ends) if end > since_s]


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def tokens_per_s(answers: Sequence[Answer]) -> float:
    """Output tokens a second, from the first request to the last end."""
    seconds = max(a.ended_s for a in answers) - min(a.sent_s for a in answers)
    return sum(a.completion_tokens for a in answers) / seconds
