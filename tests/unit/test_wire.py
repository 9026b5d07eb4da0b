"""Protobuf to values, at the engine and at the head, and back: nothing is forgotten, nothing out of range comes."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

import pytest

from pomona.cluster.membership import Identity, Load, Member, Memory, OwnerKey
from pomona.cluster.wire import to_load, to_route
from pomona.v1.inference_pb2 import ChatPrompt, GenerateRequest, GenerateResponse, LogitBias, SamplingParams
from pomona.v1.telemetry_pb2 import LoadReport
from pomona.workers.engine.base import (
    Counters,
    Delta,
    EngineLoad,
    EngineRequest,
    FinishReason,
    Logprob,
    Sampling,
    TokenLogprobs,
    ToolCall,
    Usage,
)
from pomona.workers.engine.pools import PoolView
from pomona.workers.errors import EngineError, RequestError
from pomona.workers.service import merge
from pomona.workers.wire import to_engine_request, to_generate_response, to_load_report

NAN, INF = float("nan"), float("inf")

FULL = Delta(
    ids=(1, 2),
    text="text",
    reasoning="hm",
    tool_calls=(ToolCall("call_1", "weather", "{}"),),
    logprobs=(TokenLogprobs(1, -0.5, (Logprob(3, -1.0),)),),
    finish=FinishReason.STOP,
    usage=Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=4),
)


def request(**sampling: Any) -> GenerateRequest:
    return GenerateRequest(request_id="r", text="p", sampling=SamplingParams(**sampling))


def token_bytes(token: int) -> bytes:
    return b"t%d" % token


def defaults(kind: type) -> dict[str, Any]:
    return {field.name: field.default for field in fields(kind) if field.default is not MISSING}


# ---- requests


def test_every_field_of_a_request_reaches_the_engine() -> None:
    """All but the grammar, which is compiled elsewhere; no field is left at its default."""
    sent = GenerateRequest(
        request_id="r",
        chat=ChatPrompt(messages_json="[]", tools_json='[{"type": "function"}]'),
        sampling=SamplingParams(
            max_tokens=9,
            temperature=0.5,
            top_p=0.25,
            top_k=40,
            min_p=0.125,
            seed=7,
            stop=["END"],
            ignore_eos=True,
            top_logprobs=2,
            repetition_penalty=1.5,
            presence_penalty=-2,
            frequency_penalty=0.5,
            logit_bias=[LogitBias(id=5, bias=-100), LogitBias(id=6, bias=1.5)],
            stop_token_ids=[2, 3],
            min_tokens=9,
        ),
        priority=-4,
        keep_reasoning_in_text=True,
        resume_ids=[2, 3],
    )
    made = to_engine_request(sent, (1, 2, 3), vocab_size=7)
    assert made == EngineRequest(
        request_id="r",
        prompt=(1, 2, 3),
        max_tokens=9,
        sampling=Sampling(
            temperature=0.5,
            top_p=0.25,
            top_k=40,
            min_p=0.125,
            repetition_penalty=1.5,
            presence_penalty=-2.0,
            frequency_penalty=0.5,
            logit_bias=((5, -100.0), (6, 1.5)),
            seed=7,
            top_logprobs=2,
        ),
        stop=("END",),
        stop_token_ids=(2, 3),
        min_tokens=9,
        ignore_eos=True,
        priority=-4,
        tools_json='[{"type": "function"}]',
        keep_reasoning_in_text=True,
        resumed_tokens=2,
        prompt_param="messages",
    )
    assert [name for name, value in defaults(EngineRequest).items() if getattr(made, name) == value] == ["grammar"]
    assert [name for name, value in defaults(Sampling).items() if getattr(made.sampling, name) == value] == []


def test_a_request_that_says_nothing_has_the_engines_defaults() -> None:
    assert to_engine_request(request(), (1,), vocab_size=2) == EngineRequest("r", (1,))


def test_a_repetition_penalty_of_0_or_1_is_off() -> None:
    """0 is what a client sends that knows no optional fields."""
    assert {to_engine_request(request(repetition_penalty=p), ()).sampling.repetition_penalty for p in (0, 1)} == {1.0}


def test_a_token_that_is_biased_twice_has_the_last_bias() -> None:
    biases = [LogitBias(id=5, bias=1), LogitBias(id=6, bias=2), LogitBias(id=5, bias=3)]
    assert to_engine_request(request(logit_bias=biases), ()).sampling.logit_bias == ((5, 3.0), (6, 2.0))


@pytest.mark.parametrize(
    ("param", "sampling"),
    [
        ("max_tokens", {"max_tokens": 0}),
        ("min_tokens", {"max_tokens": 4, "min_tokens": 5}),
        *[("temperature", {"temperature": value}) for value in (-1, NAN, INF)],
        *[("top_p", {"top_p": value}) for value in (0, 1.5, NAN)],
        *[("min_p", {"min_p": value}) for value in (-0.5, 1.5, NAN)],
        ("top_logprobs", {"top_logprobs": 21}),
        *[("repetition_penalty", {"repetition_penalty": value}) for value in (-1, NAN, INF)],
        *[(name, {name: value}) for name in ("presence_penalty", "frequency_penalty") for value in (-2.5, 2.5, NAN)],
        *[("logit_bias", {"logit_bias": [LogitBias(id=1, bias=value)]}) for value in (-101, 101, NAN, INF)],
        ("logit_bias", {"logit_bias": [LogitBias(id=9, bias=1), LogitBias(id=10, bias=1)]}),
        ("stop_token_ids", {"stop_token_ids": [9, 10]}),
    ],
)
def test_what_is_out_of_range_names_its_parameter(param: str, sampling: dict[str, Any]) -> None:
    """In a vocabulary of 10."""
    with pytest.raises(RequestError) as caught:
        to_engine_request(request(**sampling), (1,), vocab_size=10)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param in str(caught.value)


def test_limits_are_in_range() -> None:
    edges = {"presence_penalty": -2, "frequency_penalty": 2, "logit_bias": [LogitBias(id=9, bias=-100)]}
    to_engine_request(request(**edges, stop_token_ids=[9], min_tokens=3, max_tokens=3), (1,), vocab_size=10)
    to_engine_request(request(min_tokens=3), (1,))  # nobody said how long it may get


# ---- answers


def test_every_field_of_a_delta_reaches_the_client() -> None:
    """All but the error, which is a status."""
    assert [name for name, value in defaults(Delta).items() if getattr(FULL, name) == value] == ["error"]
    sent = to_generate_response(FULL, token_bytes)
    assert {field.name for field, _ in sent.ListFields()} == {
        field.name for field in GenerateResponse.DESCRIPTOR.fields
    }
    (call,) = sent.tool_calls
    assert (call.id, call.name, call.arguments_json) == ("call_1", "weather", "{}")
    assert (sent.text, sent.reasoning, list(sent.ids)) == ("text", "hm", [1, 2])
    assert (sent.logprobs[0].sampled.token, sent.logprobs[0].top[0].token) == (b"t1", b"t3")
    assert (sent.usage.prompt_tokens, sent.usage.completion_tokens, sent.usage.cached_tokens) == (5, 2, 4)


def test_merged_deltas_say_all_that_each_of_them_said() -> None:
    """What accumulates is joined in order, what ends an answer is the last one's; no field is forgotten."""
    first = Delta(
        ids=(8,), text="a ", reasoning="so ", tool_calls=(ToolCall("call_0", "f", "[]"),), logprobs=FULL.logprobs
    )
    assert merge([first, Delta(), FULL]) == Delta(
        ids=(8, 1, 2),
        text="a text",
        reasoning="so hm",
        tool_calls=first.tool_calls + FULL.tool_calls,
        logprobs=FULL.logprobs * 2,
        finish=FULL.finish,
        usage=FULL.usage,
    )
    failed = Delta(error=EngineError("broken"))
    assert merge([first, failed]).error is failed.error
    assert merge([Delta(), FULL]) == merge([FULL]) == FULL


