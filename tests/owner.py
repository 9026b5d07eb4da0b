"""One owner without threads: the real scheduler over the real runner and a tiny model, stepped by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

import tiny
from pomona.workers.engine.base import EngineRequest, StepResult
from pomona.workers.engine.pace import Pace
from pomona.workers.engine.pools import Pools
from pomona.workers.engine.runner import ModelRunner
from pomona.workers.engine.scheduler import Rules, Scheduler
from pomona.workers.models.caches import maker

VOCAB = 512
CONTEXT = 512
KINDS = ("llama", "qwen3_moe", "gemma3_text", "qwen3_next", "lfm2", "mamba2", "falcon_h1", "granitemoehybrid")
STATE = ("qwen3_next", "lfm2", "mamba2", "falcon_h1", "granitemoehybrid")


@functools.cache
def model_of(kind: str, folder: Path) -> Any:
    path = folder / kind
    return load_model(path if path.exists() else tiny.make(kind, path, vocab=VOCAB, context=CONTEXT))[0]


def one_by_one(
    model: Any, prompt: Sequence[int], tokens: int, make: Callable[[], list[Any]] | None = None
) -> list[int]:
    """Greedy decoding as mlx-lm does it for a single sequence: no batch, no chunks, nothing reused."""
    caches = make() if make else make_prompt_cache(model)
    step, answer = mx.array([list(prompt)]), []
    for _ in range(tokens):
        answer.append(int(mx.argmax(model(step, cache=caches)[:, -1], axis=-1).item()))
        step = mx.array([[answer[-1]]])
    return answer


class Owner:
    """Scheduler, pools and runner; after every step the invariants are checked and the cache is within its room."""

    def __init__(
        self,
        model: Any,
        *,
        requests: int = 8,
        kv_tokens: int = 100_000,
        aux_slots: int = 0,
        slots_per_request: int = 0,
        chunk_tokens: int = 512,
        prefix_cache: bool = True,
        kv_bits: int | None = None,
    ) -> None:
        rules = Rules(CONTEXT, aux_slots_per_request=slots_per_request, prefix_cache=prefix_cache)
        pools = Pools(requests=requests, kv_tokens=kv_tokens, aux_slots=aux_slots)
        self.scheduler = Scheduler(rules, pools, Pace(0.25, chunk_tokens))
        self.runner = ModelRunner(model, maker(model, kv_bits), eos=(), vocab_size=VOCAB)
        self.answers: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        self.ended: set[str] = set()
        self.failed: dict[str, str] = {}
        self.most_running = 0
        self.prompt_tokens = 0

    def submit(self, request: EngineRequest) -> None:
        self.scheduler.submit(request)
        self.answers[request.request_id] = []

    def cancel(self, request_id: str) -> None:
        self.scheduler.cancel(request_id)

    def step(self) -> StepResult:
        plan = self.scheduler.plan()
        self.scheduler.check_invariants()
        self.most_running = max(self.most_running, self.scheduler.running)
        result = self.runner.step(plan)
        booked = self.scheduler.commit(result)
        for token in booked.tokens:
            self.cached.setdefault(token.request_id, token.cached_tokens)
            self.answers[token.request_id].append(token.token)
            if token.finish is not None:
                self.ended.add(token.request_id)
        for failure in booked.failed:
            self.failed[failure.request_id] = failure.reason
        self.prompt_tokens += result.prompt_tokens
        self.scheduler.check_invariants()
        for pool in (self.scheduler.pools.kv_tokens, self.scheduler.pools.aux_slots):
            view = pool.view()
            assert view.used + view.evictable + view.free == view.capacity
            assert min(view.used, view.evictable, view.free) >= 0
        return result

    def run(self, most_steps: int = 5000) -> None:
        for _ in range(most_steps):
            if not self.scheduler.has_work():
                break
            self.step()
        assert not self.scheduler.has_work(), "it never ends"
        pools = self.scheduler.pools
        assert (pools.requests.used, pools.kv_tokens.used, pools.aux_slots.used) == (0, 0, 0)

    def close(self) -> None:
        self.runner.close()
