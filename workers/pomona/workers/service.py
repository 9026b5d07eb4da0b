"""The owner leader's gRPC service: Generate, Abort, GetLoads. Edge only: it converts, submits and streams."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from pomona.v1 import inference_pb2, inference_pb2_grpc, telemetry_pb2

from .engine.base import Delta
from .engine.engine import Engine
from .engine.grammar import CompiledGrammar
from .engine.grammar_compiler import GrammarCompiler
from .errors import Overloaded, PomonaError, RequestError, StaleEpoch, Unavailable
from .text.prompt import PromptEncoder
from .wire import TokenBytes, to_engine_request, to_generate_response

DEFAULT_DEADLINE_S = 3600.0

# The first row that fits decides; the gateway has the same table the other way round.
STATUS_OF: tuple[tuple[type[PomonaError], grpc.StatusCode], ...] = (
    (RequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (StaleEpoch, grpc.StatusCode.FAILED_PRECONDITION),
    (Unavailable, grpc.StatusCode.UNAVAILABLE),
    (PomonaError, grpc.StatusCode.INTERNAL),
)

if TYPE_CHECKING:  # generic in the stubs only
    Context = grpc.aio.ServicerContext[Any, Any]


class AnswerQueue:
    """An answer on its way out: what waits together leaves together, and the first never waits."""

    def __init__(self) -> None:
        self._deltas: deque[Delta] = deque()
        self._some = asyncio.Event()
        self._late = False
        self._complete = False
        self.ended = False

    def put(self, delta: Delta) -> None:
        """Called on the event loop. After the last delta nothing counts: a step that runs while an answer is aborted
        may still say a token."""
        if self._complete:
            return
        self._complete = delta.last
        self._deltas.append(delta)
        self._some.set()

    async def deltas(self, deadline: float) -> AsyncIterator[Delta]:
        """Merged deltas until the last one. Raises the answer's error, or TimeoutError past the loop's `deadline`."""
        # One timer an answer, which only wakes: a timeout around each wait would be made anew for every token, and one
        # around the loop would cancel whoever iterates while this stands at its yield.
        timer = asyncio.get_running_loop().call_at(deadline, self._expire)
        try:
            while not self.ended:
                await self._some.wait()
                self._some.clear()
                if not self._deltas:
                    raise TimeoutError
                waiting, self._deltas = list(self._deltas), deque()
                delta = merge(waiting)
                self.ended = delta.last
                if delta.ids or delta.text or delta.reasoning or delta.tool_calls or delta.finish is not None:
                    yield delta
                if delta.error is not None:
                    raise delta.error
                if self._late and not self.ended:
                    raise TimeoutError
        finally:
            timer.cancel()

    def _expire(self) -> None:
        self._late = True
        self._some.set()


def merge(deltas: list[Delta]) -> Delta:
    """Consecutive pieces of one answer as one piece."""
    if len(deltas) == 1:
        return deltas[0]
    return Delta(
        ids=tuple(i for d in deltas for i in d.ids),
        text="".join([d.text for d in deltas]),
        reasoning="".join([d.reasoning for d in deltas]),
        tool_calls=tuple(call for d in deltas for call in d.tool_calls),
        logprobs=tuple(entry for d in deltas for entry in d.logprobs),
        finish=deltas[-1].finish,
        usage=deltas[-1].usage,
        error=deltas[-1].error,
    )


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """Serves one owner. `admits(model, epoch)` raises Unavailable where new work is not welcome: no share, draining."""

    def __init__(
        self,
        engine: Engine,
        prompts: PromptEncoder,
        tokenizing: Executor,
        token_bytes: TokenBytes,
        admits: Callable[[str, int], None],
        load: Callable[[], telemetry_pb2.LoadReport],
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._tokenizing = tokenizing
        self._token_bytes = token_bytes
        self._admits = admits
        self._load = load
        self._grammars = grammars
        self._live: dict[str, AnswerQueue] = {}

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        try:
            async for response in self._answer(request):
                yield response
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the request's deadline passed")
        except PomonaError as exc:
            await refuse(context, exc)

    async def _answer(self, request: inference_pb2.GenerateRequest) -> AsyncIterator[inference_pb2.GenerateResponse]:
        self._admits(request.model, request.epoch)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (request.deadline_s if request.HasField("deadline_s") else DEFAULT_DEADLINE_S)
        async with asyncio.timeout_at(deadline):
            prompt = await loop.run_in_executor(self._tokenizing, self._prompts.encode, request)
            grammar = await self._grammar(request)
        asked = to_engine_request(request, prompt, vocab_size=self._prompts.vocab_size)
        asked = dataclasses.replace(asked, grammar=grammar)
        answer = AnswerQueue()
        if request.request_id in self._live:
            raise RequestError(f"request id {request.request_id} is already in use", param="request_id")
        self._live[request.request_id] = answer
        try:
            self._engine.submit(asked, answer.put)
            async for delta in answer.deltas(deadline):
                yield to_generate_response(delta, self._token_bytes)
        finally:
            del self._live[request.request_id]
            if not answer.ended:  # the client left, or the deadline passed
                self._engine.cancel(request.request_id)

    async def _grammar(self, request: inference_pb2.GenerateRequest) -> CompiledGrammar | None:
        """What the answer, or the rest of a resumed one, has to look like."""
        if not request.HasField("grammar"):
            return None
        if self._grammars is None:
            raise RequestError("this owner serves no structured output", param="response_format")
        # Shielded: a client who leaves must not take the grammar from others who wait for the same.
        grammar = await asyncio.shield(asyncio.wrap_future(self._grammars.submit(request.grammar)))
        try:
            return grammar.after(request.resume_ids)
        except ValueError as exc:
            raise RequestError(f"the answer so far does not follow its grammar: {exc}", param="resume_ids") from exc

    async def Abort(self, request: inference_pb2.AbortRequest, context: Context) -> inference_pb2.AbortResponse:
        answer = self._live.get(request.request_id)
        if answer is not None:
            self._engine.cancel(request.request_id)
            answer.put(Delta(error=RequestError("the request was aborted", code="aborted", status=499)))
        return inference_pb2.AbortResponse(found=answer is not None)

    async def GetLoads(
        self, request: inference_pb2.GetLoadsRequest, context: Context
    ) -> inference_pb2.GetLoadsResponse:
        return inference_pb2.GetLoadsResponse(load=self._load())


async def refuse(context: Context, error: PomonaError) -> NoReturn:
    """End the call with the error's status, and the caller's param and code in the trailing metadata."""
    status = next(code for kind, code in STATUS_OF if isinstance(error, kind))
    trailing = [
        (key, value)
        for key, value in (
            ("pomona-error-param", getattr(error, "param", None)),
            ("pomona-error-code", getattr(error, "code", None)),
        )
        if value
    ]
    await context.abort(status, str(error), tuple(trailing))
    raise AssertionError("abort raises")
