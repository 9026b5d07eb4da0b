"""One owner, put together: engine thread, gRPC service, telemetry. No Ray here; the actor only holds it."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pomona.v1 import inference_pb2_grpc, registry_pb2, telemetry_pb2

from . import rpc, wire
from .engine.base import Batch, EngineLoad
from .engine.engine import Engine, EngineParts
from .engine.grammar_compiler import GrammarCompiler
from .errors import EngineError, OperatorError, StaleEpoch, Unavailable
from .service import InferenceService
from .setup import Loaded, prepare
from .spec import Ended, Progress, Stage, WorkerSpec
from .telemetry import Reporter
from .text.prompt import PromptEncoder
from .text.vocabulary import token_bytes

log = logging.getLogger(__name__)

GRACE_S = 2.0
SERVICE = "pomona.v1.InferenceService"


@dataclass(slots=True)
class _State:
    """What changes while the worker serves."""

    load: EngineLoad | None = None
    seq: int = 0
    draining: bool = False


class Worker:
    """Serves one owner from start to stop. `prepare` is replaced in tests that need no model."""

    def __init__(self, spec: WorkerSpec, prepare_: Callable[..., Loaded] = prepare) -> None:
        self.spec = spec
        self.incarnation = uuid.uuid4().hex
        self.progress = Progress()
        self.address = ""
        self._prepare = prepare_
        self._state = _State()
        self._stop = asyncio.Event()
        self._ended = Ended("stopped")
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[Loaded] = self._loop.create_future()
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # not in the stubs
        self._engine = Engine(
            self._set_up,
            self._publish,
            clock=time.monotonic,
            on_exit=self._on_engine_exit,
            max_queued_requests=spec.max_queued_requests,
            prefix_cache=spec.prefix_cache,
            max_step_s=spec.max_step_s,
            chunk_tokens=spec.chunked_prefill_size,
        )
        self._reporter: Reporter | None = None

    async def run(self) -> Ended:
        """Load, register, serve until stopped; says why it ended."""
        self._engine.start()
        try:
            loaded = await self._loaded
        except OperatorError as exc:
            return Ended(str(exc), operator=True)
        except Exception as exc:
            log.exception("loading failed")
            return Ended(f"loading {self.spec.source} failed: {type(exc).__name__}: {exc}")
        grammars = GrammarCompiler(loaded.tokenizer, loaded.vocab_size, loaded.tokenizer.eos_token_ids)
        with ThreadPoolExecutor(1, "pomona-tokenizer") as tokenizing, closing(grammars):
            await self._serve(loaded, tokenizing, grammars)
        return self._ended

    def stop(self) -> None:
        """End `run`: requests get an error, the head is told."""
        self._stop.set()

    async def _serve(self, loaded: Loaded, tokenizing: ThreadPoolExecutor, grammars: GrammarCompiler) -> None:
        server = rpc.server(self.spec.token)
        service = InferenceService(
            self._engine,
            PromptEncoder(loaded.tokenizer, loaded.vocab_size),
            tokenizing,
            token_bytes(loaded.tokenizer),
            self._admits,
            self.load_report,
            grammars,
        )
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        self.address = rpc.bind(server, self.spec.bind_host)
        await server.start()
        self.progress = Progress(Stage.REGISTERING)
        self._reporter = Reporter(
            self.spec.registry_address,
            self.spec.token,
            lambda: self._registration(loaded),
            self.load_report,
            self._on_response,
        )
        reporting = asyncio.create_task(self._reporter.run())
        try:
            await self._stop.wait()
        finally:
            reporting.cancel()
            await asyncio.gather(reporting, return_exceptions=True)
            await asyncio.to_thread(self._engine.stop)
            await server.stop(GRACE_S)

    def _registration(self, loaded: Loaded) -> registry_pb2.RegisterRequest:
        m = loaded.memory
        return registry_pb2.RegisterRequest(
            worker=telemetry_pb2.WorkerIdentity(
                model=self.spec.model,
                replica=self.spec.replica,
                owner=self.spec.owner,
                incarnation=self.incarnation,
                host=self.spec.host,
            ),
            address=self.address,
            epoch=self._state.load.epoch if self._state.load is not None else 0,
            memory=telemetry_pb2.MemoryProfile(
                kv_tokens=m.kv_tokens,
                hybrid=m.hybrid,
                aux_slots=m.aux_slots,
                kv_bytes_per_token=m.kv_bytes_per_token,
                aux_bytes_per_slot=m.aux_bytes_per_slot,
                weights_bytes=m.weights_bytes,
                reserve_bytes=m.reserve_bytes,
                budget_bytes=m.budget_bytes,
                context_tokens=m.context_tokens,
            ),
        )

    # -- on the event loop ------------------------------------------------------------------------------------

    def load_report(self) -> telemetry_pb2.LoadReport:
        """The latest snapshot; zero capacity until a share is in force."""
        self._state.seq += 1
        if self._state.load is None:
            report = telemetry_pb2.LoadReport(incarnation=self.incarnation, seq=self._state.seq)
        else:
            report = wire.to_load_report(
                self._state.load, now=time.monotonic(), seq=self._state.seq, incarnation=self.incarnation
            )
        report.worker_id = self._reporter.worker_id if self._reporter is not None else ""
        return report

    def _admits(self, model: str, epoch: int) -> None:
        load = self._state.load
        if model not in ("", self.spec.model):
            raise Unavailable(f"this owner serves {self.spec.model}, not {model}")
        if load is None:
            raise Unavailable("this owner has no share yet")
        if self._state.draining or self._stop.is_set():
            raise Unavailable("this owner is draining")
        if epoch and epoch < load.epoch:
            raise StaleEpoch(f"the request was routed under epoch {epoch}, epoch {load.epoch} is in force")

    def _on_response(self, response: registry_pb2.ReportLoadResponse) -> None:
        self._state.draining = response.drain
        if response.HasField("allocation"):
            self._engine.allocate(wire.to_share(response.allocation))

    def _deliver(self, batch: Batch, load: EngineLoad | None) -> None:
        for sink, delta in batch:
            sink(delta)
        before, self._state.load = self._state.load, load or self._state.load
        if before is None and load is not None:
            self.progress = Progress(Stage.READY)
            self._serving = asyncio.create_task(self._set_health(health_pb2.HealthCheckResponse.SERVING))
        if self._reporter is not None and load is not None and _news(before, load):
            self._reporter.changed()

    async def _set_health(self, status: int) -> None:
        for service in ("", SERVICE):
            await self._health.set(service, status)

    # -- on the engine thread ---------------------------------------------------------------------------------

    def _set_up(self) -> EngineParts | None:
        try:
            loaded = self._prepare(self.spec, self._set_progress)
        except BaseException as exc:
            self._loop.call_soon_threadsafe(self._loaded.set_exception, exc)
            return None
        self._loop.call_soon_threadsafe(self._loaded.set_result, loaded)
        return loaded.parts

    def _on_engine_exit(self, failure: EngineError | None) -> None:
        def end() -> None:
            self._ended = Ended(str(failure) if failure else "stopped")
            self._stop.set()

        self._loop.call_soon_threadsafe(end)

    def _set_progress(self, progress: Progress) -> None:
        self.progress = progress

    def _publish(self, batch: Batch, load: EngineLoad | None) -> None:
        self._loop.call_soon_threadsafe(self._deliver, batch, load)


def _news(before: EngineLoad | None, now: EngineLoad) -> bool:
    """Whether anything that others decide by has changed."""
    if before is None:
        return True
    return (before.running, before.waiting, before.epoch, before.requests, before.kv_tokens, before.aux_slots) != (
        now.running,
        now.waiting,
        now.epoch,
        now.requests,
        now.kv_tokens,
        now.aux_slots,
    )
