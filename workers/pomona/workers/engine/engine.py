"""The engine thread: the one thread that owns MLX. Everybody else talks to the scheduler, under one lock.

Submitting, refusing and cancelling never wait for a model step: they change the scheduler at once, and the step that
runs meanwhile only loses the tokens of those who left.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from ..errors import EngineError, PomonaError, Unavailable
from .base import (
    Batch,
    Clock,
    Counters,
    Delta,
    EngineLoad,
    EngineRequest,
    FinishReason,
    MemoryUse,
    Piece,
    Runner,
    Share,
    Sink,
    StepPlan,
    StepResult,
    Text,
    TokenLogprobs,
    TokenOut,
    Usage,
)
from .pace import Pace
from .pools import Pools
from .scheduler import Rules, Scheduler

log = logging.getLogger(__name__)

# How long the idle thread sleeps before it shows that it is alive.
IDLE_HEARTBEAT_S = 0.25
# A burst that meets an idle engine starts together: prompts that come one after the other would each prefill alone and
# then be merged, which costs more than waiting until none has come for so long (or so many have).
GATHER_QUIET_S = 0.004
GATHER_REQUESTS = 64


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What the engine thread makes for itself at start: everything here touches MLX or the tokenizer."""

    make_runner: Callable[[], Runner]
    new_text: Callable[[EngineRequest], Text]
    memory: Callable[[], MemoryUse]
    context_tokens: int


@dataclass(slots=True)
class _Answer:
    """The engine's side of one request: where its text goes."""

    request: EngineRequest
    sink: Sink
    text: Text
    generated: int = 0
    cached_tokens: int = 0


