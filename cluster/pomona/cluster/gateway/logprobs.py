"""Logprobs in OpenAI's two shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pomona.v1 import inference_pb2

Json = dict[str, Any]


def finite(logprob: float) -> float | None:
    return logprob if math.isfinite(logprob) else None


def token_text(token: bytes) -> str:
    """The token as text; a token that ends inside a character as OpenAI writes it, `bytes:\\xe2\\x82`."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def characters(token: bytes) -> int:
    """How many UTF-8 characters begin in these bytes."""
    return sum(byte & 0xC0 != 0x80 for byte in token)


def chat_logprobs(entries: Sequence[inference_pb2.TokenLogprobs]) -> Json | None:
    if not entries:
        return None
    return {
        "content": [{**_token(entry.sampled), "top_logprobs": [_token(top) for top in entry.top]} for entry in entries]
    }


def _token(entry: inference_pb2.TokenLogprob) -> Json:
    return {"token": token_text(entry.token), "logprob": finite(entry.logprob), "bytes": list(entry.token)}


def completion_logprobs(entries: Sequence[inference_pb2.TokenLogprobs], offset: int) -> Json | None:
    """The older shape: parallel lists, `text_offset` in characters from the start of the text."""
    if not entries:
        return None
    offsets = [offset]
    for entry in entries[:-1]:
        offsets.append(offsets[-1] + characters(entry.sampled.token))
    return {
        "tokens": [token_text(entry.sampled.token) for entry in entries],
        "token_logprobs": [finite(entry.sampled.logprob) for entry in entries],
        "top_logprobs": [
            {token_text(top.token): finite(top.logprob) for top in (entry.sampled, *entry.top)} for entry in entries
        ],
        "text_offset": offsets,
    }
