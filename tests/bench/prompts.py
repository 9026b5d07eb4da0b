"""Prompts: deterministic words, the same for both servers."""

from __future__ import annotations

import random

WORDS = (
    *("river", "stone", "cloud", "market", "engine", "window", "garden", "silver", "copper", "planet", "bridge"),
    *("candle", "forest", "harbor", "meadow", "signal", "thread", "violet", "winter", "yellow", "anchor", "basket"),
    *("circle", "desert"),
)


def prompt(seed: str, words: int, *, shared: int = 0) -> str:
    """`words` words drawn by `seed`; the first `shared` of them are the same in every prompt."""
    head = random.Random("shared").choices(WORDS, k=shared)
    tail = random.Random(seed).choices(WORDS, k=words - shared)
    return f"{' '.join(head + tail)} Write a long story about these words."


def prompts(name: str, count: int, words: int, *, shared: int = 0) -> list[str]:
    """`count` prompts of a load; loads of different names have no prompt in common."""
    return [prompt(f"{name} {i}", words, shared=shared) for i in range(count)]
