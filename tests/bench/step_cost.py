"""What a step costs beside the model: scheduler, text and publishing for 64 running requests, in process.

    python tests/bench/step_cost.py

Engine thread, scheduler, text and the event loop's side (queues, protobuf) are the real ones; the runner is a fake
that says 64 tokens a step, after a pause in which the event loop may work, as it may while MLX computes, or at once.
Reported: the time between the end of a runner's step and the beginning of the next, on the clock and as the engine
thread's CPU. The bar is for the first of the two lines: with no pause the two threads fight for one interpreter.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from models import converted_smollm2

from pomona.workers.engine.base import (
    Admitted,
    Batch,
    EngineLoad,
    EngineRequest,
    FinishReason,
    MemoryUse,
    Prefilled,
    Share,
    StepPlan,
    StepResult,
    TokenOut,
)
from pomona.workers.engine.engine import Engine, EngineParts
from pomona.workers.service import AnswerQueue
from pomona.workers.text.maker import TextMaker
from pomona.workers.wire import to_generate_response

REQUESTS, STEPS, WARM_STEPS = 64, 400, 50
BAR_MS, WAIT_S = 1.5, 60.0
TEXT = "The harbor was quiet that winter; silver light fell over the bridge, and 17 boats — old friends — came home. "


@dataclass(slots=True)
class _Row:
    admitted: Admitted
    position: int = 0
    generated: int = 0


@dataclass(slots=True)
class FakeRunner:
    """Says the tokens of a text for every row; measures what happens between its steps."""

    tokens: list[int]
    pause_s: float
    between: list[tuple[float, float]] = field(default_factory=list)  # clock and CPU seconds
    _rows: dict[str, _Row] = field(default_factory=dict)
    _left: tuple[float, float] = (0.0, 0.0)

    def step(self, plan: StepPlan) -> StepResult:
        self.between.append((time.perf_counter() - self._left[0], time.thread_time() - self._left[1]))
        result = self._result(plan)
        if self.pause_s:
            time.sleep(self.pause_s)
        self._left = (time.perf_counter(), time.thread_time())
        return result

    def _result(self, plan: StepPlan) -> StepResult:
        for request_id in plan.leave:
            self._rows.pop(request_id, None)
        self._rows |= {admitted.request.request_id: _Row(admitted) for admitted in plan.start}
        tokens = [self._token(row) for row in list(self._rows.values()) if row.generated]
        prefilled = []
        for chunk in plan.prefill:
            row = self._rows[chunk.request_id]
            row.position = min(row.position + chunk.tokens, len(row.admitted.request.prompt))
            prefilled.append(Prefilled(chunk.request_id, row.position, 0))
            if row.position == len(row.admitted.request.prompt):
                tokens.append(self._token(row))
        return StepResult(tuple(tokens), tuple(prefilled), prompt_tokens=sum(chunk.tokens for chunk in plan.prefill))

    def _token(self, row: _Row) -> TokenOut:
        token = self.tokens[row.generated % len(self.tokens)]
        row.generated += 1
        whole = row.generated == row.admitted.max_tokens
        if whole:
            del self._rows[row.admitted.request.request_id]
        return TokenOut(row.admitted.request.request_id, token, FinishReason.LENGTH if whole else None)

    def close(self) -> None:
        self._rows.clear()


class Owner:
    """The engine as worker.Worker holds it, without Ray and gRPC."""

    def __init__(self, tokenizer: Any, pause_s: float) -> None:
        self.runner = FakeRunner(tokenizer.encode(TEXT), pause_s)
        self.load: EngineLoad | None = None
        self._texts = TextMaker(tokenizer)
        self._loop = asyncio.get_running_loop()
        self.engine = Engine(self._set_up, self._publish, clock=time.monotonic)

    def _set_up(self) -> EngineParts:
        return EngineParts(lambda: self.runner, self._texts.new, MemoryUse, context_tokens=8192)

    def _publish(self, batch: Batch, load: EngineLoad | None) -> None:
        self._loop.call_soon_threadsafe(self._deliver, batch, load)

    def _deliver(self, batch: Batch, load: EngineLoad | None) -> None:
        for sink, delta in batch:
            sink(delta)
        self.load = load or self.load

    async def ready(self) -> None:
        """Returns with a share in force."""
        self.engine.start()
        while self.load is None:
            self.engine.allocate(Share(1, REQUESTS, 1_000_000, 0, 0))
            await asyncio.sleep(0.01)

    async def answer(self, request: EngineRequest) -> int:
        """What service.InferenceService does for one request; returns how many tokens came."""
        queue = AnswerQueue()
        self.engine.submit(request, queue.put)
        deadline = asyncio.get_running_loop().time() + WAIT_S
        messages = [to_generate_response(d, _no_bytes) async for d in queue.deltas(deadline)]
        return sum(len(message.ids) for message in messages)


def _no_bytes(_token: int) -> bytes:
    raise AssertionError("nobody asked for logprobs")


async def measure(tokenizer: Any, pause_s: float) -> float:
    """Prints one line; returns milliseconds a step on the clock (median)."""
    owner = Owner(tokenizer, pause_s)
    try:
        async with asyncio.timeout(WAIT_S):
            await owner.ready()
            prompt = tuple(itertools.islice(itertools.cycle(owner.runner.tokens), 40))
            requests = [EngineRequest(f"request {i}", prompt, max_tokens=STEPS) for i in range(REQUESTS)]
            said = await asyncio.gather(*(owner.answer(request) for request in requests))
    finally:
        await asyncio.to_thread(owner.engine.stop)
    assert said == [STEPS] * REQUESTS, said
    # The last ones have fewer rows: not all started in the same step.
    clock, cpu = zip(*owner.runner.between[WARM_STEPS : STEPS - WARM_STEPS], strict=True)
    median_ms: float = 1e3 * statistics.median(clock)
    p90_ms = 1e3 * statistics.quantiles(clock, n=10)[-1]
    print(
        f"{REQUESTS} requests, model {1e3 * pause_s:g} ms a step, beside it: {median_ms:.2f} ms (median), "
        f"{p90_ms:.2f} ms (90th percentile), {1e3 * statistics.fmean(cpu):.2f} ms of the engine thread's CPU; "
        f"bar {BAR_MS} ms"
    )
    return median_ms


def main() -> None:
    from mlx_lm.utils import load_tokenizer

    tokenizer = load_tokenizer(converted_smollm2(), {"trust_remote_code": False}, eos_token_ids=[2])
    medians = [asyncio.run(measure(tokenizer, pause_s)) for pause_s in (0.01, 0.0)]
    if medians[0] >= BAR_MS:
        sys.exit(f"a step costs {medians[0]:.2f} ms beside the model: at most {BAR_MS} ms are allowed")


if __name__ == "__main__":
    main()
