"""From what the client meant (messages, text, ids) to token ids. The worker alone knows the tokenizer."""

from __future__ import annotations

import json
import re
from typing import Any, Protocol

from pomona.v1 import inference_pb2

from ..errors import RequestError

# What the template is called with is the server's to say; a client's template would be a program of theirs.
RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "conversation",
        "continue_final_message",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tools",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    }
)


class Tokenizer(Protocol):
    """The part of mlx-lm's TokenizerWrapper that prompts need."""

    has_chat_template: bool
    has_tool_calling: bool
    bos_token: str | None
    chat_template: Any

    def apply_chat_template(self, messages: list[Any], **kwargs: Any) -> list[int]: ...

    def encode(self, text: str, **kwargs: Any) -> list[int]: ...


class PromptEncoder:
    """Renders and tokenises prompts. Not thread safe: the worker calls it from one thread of its own."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size

    def encode(self, request: inference_pb2.GenerateRequest) -> tuple[int, ...]:
        """Token ids of the request's prompt, then those it resumes from. Raises RequestError."""
        kind = request.WhichOneof("prompt")
        if kind == "chat":
            ids = self._chat(request.chat)
        elif kind == "text":
            ids = self._text(request.text)
        elif kind == "tokens":
            ids = list(request.tokens.ids)
        else:
            raise RequestError("the request has no prompt", param="prompt")
        ids = [*ids, *request.resume_ids]
        beyond = next((i for i in ids if i >= self.vocab_size), None)
        if beyond is not None:
            raise RequestError(f"token id {beyond} is outside the vocabulary of {self.vocab_size}", param="prompt")
        return tuple(ids)

    def _text(self, text: str) -> list[int]:
        # As mlx-lm's own generate: a prompt that spells out the BOS token does not get another one.
        bos = self._tokenizer.bos_token
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=bos is None or not text.startswith(bos)))
        except (TypeError, ValueError) as exc:
            raise RequestError(f"the prompt cannot be tokenised: {exc}", param="prompt") from exc

    def _chat(self, chat: inference_pb2.ChatPrompt) -> list[int]:
        if not self._tokenizer.has_chat_template:
            raise RequestError("this model has no chat template: use /v1/completions", param="messages")
        messages = _json(chat.messages_json, list, "messages")
        arguments = _json(chat.template_arguments_json or "{}", dict, "chat_template_kwargs")
        if reserved := sorted(RESERVED & arguments.keys()):
            raise RequestError(
                f"chat_template_kwargs must not name {', '.join(reserved)}", param="chat_template_kwargs"
            )
        if tools := _json(chat.tools_json or "[]", list, "tools"):
            self._require_tool_calling()
            arguments["tools"] = tools
        tail = "continue_final_message" if chat.continue_final_message else "add_generation_prompt"
        try:
            messages = [_for_template(message) for message in messages]
            return list(self._tokenizer.apply_chat_template(messages, **{**arguments, tail: True}))
        except Exception as exc:  # a template is the model authors' program: whatever it raises, these messages caused
            raise RequestError(f"the model's chat template refuses these messages: {exc}", param="messages") from exc

    def _require_tool_calling(self) -> None:
        template = self._tokenizer.chat_template
        unlisted = isinstance(template, str) and not re.search(r"\btools\b", template)
        if unlisted or not self._tokenizer.has_tool_calling:
            raise RequestError(
                "this model has no tool calling: its chat template lists no tools, or mlx-lm cannot parse its calls",
                param="tools",
            )


def _for_template(message: Any) -> Any:
    """The message as templates expect it: content is a string, and a call's arguments are an object, not JSON text."""
    if not isinstance(message, dict):
        return message
    calls = message.get("tool_calls")
    changed: dict[str, Any] = {"content": ""} if message.get("content") is None else {}
    if isinstance(calls, list):
        changed["tool_calls"] = [_call_for_template(call) for call in calls]
    return {**message, **changed}


def _call_for_template(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call  # some templates take the text as it is
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _json(text: str, kind: type, param: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise RequestError(f"{param} is not JSON: {exc}", param=param) from exc
    if not isinstance(value, kind):
        raise RequestError(f"{param} must be a JSON {'list' if kind is list else 'object'}", param=param)
    return value
