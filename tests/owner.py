"""One owner without threads: the real scheduler over the real runner and a tiny model, stepped by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

import tiny
from pomona.workers.engine.base import EngineRequest, StepPlan, StepResult
from pomona.workers.engine.pace import Pace
from pomona.workers.engine.pools import Pools
from pomona.workers.engine.rows import planes
from pomona.workers.engine.runner import ModelRunner
from pomona.workers.engine.scheduler import Rules, Scheduler
from pomona.workers.engine.split import Shape, StepCost
from pomona.workers.models.caches import maker

VOCAB = 512
CONTEXT = 512
KINDS = ("llama", "qwen3_moe", "gemma3_text", "qwen3_next", "lfm2", "mamba2", "falcon_h1", "granitemoehybrid")
TOLERANCE = 2e-4  # of log probabilities: sums in another order differ by a tenth of it
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
    step = mx.array([list(prompt)])
    answer: list[Any] = []
    for _ in range(tokens):
        answer.append(mx.argmax(model(step, cache=caches)[:, -1], axis=-1).item())
        step = mx.array([[answer[-1]]])
    return answer


def assert_alone(
    model: Any,
    prompts: Mapping[str, Sequence[int]],
    answers: Mapping[str, Sequence[int]],
    logprobs: Mapping[str, Sequence[float]],
) -> None:
    """Every token is the likeliest after all before it, and as likely as there: what greedy decoding alone must say.

    One pass over the whole texts without any cache, the shorter ones padded at their end, which no token before sees.
    A tie may go either way: its text then goes on from what was said.
    """
    texts = {request_id: [*prompts[request_id], *said] for request_id, said in answers.items() if said}
    if not texts:
        return
    longest = max(map(len, texts.values()))
    padded = mx.array([text + [0] * (longest - len(text)) for text in texts.values()])
    logits = model(padded)[:, :-1].astype(mx.float32)
    logits = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    best: Any = mx.max(logits, axis=-1).tolist()
    chosen: Any = mx.take_along_axis(logits, padded[:, 1:, None], axis=-1)[..., 0].tolist()
    for row, (request_id, text) in enumerate(texts.items()):
        start = len(prompts[request_id])
        for at in range(start, len(text)):
            expected, told = chosen[row][at - 1], logprobs[request_id][at - start]
            assert best[row][at - 1] - expected <= TOLERANCE, f"{request_id}: token {at - start} is not the likeliest"
            assert abs(told - expected) <= TOLERANCE, f"{request_id}: token {at - start} has {told}, alone {expected}"


def bytes_a_token(model: Any) -> int:
    """Keys and values of one token."""
    caches = maker(model)()
    model(mx.array([[1]]), cache=caches)
    return sum(plane[..., :1, :].nbytes for cache in caches for plane in planes(cache))


class FixedCost(StepCost):
    """What a decode step costs is given, whatever steps take."""

    def __init__(self, pass_s: float, cell_s: float) -> None:
        super().__init__()
        self._given = (pass_s, cell_s)

    def observe(self, shape: Shape, seconds: float) -> None:
        pass

    def of(self, shape: Shape) -> float:
        return shape.passes * self._given[0] + shape.cells * self._given[1]


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
        make_caches: Callable[[], list[Any]] | None = None,
        admit_ahead_tokens: int = 256,
        growth_tokens: int = 64,
        cost: StepCost | None = None,
    ) -> None:
        rules = Rules(
            CONTEXT,
            aux_slots_per_request=slots_per_request,
            prefix_cache=prefix_cache,
            admit_ahead_tokens=admit_ahead_tokens,
            growth_tokens=growth_tokens,
        )
        pools = Pools(requests=requests, kv_tokens=kv_tokens, aux_slots=aux_slots)
        self.scheduler = Scheduler(rules, pools, Pace(0.25, chunk_tokens))
        self.runner = ModelRunner(
            model, make_caches or maker(model, kv_bits), eos=(), vocab_size=VOCAB, kv_tokens=kv_tokens, cost=cost
        )
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.answers: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[float]] = {}
        self.cached: dict[str, int] = {}
        self.ended: set[str] = set()
        self.resumed: set[str] = set()  # after a preemption, with a part of its answer
        self.failed: dict[str, str] = {}
        self.most_running = 0
        self.prompt_tokens = 0

    @property
    def batches(self) -> list[list[int]]:
        """The tokens that each row holds, of each batch."""
        return [list(lengths) for lengths in self.runner._batches.lengths()]

    @property
    def held(self) -> set[str]:
        """Whom the runner holds anything of."""
        return {*self.runner._prompts, *self.runner._answers}

    def submit(self, request: EngineRequest) -> None:
        self.scheduler.submit(request)
        self.prompts[request.request_id] = request.prompt
        self.answers[request.request_id] = []
        self.logprobs[request.request_id] = []

    def cancel(self, request_id: str) -> None:
        self.scheduler.cancel(request_id)

    def step(self) -> StepResult:
        plan = self.scheduler.plan()
        self.scheduler.check_invariants()
        self.most_running = max(self.most_running, self.scheduler.running)
        self.resumed.update(admitted.request.request_id for admitted in plan.start if admitted.generated)
        result = self.runner.step(plan)
        self._check_cache(plan, result)
        booked = self.scheduler.commit(result)
        for token in booked.tokens:
            self.cached.setdefault(token.request_id, token.cached_tokens)
            self.answers[token.request_id].append(token.token)
            if token.logprob is not None:
                self.logprobs[token.request_id].append(token.logprob)
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

    def _check_cache(self, plan: StepPlan, result: StepResult) -> None:
        """Within what the plan left it, and what those that ended in the step held."""
        ended = [token.request_id for token in result.tokens if token.finish is not None]
        freed = sum(len(self.prompts[r]) + len(self.answers[r]) for r in ended)
        assert result.cached_tokens <= plan.cache_tokens + freed
        assert result.cached_slots <= plan.cache_slots + len(ended) * self.scheduler.rules.aux_slots_per_request

    def run(self, most_steps: int = 5000) -> None:
        for _ in range(most_steps):
            if not self.scheduler.has_work():
                break
            self.step()
        assert not self.scheduler.has_work(), "it never ends"
        self.check_empty()

    def assert_alone(self, model: Any) -> None:
        """Every greedy answer, whole or cut, is what its request would be told alone."""
        assert not self.failed
        assert_alone(model, self.prompts, self.answers, self.logprobs)

    def check_empty(self) -> None:
        """Nobody is here, so nothing is in use."""
        pools = self.scheduler.pools
        assert (pools.requests.used, pools.kv_tokens.used, pools.aux_slots.used) == (0, 0, 0)
        assert (self.batches, self.held) == ([], set())

    def close(self) -> None:
        self.runner.close()
