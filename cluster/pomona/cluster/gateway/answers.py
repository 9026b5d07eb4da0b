"""What goes back to the client: OpenAI's shapes for answers, chunks and errors. No pydantic: this runs per token."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from starlette.responses import Response

from pomona.v1 import inference_pb2
from pomona.workers.errors import EngineError, LostHost, Overloaded, RequestError, Unavailable

from .logprobs import Json, characters, chat_logprobs, completion_logprobs

DONE = b"data: [DONE]\n\n"

FINISH_REASONS: Mapping[int, str] = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
}

# json.dumps would make an encoder a call.
_encoded = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode

# Stands for the text in the chunk that a stream's plain chunks are made from.
MARK = "\0text\0"
MARK_JSON = _encoded(MARK).encode()


def dumps(payload: Json) -> bytes:
    return _encoded(payload).encode()


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


@dataclass(frozen=True, slots=True)
class Mould:
    """A chunk that adds nothing but text: the bytes before and after the text."""

    before: bytes
    after: bytes

    def chunk(self, text: str) -> bytes:
        return self.before + _encoded(text).encode() + self.after


@dataclass(slots=True)
class Choice:
    """What has arrived of one choice. `offset` counts the characters of the tokens already described; `calls_sent`
    the calls already streamed, of the at most `max_calls` that are kept."""

    index: int
    max_calls: int | None = None
    started: bool = False
    offset: int = 0
    calls_sent: int = 0
    finish_reason: str | None = None
    usage: inference_pb2.Usage | None = None
    texts: list[str] = field(default_factory=list)
    reasonings: list[str] = field(default_factory=list)
    calls: list[inference_pb2.ToolCall] = field(default_factory=list)
    logprobs: list[inference_pb2.TokenLogprobs] = field(default_factory=list)
    moulds: dict[str, Mould] = field(default_factory=dict)

    def note(self, message: inference_pb2.GenerateResponse) -> None:
        if message.tool_calls:
            self.calls = [*self.calls, *message.tool_calls][: self.max_calls]
        if message.finish_reason:
            if message.finish_reason == inference_pb2.FINISH_REASON_ABORT:
                raise LostHost("The worker gave the request up before its answer was complete.")
            reason = FINISH_REASONS[message.finish_reason]
            self.finish_reason = "tool_calls" if self.calls and reason == "stop" else reason
            self.usage = message.usage


class Answer(ABC):
    """One HTTP answer in the making, of `prompts * n` choices. Either `chunk` or `collect` is fed every message."""

    id_prefix: ClassVar[str]
    object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(
        self,
        answer_id: str,
        created: int,
        model: str,
        *,
        choices: int,
        n: int,
        with_usage: bool,
        max_calls: int | None = None,
    ) -> None:
        self._choices = [Choice(index, max_calls) for index in range(choices)]
        self._n = n
        self._with_usage = with_usage
        self._identity: Json = {"id": answer_id, "created": created, "model": model}

    def chunk(self, index: int, message: inference_pb2.GenerateResponse) -> bytes | None:
        """The event for one message, or None when it holds nothing for the client yet."""
        choice = self._choices[index]
        choice.note(message)
        if choice.started and not (choice.finish_reason or message.logprobs or len(choice.calls) > choice.calls_sent):
            return self._plain_chunk(choice, message)
        event_bytes = self._event([self._delta(choice, message)], None)
        choice.started = True
        choice.calls_sent = len(choice.calls)
        choice.offset += sum(characters(entry.sampled.token) for entry in message.logprobs)
        return event_bytes

    def _plain_chunk(self, choice: Choice, message: inference_pb2.GenerateResponse) -> bytes | None:
        """The event for text alone. Nearly every message is that, thousands of times a second."""
        text, reasoning = message.text, message.reasoning
        if text and reasoning:
            return self._event([self._delta(choice, message)], None)
        if text:
            return self._mould(choice, "text").chunk(text)
        return self._mould(choice, "reasoning").chunk(reasoning) if reasoning else None

    def _mould(self, choice: Choice, name: str) -> Mould:
        """For plain chunks whose text is in the message's field `name`."""
        mould = choice.moulds.get(name)
        if mould is None:
            marked = inference_pb2.GenerateResponse()
            setattr(marked, name, MARK)
            event_bytes = self._event([self._delta(choice, marked)], None)
            mould = choice.moulds[name] = Mould(*event_bytes.rsplit(MARK_JSON, 1))
        return mould

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
        choice.reasonings.append(message.reasoning)
        choice.logprobs.extend(message.logprobs)

    def whole(self) -> Json:
        choices = [self._entry(choice) for choice in self._choices]
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
    def _entry(self, choice: Choice) -> Json:
        """The whole answer's entry in `choices`."""


class ChatAnswer(Answer):
    """`chat.completion` and its chunks."""

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _delta(self, choice: Choice, message: inference_pb2.GenerateResponse) -> Json:
        delta: Json = {} if choice.started else {"role": "assistant", "content": ""}
        if message.reasoning:
            delta["reasoning_content"] = message.reasoning
        if message.text:
            delta["content"] = message.text
        if new := choice.calls[choice.calls_sent :]:
            delta["tool_calls"] = [
                {"index": index, **tool_call(call)} for index, call in enumerate(new, choice.calls_sent)
            ]
        return {
            "index": choice.index,
            "delta": delta,
            "logprobs": chat_logprobs(message.logprobs),
            "finish_reason": choice.finish_reason,
        }

    def _entry(self, choice: Choice) -> Json:
        text = "".join(choice.texts)
        message: Json = {"role": "assistant", "content": text or (None if choice.calls else "")}
        if reasoning := "".join(choice.reasonings):
            message["reasoning_content"] = reasoning
        if choice.calls:
            message["tool_calls"] = [tool_call(call) for call in choice.calls]
        return {
            "index": choice.index,
            "message": message,
            "logprobs": chat_logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
        }


def tool_call(call: inference_pb2.ToolCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}


class CompletionAnswer(Answer):
    """`text_completion` and its chunks. It has one text: reasoning would be part of it."""

    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"

    def _delta(self, choice: Choice, message: inference_pb2.GenerateResponse) -> Json:
        return {
            "index": choice.index,
            "text": message.reasoning + message.text,
            "logprobs": completion_logprobs(message.logprobs, choice.offset),
            "finish_reason": choice.finish_reason,
        }

    def _entry(self, choice: Choice) -> Json:
        return {
            "index": choice.index,
            "text": "".join(choice.reasonings + choice.texts),
            "logprobs": completion_logprobs(choice.logprobs, 0),
            "finish_reason": choice.finish_reason,
        }
