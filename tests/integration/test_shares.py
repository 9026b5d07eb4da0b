"""The real start-up without Ray: a real registry on a real gRPC server, and real workers with real tiny models.

All in one process: each worker has an engine thread of its own, and one event loop serves every port.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pomona.cluster.capacity import Limits, part
from pomona.cluster.cluster import Cluster
from pomona.cluster.membership import OwnerKey
from pomona.cluster.registry import RegistryService
from pomona.cluster.topology import Topology
from pomona.v1 import inference_pb2, inference_pb2_grpc, registry_pb2, registry_pb2_grpc, telemetry_pb2
from pomona.workers import rpc
from pomona.workers.setup import Loaded, prepare
from pomona.workers.spec import Ended, Stage, WorkerSpec
from pomona.workers.worker import SERVICE, Worker
from tiny import make

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKEN = "the cluster's token"
WAIT_S = 20.0  # for what must happen, on a machine that may be busy
SOON_S = 1.0  # what a client that left may still hold, at the longest
KV_TOKENS = 20_000
CONTEXT = 8192
ENDLESS = 8000  # tokens of an answer that no test sees the end of

ALONE = Topology()
PURE_DP = Topology(dp_size=4)
DP_ATTENTION = Topology(tp_size=4, dp_size=4, enable_dp_attention=True)
EIGHT = Limits(8)
SERVING = health_pb2.HealthCheckResponse.SERVING

Request = inference_pb2.GenerateRequest
Sampling = inference_pb2.SamplingParams


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: make(kind, folder / kind, context=CONTEXT) for kind in ("llama", "qwen3_next", "lfm2")}


async def until(true: Callable[[], object], within_s: float = WAIT_S) -> None:
    """Let the loop run until it is so; an error when it is not in time."""
    async with asyncio.timeout(within_s):
        while not true():  # noqa: ASYNC110 - what it waits for are plain fields of several objects
            await asyncio.sleep(0.005)


@dataclass
class Client:
    """Calls one worker, as the gateway does."""

    stub: inference_pb2_grpc.InferenceServiceStub
    health: health_pb2_grpc.HealthStub

    def generate(self, request_id: str, max_tokens: int = 24, **fields: Any) -> Any:
        """The call of a greedy request that no end token ends."""
        fields.setdefault("sampling", Sampling(max_tokens=max_tokens, ignore_eos=True))
        if not {"chat", "tokens", "text"} & fields.keys():
            fields["text"] = "hello world"
        return self.stub.Generate(
            Request(request_id=request_id, model="M", **fields), metadata=rpc.metadata(TOKEN), timeout=WAIT_S
        )

    async def answer(self, request_id: str = "r", **fields: Any) -> list[inference_pb2.GenerateResponse]:
        return [message async for message in self.generate(request_id, **fields)]

    async def refusal(self, request_id: str = "r", **fields: Any) -> grpc.aio.AioRpcError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.answer(request_id, **fields)
        return caught.value

    async def load(self) -> telemetry_pb2.LoadReport:
        answer = await self.stub.GetLoads(inference_pb2.GetLoadsRequest(), metadata=rpc.metadata(TOKEN), timeout=WAIT_S)
        return answer.load

    async def load_until(self, true: Callable[[telemetry_pb2.LoadReport], bool], within_s: float) -> None:
        async with asyncio.timeout(within_s):
            while not true(await self.load()):  # noqa: ASYNC110 - each look is a call of its own
                await asyncio.sleep(0.01)

    async def abort(self, request_id: str) -> bool:
        answer = await self.stub.Abort(
            inference_pb2.AbortRequest(request_id=request_id), metadata=rpc.metadata(TOKEN), timeout=WAIT_S
        )
        return answer.found

    async def healthy(self, service: str = SERVICE) -> bool:
        answer = await self.health.Check(
            health_pb2.HealthCheckRequest(service=service), metadata=rpc.metadata(TOKEN), timeout=WAIT_S
        )
        return answer.status == SERVING


@dataclass
class Bench:
    """A registry as Head.start makes it, and the workers that register with it."""

    topology: Topology
    limits: Limits
    cluster: Cluster = field(init=False)
    address: str = ""
    workers: list[Worker] = field(default_factory=list)
    runs: list[asyncio.Task[Ended]] = field(default_factory=list)
    _server: Any = None
    _open: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    async def open(self, port: int = 0) -> None:
        self.cluster = Cluster("M", self.topology, self.limits, time.monotonic)
        self._server = rpc.server(TOKEN)
        registry_pb2_grpc.add_RegistryServiceServicer_to_server(RegistryService(self.cluster), self._server)
        self.address = rpc.bind(self._server, "127.0.0.1", port)
        await self._server.start()

    async def close(self) -> None:
        await self._server.stop(0)

    def start(
        self,
        source: Path | str,
        replica: int = 0,
        owner: int = 0,
        prepare_: Callable[..., Loaded] = prepare,
        **spec: Any,
    ) -> Worker:
        """What the launcher starts for an owner of the replica."""
        slots = self.limits.max_mamba_cache_size
        made = WorkerSpec(
            model="M",
            source=str(source),
            replica=replica,
            owner=owner,
            host=f"mac{len(self.workers)}",
            bind_host="127.0.0.1",
            registry_address=self.address,
            token=TOKEN,
            aux_slots=None if slots is None else part(slots, self.topology.attn_dp_size)[owner],
            ranks_on_host=4,
            mem_fraction_static=0.5,
            max_total_tokens=KV_TOKENS,
        )
        worker = Worker(replace(made, **spec), prepare_)
        self.workers.append(worker)
        self.runs.append(asyncio.create_task(worker.run()))
        return worker

    def start_all(self, source: Path) -> None:
        for replica in range(self.topology.replicas):
            for owner in range(self.topology.attn_dp_size):
                self.start(source, replica, owner)

    async def ready(self) -> None:
        """All workers are ready, and the registry has heard so."""
        await until(lambda: all(w.progress.stage is Stage.READY for w in self.workers))
        await until(lambda: len(self.cluster.view().owners) == len(self.workers))

    async def client(self, worker: Worker) -> Client:
        channel = await self._open.enter_async_context(rpc.channel(worker.address))
        return Client(inference_pb2_grpc.InferenceServiceStub(channel), health_pb2_grpc.HealthStub(channel))

    async def registry(self) -> registry_pb2_grpc.RegistryServiceStub:
        channel = await self._open.enter_async_context(rpc.channel(self.address))
        return registry_pb2_grpc.RegistryServiceStub(channel)

    async def at_the_engines(self) -> list[telemetry_pb2.LoadReport]:
        return [await (await self.client(worker)).load() for worker in self.workers]

    def in_the_view(self) -> list[dict[str, Any]]:
        """The owners as `status --json` shows them, their pools included."""
        return self.cluster.view().to_json()["owners"]

    async def end(self) -> None:
        await self._open.aclose()
        for worker in self.workers:
            worker.stop()
        await asyncio.wait_for(asyncio.gather(*self.runs), WAIT_S)
        await self.close()


@contextlib.asynccontextmanager
async def opened(topology: Topology = ALONE, limits: Limits = EIGHT) -> AsyncIterator[Bench]:
    bench = Bench(topology, limits)
    await bench.open()
    try:
        yield bench
    finally:
        await bench.end()


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


def idle(load: telemetry_pb2.LoadReport) -> bool:
    return not (load.running_requests or load.waiting_requests or load.kv_tokens.used or load.aux_slots.used)


def trailing(error: grpc.aio.AioRpcError) -> dict[str, str]:
    return {k: v for k, v in error.trailing_metadata() or () if k.startswith("pomona-")}


async def first_of(calls: Iterable[Any]) -> None:
    """Each call has begun to answer."""
    for call in calls:
        assert await asyncio.wait_for(call.read(), WAIT_S) is not grpc.aio.EOF


async def error_of(call: Any) -> grpc.aio.AioRpcError:
    """How a call that was read from ends."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as exc:
        return exc
    raise AssertionError("the call ended without an error")


