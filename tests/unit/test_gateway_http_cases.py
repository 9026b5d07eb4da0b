"""The cases of tests/cases/http.jsonl that need no engine: each is one test under its id."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from fakes import FakeBackend, speaks
from pomona.cluster.gateway.app import create_app
from pomona.cluster.gateway.metrics import GatewayMetrics

TEXT = (Path(__file__).parents[1] / "cases" / "http.jsonl").read_text(encoding="utf-8")
CASES: dict[str, dict[str, Any]] = {case["id"]: case for case in map(json.loads, TEXT.splitlines()) if case}

SKIPPED = {  # who tests what the gateway alone cannot show
    "same-prompt-twice": "integration",
    "emoji-split": "integration",
    "stop-two-lengths": "integration",
    "over-context": "integration; test_gateway_backend has the error's way through the gateway",
    "tool-call-split": "test_tool_calls; test_gateway_calls has the answer's shape",
    "tool-call-malformed": "test_tool_calls; test_gateway_calls has the answer's shape",
    "tool-call-truncated": "test_tool_calls; test_gateway_calls has the answer's shape",
    "disconnect-streaming": "test_gateway_connections",
    "disconnect-nonstreaming": "test_gateway_connections",
    "slow-reader": "test_gateway_connections",
}

USER = [{"role": "user", "content": "Say hi."}]
PATH = "/v1/chat/completions"
RAW = {
    "nan-number": CASES["nan-number"]["send"]["raw"].encode(),
    "deep-json": b"[" * 50_000,
    "long-integer": b'{"model":"M","messages":[{"role":"user","content":"a"}],"max_tokens":' + b"9" * 6_000 + b"}",
    "bad-utf8": b'{"model":"M","messages":[{"role":"user","content":"\xff\xfe"}]}',
    "empty-body": b"",
    "stop-too-many": json.dumps({"model": "M", "messages": USER, "stop": ["a"] * 5_000}).encode(),
}

Check = Callable[[httpx.Response, FakeBackend], None]


def error(status: int, param: str | None = None, code: str | None = None) -> Check:
    """The whole of OpenAI's error shape, and nothing reached the backend."""

    def check(response: httpx.Response, backend: FakeBackend) -> None:
        assert response.status_code == status
        body = response.json()["error"]
        assert set(body) == {"message", "type", "param", "code"}
        assert body["message"]
        assert body["type"] == "invalid_request_error"
        assert param is None or body["param"] == param
        assert code is None or body["code"] == code
        assert backend.requests == []

    return check


