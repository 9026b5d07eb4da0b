"""The gateway over HTTP: answers, statuses, keys, probes, metrics and the OpenAPI document."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Callable, Iterable
from typing import Any

import httpx
import pytest

from fakes import STOP, FakeBackend, Step, entry, last, series, token
from pomona.cluster.gateway.app import create_app
from pomona.cluster.gateway.metrics import GatewayMetrics
from pomona.v1 import inference_pb2
from pomona.workers.errors import EngineError, LostHost, Overloaded, RequestError, Unavailable

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "M", "messages": [{"role": "user", "content": "Say hi."}]}


def client(backend: FakeBackend, metrics: GatewayMetrics | None = None, **options: Any) -> httpx.AsyncClient:
    arguments = {"api_key": None, "metrics": metrics or GatewayMetrics(), "version": "1.2.3", **options}
    transport = httpx.ASGITransport(create_app(backend, **arguments), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://pomona")


def always(*steps: Step) -> Callable[[inference_pb2.GenerateRequest], Iterable[Step]]:
    return lambda _: steps


def events(text: str) -> list[Any]:
    """Every event of a stream, [DONE] as it is."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


# ---- answers


async def test_streamed_deltas_are_the_whole_text() -> None:
    """Finish reasons are null until the last chunk, and empty messages make no chunk."""
    steps = [token("A"), token(""), token("ğ"), last("!", STOP, 4)]
    async with client(FakeBackend(always(*steps))) as http:
        whole = (await http.post(CHAT, json=BODY)).json()
        stream = events((await http.post(CHAT, json=BODY | {"stream": True})).text)
    assert stream.pop() == "[DONE]"
    choices = [chunk["choices"][0] for chunk in stream]
    assert (
        "".join(choice["delta"]["content"] for choice in choices) == whole["choices"][0]["message"]["content"] == "Ağ!"
    )
    assert [choice["finish_reason"] for choice in choices] == [None, None, "stop"]
    assert [("role" in choice["delta"]) for choice in choices] == [True, False, False]
    assert {chunk["object"] for chunk in stream} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in stream}) == 1


async def test_usage_sums_choices_and_counts_each_prompt_once() -> None:
    """Two prompts of 7 tokens with 2 choices of 3 tokens each."""
    async with client(FakeBackend()) as http:
        reply = await http.post("/v1/completions", json={"model": "M", "prompt": ["a", "b"], "n": 2})
    assert reply.json()["usage"] == {
        "prompt_tokens": 14,
        "completion_tokens": 12,
        "total_tokens": 26,
        "prompt_tokens_details": {"cached_tokens": 6},
    }
    assert [choice["index"] for choice in reply.json()["choices"]] == [0, 1, 2, 3]


async def test_choices_stream_interleaved_under_their_index() -> None:
    """The second choice need not wait for the first."""
    second_done = asyncio.Event()

    def script(request: inference_pb2.GenerateRequest) -> Iterable[Step]:
        if request.request_id.endswith("-0"):
            yield from (token("a"), second_done, last("b", STOP, 2))
        else:
            yield last("c", STOP, 1)
            second_done.set()

    async with client(FakeBackend(script)) as http:
        stream = events((await http.post(CHAT, json=BODY | {"stream": True, "n": 2})).text)
    seen = [(chunk["choices"][0]["index"], chunk["choices"][0]["delta"]["content"]) for chunk in stream[:-1]]
    assert seen == [(0, "a"), (1, "c"), (0, "b")]


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_logprobs_have_parallel_lists(stream: bool) -> None:
    """Offsets count characters of the text, also across chunks and tokens that end inside a character."""
    said = [(b"\xc4", "", -0.5), (b"\x8f", "ď", -float("inf")), (b"x", "x", -0.25)]
    steps = [token(text, logprobs=[entry(raw, value, 1)]) for raw, text, value in said]
    steps.append(last("", STOP, 3))
    async with client(FakeBackend(always(*steps))) as http:
        reply = await http.post("/v1/completions", json={"model": "M", "prompt": "p", "logprobs": 1, "stream": stream})
    answers = events(reply.text)[:-1] if stream else [reply.json()]
    parts = [answer["choices"][0]["logprobs"] for answer in answers if answer["choices"][0]["logprobs"]]
    merged = {name: list(itertools.chain.from_iterable(part[name] for part in parts)) for name in parts[0]}
    assert merged == {
        "tokens": ["bytes:\\xc4", "bytes:\\x8f", "x"],
        "token_logprobs": [-0.5, None, -0.25],
        "top_logprobs": [
            {"bytes:\\xc4": -0.5, "t0": None},
            {"bytes:\\x8f": None, "t0": None},
            {"x": -0.25, "t0": None},
        ],
        "text_offset": [0, 1, 1],
    }


