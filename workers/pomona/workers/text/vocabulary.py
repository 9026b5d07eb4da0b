"""The bytes of single tokens, for logprobs: a token may be part of a character, which text cannot say."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def token_bytes(tokenizer: Any) -> Callable[[int], bytes]:
    """A function from token id to its bytes; byte-level BPE and SentencePiece spellings are undone."""
    special = set(tokenizer.all_special_ids)
    byte_level = _byte_level_table()
    is_byte_level = "Ġ" in "".join(tokenizer.convert_ids_to_tokens(list(range(min(2000, len(tokenizer))))))

    @functools.lru_cache(maxsize=65536)
    def of(token: int) -> bytes:
        spelled = tokenizer.convert_ids_to_tokens(token) or ""
        if token in special:
            return str(spelled).encode()
        if is_byte_level:
            return b"".join(byte_level.get(c, c.encode()) for c in spelled)
        if len(spelled) == 6 and spelled.startswith("<0x"):
            return bytes([int(spelled[3:5], 16)])
        return str(spelled).replace("▁", " ").encode()

    return of


def _byte_level_table() -> dict[str, bytes]:
    """GPT-2's printable stand-in for each byte, the other way round."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {char: bytes([byte]) for byte, char in bytes_to_unicode().items()}
