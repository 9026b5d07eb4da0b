"""Tool calls, reasoning and the cheap way of plain chunks, over HTTP against a scripted worker."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from fakes import LENGTH, STOP, FakeBackend, Step, call, entry, last, token
from pomona.cluster.gateway.answers import MARK
from pomona.cluster.gateway.app import create_app
from pomona.cluster.gateway.metrics import GatewayMetrics

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
BODY: dict[str, Any] = {"model": "M", "messages": [{"role": "user", "content": "Weather?"}]}
ANKARA = call("weather", '{"city": "Ankara"}', "call_a")
IZMIR = call("weather", '{"city": "İzmir"}', "call_b")
CALLS = [
    {"id": "call_a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ankara"}'}},
    {"id": "call_b", "type": "function", "function": {"name": "weather", "arguments": '{"city": "İzmir"}'}},
]


async def post(steps: list[Step], path: str = "/v1/chat/completions", **fields: Any) -> httpx.Response:
    app = create_app(FakeBackend(lambda _: steps), api_key=None, metrics=GatewayMetrics(), version="1")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://pomona") as http:
        response = await http.post(path, json=BODY | fields)
    assert response.status_code == 200, response.text
    return response


async def choice_of(steps: list[Step], **fields: Any) -> dict[str, Any]:
    """The one choice of a whole answer."""
    (choice,) = (await post(steps, **fields)).json()["choices"]
    made: dict[str, Any] = choice
    return made


async def stream_of(steps: list[Step], **fields: Any) -> list[dict[str, Any]]:
    """The choice of every chunk."""
    *events, done = (await post(steps, stream=True, **fields)).text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]


# ---- tool calls


async def test_a_whole_answer_lists_its_calls() -> None:
    """Content is null when there is no text; the reason is tool_calls instead of stop."""
    choice = await choice_of(
        [token(""), token("", tool_calls=[ANKARA]), token("", tool_calls=[IZMIR]), last("", STOP, 9)]
    )
    assert choice["message"] == {"role": "assistant", "content": None, "tool_calls": CALLS}
    assert choice["finish_reason"] == "tool_calls"


async def test_a_streamed_call_is_whole_in_one_chunk_under_its_index() -> None:
    """Indexes count through the answer, also when a message holds several calls; no delta holds a null."""
    steps: list[Step] = [
        token("Let me see."),
        token(" "),
        token("", tool_calls=[ANKARA]),
        token("", tool_calls=[IZMIR]),
    ]
    choices = await stream_of([*steps, last("", STOP, 9)], tools=[WEATHER])
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": "Let me see."},
        {"content": " "},
        {"tool_calls": [{"index": 0, **CALLS[0]}]},
        {"tool_calls": [{"index": 1, **CALLS[1]}]},
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, None, "tool_calls"]


async def test_calls_that_end_the_answer_are_in_its_last_chunk() -> None:
    end = last("", STOP, 2)
    end.tool_calls.extend([ANKARA, IZMIR])
    (choice,) = await stream_of([end])
    assert choice["delta"]["tool_calls"] == [{"index": 0, **CALLS[0]}, {"index": 1, **CALLS[1]}]
    assert choice["finish_reason"] == "tool_calls"


async def test_without_parallel_calls_the_first_is_kept() -> None:
    """Whole and streamed; a dropped call makes no chunk."""
    steps: list[Step] = [token("a"), token("", tool_calls=[ANKARA]), token("", tool_calls=[IZMIR]), last("", STOP, 9)]
    choice = await choice_of(steps, tools=[WEATHER], parallel_tool_calls=False)
    assert choice["message"] == {"role": "assistant", "content": "a", "tool_calls": CALLS[:1]}
    choices = await stream_of(steps, tools=[WEATHER], parallel_tool_calls=False)
    assert [choice["delta"].get("tool_calls") for choice in choices] == [None, [{"index": 0, **CALLS[0]}], None]
    assert choices[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("calls", [[], [ANKARA]])
async def test_an_answer_cut_inside_a_call_ended_by_length(calls: list[Any]) -> None:
    """Case tool-call-truncated: what was whole before the cut is kept, the rest is text."""
    steps: list[Step] = [token("", tool_calls=calls), last('<tool_call>{"name', LENGTH, 9)]
    choice = await choice_of(steps, tools=[WEATHER])
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == '<tool_call>{"name'
    assert len(choice["message"].get("tool_calls", [])) == len(calls)
    assert (await stream_of(steps, tools=[WEATHER]))[-1]["finish_reason"] == "length"


async def test_a_malformed_call_is_an_answer_that_stopped() -> None:
    """Case tool-call-malformed: the worker gave its text back."""
    steps: list[Step] = [token("<tool_call>"), last("{broken</tool_call>", STOP, 2)]
    assert (await choice_of(steps, tools=[WEATHER]))["finish_reason"] == "stop"
    choices = await stream_of(steps, tools=[WEATHER])
    assert "".join(choice["delta"]["content"] for choice in choices) == "<tool_call>{broken</tool_call>"
    assert choices[-1]["finish_reason"] == "stop"


# ---- reasoning


async def test_reasoning_has_a_field_of_its_own() -> None:
    """Whole and streamed, also where a message holds the end of it and the beginning of the text."""
    steps: list[Step] = [token("", reasoning=part) for part in ("So", " far", " good")]
    steps += [token("Hi", reasoning="."), token(" there"), last("!", STOP, 6)]
    choice = await choice_of(steps)
    assert choice["message"] == {"role": "assistant", "content": "Hi there!", "reasoning_content": "So far good."}
    assert choice["finish_reason"] == "stop"
    assert [choice["delta"] for choice in await stream_of(steps)] == [
        {"role": "assistant", "content": "", "reasoning_content": "So"},
        {"reasoning_content": " far"},
        {"reasoning_content": " good"},
        {"reasoning_content": ".", "content": "Hi"},
        {"content": " there"},
        {"content": "!"},
    ]


async def test_an_answer_of_reasoning_alone_has_empty_text() -> None:
    choice = await choice_of([token("", reasoning="Hm"), last("", LENGTH, 2)])
    assert choice["message"] == {"role": "assistant", "content": "", "reasoning_content": "Hm"}


# ---- plain chunks


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_plain_chunk_is_the_first_one_with_another_text(path: str) -> None:
    """Whatever the text holds: JSON's marks, other planes, and what the chunk is made from."""
    texts = ["first", '"', "\\", "\n\n", "ğ", "😀", "\u2028", "data: [DONE]", MARK, "\0", "}"]
    steps: list[Step] = [*map(token, texts), last("", STOP, len(texts))]
    include = {"include_usage": True}
    reply = await post(steps, path, prompt="p", stream=True, stream_options=include)
    first, *others = [json.loads(line.removeprefix("data: ")) for line in reply.text.split("\n\n")[: len(texts)]]
    for text, chunk in zip(texts[1:], others, strict=True):
        choice = {"delta": {"content": text}} if "chat" in path else {"text": text}
        assert chunk == first | {"choices": [first["choices"][0] | choice]}


async def test_tokens_with_logprobs_keep_them_among_plain_chunks() -> None:
    steps: list[Step] = [
        token("a"),
        token("b"),
        token("c", logprobs=[entry(b"c", -1.0, 0)]),
        token("d"),
        last("", STOP, 4),
    ]
    choices = await stream_of(steps)
    assert [choice["logprobs"] is not None for choice in choices] == [False, False, True, False, False]