# ---- errors


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("exc", "status", "code", "outcome"),
    [
        (RequestError("Too long.", code="too_long"), 400, "too_long", "client_error"),
        (RequestError("Too slow.", code="timeout", status=504), 504, "timeout", "error"),
        (Overloaded("Full."), 429, "overloaded", "shed"),
        (Unavailable("Nobody."), 503, "unavailable", "shed"),
        (LostHost("Gone."), 503, "lost_host", "error"),
        (EngineError("Broken."), 500, "engine_error", "error"),
        (ZeroDivisionError("secret"), 500, "internal_error", "error"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
async def test_errors_before_the_first_token_are_statuses(
    exc: Exception, status: int, code: str, outcome: str, stream: bool
) -> None:
    """Streamed or not; what may be tried again says when; bugs say nothing of themselves."""
    metrics = GatewayMetrics()
    async with client(FakeBackend(always(exc)), metrics) as http:
        reply = await http.post(CHAT, json=BODY | {"stream": stream})
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
    assert (reply.headers.get("retry-after") == "1") == (code in {"overloaded", "unavailable", "lost_host"})
    assert "secret" not in reply.text
    name = f'pomona_requests_total{{model="M",outcome="{outcome}",route="chat"}}'
    assert series(metrics, "pomona_requests_total") == {name: 1.0}


@pytest.mark.parametrize("exc", [LostHost("Gone."), EngineError("Broken."), ZeroDivisionError("secret")])
async def test_an_error_after_the_first_token_is_an_event_without_done(exc: Exception) -> None:
    """The client is told, and does not take the text for complete."""
    async with client(FakeBackend(always(token("a"), exc))) as http:
        reply = await http.post(CHAT, json=BODY | {"stream": True})
    chunk, failure = events(reply.text)
    assert chunk["choices"][0]["delta"]["content"] == "a"
    assert failure["error"]["type"] == "server_error"
    assert "secret" not in reply.text


@pytest.mark.parametrize("steps", [[], [token("a")], [token("a"), last("", inference_pb2.FINISH_REASON_ABORT, 1)]])
async def test_an_answer_that_stops_without_a_reason_is_an_error(steps: list[Step]) -> None:
    """Half an answer is never passed off as whole."""
    async with client(FakeBackend(always(*steps))) as http:
        assert (await http.post(CHAT, json=BODY)).status_code == 503
        assert events((await http.post(CHAT, json=BODY | {"stream": True})).text)[-1]["error"]["code"] == "lost_host"


async def test_one_failed_choice_ends_the_others() -> None:
    """No choice runs on for a client that has its error."""
    backend = FakeBackend(lambda r: [Overloaded("Full.")] if r.request_id.endswith("-1") else [asyncio.Event()])
    async with client(backend) as http:
        assert (await http.post(CHAT, json=BODY | {"n": 2})).status_code == 429
    assert {await backend.next_end(), await backend.next_end()} == {"failed", "aborted"}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nope", 404), ("GET", "/v1/models/nope/x", 404), ("POST", "/health", 405), ("GET", CHAT, 405)],
)
async def test_unknown_paths_and_methods_answer_in_openais_shape(method: str, path: str, status: int) -> None:
    """Clients parse one shape of error, whatever went wrong."""
    async with client(FakeBackend()) as http:
        reply = await http.request(method, path)
    assert (reply.status_code, set(reply.json()["error"])) == (status, {"message", "type", "param", "code"})


@pytest.mark.parametrize("declared", [True, False])
async def test_bodies_over_the_limit_are_refused(declared: bool) -> None:
    """By their declared length before they are read, otherwise as soon as they are too long."""

    async def chunks() -> Any:
        for _ in itertools.repeat(None):
            yield b" " * 600

    async with client(FakeBackend(), max_body_bytes=1000) as http:
        reply = await http.post(CHAT, content=b" " * 1001 if declared else chunks())
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")
        assert (await http.post(CHAT, json=BODY)).status_code == 200


# ---- keys, probes, documents


async def test_the_key_guards_answers_and_the_cluster_but_no_probe() -> None:
    """401 in OpenAI's shape for a missing, wrong, or strange key."""
    async with client(FakeBackend(), api_key="kéy") as http:
        for key in (None, "Bearer nope", "kéy", "Bearer kéyy"):
            headers = {"authorization": key.encode()} if key else {}
            for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("GET", "/cluster")):
                reply = await http.request(method, path, headers=headers)
                assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
        reply = await http.post(CHAT, json=BODY, headers={"authorization": "Bearer kéy".encode()})
        assert reply.status_code == 200
        for path in ("/health", "/ready", "/metrics"):
            assert (await http.get(path)).status_code == 200


