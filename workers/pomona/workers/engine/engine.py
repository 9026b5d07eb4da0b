"""The engine thread: the one thread that owns MLX. asyncio talks to it through an inbox, it answers in batches."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from pomona.workers.engine.base import (
    Batch,
    Clock,
    Counters,
    Delta,
    EngineLoad,
    EngineRequest,
    FinishReason,
    Runner,
    Share,
    Sink,
    TokenLogprobs,
    TokenOut,
    Usage,
)
from pomona.workers.engine.pools import Pools
from pomona.workers.engine.scheduler import Rules, Scheduler
from pomona.workers.errors import EngineError, PomonaError, Unavailable

log = logging.getLogger(__name__)

# How long the idle thread sleeps before it shows that it is alive.
IDLE_HEARTBEAT_S = 0.25


class Text(Protocol):
    """The text of one answer (text.stream.TextStream)."""

    def push(self, token: int) -> tuple[str, bool]: ...

    def finish(self) -> tuple[str, bool]: ...


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What the engine thread makes for itself at start: everything here touches MLX or the tokenizer."""

    make_runner: Callable[[Share], Runner]
    new_text: Callable[[tuple[str, ...]], Text]
    memory: Callable[[], tuple[int, int]]
    context_tokens: int


@dataclass(slots=True)
class _Answer:
    """The engine's side of one request: where its text goes."""

    request: EngineRequest
    sink: Sink
    text: Text
    generated: int = 0


