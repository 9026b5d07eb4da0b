"""The gateway over real connections: clients that leave, do not read or do not send, and the real OpenAI SDK."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from fakes import STOP, WAIT_S, FakeBackend, Step, call, last, series, served, speaks, token
from pomona.cluster.gateway.app import create_app
from pomona.cluster.gateway.metrics import GatewayMetrics
from pomona.v1 import inference_pb2

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "M", "messages": [{"role": "user", "content": "Say hi."}]}


async def connect(address: tuple[str, int], **fields: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A chat request sent over a socket of its own, nothing read yet."""
    connection = socket.create_connection(address)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    reader, writer = await asyncio.open_connection(sock=connection, limit=4096)
    body = json.dumps(BODY | fields)
    writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
    return reader, writer


async def test_a_client_that_leaves_a_stream_aborts_it_and_no_other() -> None:
    """Case disconnect-streaming."""
    go = asyncio.Event()
    backend = FakeBackend(lambda r: [token("a"), token("b"), go, last("c", STOP, 3)])
    metrics = GatewayMetrics()
    async with served(create_app(backend, api_key=None, metrics=metrics, version="1")) as address:
        (leaver, leaving), (reader, writer) = await connect(address, stream=True), await connect(address, stream=True)
        for either in (leaver, reader):
            await asyncio.wait_for(either.readuntil(b'"b"'), WAIT_S)
        leaving.close()
        assert await backend.next_end() == "aborted"
        go.set()
        await asyncio.wait_for(reader.readuntil(b"[DONE]"), WAIT_S)
        assert await backend.next_end() == "complete"
        writer.close()
    outcomes = series(metrics, "pomona_requests_total")
    assert outcomes == {f'pomona_requests_total{{model="M",outcome="{o}",route="chat"}}': 1 for o in ("aborted", "ok")}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("steps", [[], [token("a")]], ids=["queued-or-prefill", "decode"])
