"""Protobuf at the edge: each message is converted once, here, to or from the engine's values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

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

# OpenAI's limits.
MAX_TOP_LOGPROBS = 20
MAX_PENALTY = 2
MAX_LOGIT_BIAS = 100

TokenBytes = Callable[[int], bytes]


def to_engine_request(
    request: inference_pb2.GenerateRequest, prompt: tuple[int, ...], *, vocab_size: int | None = None
) -> EngineRequest:
    """The request as the engine wants it, without its grammar. Raises RequestError for values outside their range.

    Token ids are checked where `vocab_size` is given.
    """
    s = request.sampling
    if s.HasField("max_tokens") and s.max_tokens < 1:
        raise RequestError("max_tokens must be at least 1", param="max_tokens")
    if s.HasField("max_tokens") and s.min_tokens > s.max_tokens:
        raise RequestError(f"min_tokens {s.min_tokens} is above max_tokens {s.max_tokens}", param="min_tokens")
    if vocab_size is not None:
        _check_ids((bias.id for bias in s.logit_bias), vocab_size, "logit_bias")
        _check_ids(s.stop_token_ids, vocab_size, "stop_token_ids")
    return EngineRequest(
        request_id=request.request_id,
        prompt=prompt,
        max_tokens=s.max_tokens if s.HasField("max_tokens") else None,
        sampling=_to_sampling(s),
        stop=tuple(s.stop),
        stop_token_ids=tuple(s.stop_token_ids),
        min_tokens=s.min_tokens,
        ignore_eos=s.ignore_eos,
        priority=request.priority,
        tools_json=request.chat.tools_json,
        keep_reasoning_in_text=request.keep_reasoning_in_text,
        resumed_tokens=len(request.resume_ids),
        prompt_param="messages" if request.WhichOneof("prompt") == "chat" else "prompt",
    )


def _check_ids(ids: Iterable[int], vocab_size: int, param: str) -> None:
    beyond = next((token for token in ids if token >= vocab_size), None)
    if beyond is not None:
        raise RequestError(f"{param}: token id {beyond} is outside the vocabulary of {vocab_size}", param=param)


def _to_sampling(s: inference_pb2.SamplingParams) -> Sampling:
    _check_ranges(s)
    return Sampling(
        temperature=s.temperature,
        top_p=s.top_p if s.HasField("top_p") else 1.0,
        top_k=s.top_k,
        min_p=s.min_p,
        repetition_penalty=s.repetition_penalty or 1.0,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        logit_bias=tuple({bias.id: bias.bias for bias in s.logit_bias}.items()),
        seed=s.seed if s.HasField("seed") else None,
        top_logprobs=s.top_logprobs if s.HasField("top_logprobs") else None,
    )


def _check_ranges(s: inference_pb2.SamplingParams) -> None:
    if s.top_logprobs > MAX_TOP_LOGPROBS:
        raise RequestError(f"top_logprobs {s.top_logprobs} must be at most {MAX_TOP_LOGPROBS}", param="top_logprobs")
    if not 0 <= s.temperature < math.inf:
        raise RequestError(f"temperature {s.temperature} must be 0 or more", param="temperature")
    if s.HasField("top_p") and not 0 < s.top_p <= 1:
        raise RequestError(f"top_p {s.top_p} must be above 0 and at most 1", param="top_p")
    if not 0 <= s.repetition_penalty < math.inf:
        raise RequestError(f"repetition_penalty {s.repetition_penalty} must be above 0", param="repetition_penalty")
    _check_between(0, s.min_p, 1, "min_p")
    _check_between(-MAX_PENALTY, s.presence_penalty, MAX_PENALTY, "presence_penalty")
    _check_between(-MAX_PENALTY, s.frequency_penalty, MAX_PENALTY, "frequency_penalty")
    for bias in s.logit_bias:
        _check_between(-MAX_LOGIT_BIAS, bias.bias, MAX_LOGIT_BIAS, "logit_bias")


def _check_between(least: float, value: float, most: float, param: str) -> None:
    if not least <= value <= most:
        raise RequestError(f"{param} {value} must lie between {least} and {most}", param=param)


def to_generate_response(delta: Delta, token_bytes: TokenBytes) -> inference_pb2.GenerateResponse:
    """One message of the answer's stream."""
    response = inference_pb2.GenerateResponse(ids=delta.ids, text=delta.text, reasoning=delta.reasoning)
    response.tool_calls.extend(
        inference_pb2.ToolCall(id=call.id, name=call.name, arguments_json=call.arguments_json)
        for call in delta.tool_calls
    )
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
        cache_bytes=load.cache_bytes,
        limit_bytes=load.limit_bytes,
        finished_requests=load.counters.finished_requests,
        failed_requests=load.counters.failed_requests,
        prompt_tokens=load.counters.prompt_tokens,
        generation_tokens=load.counters.generation_tokens,
        preempted_requests=load.counters.preempted_requests,
    )


def _to_pool(pool: PoolView) -> telemetry_pb2.PoolLoad:
    return telemetry_pb2.PoolLoad(capacity=pool.capacity, used=pool.used, evictable=pool.evictable)
