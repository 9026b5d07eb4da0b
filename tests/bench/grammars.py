"""What structured output costs: compile time, and mask time a token, of each library that is installed.

    python tests/bench/grammars.py TOKENIZER.JSON

Only llguidance is a dependency of pomona; install outlines-core beside it to compare. Each case is compiled three times
(the median counts), then followed by random allowed tokens, five answers of at most 200 tokens.
"""

from __future__ import annotations

import importlib.util
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

EOS = 2
SMALL = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
NESTED = {
    "$defs": {
        "item": {
            "type": "object",
            "properties": {
                "kind": {"enum": ["book", "record", "film"]},
                "price": {"type": "number"},
                "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
            },
            "required": ["kind", "price", "tags"],
            "additionalProperties": False,
        }
    },
    "type": "object",
    "properties": {"items": {"type": "array", "items": {"$ref": "#/$defs/item"}}, "total": {"type": "integer"}},
    "required": ["items", "total"],
    "additionalProperties": False,
}
LARGE = {
    "type": "object",
    "properties": {f"property_{i}": {"type": ("string", "integer", "boolean")[i % 3]} for i in range(100)},
    "required": [f"property_{i}" for i in range(100)],
    "additionalProperties": False,
}
WORDS = [f"choice number {i}" for i in range(100)]
CASES = {
    "small schema": ("schema", json.dumps(SMALL)),
    "nested schema": ("schema", json.dumps(NESTED)),
    "100 properties": ("schema", json.dumps(LARGE)),
    "regex": ("regex", r"[a-z]{2,20}@[a-z]{2,20}\.(com|org|net)"),
    "100 choices": ("regex", "|".join(WORDS)),
}


class Walker(Protocol):
    """One answer under one grammar."""

    def mask(self) -> Any: ...

    def accept(self, token: int) -> None: ...


Compile = Callable[[str, str], Callable[[], Walker]]


def with_llguidance(tokenizer: str) -> Compile:
    from llguidance import LLMatcher, LLTokenizer

    native = LLTokenizer(tokenizer, eos_token=EOS)

    class Answer:
        def __init__(self, base: LLMatcher) -> None:
            self._matcher = base.deep_copy()
            self._mask = np.zeros(-(-native.vocab_size // 32), np.uint32)

        def mask(self) -> Any:
            self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
            return self._mask

        def accept(self, token: int) -> None:
            self._matcher.consume_token(token)

    def compiled(kind: str, text: str) -> Callable[[], Walker]:
        make = LLMatcher.grammar_from_json_schema if kind == "schema" else LLMatcher.grammar_from_regex
        base = LLMatcher(native, make(text))
        return lambda: Answer(base)

    return compiled


def with_outlines_core(tokenizer: str) -> Compile:
    from outlines_core import Guide, Index, Vocabulary  # type: ignore[import-not-found]
    from outlines_core.json_schema import build_regex_from_schema  # type: ignore[import-not-found]
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte = {char: value for value, char in bytes_to_unicode().items()}
    ids: dict[bytes, list[int]] = {}
    for token, i in json.loads(tokenizer)["model"]["vocab"].items():
        if i > 16:  # SmolLM2's first 17 are special
            ids.setdefault(bytes(byte[c] for c in token), []).append(i)
    vocabulary = Vocabulary(EOS, ids)
    words = -(-(1 + max(i for group in ids.values() for i in group)) // 32)

    class Answer:
        def __init__(self, index: Any) -> None:
            self._guide = Guide(index)
            self._mask = np.zeros(words, np.uint32)

        def mask(self) -> Any:
            self._guide.write_mask_into(self._mask.ctypes.data, words, 4)
            return self._mask

        def accept(self, token: int) -> None:
            self._guide.advance(token)

    def compiled(kind: str, text: str) -> Callable[[], Walker]:
        index = Index(build_regex_from_schema(text) if kind == "schema" else text, vocabulary)
        return lambda: Answer(index)

    return compiled


def mask_times(answer: Walker, seed: int) -> Iterator[float]:
    chance = random.Random(seed)
    for _ in range(200):
        started = time.perf_counter()
        mask = answer.mask()
        yield time.perf_counter() - started
        token = int(chance.choice(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))))
        if token == EOS:
            return
        answer.accept(token)


def report(library: str, compile_: Compile) -> None:
    for name, (kind, text) in CASES.items():
        took = []
        for _ in range(3):
            started = time.perf_counter()
            begin = compile_(kind, text)
            took.append(time.perf_counter() - started)
        times = sorted(t for seed in range(5) for t in mask_times(begin(), seed))
        median, p99, most = (1e6 * t for t in (times[len(times) // 2], times[int(len(times) * 0.99)], times[-1]))
        print(f"| {library} | {name} | {1e3 * statistics.median(took):.1f} | {median:.0f} | {p99:.0f} | {most:.0f} |")


if __name__ == "__main__":
    tokenizer = Path(sys.argv[1]).read_text()
    print("| library | case | compile ms | mask us, median | p99 | max |\n|---|---|---|---|---|---|")
    for module, candidate in (("llguidance", with_llguidance), ("outlines_core", with_outlines_core)):
        if importlib.util.find_spec(module) is not None:
            report(module, candidate(tokenizer))
