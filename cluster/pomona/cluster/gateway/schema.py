"""What clients may send: OpenAI's request bodies, checked, and turned into `GenerateRequest`.

Explicit null means that a field was not sent. Nothing that changes the answer is ignored in silence: what this
version does not do yet is refused unless it is neutral. Other unknown fields are ignored, as OpenAI-compatible
servers do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from pomona.v1 import inference_pb2
from pomona.workers.errors import RequestError

UINT32_MAX = 2**32 - 1
MAX_CHOICES = 128
DEFAULT_TEMPERATURE = 1.0
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions, and vLLM's

# Fields that change the answer and that this version does not do yet, with the values that change nothing.
NEUTRAL: Mapping[str, tuple[JsonValue, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (0, 1),
    "logit_bias": ({},),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "web_search_options": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": ([],),
    "guided_grammar": (),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "min_tokens": (0,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "xtc_probability": (0,),
    "echo": (False,),
    "suffix": ("",),
}

TokenId = Annotated[int, Field(ge=0, le=UINT32_MAX)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Text = Annotated[str, Field(min_length=1)]
JsonObject = dict[str, JsonValue]


def refuse(param: str, message: str) -> PydanticCustomError:
    """An error about `param` that a validator of the whole body raises."""
    return PydanticCustomError("refused", "{text}", {"text": message, "param": param})


class Lenient(BaseModel):
    """Strict about the types of what it knows, silent about the rest."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")


class StreamOptions(Lenient):
    include_usage: bool | None = None


class ContentPart(Lenient):
    type: str
    text: str | None = None

    @model_validator(mode="after")
    def _is_text(self) -> ContentPart:
        if self.type != "text" or self.text is None:
            raise PydanticCustomError("not_text", "This model takes parts of type 'text' only")
        return self


class Message(Lenient):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[JsonObject] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        extra = self.model_extra or {}
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("no_content", "A message of this role needs content")
        if any(extra.get(name) is not None for name in ("function_call", "audio")):
            raise PydanticCustomError("not_yet", "This version does not take 'function_call' or 'audio' in messages")
        return self

    def for_template(self) -> JsonObject:
        """The message as chat templates expect it: content joined to text, only what was sent."""
        content = self.content if isinstance(self.content, str) else "".join(p.text or "" for p in self.content or [])
        # Templates know no `developer`: it is the newer name of `system`.
        role = "system" if self.role == "developer" else self.role
        message: JsonObject = {"role": role, "content": content}
        optional = self.model_dump(include={"name", "tool_calls", "tool_call_id", "reasoning_content"})
        return message | {name: value for name, value in optional.items() if value is not None}


class Body(Lenient):
    """The fields that both endpoints share."""

    model: Text
    max_tokens: int | None = Field(None, ge=1, description="Unset or large: what the context window leaves.")
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy; 1 when unset.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=UINT32_MAX, description="-1 and 0 are off.")
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    n: int | None = Field(None, ge=1, le=16)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    user: str | None = None

    @model_validator(mode="after")
    def _does_what_it_says(self) -> Body:
        for name, value in (self.model_extra or {}).items():
            neutral = NEUTRAL.get(name)
            if neutral is not None and value is not None and value not in neutral:
                raise refuse(name, f"This version does not do '{name}' yet; leave it out.")
        return self

    @property
    def choices_per_prompt(self) -> int:
        return self.n or 1

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def token_limit(self) -> int | None:
        return self.max_tokens

    def alternatives(self) -> int | None:
        """How many alternatives to list beside each token; None: no logprobs at all."""
        raise NotImplementedError

    def prompts(self) -> list[dict[str, Any]]:
        """One set of GenerateRequest's prompt arguments a prompt."""
        raise NotImplementedError


