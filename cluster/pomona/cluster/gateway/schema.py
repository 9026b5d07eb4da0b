"""What clients may send: OpenAI's request bodies, checked, and turned into `GenerateRequest`.

Explicit null means that a field was not sent. Nothing that changes the answer is ignored in silence: what this
version does not do yet is refused unless it is neutral. Other unknown fields are ignored, as OpenAI-compatible
servers do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import Field, JsonValue, ValidationError, model_validator

from pomona.v1 import inference_pb2
from pomona.workers.errors import RequestError

from .fields import UINT32_MAX, JsonObject, Lenient, Text, TokenId, refuse, to_json
from .formats import Formatted
from .messages import Message, Tool

MAX_CHOICES = 128
DEFAULT_TEMPERATURE = 1.0
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions, and vLLM's
MAX_LISTED_IDS = 1024  # OpenAI's limit for logit_bias

# Fields that change the answer and that this version does not do yet, with the values that change nothing.
NEUTRAL: Mapping[str, tuple[JsonValue, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "web_search_options": (),
    "guided_grammar": (),
    "guided_whitespace_pattern": (),
    "ebnf": (),
    "structural_tag": (),
    "bad_words": ([],),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "xtc_probability": (0,),
    "echo": (False,),
    "suffix": ("",),
}

TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]


class StreamOptions(Lenient):
    include_usage: bool | None = None


class Body(Formatted):
    """The fields that both endpoints share."""

    model: Text
    max_tokens: int | None = Field(None, ge=1, description="Unset or large: what the context window leaves.")
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy; 1 when unset.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=UINT32_MAX, description="-1 and 0 are off.")
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: float | None = Field(None, gt=0, description="1 is off; counts the prompt too.")
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=MAX_LISTED_IDS)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_LISTED_IDS)] | None = None
    min_tokens: int | None = Field(None, ge=0, description="No end of the answer before so many tokens.")
    n: int | None = Field(None, ge=1, le=16)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    priority: Int32 | None = Field(None, description="Higher goes first; 0 when unset.")
    user: str | None = None

    @model_validator(mode="after")
    def _does_what_it_says(self) -> Body:
        for name, value in (self.model_extra or {}).items():
            neutral = NEUTRAL.get(name)
            if neutral is not None and value is not None and value not in neutral:
                raise refuse(name, f"This version does not do '{name}' yet; leave it out.")
        return self

    @model_validator(mode="after")
    def _can_end(self) -> Body:
        limit = self.token_limit()
        if self.min_tokens and limit is not None and self.min_tokens > limit:
            raise refuse("min_tokens", f"'min_tokens' is {self.min_tokens}, more than the limit of {limit} tokens.")
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

    def keeps_reasoning_in_text(self) -> bool:
        raise NotImplementedError

    def max_calls(self) -> int | None:
        """How many tool calls a choice may make; None: any number."""
        return None

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
    tools: list[Tool] | None = None
    tool_choice: str | JsonObject | None = Field(None, description="'auto' or 'none'.")
    parallel_tool_calls: bool | None = Field(None, description="false: the first call of an answer only.")
    separate_reasoning: bool | None = Field(None, description="false: reasoning stays in the content. SGLang's name.")

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
    def _may_call(self) -> ChatBody:
        if self.tool_choice not in (None, "none", "auto"):
            raise refuse("tool_choice", "'tool_choice' is 'auto' or 'none' in this version: a call cannot be forced.")
        if self.offered_tools() and (asked := self.grammars()):
            field = next(iter(asked))
            raise refuse(field, f"'{field}' forbids tool calls: leave out 'tools', or set tool_choice to 'none'.")
        return self

    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def keeps_reasoning_in_text(self) -> bool:
        return self.separate_reasoning is False

    def max_calls(self) -> int | None:
        return 1 if self.parallel_tool_calls is False else None

    def offered_tools(self) -> list[Tool]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    def prompts(self) -> list[dict[str, Any]]:
        arguments = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            arguments.setdefault("reasoning_effort", self.reasoning_effort)
        tools = [tool.for_template() for tool in self.offered_tools()]
        chat = inference_pb2.ChatPrompt(
            messages_json=to_json([message.for_template() for message in self.messages], "messages"),
            template_arguments_json=to_json(arguments, "chat_template_kwargs") if arguments else "",
            tools_json=to_json(tools, "tools") if tools else "",
            continue_final_message=bool(self.continue_final_message),
        )
        return [{"chat": chat}]


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

    def keeps_reasoning_in_text(self) -> bool:
        """A completion is text and nothing else."""
        return True

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
    if worst["type"] == "json_invalid" and not field:
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
        repetition_penalty=None if body.repetition_penalty == 1 else body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=[inference_pb2.LogitBias(id=token, bias=bias) for token, bias in (body.logit_bias or {}).items()],
        stop=stop,
        stop_token_ids=body.stop_token_ids,
        min_tokens=min(body.min_tokens or 0, UINT32_MAX),
        ignore_eos=bool(body.ignore_eos),
        top_logprobs=body.alternatives(),
    )


def to_generate_requests(body: Body, request_id: str) -> list[inference_pb2.GenerateRequest]:
    """One request a choice: the n choices of the first prompt, then those of the second, and so on."""
    prompts, n, grammar = body.prompts(), body.choices_per_prompt, body.grammar()
    return [
        inference_pb2.GenerateRequest(
            request_id=f"{request_id}-{prompt_index * n + index}",
            model=body.model,
            sampling=sampling(body, index),
            grammar=grammar,
            priority=body.priority,
            keep_reasoning_in_text=body.keeps_reasoning_in_text(),
            **prompt,
        )
        for prompt_index, prompt in enumerate(prompts)
        for index in range(n)
    ]
