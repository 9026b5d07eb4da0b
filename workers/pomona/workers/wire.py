"""Protobuf at the edge: each message is converted once, here, to or from the engine's values."""

from __future__ import annotations

from collections.abc import Callable

from pomona.v1 import inference_pb2, telemetry_pb2

from .engine.base import (
    Delta,
    EngineLoad,
    EngineRequest,
    FinishReason,
    Sampling,
    Share,
    TokenLogprobs,
)
from .engine.pools import PoolView
from .errors import RequestError

_FINISH = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: inference_pb2.FINISH_REASON_ABORT,
}

# OpenAI's limit.
MAX_TOP_LOGPROBS = 20

TokenBytes = Callable[[int], bytes]


def to_engine_request(request: inference_pb2.GenerateRequest, prompt: tuple[int, ...]) -> EngineRequest:
    """The request as the engine wants it. Raises RequestError for values outside their range."""
    s = request.sampling
    if s.HasField("max_tokens") and s.max_tokens < 1:
        raise RequestError("max_tokens must be at least 1", param="max_tokens")
    return EngineRequest(
        request_id=request.request_id,
        prompt=prompt,
        max_tokens=s.max_tokens if s.HasField("max_tokens") else None,
        sampling=_to_sampling(s),
        stop=tuple(s.stop),
        ignore_eos=s.ignore_eos,
        prompt_param="messages" if request.WhichOneof("prompt") == "chat" else "prompt",
    )


def _to_sampling(s: inference_pb2.SamplingParams) -> Sampling:
    if s.top_logprobs > MAX_TOP_LOGPROBS:
        raise RequestError(f"top_logprobs {s.top_logprobs} must be at most {MAX_TOP_LOGPROBS}", param="top_logprobs")
    if not 0 <= s.temperature < float("inf"):
        raise RequestError(f"temperature {s.temperature} must be 0 or more", param="temperature")
    if s.HasField("top_p") and not 0 < s.top_p <= 1:
        raise RequestError(f"top_p {s.top_p} must be above 0 and at most 1", param="top_p")
    if not 0 <= s.min_p <= 1:
        raise RequestError(f"min_p {s.min_p} must lie between 0 and 1", param="min_p")
    return Sampling(
        temperature=s.temperature,
        top_p=s.top_p if s.HasField("top_p") else 1.0,
        top_k=s.top_k,
        min_p=s.min_p,
        seed=s.seed if s.HasField("seed") else None,
        top_logprobs=s.top_logprobs if s.HasField("top_logprobs") else None,
    )


def to_generate_response(delta: Delta, token_bytes: TokenBytes) -> inference_pb2.GenerateResponse:
    """One message of the answer's stream."""
    response = inference_pb2.GenerateResponse(ids=delta.ids, text=delta.text)
    response.logprobs.extend(_to_logprobs(entry, token_bytes) for entry in delta.logprobs)
    if delta.finish is not None:
        response.finish_reason = _FINISH[delta.finish]
    if delta.usage is not None:
        response.usage.prompt_tokens = delta.usage.prompt_tokens
        response.usage.completion_tokens = delta.usage.completion_tokens
        response.usage.cached_tokens = delta.usage.cached_tokens
    return response


def _to_logprobs(entry: TokenLogprobs, token_bytes: TokenBytes) -> inference_pb2.TokenLogprobs:
    def one(token: int, logprob: float) -> inference_pb2.TokenLogprob:
        return inference_pb2.TokenLogprob(id=token, token=token_bytes(token), logprob=logprob)

    return inference_pb2.TokenLogprobs(
        sampled=one(entry.token, entry.logprob), top=[one(t.token, t.logprob) for t in entry.top]
    )


def to_share(allocation: telemetry_pb2.Allocation) -> Share:
    return Share(
        epoch=allocation.epoch,
        max_running_requests=allocation.max_running_requests,
        kv_tokens=allocation.kv_tokens,
        aux_slots=allocation.aux_slots,
        aux_slots_per_request=allocation.aux_slots_per_request,
    )


def to_load_report(load: EngineLoad, *, now: float, seq: int, incarnation: str) -> telemetry_pb2.LoadReport:
    """An absolute snapshot; `now` is on the engine's clock. The reporter adds the worker id."""
    return telemetry_pb2.LoadReport(
        incarnation=incarnation,
        epoch=load.epoch,
        seq=seq,
        step_age_s=max(0.0, now - load.stepped_at),
        running_requests=load.running,
        waiting_requests=load.waiting,
        max_running_requests=load.requests.capacity,
        kv_tokens=_to_pool(load.kv_tokens),
        aux_slots=_to_pool(load.aux_slots),
        aux_slots_per_request=load.aux_slots_per_request,
        active_bytes=load.active_bytes,
        limit_bytes=load.limit_bytes,
        finished_requests=load.counters.finished_requests,
        failed_requests=load.counters.failed_requests,
        prompt_tokens=load.counters.prompt_tokens,
        generation_tokens=load.counters.generation_tokens,
    )


def _to_pool(pool: PoolView) -> telemetry_pb2.PoolLoad:
    return telemetry_pb2.PoolLoad(capacity=pool.capacity, used=pool.used, evictable=pool.evictable)
