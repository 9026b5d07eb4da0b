"""What the gateway takes from clients, field by field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pomona.cluster.gateway.schema import ChatBody, CompletionBody, parse, to_generate_requests
from pomona.v1 import inference_pb2
from pomona.workers.errors import RequestError

USER = {"role": "user", "content": "hi"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def chat(**fields: Any) -> list[inference_pb2.GenerateRequest]:
    body = {"model": "M", "messages": [USER], **fields}
    return to_generate_requests(parse(ChatBody, json.dumps(body).encode()), "r")


def completion(**fields: Any) -> list[inference_pb2.GenerateRequest]:
    body = {"model": "M", "prompt": "p", **fields}
    return to_generate_requests(parse(CompletionBody, json.dumps(body).encode()), "r")


def messages(*sent: dict[str, Any]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = json.loads(chat(messages=list(sent))[0].chat.messages_json)
    return made


def test_a_plain_chat_request_has_openais_defaults() -> None:
    """Temperature 1; nothing else is set that the client did not send."""
    (request,) = chat()
    assert request == inference_pb2.GenerateRequest(
        request_id="r-0",
        model="M",
        chat=inference_pb2.ChatPrompt(messages_json=json.dumps([USER])),
        sampling=inference_pb2.SamplingParams(temperature=1.0),
    )


def test_explicit_nulls_are_fields_that_were_not_sent() -> None:
    """Every optional field may be null."""
    optional = set(ChatBody.model_fields) - {"model", "messages"} | {"logit_bias", "response_format", "functions"}
    assert chat(**dict.fromkeys(optional)) == chat()
    optional = set(CompletionBody.model_fields) - {"model", "prompt"} | {"echo", "suffix"}
    assert completion(**dict.fromkeys(optional)) == completion()


def test_every_sampling_field_reaches_the_worker() -> None:
    """Names and units as on the wire."""
    (request,) = chat(
        max_tokens=9,
        temperature=0,
        top_p=0.5,
        top_k=40,
        min_p=0.25,
        seed=-1,
        presence_penalty=-2,
        frequency_penalty=0.5,
        repetition_penalty=1.5,
        logit_bias={"5": -100, "0": 1.5},
        stop="END",
        stop_token_ids=[2, 7],
        min_tokens=9,
        ignore_eos=True,
        logprobs=True,
        priority=-3,
    )
    assert request.priority == -3
    assert request.sampling == inference_pb2.SamplingParams(
        max_tokens=9,
        temperature=0,
        top_p=0.5,
        top_k=40,
        min_p=0.25,
        seed=2**64 - 1,
        presence_penalty=-2,
        frequency_penalty=0.5,
        repetition_penalty=1.5,
        logit_bias=[inference_pb2.LogitBias(id=5, bias=-100), inference_pb2.LogitBias(id=0, bias=1.5)],
        stop=["END"],
        stop_token_ids=[2, 7],
        min_tokens=9,
        ignore_eos=True,
        top_logprobs=0,
    )


@pytest.mark.parametrize("top_k", [-1, 0])
def test_top_k_off_is_not_sent(top_k: int) -> None:
    """-1 and 0 are the two spellings of off."""
    assert not chat(top_k=top_k)[0].sampling.HasField("top_k")


def test_the_newer_token_limit_wins_and_large_ones_are_the_workers_to_cap() -> None:
    """max_completion_tokens replaces max_tokens; a billion, or more than the wire holds, is no error."""
    assert chat(max_tokens=9, max_completion_tokens=4)[0].sampling.max_tokens == 4
    assert chat(max_tokens=10**9)[0].sampling.max_tokens == 10**9
    assert chat(max_tokens=10**30)[0].sampling.max_tokens == 2**32 - 1
    assert completion()[0].sampling.max_tokens == 16


def test_choices_of_one_prompt_have_seeds_of_their_own() -> None:
    """seed + index, wrapping at 64 bits; without a seed none is sent."""
    assert [r.sampling.seed for r in chat(n=3, seed=2**64 - 2)] == [2**64 - 2, 2**64 - 1, 0]
    assert not any(r.sampling.HasField("seed") for r in chat(n=2))


def test_prompts_come_in_four_shapes_and_choices_prompt_by_prompt() -> None:
    """Text, texts, ids, lists of ids; ids of requests count through."""
    texts = completion(prompt=["a", "b"], n=2)
    assert [r.text for r in texts] == ["a", "a", "b", "b"]
    assert [r.request_id for r in texts] == ["r-0", "r-1", "r-2", "r-3"]
    assert [list(r.tokens.ids) for r in completion(prompt=[1, 2])] == [[1, 2]]
    assert [list(r.tokens.ids) for r in completion(prompt=[[1, 2], [3]])] == [[1, 2], [3]]
    assert completion(prompt="")[0].WhichOneof("prompt") == "text"


def test_messages_reach_the_template_joined_and_without_what_was_not_sent() -> None:
    """Parts are joined, null content is empty text, developer is the newer name of system."""
    call = {"id": "c1", "type": "function", "function": {"name": "w", "arguments": "{}"}}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert messages(
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": parts, "name": "ann", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ) == [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": "ab", "name": "ann"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
    ]


def test_template_arguments_and_continuation_are_handed_on() -> None:
    """chat_template_kwargs as JSON, reasoning_effort among them."""
    (request,) = chat(
        messages=[USER, {"role": "assistant", "content": "So"}],
        chat_template_kwargs={"enable_thinking": False},
        reasoning_effort="low",
        continue_final_message=True,
        add_generation_prompt=False,
    )
    arguments = {"enable_thinking": False, "reasoning_effort": "low"}
    assert json.loads(request.chat.template_arguments_json) == arguments
    assert request.chat.continue_final_message


def test_tools_reach_the_template_as_they_were_sent() -> None:
    """Nulls of the tool itself are left out, those of its schema are part of the schema."""
    schema = {"type": "object", "properties": {"city": {"default": None, "enum": ["Ankara", None]}}}
    sent = {"name": "weather", "description": "Says it.", "parameters": schema, "strict": None, "x": [1]}
    (request,) = chat(tools=[{"type": "function", "function": sent}], tool_choice="auto", parallel_tool_calls=True)
    function = {"name": "weather", "description": "Says it.", "parameters": schema, "x": [1]}
    assert json.loads(request.chat.tools_json) == [{"type": "function", "function": function}]


def test_tool_choice_none_offers_no_tools() -> None:
    assert chat(tools=[TOOL], tool_choice="none") == chat()


def test_reasoning_stays_in_the_text_where_the_answer_has_no_other_place() -> None:
    """SGLang's separate_reasoning for chats; completions are text alone."""
    assert not chat()[0].keep_reasoning_in_text
    assert not chat(separate_reasoning=True)[0].keep_reasoning_in_text
    assert chat(separate_reasoning=False)[0].keep_reasoning_in_text
    assert completion()[0].keep_reasoning_in_text


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {}},
        {"stop_token_ids": [], "min_tokens": 0, "priority": 0},
        {"tools": []},
        {"tool_choice": "auto", "parallel_tool_calls": True, "separate_reasoning": True},
        {"guided_choice": []},
        {"response_format": {"type": "text"}},
        {"top_logprobs": 0},
        {"best_of": 1, "echo": False, "suffix": ""},
        {"metadata": {"a": "b"}, "store": True, "some_new_field": [1]},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_neutral_and_unknown_fields_change_nothing(fields: dict[str, Any]) -> None:
    """What other servers' clients send by default is accepted."""
    assert chat(**fields) == chat()


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        *[(name, {name: value}) for name in ("presence_penalty", "frequency_penalty") for value in (-2.1, 2.1, "1")],
        *[("repetition_penalty", {"repetition_penalty": value}) for value in (0, -1, "1", float("inf"))],
        *[("logit_bias", {"logit_bias": {"5": value}}) for value in (-101, 100.5, "1", None, float("nan"))],
        *[("logit_bias", {"logit_bias": {key: 1}}) for key in ("-1", "x", "", "1.5", str(2**32))],
        ("logit_bias", {"logit_bias": [5]}),
        ("logit_bias", {"logit_bias": {str(token): 1 for token in range(1025)}}),
        *[("stop_token_ids", {"stop_token_ids": value}) for value in (5, "5", ["5"], [-1], [2**32], [1] * 1025)],
        *[("min_tokens", {"min_tokens": value}) for value in (-1, 1.5, "1", True)],
        ("min_tokens", {"min_tokens": 5, "max_tokens": 4}),
        ("min_tokens", {"min_tokens": 5, "max_completion_tokens": 4, "max_tokens": 9}),
        *[("priority", {"priority": value}) for value in (0.5, "1", 2**31, -(2**31) - 1)],
        *[("tools", {"tools": value}) for value in ("weather", {}, [1], [{}], [{"type": "function"}])],
        ("tools", {"tools": [TOOL | {"type": "custom"}]}),
        *[("tools", {"tools": [{"type": "function", "function": {"name": n}}]}) for n in ("", "a b", "a" * 65, 5, "ğ")],
        ("tools", {"tools": [{"type": "function", "function": {"name": "f", "parameters": "{}"}}]}),
        *[("tool_choice", {"tools": [TOOL], "tool_choice": value}) for value in ("required", TOOL, 1)],
        ("parallel_tool_calls", {"parallel_tool_calls": "no"}),
        ("separate_reasoning", {"separate_reasoning": 0}),
        ("functions", {"functions": [{"name": "f"}]}),
        ("guided_grammar", {"guided_grammar": "root ::= a"}),
        ("ebnf", {"ebnf": "root ::= a"}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": True}),
        ("max_completion_tokens", {"max_completion_tokens": -1}),
        ("temperature", {"temperature": 2.5}),
        ("temperature", {"temperature": float("inf")}),
        ("top_p", {"top_p": 0}),
        ("top_k", {"top_k": -2}),
        ("min_p", {"min_p": 1.5}),
        ("seed", {"seed": 2**64}),
        ("stop", {"stop": ["a"] * 17}),
        ("stop", {"stop": [""]}),
        ("stop", {"stop": ""}),
        ("n", {"n": 17}),
        ("n", {"n": 0}),
        ("stream", {"stream": "yes"}),
        ("stream_options", {"stream_options": {"include_usage": 1}}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("logprobs", {"logprobs": 3}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"a": float("nan")}}),
        ("continue_final_message", {"continue_final_message": True}),
        ("add_generation_prompt", {"add_generation_prompt": False}),
        ("messages", {"messages": []}),
        ("messages", {"messages": [{"role": "user"}]}),
        ("messages", {"messages": [{"role": "robot", "content": "a"}]}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
        ("messages", {"messages": [{"role": "assistant", "content": None, "function_call": {"name": "f"}}]}),
        ("model", {"model": ""}),
    ],
)
def test_what_cannot_be_served_names_its_parameter(param: str, fields: dict[str, Any]) -> None:
    """400 with OpenAI's param and a sentence."""
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param in str(caught.value)
    assert str(caught.value).endswith(".")


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("prompt", {"prompt": None}),
        ("prompt", {"prompt": []}),
        ("prompt", {"prompt": [[]]}),
        ("prompt", {"prompt": [-1]}),
        ("prompt", {"prompt": [2**32]}),
        ("prompt", {"prompt": ["a", 1]}),
        ("n", {"prompt": ["a"] * 100, "n": 2}),
        ("echo", {"echo": True}),
        ("suffix", {"suffix": "end"}),
        ("best_of", {"best_of": 4}),
        ("logprobs", {"logprobs": 21}),
        ("min_tokens", {"min_tokens": 17}),  # the limit is 16 when none is sent
    ],
)
def test_completions_refuse_what_they_cannot_do(param: str, fields: dict[str, Any]) -> None:
    """As for chat."""
    with pytest.raises(RequestError) as caught:
        completion(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_errors_never_echo_what_was_sent() -> None:
    """Neither values nor the validator's own jargon reach the client."""
    with pytest.raises(RequestError) as caught:
        chat(messages=[{"role": "user", "content": 5, "secret": "hunter2"}])
    assert str(caught.value) == "'messages.0.content': Input should be a valid string."
