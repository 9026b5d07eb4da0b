"""One owner as a gateway meets it: answers, refusals, and ends that free at once what was held."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
import pytest_asyncio

from integration.owners import (
    CONTEXT,
    ENDLESS,
    KV_TOKENS,
    SOON_S,
    WAIT_S,
    Client,
    Sampling,
    TokenPrompt,
    error_of,
    first_of,
    idle,
    ids_of,
    opened,
    trailing,
    until,
)
from pomona.cluster.capacity import Limits
from pomona.v1 import inference_pb2
from pomona.workers.setup import Loaded
from pomona.workers.spec import Ended

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(models):
    """A dense worker that runs two requests at once, and a client; tests leave it idle."""
    async with opened(limits=Limits(2)) as bench:
        worker = bench.start(models["llama"], max_queued_requests=3)
        await bench.ready()
        yield bench, worker, await bench.client(worker)


@pytest.fixture
def client(served) -> Client:
    return served[2]


# -- answers --------------------------------------------------------------------------------------


async def test_an_answer_is_what_mlx_lm_says_with_usage_in_its_last_message(client, models):
    from mlx_lm import load
    from mlx_lm.generate import stream_generate

    model, tokenizer = load(str(models["llama"]))[:2]
    prompt = tokenizer.encode("a prompt of its own")
    expected = [r.token for r in stream_generate(model, tokenizer, prompt, max_tokens=24)]

    messages = await client.answer(text="a prompt of its own")
    assert ids_of(messages) == expected
    assert "".join(m.text for m in messages) == tokenizer.decode(expected)
    assert [m.finish_reason for m in messages[:-1]] == [inference_pb2.FINISH_REASON_UNSPECIFIED] * (len(messages) - 1)
    assert messages[-1].finish_reason == inference_pb2.FINISH_REASON_LENGTH
    usage = messages[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (len(prompt), 24, 0)


async def test_an_answer_is_the_same_among_others(client):
    alone = ids_of(await client.answer())
    together = await asyncio.gather(*(client.answer(f"r{i}") for i in range(3)))
    assert [ids_of(answer) for answer in together] == [alone] * 3


async def test_what_was_generated_elsewhere_is_gone_on_from(client):
    whole = ids_of(await client.answer())
    rest = await client.answer(max_tokens=14, resume_ids=whole[:10])
    assert ids_of(rest) == whole[10:]


async def test_a_prompt_reuses_exactly_what_it_begins_with_of_an_earlier_one(client):
    shared = list(range(300, 353))
    await client.answer(tokens=TokenPrompt(ids=[*shared, 400, 401]), max_tokens=2)
    again = await client.answer(tokens=TokenPrompt(ids=[*shared, 402, 403, 404]), max_tokens=2)
    assert (again[-1].usage.prompt_tokens, again[-1].usage.cached_tokens) == (56, 53)


TWO_AT_ONCE = {"llama": Limits(2), "qwen3_next": Limits(2, 8)}


@pytest.mark.parametrize("kind", TWO_AT_ONCE)
async def test_two_answers_that_one_owner_cannot_hold_at_once_are_each_as_if_alone(models, kind):
    """Both begin together; one has to make room, waits, and goes on where it was."""
    async with opened(limits=TWO_AT_ONCE[kind]) as bench:
        worker = bench.start(models[kind], max_total_tokens=560)
        await bench.ready()
        client = await bench.client(worker)
        prompts = [TokenPrompt(ids=range(start, start + 10)) for start in (300, 400)]
        alone = [await client.answer(f"alone {i}", tokens=prompt, max_tokens=300) for i, prompt in enumerate(prompts)]
        calls = [client.answer(f"r{i}", tokens=prompt, max_tokens=300) for i, prompt in enumerate(prompts)]
        together = await asyncio.gather(*calls)
        assert [ids_of(answer) for answer in together] == [ids_of(answer) for answer in alone]
        assert [answer[-1].usage.completion_tokens for answer in together] == [300, 300]
        await client.load_until(idle, SOON_S)
        assert (await client.load()).preempted_requests >= 1


async def test_a_chat_is_rendered_by_the_models_own_template(client):
    messages = '[{"role": "user", "content": "hello"}]'
    answer = await client.answer(chat=inference_pb2.ChatPrompt(messages_json=messages), max_tokens=2)
    assert answer[-1].usage.prompt_tokens > 5
    assert answer[-1].usage.completion_tokens == 2


async def test_logprobs_come_with_the_tokens_bytes(client):
    answer = await client.answer(sampling=Sampling(max_tokens=3, top_logprobs=2))
    entries = [entry for m in answer for entry in m.logprobs]
    assert len(entries) == 3
    for entry in entries:
        assert entry.sampled.logprob <= 0
        assert entry.top[0].id == entry.sampled.id  # greedy
        assert len(entry.top) == 2
        assert entry.sampled.token


async def test_counters_and_pools_add_up_after_answers(client):
    before = await client.load()
    await client.answer(max_tokens=5)
    await client.load_until(idle, SOON_S)
    after = await client.load()
    assert after.finished_requests == before.finished_requests + 1
    assert after.generation_tokens == before.generation_tokens + 5
    assert after.prompt_tokens > before.prompt_tokens
    assert after.kv_tokens.capacity == KV_TOKENS


# -- ends that are not answers --------------------------------------------------------------------


async def test_closing_the_stream_frees_the_pools_within_a_second(served):
    bench, _, client = served
    before = await client.load()
    call = client.generate("leaves", ENDLESS)
    await first_of([call])
    assert 256 <= (await client.load()).kv_tokens.used < ENDLESS  # what there is of it, and room to go on
    call.cancel()
    await client.load_until(idle, SOON_S)
    await until(lambda: bench.in_the_view()[0]["pools"]["kv_tokens"]["used"] == 0, SOON_S)
    after = await client.load()
    assert after.finished_requests == before.finished_requests
    assert after.generation_tokens - before.generation_tokens < ENDLESS


async def test_a_client_that_leaves_the_queue_leaves_it_at_once(client):
    calls = [client.generate(f"runs{i}", ENDLESS) for i in range(2)]
    await first_of(calls)
    waits = client.generate("waits", ENDLESS)
    await client.load_until(lambda load: load.waiting_requests == 1, WAIT_S)
    waits.cancel()
    await client.load_until(lambda load: load.waiting_requests == 0, SOON_S)
    assert (await client.load()).running_requests == 2
    for call in calls:
        call.cancel()
    await client.load_until(idle, SOON_S)


async def test_abort_ends_the_stream_with_its_code_and_frees_the_pools(client):
    call = client.generate("aborted", ENDLESS)
    await first_of([call])
    assert await client.abort("aborted")
    assert trailing(await error_of(call)) == {"pomona-error-code": "aborted"}
    await client.load_until(idle, SOON_S)
    assert not await client.abort("aborted")
    assert not await client.abort("never was")


async def test_a_deadline_ends_the_request_and_frees_the_pools(client):
    error = await client.refusal(max_tokens=ENDLESS, deadline_s=0.1)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await client.load_until(idle, SOON_S)


async def test_a_full_queue_is_resource_exhausted_and_those_in_it_are_not_touched(client):
    running = [client.generate(f"runs{i}", ENDLESS) for i in range(2)]
    await first_of(running)
    waiting = [client.generate(f"waits{i}", ENDLESS) for i in range(3)]
    await client.load_until(lambda load: load.waiting_requests == 3, WAIT_S)
    assert (await client.refusal("one more")).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await client.load()).waiting_requests == 3
    for call in (*running, *waiting):
        call.cancel()
    await client.load_until(idle, SOON_S)


BAD: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "no prompt": ({"text": ""}, {"pomona-error-param": "prompt"}),
    "no tokens": ({"tokens": TokenPrompt()}, {"pomona-error-param": "prompt"}),
    "a token beyond the vocabulary": (
        {"tokens": TokenPrompt(ids=[512])},
        {"pomona-error-param": "prompt"},
    ),
    "resumed from beyond the vocabulary": ({"resume_ids": [512]}, {"pomona-error-param": "prompt"}),
    "longer than the context": (
        {"tokens": TokenPrompt(ids=[5] * CONTEXT)},
        {"pomona-error-param": "prompt", "pomona-error-code": "context_length_exceeded"},
    ),
    "messages that are no JSON": (
        {"chat": inference_pb2.ChatPrompt(messages_json="[")},
        {"pomona-error-param": "messages"},
    ),
    "messages that the template refuses": (
        {"chat": inference_pb2.ChatPrompt(messages_json="[1]")},
        {"pomona-error-param": "messages"},
    ),
    "a chat template of the client's own": (
        {"chat": inference_pb2.ChatPrompt(messages_json="[]", template_arguments_json='{"chat_template": "x"}')},
        {"pomona-error-param": "chat_template_kwargs"},
    ),
    "no tokens to answer with": ({"sampling": Sampling(max_tokens=0)}, {"pomona-error-param": "max_tokens"}),
    "a negative temperature": ({"sampling": Sampling(temperature=-1)}, {"pomona-error-param": "temperature"}),
    "a temperature that is no number": (
        {"sampling": Sampling(temperature=float("nan"))},
        {"pomona-error-param": "temperature"},
    ),
    "top_p of nothing": ({"sampling": Sampling(top_p=0)}, {"pomona-error-param": "top_p"}),
    "min_p above one": ({"sampling": Sampling(min_p=1.5)}, {"pomona-error-param": "min_p"}),
}


@pytest.mark.parametrize("case", BAD)
async def test_a_bad_request_is_invalid_argument_and_names_what_is_wrong(client, case):
    fields, expected = BAD[case]
    error = await client.refusal(**fields)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert trailing(error) == expected
    assert error.details()
    assert idle(await client.load())


async def test_a_request_id_in_use_is_refused_and_its_owner_goes_on(client):
    call = client.generate("twice", ENDLESS)
    await first_of([call])
    error = await client.refusal("twice")
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert trailing(error) == {"pomona-error-param": "request_id"}
    await first_of([call])
    call.cancel()
    await client.load_until(idle, SOON_S)


async def test_more_alternatives_than_tokens_are_the_callers_mistake(client):
    error = await client.refusal(sampling=Sampling(max_tokens=2, top_logprobs=513))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_call_without_the_clusters_token_is_refused(client):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.stub.GetLoads(inference_pb2.GetLoadsRequest(), timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_stop_answers_everybody_and_ends_the_run(models):
    async with opened(limits=Limits(2)) as bench:
        worker = bench.start(models["llama"])
        await bench.ready()
        client = await bench.client(worker)
        calls = [client.generate(f"runs{i}", ENDLESS) for i in range(2)]
        await first_of(calls)
        calls += [client.generate(f"waits{i}", ENDLESS) for i in range(3)]
        await client.load_until(lambda load: load.waiting_requests == 3, WAIT_S)
        worker.stop()
        for call in calls:
            error = await error_of(call)
            assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "this owner stopped")
        assert await asyncio.wait_for(bench.runs[0], WAIT_S) == Ended("stopped")
        host, _, port = worker.address.rpartition(":")
        with pytest.raises(OSError, match=r"."):
            await asyncio.open_connection(host, int(port))


async def test_a_worker_that_stops_tells_the_head(models):
    async with opened() as bench:
        worker = bench.start(models["llama"])
        await bench.ready()
        worker.stop()
        await asyncio.wait_for(bench.runs[0], WAIT_S)
        assert bench.cluster.members.all() == ()


async def test_a_model_that_is_not_there_ends_the_run_as_the_operators_to_mend(tmp_path):
    async with opened() as bench:
        bench.start(tmp_path / "nothing")
        ended = await asyncio.wait_for(asyncio.shield(bench.runs[0]), WAIT_S)
        assert ended.operator
        assert "nothing is not there" in ended.reason
        assert bench.cluster.members.all() == ()


async def test_a_context_beyond_the_models_ends_the_run_as_the_operators_to_mend(models):
    async with opened() as bench:
        bench.start(models["llama"], context_length=CONTEXT + 1)
        ended = await asyncio.wait_for(asyncio.shield(bench.runs[0]), WAIT_S)
        assert ended.operator
        assert f"use at most {CONTEXT}" in ended.reason


async def test_anything_else_that_breaks_while_loading_is_ours_and_says_what(models):
    def breaks(*_: object) -> Loaded:
        raise RuntimeError("no such kernel")

    async with opened() as bench:
        bench.start(models["llama"], prepare_=breaks)
        ended = await asyncio.wait_for(asyncio.shield(bench.runs[0]), WAIT_S)
        assert not ended.operator
        assert "RuntimeError: no such kernel" in ended.reason