# -- shares: from the command line's numbers to pools at the engine -------------------------------------------


async def test_pure_dp_keeps_the_full_limit_on_each_of_four_replicas(models):
    async with opened(PURE_DP, Limits(8)) as bench:
        bench.start_all(models["llama"])
        await bench.ready()
        loads = await bench.at_the_engines()
        assert [load.max_running_requests for load in loads] == [8, 8, 8, 8]
        assert [load.kv_tokens.capacity for load in loads] == [KV_TOKENS] * 4
        owners = bench.in_the_view()
        assert [o["max_running_requests"] for o in owners] == [8, 8, 8, 8]
        assert [o["pools"]["request_slots"]["capacity"] for o in owners] == [8, 8, 8, 8]
        assert [(o["replica"], o["owner"]) for o in owners] == [(r, 0) for r in range(4)]
        assert bench.cluster.plan().unallocated == 0


async def test_dp_attention_splits_8_into_2_2_2_2_once_the_last_owner_has_come(models):
    async with opened(DP_ATTENTION, Limits(8)) as bench:
        for owner in (3, 1, 0):
            bench.start(models["llama"], owner=owner)
        await until(lambda: len(bench.cluster.members.all()) == 3)
        early = await bench.client(bench.workers[0])
        assert (await early.load()).max_running_requests == 0
        assert not await early.healthy()
        refused = await early.refusal()
        assert (refused.code(), refused.details()) == (grpc.StatusCode.UNAVAILABLE, "this owner has no share yet")

        bench.start(models["llama"], owner=2)
        await bench.ready()
        loads = await bench.at_the_engines()
        assert [load.max_running_requests for load in loads] == [2, 2, 2, 2]
        assert {load.epoch for load in loads} == {bench.cluster.epoch} == {1}
        owners = bench.in_the_view()
        assert [o["pools"]["request_slots"]["capacity"] for o in owners] == [2, 2, 2, 2]
        assert {o["phase"] for o in owners} == {"ready"}
        assert await early.healthy()