# ---- snapshots

SNAPSHOT = EngineLoad(
    epoch=3,
    running=2,
    waiting=5,
    requests=PoolView(4, 2),
    kv_tokens=PoolView(100, 30, 20),
    aux_slots=PoolView(16, 8, 4),
    aux_slots_per_request=4,
    counters=Counters(
        finished_requests=10, failed_requests=1, prompt_tokens=1000, generation_tokens=500, preempted_requests=7
    ),
    stepped_at=40.0,
    active_bytes=600,
    cache_bytes=50,
    limit_bytes=1000,
)


def test_every_field_of_a_snapshot_is_in_the_report() -> None:
    """All but the worker id, which the reporter adds."""
    report = to_load_report(SNAPSHOT, now=42.0, seq=9, incarnation="life")
    counters = {field.name: getattr(SNAPSHOT.counters, field.name) for field in fields(Counters)}
    assert {name: getattr(report, name) for name in counters} == counters
    assert (report.active_bytes, report.cache_bytes, report.limit_bytes) == (600, 50, 1000)
    assert (report.step_age_s, report.seq, report.incarnation) == (2.0, 9, "life")
    sent = {field.name for field, _ in report.ListFields()}
    assert {field.name for field in LoadReport.DESCRIPTOR.fields} - sent == {"worker_id"}


def test_what_a_worker_reports_is_what_the_head_knows_and_gateways_hear() -> None:
    """Pools, memory and preemptions; the other counters end at the head."""
    load = to_load(to_load_report(SNAPSHOT, now=42.0, seq=9, incarnation="life"))
    assert load == Load(
        epoch=3,
        seq=9,
        step_age_s=2.0,
        running=2,
        waiting=5,
        max_running=4,
        kv=SNAPSHOT.kv_tokens,
        aux=SNAPSHOT.aux_slots,
        active_bytes=600,
        cache_bytes=50,
        limit_bytes=1000,
        preempted=7,
    )
    member = Member("w", Identity("M", OwnerKey(0, 0), "life", "mac1", "127.0.0.1:1"), Memory(1000), 0.0, load)
    assert to_load(to_route(member, 0.0).load) == load
