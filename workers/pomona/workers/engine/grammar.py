"""Compiled grammars and the matchers that answers follow through them: llguidance behind the engine's contract."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

Mask = npt.NDArray[np.uint32]

# An automaton grows by about a kilobyte a token of new text; a fresh one costs milliseconds.
WORN_TOKENS = 10_000


class Vocabulary:
    """The model's tokens as grammars see them. Ids beyond the model's `size` or the tokenizer's are forbidden."""

    def __init__(self, native: LLTokenizer, size: int) -> None:
        self.native = native
        self.size = size
        self.eos = frozenset(native.eos_tokens)
        self.words = -(-size // 32)
        self.buffer_words = -(-native.vocab_size // 32)
        self.last_word = np.uint32((1 << ((size - 1) % 32 + 1)) - 1)
        self.only_eos: Mask = np.zeros(self.words, np.uint32)
        for token in self.eos:
            self.only_eos[token // 32] |= np.uint32(1 << token % 32)

    @classmethod
    def of(cls, tokenizer: Any, size: int, eos_ids: Collection[int]) -> Vocabulary:
        """From mlx-lm's TokenizerWrapper, in about a second. Raises ValueError for one that llguidance cannot read."""
        from llguidance.hf import from_tokenizer

        inner = tokenizer._tokenizer
        whole = max(size, 1 + max(inner.get_vocab().values(), default=0))
        eos = sorted(token for token in eos_ids if 0 <= token < size)
        return cls(from_tokenizer(inner, n_vocab=whole, eos_token=eos), size)


@dataclass(slots=True)
class Wear:
    """How much one automaton has been used: it grows with the text it meets, up to a limit that ends answers."""

    tokens: int = 0
    broken: bool = False


class CompiledGrammar:
    """A grammar ready for many answers. They share its automaton, so that each finds what others have worked out."""

    def __init__(self, native: LLMatcher, vocabulary: Vocabulary, wear: Wear | None = None) -> None:
        self.vocabulary = vocabulary
        self.wear = wear or Wear()
        self._native = native

    @property
    def worn(self) -> bool:
        """Whether the next answer had better have it compiled afresh."""
        return self.wear.broken or self.wear.tokens > WORN_TOKENS

    def after(self, tokens: Sequence[int]) -> CompiledGrammar:
        """The grammar of what may follow `tokens`. Raises ValueError when they break it."""
        if not tokens:
            return self
        native = self._native.deep_copy()
        fitting = native.try_consume_tokens(list(tokens))
        if fitting < len(tokens):
            raise ValueError(f"the grammar forbids token {tokens[fitting]}")
        return CompiledGrammar(native, self.vocabulary, self.wear)

    def matcher(self) -> GrammarMatcher:
        """A matcher at the grammar's beginning. Raises ValueError as `accept` does."""
        return GrammarMatcher(self._native.deep_copy(), self.vocabulary, self.wear)


class GrammarMatcher:
    """Where one answer stands. `accept` works out the next mask too, so that whatever fails, fails there."""

    __slots__ = ("_address", "_buffer", "_ended", "_mask", "_native", "_vocabulary", "_wear")

    def __init__(self, native: LLMatcher, vocabulary: Vocabulary, wear: Wear) -> None:
        self._native = native
        self._vocabulary = vocabulary
        self._wear = wear
        self._ended = False
        self._buffer: Mask = np.zeros(vocabulary.buffer_words, np.uint32)
        self._address = self._buffer.ctypes.data
        self._mask = self._buffer[: vocabulary.words]
        self._refresh()

    def mask(self) -> Mask:
        """uint32 [ceil(vocab / 32)], in force until the next `accept`, which changes it in place."""
        return self._vocabulary.only_eos if self._ended else self._mask

    def accept(self, token: int) -> None:
        """Raises ValueError for a token that the mask forbids, and where the grammar grows over its limits."""
        if token in self._vocabulary.eos:
            if not (self._ended or self._native.is_accepting()):
                raise ValueError(f"the answer may not end here, with token {token}")
            self._ended = True
            return
        if self._ended or token >= self._vocabulary.size or self._native.try_consume_tokens([token]) != 1:
            self._check()
            raise ValueError(f"the grammar forbids token {token} here")
        self._wear.tokens += 1
        self._refresh()

    def _refresh(self) -> None:
        self._native.unsafe_compute_mask_ptr(self._address, self._buffer.nbytes)
        self._check()
        self._mask[-1] &= self._vocabulary.last_word

    def _check(self) -> None:
        if self._native.is_error():
            self._wear.broken = True
            raise ValueError(f"the grammar has become too complex: {self._native.get_error().splitlines()[0]}")