async def test_readiness_says_what_is_missing() -> None:
    """503 with the reason while no model can be served; one lost model does not stop the others."""
    backend = FakeBackend(models=["M", "org/N"])
    async with client(backend) as http:
        assert (await http.get("/ready")).json() == {"ready": True}
        backend.ready_names = {"M"}
        assert (await http.get("/ready")).json() == {"ready": True, "waiting": ["org/N"]}
        backend.ready_names = set()
        reply = await http.get("/ready")
        assert (reply.status_code, reply.json()["ready"]) == (503, False)
        assert "org/N" in reply.json()["reason"]
        assert (await http.get("/health")).status_code == 200
        assert [model["id"] for model in (await http.get("/v1/models")).json()["data"]] == ["M", "org/N"]
        assert (await http.get("/v1/models/org/N")).json()["id"] == "org/N"
        assert (await http.get("/cluster")).json() == {"owners": []}


async def test_the_openapi_document_names_every_route_and_resolves() -> None:
    """Every reference in it points at something in it."""
    async with client(FakeBackend()) as http:
        document = (await http.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.")
    assert document["info"] == {"title": "pomona", "version": "1.2.3"}
    paths = {CHAT, "/v1/completions", "/v1/models", "/v1/models/{model}", "/health", "/ready", "/metrics", "/cluster"}
    assert set(document["paths"]) == paths
    text = json.dumps(document)
    names = set(re.findall(r'"#/components/schemas/([^"]+)"', text))
    assert {"ChatBody", "CompletionBody", "Message"} <= names <= set(document["components"]["schemas"])
    assert text.count('"$ref": "') == len(re.findall(r'"\$ref": "#/components/schemas/', text))


async def test_metrics_count_what_happened() -> None:
    """Tokens, times and outcomes of two requests, in the old text format whatever is asked for."""
    ticks = itertools.count()
    metrics = GatewayMetrics(clock=lambda: next(ticks))
    async with client(FakeBackend(), metrics) as http:
        await http.post(CHAT, json=BODY)
        await http.post(CHAT, json=BODY | {"stream": True})
        reply = await http.get("/metrics", headers={"accept": "application/openmetrics-text"})
    assert reply.headers["content-type"] == "text/plain; version=0.0.4"
    counted = series(metrics, "pomona_")
    assert counted['pomona_requests_total{model="M",outcome="ok",route="chat"}'] == 2
    assert counted['pomona_prompt_tokens_total{model="M"}'] == 14
    assert counted['pomona_cached_prompt_tokens_total{model="M"}'] == 6
    assert counted['pomona_generation_tokens_total{model="M"}'] == 6
    assert counted['pomona_time_to_first_token_seconds_sum{model="M"}'] == 2
    assert counted['pomona_inter_token_latency_seconds_count{model="M"}'] == 4
    assert counted['pomona_request_duration_seconds_sum{model="M"}'] == 8


async def test_the_capacity_page_needs_no_key_and_loads_nothing_from_elsewhere() -> None:
    async with client(FakeBackend(), api_key="secret") as http:
        reply = await http.get("/")
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/html")
    assert "//" not in re.sub(r"<script>.*</script>", "", reply.text, flags=re.DOTALL)