async def test_a_client_that_leaves_before_its_answer_aborts_it(
    steps: list[Step], stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Case disconnect-nonstreaming: at once, whatever the request was waiting for, and without a complaint."""
    waiting = asyncio.Event()

    def script(_: inference_pb2.GenerateRequest) -> Iterable[Step]:
        yield from steps
        waiting.set()
        yield asyncio.Event()

    backend = FakeBackend(script)
    metrics = GatewayMetrics()
    with caplog.at_level(logging.WARNING):
        async with served(create_app(backend, api_key=None, metrics=metrics, version="1")) as address:
            _, writer = await connect(address, n=2, stream=stream)
            await asyncio.wait_for(waiting.wait(), WAIT_S)
            writer.close()
            assert [await backend.next_end(), await backend.next_end()] == ["aborted"] * 2
    assert series(metrics, "pomona_requests_total") == {
        'pomona_requests_total{model="M",outcome="aborted",route="chat"}': 1.0
    }
    assert caplog.messages == []


async def test_a_client_that_does_not_read_is_cut_off() -> None:
    """Case slow-reader: little is made for it in advance, others go on, and at the write timeout it ends."""
    backend = FakeBackend(lambda r: speaks("fine")(r) if r.sampling.seed else itertools.repeat(token("x" * 65_536)))
    app = create_app(backend, api_key=None, metrics=GatewayMetrics(), version="1", write_timeout_s=0.3)
    async with served(app) as address:
        reader, writer = await connect(address, stream=True)
        other, other_writer = await connect(address, stream=True, seed=5)
        await asyncio.wait_for(other.readuntil(b"[DONE]"), WAIT_S)
        assert {await backend.next_end(), await backend.next_end()} == {"complete", "aborted"}
        assert backend.sent < 1000
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.read(), WAIT_S)
        writer.close()
        other_writer.close()


async def test_a_body_that_never_comes_is_given_up() -> None:
    """A client cannot hold a request open by not sending it."""
    app = create_app(FakeBackend(), api_key=None, metrics=GatewayMetrics(), version="1", write_timeout_s=0.2)
    async with served(app) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n".encode())
        assert b" 408 " in await asyncio.wait_for(reader.readline(), WAIT_S)
        writer.close()


async def test_the_openai_sdk_chats_whole_and_streamed() -> None:
    """The client that users have."""
    backend = FakeBackend()
    app = create_app(backend, api_key="k", metrics=GatewayMetrics(), version="1")
    async with served(app) as (host, port), AsyncOpenAI(base_url=f"http://{host}:{port}/v1", api_key="k") as sdk:
        assert [model.id async for model in sdk.models.list()] == ["M"]
        whole = await sdk.chat.completions.create(model="M", messages=BODY["messages"], logprobs=True)
        assert whole.choices[0].message.content == "Hi there!"
        assert whole.usage is not None
        assert whole.usage.total_tokens == 10
        stream = await sdk.chat.completions.create(
            model="M", messages=BODY["messages"], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hi there!"
    assert chunks[-1].usage == whole.usage


TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@asynccontextmanager
async def sdk_for(backend: FakeBackend) -> AsyncIterator[AsyncOpenAI]:
    app = create_app(backend, api_key=None, metrics=GatewayMetrics(), version="1")
    async with served(app) as (host, port), AsyncOpenAI(base_url=f"http://{host}:{port}/v1", api_key="k") as sdk:
        yield sdk


async def test_the_openai_sdk_gets_tool_calls_whole_and_streamed() -> None:
    """The same calls either way, ready to be sent back as the next turn."""
    steps = [token("", reasoning="Hm"), token("", reasoning="."), token("", tool_calls=[call("weather", "{}", "a")])]
    steps += [token("", tool_calls=[call("weather", '{"city": "İzmir"}', "b")]), last("", STOP, 5)]
    backend = FakeBackend(lambda _: steps)
    async with sdk_for(backend) as sdk:
        whole = await sdk.chat.completions.create(model="M", messages=BODY["messages"], tools=TOOLS)
        async with sdk.chat.completions.stream(model="M", messages=BODY["messages"], tools=TOOLS) as stream:
            deltas = [e.chunk.choices[0].delta async for e in stream if e.type == "chunk"]
            streamed = await stream.get_final_completion()
        answer = whole.choices[0].message
        assert answer.tool_calls
        turn: list[Any] = [
            answer,
            *({"role": "tool", "tool_call_id": c.id, "content": "sunny"} for c in answer.tool_calls),
        ]
        await sdk.chat.completions.create(model="M", messages=BODY["messages"] + turn, tools=TOOLS)
    assert whole.choices[0].finish_reason == streamed.choices[0].finish_reason == "tool_calls"
    assert answer.content is None
    assert [c.to_dict() for c in answer.tool_calls] == [
        {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
        {"id": "b", "type": "function", "function": {"name": "weather", "arguments": '{"city": "İzmir"}'}},
    ]
    again = streamed.choices[0].message.tool_calls
    assert again
    assert [(c.id, c.function.name, c.function.arguments) for c in again] == [
        (c.id, c.function.name, c.function.arguments) for c in answer.tool_calls if c.type == "function"
    ]
    assert answer.to_dict()["reasoning_content"] == "Hm."
    assert "".join(delta.to_dict().get("reasoning_content", "") for delta in deltas) == "Hm."
    assert json.loads(backend.requests[0].chat.tools_json) == TOOLS
    sent_back = json.loads(backend.requests[-1].chat.messages_json)
    assert [message["role"] for message in sent_back] == ["user", "assistant", "tool", "tool"]
    assert sent_back[1]["tool_calls"] == [c.to_dict() for c in answer.tool_calls]


class City(BaseModel):
    name: str
    people: int


async def test_the_openai_sdk_parses_an_answer_into_a_model() -> None:
    """Its response_format reaches the worker as the model's schema, made strict by the SDK."""
    backend = FakeBackend(speaks('{"name": "Ankara",', ' "people": 5}'))
    async with sdk_for(backend) as sdk:
        answer = await sdk.chat.completions.parse(model="M", messages=BODY["messages"], response_format=City)
    assert answer.choices[0].message.parsed == City(name="Ankara", people=5)
    schema = json.loads(backend.requests[0].grammar.json_schema)
    assert schema == City.model_json_schema() | {"additionalProperties": False}