def said(text: str, reason: str = "stop") -> Check:
    def check(response: httpx.Response, _: FakeBackend) -> None:
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, reason)

    return check


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream that ended as it should."""
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    *sent, done = response.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in sent]


def messages_are(*expected: dict[str, Any]) -> Check:
    def check(response: httpx.Response, backend: FakeBackend) -> None:
        assert response.status_code == 200
        sent = json.loads(backend.requests[0].chat.messages_json)
        assert [message["role"] for message in sent] == [message["role"] for message in expected]
        assert [message["content"] for message in sent] == [message["content"] for message in expected]

    return check


def at_most_four(response: httpx.Response, backend: FakeBackend) -> None:
    assert response.json()["usage"]["completion_tokens"] <= 4
    assert backend.requests[0].sampling.max_tokens == 4


def ends_with_done(response: httpx.Response, _: FakeBackend) -> None:
    assert events(response)


def usage_last(response: httpx.Response, _: FakeBackend) -> None:
    *chunks, usage = events(response)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)


def no_null_deltas(response: httpx.Response, _: FakeBackend) -> None:
    deltas = [chunk["choices"][0]["delta"] for chunk in events(response)]
    assert deltas[0]["role"] == "assistant"
    assert all(value is not None for delta in deltas for value in delta.values())
    assert "".join(delta.get("content", "") for delta in deltas) == "Hi there!"


def stops_reach_the_worker(response: httpx.Response, backend: FakeBackend) -> None:
    assert response.status_code == 200
    assert list(backend.requests[0].sampling.stop) == ["hi", "Hi"]


def two_choices(response: httpx.Response, _: FakeBackend) -> None:
    body = response.json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"]["completion_tokens"] == 6
    assert body["usage"]["prompt_tokens"] == 7


def logprobs_per_token(response: httpx.Response, _: FakeBackend) -> None:
    content = response.json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["Hi", " there", "!"]
    for entry in content:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert len(entry["top_logprobs"]) == 3
        values = [entry["logprob"], *(top["logprob"] for top in entry["top_logprobs"])]
        assert all(value is None or math.isfinite(value) for value in values)


CHECKS: dict[str, Check] = {
    "max-tokens-null": said("Hi there!"),
    "max-tokens-zero": error(400, "max_tokens"),
    "max-tokens-huge": said("Hi there!"),
    "max-completion-tokens": at_most_four,
    "stream-options-empty": ends_with_done,
    "stream-options-usage": usage_last,
    "messages-missing": error(400, "messages"),
    "messages-empty": error(400, "messages"),
    "content-array": messages_are({"role": "user", "content": "Say hi."}),
    "content-null-with-tool-calls": messages_are(
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "sunny"},
    ),
    "same-role-twice": messages_are({"role": "user", "content": "a"}, {"role": "user", "content": "b"}),
    "delta-without-nulls": no_null_deltas,
    "stop-string": stops_reach_the_worker,
    "stop-too-many": error(400, "stop"),
    "n-two": two_choices,
    "n-huge": error(400, "n"),
    "logprobs": logprobs_per_token,
    "temperature-text": error(400, "temperature"),
    "nan-number": error(400, "temperature"),
    "deep-json": error(400),
    "long-integer": error(400),
    "bad-utf8": error(400),
    "lone-surrogate": error(400),
    "null-byte": messages_are({"role": "user", "content": "a\0b"}),
    "unknown-model": error(404, "model", "model_not_found"),
    "empty-body": error(400),
    "wrong-method": error(405),
}


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend(speaks("Hi", " there", "!"))


@pytest.fixture
def metrics() -> GatewayMetrics:
    return GatewayMetrics()


@pytest.fixture
async def client(backend: FakeBackend, metrics: GatewayMetrics) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(backend, api_key=None, metrics=metrics, version="test")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://pomona") as made:
        yield made


@pytest.mark.parametrize("case", CHECKS)
async def test_case(case: str, client: httpx.AsyncClient, backend: FakeBackend) -> None:
    """What is sent has the right outcome, and the server goes on answering."""
    send = CASES[case]["send"]
    content = RAW.get(case) if case in RAW else json.dumps(send["body"]).encode() if "body" in send else None
    async with asyncio.timeout(5):
        response = await client.request(send.get("method", "POST"), send.get("path", PATH), content=content)
    CHECKS[case](response, backend)
    assert (await client.get("/health")).status_code == 200


async def test_10_000_junk_models_add_at_most_one_series_a_metric(
    client: httpx.AsyncClient, metrics: GatewayMetrics
) -> None:
    """Case junk-models-10k: names that clients choose are never labels."""

    async def ask(name: str) -> None:
        response = await client.post(PATH, json={"model": name, "messages": USER})
        assert response.status_code == 404

    await ask("junk")
    before = len(metrics.text().splitlines())
    for number in range(10_000):
        await ask(f"junk-{number}/../../etc/passwd")
    assert len(metrics.text().splitlines()) == before
    assert b'pomona_requests_total{model="unknown",outcome="client_error",route="chat"} 10001.0' in metrics.text()
    assert b"junk" not in metrics.text()


def test_every_case_has_a_test() -> None:
    """A case that is added is either tested here or listed with who tests it."""
    assert set(CASES) == set(CHECKS) | set(SKIPPED) | {"junk-models-10k"}
