"""What goes back to the client: OpenAI's shapes for answers, chunks and errors. No pydantic: this runs per token."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from starlette.responses import Response

from pomona.v1 import inference_pb2
from pomona.workers.errors import EngineError, LostHost, Overloaded, RequestError, Unavailable

DONE = b"data: [DONE]\n\n"

Json = dict[str, Any]

FINISH_REASONS: Mapping[int, str] = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
}


def dumps(payload: Json) -> bytes:
    return json.dumps(payload, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def event(payload: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + dumps(payload) + b"\n\n"


# ---- errors


@dataclass(frozen=True, slots=True)
class Refusal:
    """One error as HTTP says it; `retry` tells clients to come back in a second."""

    status: int
    code: str | None
    retry: bool = False


REFUSALS: Mapping[type[Exception], Refusal] = {
    Overloaded: Refusal(429, "overloaded", retry=True),
    Unavailable: Refusal(503, "unavailable", retry=True),
    LostHost: Refusal(503, "lost_host", retry=True),
    EngineError: Refusal(500, "engine_error"),
}


def refusal(exc: Exception) -> Refusal:
    if isinstance(exc, RequestError):
        return Refusal(exc.status, exc.code)
    return next((REFUSALS[kind] for kind in type(exc).__mro__ if kind in REFUSALS), Refusal(500, "internal_error"))


def error_type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def error_body(exc: Exception) -> Json:
    """OpenAI's error object. An error that is not in the tree says nothing of what is inside."""
    reply = refusal(exc)
    known = isinstance(exc, RequestError) or reply.code != "internal_error"
    message = str(exc) if known else "The server failed to answer; its log says why."
    param = exc.param if isinstance(exc, RequestError) else None
    return {"error": {"message": message, "type": error_type(reply.status), "param": param, "code": reply.code}}


def error_response(exc: Exception) -> Response:
    reply = refusal(exc)
    response = json_response(error_body(exc), reply.status)
    if reply.retry:
        response.headers["retry-after"] = "1"
    if reply.status == 401:
        response.headers["www-authenticate"] = "Bearer"
    return response


def json_response(payload: Json, status: int = 200) -> Response:
    return Response(dumps(payload), status, media_type="application/json")


# ---- answers


@dataclass(slots=True)
class Choice:
    """What has arrived of one choice. `offset` counts the characters of the tokens already described."""

    index: int
    started: bool = False
    offset: int = 0
    finish_reason: str | None = None
    usage: inference_pb2.Usage | None = None
    texts: list[str] = field(default_factory=list)
    logprobs: list[inference_pb2.TokenLogprobs] = field(default_factory=list)

    def note(self, message: inference_pb2.GenerateResponse) -> None:
        if message.finish_reason == inference_pb2.FINISH_REASON_ABORT:
            raise LostHost("The worker gave the request up before its answer was complete.")
        if message.finish_reason:
            self.finish_reason = FINISH_REASONS[message.finish_reason]
            self.usage = message.usage


class Answer(ABC):
    """One HTTP answer in the making, of `prompts * n` choices. Either `chunk` or `collect` is fed every message."""

    id_prefix: ClassVar[str]
    object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, answer_id: str, created: int, model: str, *, choices: int, n: int, with_usage: bool) -> None:
        self._choices = [Choice(index) for index in range(choices)]
        self._n = n
        self._with_usage = with_usage
        self._identity: Json = {"id": answer_id, "created": created, "model": model}

    def chunk(self, index: int, message: inference_pb2.GenerateResponse) -> bytes | None:
        """The event for one message, or None when it holds nothing for the client yet."""
        choice = self._choices[index]
        choice.note(message)
        if not (message.text or message.logprobs or message.finish_reason) and choice.started:
            return None
        event_bytes = self._event([self._delta(choice, message)], None)
        choice.started = True
        choice.offset += sum(characters(entry.sampled.token) for entry in message.logprobs)
        return event_bytes

    def usage_chunk(self) -> bytes | None:
        """The event that closes a stream whose client asked for usage."""
        return self._event([], self.usage()) if self._with_usage else None

    def _event(self, choices: list[Json], usage: Json | None) -> bytes:
        payload = {**self._identity, "object": self.chunk_object, "choices": choices}
        if self._with_usage:
            payload["usage"] = usage
        return event(payload)

    def collect(self, index: int, message: inference_pb2.GenerateResponse) -> None:
        choice = self._choices[index]
        choice.note(message)
        choice.texts.append(message.text)
        choice.logprobs.extend(message.logprobs)

    def whole(self) -> Json:
        choices = [self._entry(choice, "".join(choice.texts)) for choice in self._choices]
        return {**self._identity, "object": self.object, "choices": choices, "usage": self.usage()}

    def check_complete(self) -> None:
        """LostHost when a stream ended without saying why."""
        if any(choice.finish_reason is None for choice in self._choices):
            raise LostHost("The worker ended the stream before the answer was complete.")

    def usage(self) -> Json:
        """Completion tokens of all choices; each prompt is counted once, however many choices it has."""
        usages = [choice.usage or inference_pb2.Usage() for choice in self._choices]
        prompt = sum(usage.prompt_tokens for usage in usages[:: self._n])
        completion = sum(usage.completion_tokens for usage in usages)
        cached = sum(usage.cached_tokens for usage in usages[:: self._n])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    @abstractmethod
    def _delta(self, choice: Choice, message: inference_pb2.GenerateResponse) -> Json:
        """The chunk's entry in `choices`."""

    @abstractmethod
    def _entry(self, choice: Choice, text: str) -> Json:
        """The whole answer's entry in `choices`."""


class ChatAnswer(Answer):
    """`chat.completion` and its chunks."""

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _delta(self, choice: Choice, message: inference_pb2.GenerateResponse) -> Json:
        delta: Json = {} if choice.started else {"role": "assistant", "content": ""}
        if message.text:
            delta["content"] = message.text
        return {
            "index": choice.index,
            "delta": delta,
            "logprobs": chat_logprobs(message.logprobs),
            "finish_reason": FINISH_REASONS.get(message.finish_reason),
        }

    def _entry(self, choice: Choice, text: str) -> Json:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": text},
            "logprobs": chat_logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
        }


class CompletionAnswer(Answer):
    """`text_completion` and its chunks."""

    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"

    def _delta(self, choice: Choice, message: inference_pb2.GenerateResponse) -> Json:
        return {
            "index": choice.index,
            "text": message.text,
            "logprobs": completion_logprobs(message.logprobs, choice.offset),
            "finish_reason": FINISH_REASONS.get(message.finish_reason),
        }

    def _entry(self, choice: Choice, text: str) -> Json:
        return {
            "index": choice.index,
            "text": text,
            "logprobs": completion_logprobs(choice.logprobs, 0),
            "finish_reason": choice.finish_reason,
        }


# ---- logprobs


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
