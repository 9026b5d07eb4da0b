"""From tokens to text, one at a time, only in whole characters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import ByteLevel, DecodeStream


class Detokenizer(Protocol):
    """mlx-lm's streaming detokenizers. `last_segment` is the text since it was last read."""

    def add_token(self, token: int) -> None: ...

    def finalize(self) -> None: ...

    @property
    def last_segment(self) -> str: ...


class ByteLevelDetokenizer:
    """The text of byte-level BPE tokens, exactly.

    mlx-lm's own drops an answer's first space, which belongs to a completion, and misspells the NUL byte.
    """

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=False)
        self._held: list[int] = []
        self.last_segment = ""

    def add_token(self, token: int) -> None:
        text = self._stream.step(self._tokenizer, token)
        if text is None:
            self._held.append(token)
        elif self._held:
            self._held = []
        self.last_segment = text or ""

    def finalize(self) -> None:
        self.last_segment = self._tokenizer.decode(self._held, skip_special_tokens=False)
        self._held = []


def detokenizers(tokenizer: Any) -> Callable[[], Detokenizer]:
    """What makes a detokenizer for each answer of mlx-lm's TokenizerWrapper.

    SentencePiece and other decoders stay with mlx-lm: there DecodeStream raises on bytes that are no character.
    """
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None and isinstance(fast.decoder, ByteLevel):
        return lambda: ByteLevelDetokenizer(fast)
    return lambda: tokenizer.detokenizer