class Engine:
    """Starts the thread, queues work for it, and publishes (answers, load) after every round.

    `setup` runs on the engine thread; None ends it (setup told whoever waits why).
    `publish` is called on the engine thread with what the round produced and the new snapshot; it must not block.
    """

    def __init__(
        self,
        setup: Callable[[], EngineParts | None],
        publish: Callable[[Batch, EngineLoad | None], None],
        *,
        clock: Clock,
        max_queued_requests: int = 1024,
    ) -> None:
        self._setup = setup
        self._publish = publish
        self._clock = clock
        self._max_queued = max_queued_requests
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="pomona-engine", daemon=True)
        self._answers: dict[str, _Answer] = {}
        self._batch: Batch = []
        self._counters = Counters()
        self._share: Share | None = None
        self._runner: Runner | None = None
        self._scheduler: Scheduler | None = None
        self._closing = False

    # -- called from any thread -------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: EngineRequest, sink: Sink) -> None:
        """Queue a request. Its answer, or the error that refuses it, arrives at `sink` through `publish`."""
        self._inbox.put(lambda: self._submit(request, sink))

    def cancel(self, request_id: str) -> None:
        """End a request in any state, within one step."""
        self._inbox.put(lambda: self._cancel(request_id))

    def allocate(self, share: Share) -> None:
        """Put a share in force. An older epoch is refused."""
        self._inbox.put(lambda: self._allocate(share))

    def stop(self, timeout_s: float = 10.0) -> bool:
        """End everything with an error to each, then the thread. False when it did not end in time."""
        self._inbox.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # -- the engine thread ------------------------------------------------------------------------------------

    def _main(self) -> None:
        parts = self._setup()
        if parts is None:
            return
        self._parts = parts
        while not self._closing:
            self._take_inbox()
            self._round()
            self._flush()
        self._shutdown()

    def _take_inbox(self) -> None:
        """Run what was queued; with nothing to step, wait for it (shortly, so that the snapshot stays fresh)."""
        idle = self._scheduler is None or not self._scheduler.has_work()
        with contextlib.suppress(queue.Empty):
            self._run(self._inbox.get(timeout=IDLE_HEARTBEAT_S) if idle else self._inbox.get_nowait())
            while not self._closing:
                self._run(self._inbox.get_nowait())

    def _run(self, command: Callable[[], None] | None) -> None:
        if command is None:
            self._closing = True
        else:
            command()

    def _round(self) -> None:
        if self._scheduler is None or self._runner is None or not self._scheduler.has_work():
            return
        plan = self._scheduler.plan()
        try:
            result = self._runner.step(plan)
        except Exception as exc:
            log.exception("step failed")
            self._fail_step(exc)
            return
        self._count(prompt_tokens=result.prompt_tokens)
        for token in self._scheduler.commit(result):
            self._emit(token)

    def _submit(self, request: EngineRequest, sink: Sink) -> None:
        try:
            if self._scheduler is None:
                raise Unavailable("this owner has no share yet")
            self._scheduler.submit(request)
            self._answers[request.request_id] = _Answer(request, sink, self._parts.new_text(request.stop))
        except PomonaError as exc:
            self._batch.append((sink, Delta(error=exc)))

    def _cancel(self, request_id: str) -> None:
        if self._scheduler is not None:
            self._scheduler.cancel(request_id)
        self._answers.pop(request_id, None)

    def _allocate(self, share: Share) -> None:
        if self._share is not None and share.epoch <= self._share.epoch:
            return
        self._share = share
        sizes = {
            "requests": share.max_running_requests,
            "kv_tokens": share.kv_tokens,
            "aux_slots": share.aux_slots,
        }
        if self._scheduler is None:
            rules = Rules(self._parts.context_tokens, share.aux_slots_per_request, self._max_queued)
            self._scheduler = Scheduler(rules, Pools(**sizes))
            self._runner = self._parts.make_runner(share)
        else:
            self._scheduler.pools.resize(**sizes)

    def _emit(self, token: TokenOut) -> None:
        """Turn one token into text and queue it; a stop string ends the request here. EOS itself has no text."""
        answer = self._answers[token.request_id]
        answer.generated += 1
        text, stopped = ("", False) if token.finish is FinishReason.STOP else answer.text.push(token.token)
        if token.finish is not None and not stopped:
            tail, stopped = answer.text.finish()
            text += tail
        if stopped and token.finish is None:
            self._scheduler_in_force().finish(token.request_id)
        self._deliver(answer, token, text, FinishReason.STOP if stopped else token.finish)

    def _deliver(self, answer: _Answer, token: TokenOut, text: str, finish: FinishReason | None) -> None:
        scores = () if token.logprob is None else (TokenLogprobs(token.token, token.logprob, token.top),)
        usage = None
        if finish is not None:
            usage = Usage(len(answer.request.prompt), answer.generated)
            del self._answers[token.request_id]
        self._batch.append((answer.sink, Delta((token.token,), text, scores, finish, usage)))
        self._count(generation_tokens=1, finished_requests=int(finish is not None))

    def _fail_step(self, cause: Exception) -> None:
        """The runner lost everything it held: an error to each of its requests, then a new runner."""
        failed = self._scheduler_in_force().fail_running()
        error = EngineError(f"the engine failed while it ran this request ({type(cause).__name__}: {cause})")
        self._fail(failed, error)
        self._close_runner()
        if self._share is not None:
            self._runner = self._parts.make_runner(self._share)

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
        if self._scheduler is not None:
            self._publish(batch, self._load())
        elif batch:
            self._publish(batch, None)

    def _load(self) -> EngineLoad:
        scheduler, share = self._scheduler_in_force(), self._share
        active, limit = self._parts.memory()
        return EngineLoad(
            epoch=share.epoch if share else 0,
            running=scheduler.running,
            waiting=scheduler.waiting,
            requests=scheduler.pools.requests.view(),
            kv_tokens=scheduler.pools.kv_tokens.view(),
            aux_slots=scheduler.pools.aux_slots.view(),
            aux_slots_per_request=scheduler.rules.aux_slots_per_request,
            counters=self._counters,
            stepped_at=self._clock(),
            active_bytes=active,
            limit_bytes=limit,
        )

    def _scheduler_in_force(self) -> Scheduler:
        assert self._scheduler is not None, "no share in force"
        return self._scheduler

    def _shutdown(self) -> None:
        if self._scheduler is not None:
            stopped = Unavailable("this owner stopped")
            self._fail((*self._scheduler.fail_running(), *self._scheduler.drain_queue()), stopped)
        self._close_runner()
        self._flush()

    def _close_runner(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            with contextlib.suppress(Exception):  # it may be what just failed
                runner.close()