class ChatBody(Body):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1, description="The newer name of max_tokens; it wins.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    chat_template_kwargs: JsonObject | None = None
    reasoning_effort: str | None = Field(None, description="Handed to the model's chat template.")
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None

    @model_validator(mode="after")
    def _can_be_rendered(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise refuse("top_logprobs", "'top_logprobs' needs 'logprobs' to be true.")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise refuse("continue_final_message", "'continue_final_message' needs a last message of the assistant.")
        if self.add_generation_prompt is not None and self.add_generation_prompt == bool(self.continue_final_message):
            raise refuse("add_generation_prompt", "'add_generation_prompt' has to be the opposite of continuing.")
        return self

    @model_validator(mode="after")
    def _needs_no_tools(self) -> ChatBody:
        if self.tools and self.tool_choice != "none":
            raise refuse("tools", "This version does not do 'tools' yet; leave them out or set tool_choice to 'none'.")
        if self.tool_choice not in (None, "none", "auto"):
            raise refuse("tool_choice", "This version does not do 'tool_choice' yet; leave it out.")
        return self

    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def prompts(self) -> list[dict[str, Any]]:
        arguments = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            arguments.setdefault("reasoning_effort", self.reasoning_effort)
        chat = inference_pb2.ChatPrompt(
            messages_json=_json([message.for_template() for message in self.messages], "messages"),
            template_arguments_json=_json(arguments, "chat_template_kwargs") if arguments else "",
            continue_final_message=bool(self.continue_final_message),
        )
        return [{"chat": chat}]


def _json(value: Any, param: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError as exc:
        raise RequestError(f"{param}: numbers have to be finite.", param=param) from exc


class CompletionBody(Body):
    """The body of POST /v1/completions."""

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_CHOICES)]
    )
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: int | None = Field(None, description="Only the value of n: this version returns every choice it makes.")

    @model_validator(mode="after")
    def _is_bounded(self) -> CompletionBody:
        if self.best_of not in (None, self.choices_per_prompt):
            raise refuse("best_of", "This version does not do 'best_of' yet; leave it out.")
        if len(self.prompts()) * self.choices_per_prompt > MAX_CHOICES:
            raise refuse("n", f"More than {MAX_CHOICES} choices in one request: send fewer prompts or a smaller n.")
        return self

    def token_limit(self) -> int | None:
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    def alternatives(self) -> int | None:
        return self.logprobs

    def prompts(self) -> list[dict[str, Any]]:
        prompts: list[Any] = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        if isinstance(prompts[0], int):
            prompts = [prompts]
        return [{"text": p} if isinstance(p, str) else {"tokens": inference_pb2.TokenPrompt(ids=p)} for p in prompts]


AnyBody = TypeVar("AnyBody", bound=Body)


def parse(model: type[AnyBody], raw: bytes) -> AnyBody:
    """The body, or RequestError that names the field."""
    try:
        return model.model_validate_json(raw)
    except ValidationError as exc:
        raise request_error(exc) from None


def request_error(exc: ValidationError) -> RequestError:
    """One sentence about the first field at fault; of a union's complaints the one that got deepest."""
    errors = exc.errors(include_url=False, include_input=False)
    field = errors[0]["loc"][:1]
    worst = max((error for error in errors if error["loc"][:1] == field), key=lambda error: len(error["loc"]))
    if worst["type"] == "json_invalid":
        return RequestError(f"The body is not valid JSON: {worst['msg'].removeprefix('Invalid JSON: ')}.")
    if worst["type"] == "refused":
        return RequestError(worst["msg"], param=worst["ctx"]["param"], code="unsupported_parameter")
    if worst["type"] == "missing":
        return RequestError(f"'{_path(worst['loc'])}' is required.", param=str(field[0]), code="missing_parameter")
    if not field:
        return RequestError("The body has to be a JSON object.")
    return RequestError(f"'{_path(worst['loc'])}': {worst['msg']}.", param=str(field[0]), code="invalid_value")


def _path(location: tuple[int | str, ...]) -> str:
    # Union members appear in locations as type names, which mean nothing to the client.
    named = (part for part in map(str, location) if part != "str" and part.replace("_", "").isalnum())
    return ".".join(named)[:100]


def sampling(body: Body, index: int) -> inference_pb2.SamplingParams:
    """`index` sets the choices of one prompt apart when a seed is given."""
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    limit = body.token_limit()
    return inference_pb2.SamplingParams(
        max_tokens=None if limit is None else min(limit, UINT32_MAX),
        temperature=DEFAULT_TEMPERATURE if body.temperature is None else body.temperature,
        top_p=body.top_p,
        top_k=body.top_k if body.top_k and body.top_k > 0 else None,
        min_p=body.min_p,
        seed=None if body.seed is None else (body.seed + index) % 2**64,
        stop=stop,
        ignore_eos=bool(body.ignore_eos),
        top_logprobs=body.alternatives(),
    )


def to_generate_requests(body: Body, request_id: str) -> list[inference_pb2.GenerateRequest]:
    """One request a choice: the n choices of the first prompt, then those of the second, and so on."""
    prompts = body.prompts()
    n = body.choices_per_prompt
    return [
        inference_pb2.GenerateRequest(
            request_id=f"{request_id}-{prompt_index * n + index}",
            model=body.model,
            sampling=sampling(body, index),
            **prompt,
        )
        for prompt_index, prompt in enumerate(prompts)
        for index in range(n)
    ]
