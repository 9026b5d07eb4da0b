"""The cases of tests/cases/http.jsonl that need a real engine, over HTTP, on three hosts."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import httpx
import pytest

from integration.conftest import Served, eventually

PATH = "/v1/chat/completions"


class Client:
    """Chats with the cluster, whole or streamed."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.http = httpx.AsyncClient(base_url=served.url, timeout=120)

    async def whole(self, question: str, **more: Any) -> dict[str, Any]:
        reply = await self.http.post(PATH, json=self.body(question, **more))
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    async def text(self, question: str, **more: Any) -> str:
        return str((await self.whole(question, **more))["choices"][0]["message"]["content"])

    async def streamed(self, question: str, **more: Any) -> str:
        text = ""
        async with self.http.stream("POST", PATH, json=self.body(question, stream=True, **more)) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    choices = httpx.Response(200, content=line[6:]).json()["choices"]
                    text += choices[0]["delta"].get("content") or ""
        return text

    def body(self, question: str, **more: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": question}]
        return {"model": self.served.model, "messages": messages, "temperature": 0, "max_tokens": 16} | more

    async def nothing_is_left(self) -> None:
        for name, labels in (
            ("pomona_running_requests", {}),
            ("pomona_waiting_requests", {}),
            ("pomona_kv_tokens", {"state": "used"}),
        ):
            await asyncio.to_thread(eventually, lambda n=name, w=labels: self.served.total(n, **w) == 0, 2, name)


@pytest.fixture
async def client(on_three_hosts: Served):
    made = Client(on_three_hosts)
    yield made
    await made.http.aclose()


async def test_same_prompt_twice_then_two_lengths_then_36_at_once(client: Client):
    first = await client.text("What is the capital of France?")
    assert await client.text("What is the capital of France?") == first
    await asyncio.gather(client.text("Hi"), client.text("Tell me, in a few words, what a harbour is good for."))
    questions = [f"What is the capital of {c}?" for c in ("France", "Italy", "Spain", "Japan", "Peru", "Chad")]
    replies = await asyncio.gather(*(client.text(q, max_tokens=6) for q in questions * 6))
    assert all(replies)
    assert replies[:6] * 6 == replies
    await client.nothing_is_left()


async def test_characters_of_several_tokens_are_never_split(client: Client):
    questions = [
        f"Repeat exactly, and nothing else: {t}" for t in ("😀😃😄🎉", "ďábel šťastný", "你好世界", "e\u0301 n\u0303")
    ]
    whole = await asyncio.gather(*(client.text(q, max_tokens=20) for q in questions))
    streamed = await asyncio.gather(*(client.streamed(q, max_tokens=20) for q in questions))
    assert streamed == whole
    assert "\ufffd" not in "".join(whole)
    assert any(ord(c) > 127 for c in "".join(whole))


async def test_of_two_stop_strings_the_earliest_in_the_text_wins(client: Client):
    question = "Count from one to twenty in words."
    text = await client.text(question, max_tokens=24)
    outer, inner = text[8:20], text[11:14]
    expected = text[: min(text.find(outer), text.find(inner))]
    stops = [inner, outer]
    assert await client.text(question, max_tokens=24, stop=stops) == expected
    assert await client.streamed(question, max_tokens=24, stop=stops) == expected
    reply = await client.whole(question, max_tokens=24, stop=stops)
    assert reply["choices"][0]["finish_reason"] == "stop"


async def test_a_half_match_at_the_end_is_not_lost(client: Client):
    text = await client.text("Count from one to twenty in words.", max_tokens=8)
    assert await client.streamed("Count from one to twenty in words.", max_tokens=8, stop=[text[-3:] + "§"]) == text


async def test_the_same_seed_gives_the_same_text_alone_and_beside_others(client: Client):
    sampling = {"temperature": 0.9, "top_p": 0.9, "seed": 11, "max_tokens": 12}
    alone = await client.text("Invent a name for a ship.", **sampling)
    others = [client.text(f"Tell me about the number {n}.", temperature=1.0) for n in range(5)]
    together, *_ = await asyncio.gather(client.text("Invent a name for a ship.", **sampling), *others)
    assert together == alone


async def test_log_probabilities_are_finite_and_one_a_token(client: Client):
    reply = await client.whole("Say hi.", logprobs=True, top_logprobs=3, max_tokens=4)
    entries = reply["choices"][0]["logprobs"]["content"]
    assert len(entries) == reply["usage"]["completion_tokens"]
    for entry in entries:
        assert len(entry["top_logprobs"]) == 3
        assert math.isfinite(entry["logprob"])
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert entry["logprob"] == pytest.approx(max(t["logprob"] for t in entry["top_logprobs"]), abs=1e-4)


async def test_two_choices_have_their_indexes_and_their_usage_adds_up(client: Client):
    reply = await client.whole("Say hi.", n=2, temperature=1.0, max_tokens=8, ignore_eos=True)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    assert reply["usage"]["completion_tokens"] == 16


async def test_a_huge_max_tokens_is_capped_at_the_context(client: Client):
    reply = await client.whole("Say hi and stop.", max_tokens=1_000_000_000)
    assert reply["choices"][0]["finish_reason"] in ("stop", "length")
    await client.nothing_is_left()


@pytest.mark.parametrize(
    ("messages", "status"),
    [
        ([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], (200, 400)),
        ([{"role": "user", "content": "a\u0000b"}], (200,)),
    ],
    ids=["same-role-twice", "null-byte"],
)
async def test_odd_messages_are_answered_or_refused_never_an_error_of_ours(client: Client, messages, status):
    reply = await client.http.post(PATH, json=client.body("", max_tokens=2) | {"messages": messages})
    assert reply.status_code in status


async def test_bad_bodies_are_400_and_leave_nothing(client: Client):
    for bad in ({"messages": []}, {"temperature": "hot"}, {"max_tokens": 0}, {"n": 1_000_000}, {"stop": ["x"] * 5000}):
        reply = await client.http.post(PATH, json=client.body("hi") | bad)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == next(iter(bad))
    for raw in (b"", b"[" * 50_000, b'{"model": "\xff\xfe"}', b'{"max_tokens": ' + b"9" * 6000 + b"}"):
        assert (await client.http.post(PATH, content=raw)).status_code == 400
    await client.nothing_is_left()
