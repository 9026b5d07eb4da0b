"""Owners without Ray: a real registry on a real gRPC server, and real workers with real tiny models.

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
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pomona.cluster.capacity import Limits, part
from pomona.cluster.cluster import Cluster
from pomona.cluster.registry import RegistryService
from pomona.cluster.topology import Topology
from pomona.v1 import inference_pb2, inference_pb2_grpc, registry_pb2_grpc, telemetry_pb2
from pomona.workers import rpc
from pomona.workers.setup import Loaded, prepare
from pomona.workers.spec import Ended, Stage, WorkerSpec
from pomona.workers.worker import SERVICE, Worker

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
TokenPrompt = inference_pb2.TokenPrompt


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


def idle(load: telemetry_pb2.LoadReport) -> bool:
    return not (load.running_requests or load.waiting_requests or load.kv_tokens.used or load.aux_slots.used)


def trailing(error: grpc.aio.AioRpcError) -> dict[str, str]:
    return {k: v for k, v in error.trailing_metadata() or () if k.startswith("pomona-")}


def ids_of(answer: Iterable[inference_pb2.GenerateResponse]) -> list[int]:
    return [token for message in answer for token in message.ids]


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