async def test_a_hybrid_splits_16_slots_into_4_each_and_runs_one_request_on_each(models):
    async with opened(DP_ATTENTION, Limits(8, 16)) as bench:
        bench.start_all(models["qwen3_next"])
        await bench.ready()
        loads = await bench.at_the_engines()
        assert [load.aux_slots.capacity for load in loads] == [4, 4, 4, 4]
        assert [load.max_running_requests for load in loads] == [1, 1, 1, 1]
        plan = bench.cluster.view().to_json()
        assert plan["hybrid"] is True
        assert plan["unallocated_running_requests"] == 4
        assert [o["pools"]["aux_state_slots"]["capacity"] for o in plan["owners"]] == [4, 4, 4, 4]
        assert [o["bound"] for o in plan["owners"]] == ["aux"] * 4
        assert len(plan["warnings"]) == 4

        clients = [await bench.client(worker) for worker in bench.workers]
        answers = await asyncio.gather(*(c.answer(f"r{i}") for i, c in enumerate(clients)))
        ids = [[token for message in answer for token in message.ids] for answer in answers]
        assert [len(one) for one in ids] == [24] * 4
        assert all(one == ids[0] for one in ids)  # four threads, one model: the same greedy answer
        call = clients[0].generate("held", ENDLESS)
        await first_of([call])
        held = await clients[0].load()
        assert (held.aux_slots.used, held.running_requests) == (4, 1)
        call.cancel()


async def test_15_slots_are_refused_in_the_units_of_the_command_line(models):
    async with opened(DP_ATTENTION, Limits(8, 15)) as bench:
        bench.start_all(models["lfm2"])
        await until(lambda: bench.cluster.refused)
        assert bench.cluster.refused is not None
        assert bench.cluster.refused.at_least == 16
        assert "--max-mamba-cache-size 15" in str(bench.cluster.refused)
        assert "use at least 16" in str(bench.cluster.refused)
        assert [load.max_running_requests for load in await bench.at_the_engines()] == [0, 0, 0, 0]
        assert bench.in_the_view() == []


# -- one worker: answers --------------------------------------------------------------------------------------


