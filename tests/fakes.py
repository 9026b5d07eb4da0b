"""Stand-ins for a cluster behind the gateway, and a real uvicorn on a loopback port."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from pomona.cluster.gateway.metrics import GatewayMetrics
from pomona.v1 import inference_pb2

STOP = inference_pb2.FINISH_REASON_STOP
LENGTH = inference_pb2.FINISH_REASON_LENGTH
WAIT_S = 10.0  # how long a test waits for what has to happen at once

Step = inference_pb2.GenerateResponse | Exception | asyncio.Event
Script = Callable[[inference_pb2.GenerateRequest], Iterable[Step]]


def entry(token: bytes, logprob: float, top: int) -> inference_pb2.TokenLogprobs:
    """Logprobs of one token; the last alternative is impossible, as masked tokens are."""
    values = [-1.0 - i for i in range(top)]
    if values:
        values[-1] = -math.inf
    return inference_pb2.TokenLogprobs(
        sampled=inference_pb2.TokenLogprob(id=1, token=token, logprob=logprob),
        top=[inference_pb2.TokenLogprob(id=i, token=b"t%d" % i, logprob=value) for i, value in enumerate(values)],
    )


def token(text: str, **fields: Any) -> inference_pb2.GenerateResponse:
    """One message of one token."""
    return inference_pb2.GenerateResponse(ids=[1], text=text, **fields)


def last(text: str, reason: int, tokens: int, prompt: int = 7, cached: int = 3) -> inference_pb2.GenerateResponse:
    """The last message of an answer of `tokens` tokens."""
    usage = inference_pb2.Usage(prompt_tokens=prompt, completion_tokens=tokens, cached_tokens=cached)
    return inference_pb2.GenerateResponse(ids=[1], text=text, finish_reason=reason, usage=usage)


def call(name: str, arguments_json: str, call_id: str = "call_1") -> inference_pb2.ToolCall:
    """One whole call of a tool."""
    return inference_pb2.ToolCall(id=call_id, name=name, arguments_json=arguments_json)


def speaks(*texts: str) -> Script:
    """One token a text, cut at max_tokens, with logprobs when they are asked for."""

    def script(request: inference_pb2.GenerateRequest) -> Iterable[Step]:
        sampling = request.sampling
        limit = sampling.max_tokens if sampling.HasField("max_tokens") else len(texts)
        said = texts[:limit]
        reason = STOP if len(said) == len(texts) else LENGTH
        for index, text in enumerate(said):
            message = last(text, reason, len(said)) if index == len(said) - 1 else token(text)
            if sampling.HasField("top_logprobs"):
                message.logprobs.append(entry(text.encode(), -0.5, sampling.top_logprobs))
            yield message

    return script


HELLO = speaks("Hi", " there", "!")


class FakeBackend:
    """Answers from a script: messages are sent, errors raised, events waited for.

    `ended` receives the request id and how it ended: complete, failed or aborted.
    """

    def __init__(self, script: Script = HELLO, models: Iterable[str] = ("M",)) -> None:
        self.script = script
        self.names = list(models)
        self.ready_names = set(self.names)
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.sent = 0
        self.ended: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    def models(self) -> list[str]:
        return self.names

    def ready(self, model: str) -> bool:
        return model in self.ready_names

    async def cluster(self) -> dict[str, Any]:
        return {"owners": []}

    async def generate(
        self, request: inference_pb2.GenerateRequest
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        self.requests.append(request)
        how = "aborted"
        try:
            for step in self.script(request):
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, Exception):
                    how = "failed"
                    raise step
                else:
                    self.sent += 1
                    yield step
            how = "complete"
        finally:
            self.ended.put_nowait((request.request_id, how))

    async def next_end(self) -> str:
        """How the next request to end has ended."""
        return (await asyncio.wait_for(self.ended.get(), WAIT_S))[1]


def series(metrics: GatewayMetrics, start: str) -> dict[str, float]:
    """The exposed samples whose names begin with `start`."""
    lines = [line.rsplit(" ", 1) for line in metrics.text().decode().splitlines() if line.startswith(start)]
    return {name: float(value) for name, value in lines}


@asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[tuple[str, int]]:
    """The app under uvicorn on a free loopback port, stopped and its port closed at the end."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=2, access_log=False)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.005)
        yield listener.getsockname()[:2]
    finally:
        server.should_exit = True
        await task
        listener.close()