class Engine:
    """Runs the thread, and publishes (answers, load) after every step and every change.

    `setup` runs on the engine thread; None ends it (setup told whoever waits why).
    `publish` is called on any thread, with what there is to deliver and the new snapshot; it must not block.
    `on_exit` is called on the engine thread when it ends after a good setup, with the reason if that is a failure.
    """

    def __init__(
        self,
        setup: Callable[[], EngineParts | None],
        publish: Callable[[Batch, EngineLoad | None], None],
        *,
        clock: Clock,
        on_exit: Callable[[EngineError | None], None] = lambda _: None,
        max_queued_requests: int = 1024,
        prefix_cache: bool = True,
        max_step_s: float = 0.25,
        chunk_tokens: int = 512,
    ) -> None:
        self._setup = setup
        self._publish = publish
        self._on_exit = on_exit
        self._clock = clock
        self._max_queued = max_queued_requests
        self._prefix_cache = prefix_cache
        self._pace = Pace(max_step_s, chunk_tokens)
        self._thread = threading.Thread(target=self._main, name="pomona-engine", daemon=True)
        # Guards everything below; notified when there may be work.
        self._lock = threading.Condition()
        self._parts: EngineParts | None = None
        self._scheduler: Scheduler | None = None
        self._share: Share | None = None
        self._answers: dict[str, _Answer] = {}
        self._batch: Batch = []
        self._counters = Counters()
        self._stepped_at = clock()
        self._closing = False
        # The engine thread's own.
        self._runner: Runner | None = None

    # -- called from any thread -------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: EngineRequest, sink: Sink) -> None:
        """Queue a request; its answer arrives at `sink` through `publish`. Raises the error that refuses it."""
        with self._lock:
            if self._scheduler is None or self._parts is None or self._closing:
                raise Unavailable("this owner has no share" if not self._closing else "this owner stopped")
            answer = _Answer(request, sink, self._parts.new_text(request))
            self._scheduler.submit(request)
            self._answers[request.request_id] = answer
            self._lock.notify()
            self._flush()

    def cancel(self, request_id: str) -> None:
        """End a request in any state: what it held is free at once."""
        with self._lock:
            self._answers.pop(request_id, None)
            if self._scheduler is not None and self._scheduler.cancel(request_id):
                self._lock.notify()
                self._flush()

    def allocate(self, share: Share) -> None:
        """Put a share in force. One that is not newer is ignored. Queued requests that no longer fit are refused."""
        with self._lock:
            stale = self._share is not None and share.epoch <= self._share.epoch
            if self._parts is None or self._closing or stale:
                return
            self._share = share
            sizes = {
                "requests": share.max_running_requests,
                "kv_tokens": share.kv_tokens,
                "aux_slots": share.aux_slots,
            }
            if self._scheduler is None:
                rules = Rules(
                    self._parts.context_tokens, share.aux_slots_per_request, self._max_queued, self._prefix_cache
                )
                self._scheduler = Scheduler(rules, Pools(**sizes), self._pace)
            else:
                refused = self._scheduler.resize(**sizes)
                self._fail(refused, Unavailable("this owner's share became too small for the request"))
            self._lock.notify()
            self._flush()

    def stop(self, timeout_s: float = 10.0) -> bool:
        """End everything with an error to each, then the thread. False when it did not end in time."""
        with self._lock:
            self._closing = True
            self._lock.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # -- the engine thread ------------------------------------------------------------------------------------

    def _main(self) -> None:
        parts = self._setup()
        if parts is None:
            return
        with self._lock:
            self._parts = parts
        failure: EngineError | None = None
        try:
            while (plan := self._next_plan()) is not None:
                self._step(plan)
        except Exception as exc:
            log.exception("the engine cannot go on")
            failure = EngineError(f"the engine stopped: {type(exc).__name__}: {exc}")
        self._shut_down(failure)
        self._on_exit(failure)

    def _next_plan(self) -> StepPlan | None:
        """Wait for work; None when the engine closes. While idle, show now and then that the thread lives."""
        was_idle = False
        with self._lock:
            while not self._closing:
                self._stepped_at = self._clock()
                if self._scheduler is not None and self._scheduler.has_work():
                    if was_idle:
                        self._gather()
                    return self._scheduler.plan()
                was_idle = True
                if not self._lock.wait(IDLE_HEARTBEAT_S):
                    self._flush()
            return None

    def _gather(self) -> None:
        """Let the rest of a burst arrive. Gives up the lock while it waits."""
        for _ in range(GATHER_REQUESTS):
            if not self._lock.wait(GATHER_QUIET_S):
                return

    def _step(self, plan: StepPlan) -> None:
        """One step of the model, outside the lock. Its failure fails the requests that were in it, nobody else."""
        if self._runner is None:
            assert self._parts is not None, "set up"
            self._runner = self._parts.make_runner()
        try:
            result = self._runner.step(plan)
        except Exception as exc:
            log.exception("step failed")
            with self._lock:
                error = EngineError(f"the engine failed while it ran this request ({type(exc).__name__}: {exc})")
                self._fail(self._scheduler_in_force().fail_running(), error)
                self._flush()
            self._close_runner()
            return
        with self._lock:
            self._book(result)
            self._flush()

    def _close_runner(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            with contextlib.suppress(Exception):  # it may be what just failed
                runner.close()

    def _shut_down(self, failure: EngineError | None) -> None:
        with self._lock:
            self._closing = True
            if self._scheduler is not None:
                left = (*self._scheduler.fail_running(), *self._scheduler.drain_queue())
                self._fail(left, failure or Unavailable("this owner stopped"))
            self._flush()
        self._close_runner()

    # -- under the lock ---------------------------------------------------------------------------------------

    def _book(self, result: StepResult) -> None:
        self._stepped_at = self._clock()
        booked = self._scheduler_in_force().commit(result)
        for failed in booked.failed:
            self._fail([failed.request_id], EngineError(failed.reason))
        for token in booked.tokens:
            try:
                self._emit(token)
            except Exception as exc:
                log.exception("text of %s failed", token.request_id)
                self._scheduler_in_force().cancel(token.request_id)
                error = EngineError(f"the text of this answer failed ({type(exc).__name__}: {exc})")
                self._fail([token.request_id], error)
        self._count(prompt_tokens=result.prompt_tokens, generation_tokens=len(booked.tokens))

    def _emit(self, token: TokenOut) -> None:
        """Turn one token into text and queue it; a stop string ends the request here. A stop token has no text."""
        answer = self._answers.get(token.request_id)
        if answer is None:
            return
        if not answer.generated:
            answer.cached_tokens = token.cached_tokens
        answer.generated += 1
        pieces = [] if token.finish is FinishReason.STOP else [answer.text.push(token.token)]
        if token.finish is not None and not any(piece.stopped for piece in pieces):
            pieces.append(answer.text.finish())
        stopped = any(piece.stopped for piece in pieces)
        if stopped and token.finish is None:
            self._scheduler_in_force().finish(token.request_id)
        self._deliver(answer, token, pieces, FinishReason.STOP if stopped else token.finish)

    def _deliver(self, answer: _Answer, token: TokenOut, pieces: list[Piece], finish: FinishReason | None) -> None:
        usage = None
        if finish is not None:
            usage = Usage(len(answer.request.prompt), answer.generated, answer.cached_tokens)
            del self._answers[token.request_id]
            self._count(finished_requests=1)
        delta = Delta(
            ids=(token.token,),
            text="".join([piece.text for piece in pieces]),
            reasoning="".join([piece.reasoning for piece in pieces]),
            tool_calls=tuple([call for piece in pieces for call in piece.tool_calls]),
            logprobs=() if token.logprob is None else (TokenLogprobs(token.token, token.logprob, token.top),),
            finish=finish,
            usage=usage,
        )
        self._batch.append((answer.sink, delta))

    def _fail(self, request_ids: Iterable[str], error: PomonaError) -> None:
        for request_id in request_ids:
            answer = self._answers.pop(request_id, None)
            if answer is not None:
                self._batch.append((answer.sink, Delta(error=error)))
                self._count(failed_requests=1)

    def _count(self, **more: int) -> None:
        self._counters = replace(self._counters, **{k: getattr(self._counters, k) + v for k, v in more.items()})

    def _flush(self) -> None:
        batch, self._batch = self._batch, []
        if batch or self._scheduler is not None:
            self._publish(batch, self._load() if self._scheduler is not None else None)

    def _load(self) -> EngineLoad:
        scheduler, share = self._scheduler_in_force(), self._share
        memory = self._parts.memory() if self._parts is not None else MemoryUse()
        return EngineLoad(
            epoch=share.epoch if share else 0,
            running=scheduler.running,
            waiting=scheduler.waiting,
            requests=scheduler.pools.requests.view(),
            kv_tokens=scheduler.pools.kv_tokens.view(),
            aux_slots=scheduler.pools.aux_slots.view(),
            aux_slots_per_request=scheduler.rules.aux_slots_per_request,
            counters=replace(self._counters, preempted_requests=scheduler.preemptions),
            stepped_at=self._stepped_at,
            active_bytes=memory.active_bytes,
            cache_bytes=memory.cache_bytes,
            limit_bytes=memory.limit_bytes,
        )

    def _scheduler_in_force(self) -> Scheduler:
        assert self._scheduler is not None, "no share in force"
        return self._scheduler