async def test_an_answer_is_what_mlx_lm_says_with_usage_in_its_last_message(client, models):
    from mlx_lm import load
    from mlx_lm.generate import stream_generate

    model, tokenizer = load(str(models["llama"]))[:2]
    prompt = tokenizer.encode("a prompt of its own")
    expected = [r.token for r in stream_generate(model, tokenizer, prompt, max_tokens=24)]

    messages = await client.answer(text="a prompt of its own")
    assert [token for m in messages for token in m.ids] == expected
    assert "".join(m.text for m in messages) == tokenizer.decode(expected)
    assert [m.finish_reason for m in messages[:-1]] == [inference_pb2.FINISH_REASON_UNSPECIFIED] * (len(messages) - 1)
    assert messages[-1].finish_reason == inference_pb2.FINISH_REASON_LENGTH
    usage = messages[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (len(prompt), 24, 0)


async def test_an_answer_is_the_same_among_others(client):
    alone = [token for m in await client.answer() for token in m.ids]
    together = await asyncio.gather(*(client.answer(f"r{i}") for i in range(3)))
    assert [[token for m in answer for token in m.ids] for answer in together] == [alone] * 3


async def test_what_was_generated_elsewhere_is_gone_on_from(client):
    whole = [token for m in await client.answer() for token in m.ids]
    rest = await client.answer(max_tokens=14, resume_ids=whole[:10])
    assert [token for m in rest for token in m.ids] == whole[10:]


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


# -- one worker: ends that are not answers --------------------------------------------------------------------


async def test_closing_the_stream_frees_the_pools_within_a_second(served):
    bench, _, client = served
    before = await client.load()
    call = client.generate("leaves", ENDLESS)
    await first_of([call])
    assert (await client.load()).kv_tokens.used > ENDLESS
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
    "no tokens": ({"tokens": inference_pb2.TokenPrompt()}, {"pomona-error-param": "prompt"}),
    "a token beyond the vocabulary": (
        {"tokens": inference_pb2.TokenPrompt(ids=[512])},
        {"pomona-error-param": "prompt"},
    ),
    "resumed from beyond the vocabulary": ({"resume_ids": [512]}, {"pomona-error-param": "prompt"}),
    "longer than the context": (
        {"tokens": inference_pb2.TokenPrompt(ids=[5] * CONTEXT)},
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


# -- the registry ---------------------------------------------------------------------------------------------


async def test_workers_register_anew_with_a_registry_that_restarts_on_the_same_port_and_streams_go_on(models):
    async with opened(Topology(dp_size=2), Limits(8)) as bench:
        bench.start_all(models["llama"])
        await bench.ready()
        client = await bench.client(bench.workers[0])
        call = client.generate("goes on", ENDLESS)
        await first_of([call])
        known = {m.worker_id for m in bench.cluster.members.all()}
        await bench.close()
        await first_of([call])
        assert (await client.load()).running_requests == 1  # it serves while the head is away
        await bench.open(int(bench.address.rpartition(":")[2]))
        assert bench.cluster.members.all() == ()
        await bench.ready()
        assert {m.worker_id for m in bench.cluster.members.all()} == known
        assert [o["pools"]["request_slots"]["capacity"] for o in bench.in_the_view()] == [8, 8]
        assert bench.in_the_view()[0]["running_requests"] == 1
        await first_of([call])
        call.cancel()


async def test_head_restart_gives_shares_of_a_higher_epoch(models):
    async with opened() as bench:
        bench.start(models["llama"])
        await bench.ready()
        before = bench.cluster.epoch
        await bench.close()
        bench.limits = Limits(4)
        await bench.open(int(bench.address.rpartition(":")[2]))
        await bench.ready()
        assert bench.cluster.epoch > before
        client = await bench.client(bench.workers[0])
        await client.load_until(lambda load: load.max_running_requests == 4, WAIT_S)


async def test_a_worker_that_the_head_forgot_registers_anew_and_refuses_the_old_epoch(models):
    async with opened() as bench:
        worker = bench.start(models["llama"])
        await bench.ready()
        client = await bench.client(worker)
        old = bench.cluster.epoch
        assert (await client.answer("now", epoch=old))[-1].usage.completion_tokens == 24
        bench.cluster.lost(OwnerKey(0, 0))
        await until(bench.cluster.members.all)
        await client.load_until(lambda load: load.epoch == bench.cluster.epoch > old, WAIT_S)
        error = await client.refusal("old", epoch=old)
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert (await client.answer("new", epoch=bench.cluster.epoch))[-1].usage.completion_tokens == 24


async def test_an_owner_that_drains_finishes_what_it_has_and_takes_nothing_new(models):
    async with opened() as bench:
        worker = bench.start(models["llama"])
        await bench.ready()
        client = await bench.client(worker)
        call = client.generate("before", ENDLESS)
        await first_of([call])
        bench.cluster.members.drain(OwnerKey(0, 0))
        error = None
        async with asyncio.timeout(WAIT_S):  # the next report, at most a second away, brings the word back
            while error is None:
                try:
                    await client.answer("after", max_tokens=1)
                except grpc.aio.AioRpcError as exc:
                    error = exc
        assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "this owner is draining")
        await first_of([call])
        assert bench.in_the_view()[0]["phase"] == "draining"
        call.cancel()


async def test_gateways_see_a_full_table_first_then_changes_and_who_left(models):
    async with opened() as bench:
        worker = bench.start(models["llama"])
        await bench.ready()
        stub = await bench.registry()
        watch = stub.WatchRoutes(registry_pb2.WatchRoutesRequest(model="M"), metadata=rpc.metadata(TOKEN))
        first = await asyncio.wait_for(watch.read(), WAIT_S)
        assert first.full
        (route,) = first.routes
        assert (route.address, route.phase) == (worker.address, telemetry_pb2.OWNER_PHASE_READY)
        assert (route.load.max_running_requests, route.context_tokens) == (8, CONTEXT)
        worker.stop()
        await asyncio.wait_for(bench.runs[0], WAIT_S)
        await stub.Deregister(
            registry_pb2.DeregisterRequest(worker_id=route.worker_id, incarnation=worker.incarnation),
            metadata=rpc.metadata(TOKEN),
        )
        async with asyncio.timeout(WAIT_S):
            while not (update := await watch.read()).removed_worker_ids:
                assert not update.full
        assert list(update.removed_worker_ids) == [route.worker_id]
        assert bench.cluster.members.all() == ()
        watch.cancel()


async def test_an_owner_that_nobody_wants_is_refused_and_never_counted():
    async with opened() as bench:
        stub = await bench.registry()
        for wrong in ({"model": "another"}, {"replica": 1}, {"owner": 1}):
            who = telemetry_pb2.WorkerIdentity(**({"model": "M", "incarnation": "x"} | wrong))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Register(registry_pb2.RegisterRequest(worker=who), metadata=rpc.metadata(TOKEN))
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert bench.cluster.members.all() == ()
