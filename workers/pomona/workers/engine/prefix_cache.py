"""Finished requests' KV, kept for as long as nobody needs the room. Bookkeeping only: what is kept is opaque.

A new prompt reuses the longest prefix that it shares with a kept sequence. (A radix tree that shares storage, and
snapshots of auxiliary state, come with the project's own runner.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

State = TypeVar("State")

# Bounds the search; the KV pool bounds the memory.
MAX_ENTRIES = 64
# Below this, copying costs more than computing.
MIN_SHARED_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Entry(Generic[State]):
    """The state after `tokens`."""

    tokens: tuple[int, ...]
    state: State


class PrefixCache(Generic[State]):
    """Least recently used goes first. `size` is the KV tokens that the entries hold."""

    def __init__(self) -> None:
        self._entries: list[Entry[State]] = []  # oldest use first
        self.size = 0

    def longest(self, prompt: Sequence[int]) -> tuple[State, int] | None:
        """The kept state that shares most with `prompt`, and how many tokens; at least one is left to compute."""
        prompt = tuple(prompt)
        lengths = [min(shared(entry.tokens, prompt), len(prompt) - 1) for entry in self._entries]
        best = max(range(len(lengths)), key=lengths.__getitem__, default=None)
        if best is None or lengths[best] < MIN_SHARED_TOKENS:
            return None
        entry = self._entries.pop(best)
        self._entries.append(entry)
        return entry.state, lengths[best]

    def add(self, tokens: Sequence[int], state: State, room: int) -> bool:
        """Keep `state` where the entries then hold at most `room` tokens; what it continues is replaced by it."""
        tokens = tuple(tokens)
        if len(tokens) > room or any(e.tokens[: len(tokens)] == tokens for e in self._entries):
            return False
        self._drop([e for e in self._entries if tokens[: len(e.tokens)] == e.tokens])
        self.shrink(room - len(tokens), MAX_ENTRIES - 1)
        self._entries.append(Entry(tokens, state))
        self.size += len(tokens)
        return True

    def shrink(self, room: int, entries: int = MAX_ENTRIES) -> None:
        """Drop the least recently used until at most `room` tokens and `entries` entries are held."""
        while self._entries and (self.size > room or len(self._entries) > entries):
            self._drop(self._entries[:1])

    def _drop(self, gone: Sequence[Entry[State]]) -> None:
        for entry in gone:
            self._entries = [e for e in self._entries if e is not entry]  # states need not compare
            self.size -= len(entry.tokens)

    def __len__(self) -> int:
        return len(self._entries)


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the longest common prefix, by halving: comparing slices is C's work."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low
