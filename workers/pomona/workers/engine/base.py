"""The engine's contract: plain values between scheduler, runner and text.

    scheduler.plan()  --StepPlan-->  runner.step()  --StepResult-->  scheduler.commit()

The scheduler touches no device. The runner decides nothing: it starts, cancels and steps what the plan names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from ..errors import PomonaError
from .pools import PoolView


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    top_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request as tokens. `max_tokens` None means whatever the context window leaves; `prompt_param` is the client's
    own name for the prompt, for errors."""

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    prompt_param: str = "prompt"


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that the pools have room for, with its token limit settled (>= 1)."""

    request: EngineRequest
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log probability (natural) of one token of the vocabulary."""

    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenOut:
    """One generated token. `finish` is set when the runner ended the request with it (EOS or length).

    `cached_tokens` is how many prompt tokens were reused, the same in each of a request's tokens.
    """

    request_id: str
    token: int
    finish: FinishReason | None = None
    logprob: float | None = None
    top: tuple[Logprob, ...] = ()
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the next step does: drop `cancel`, let the prefix cache hold at most `cache_tokens`, take in `start`, and
    run everything that is in."""

    start: tuple[Admitted, ...] = ()
    cancel: tuple[str, ...] = ()
    cache_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced, how many prompt tokens it computed, and what the prefix cache holds after it.

    `cached_tokens` is at most the plan's `cache_tokens` plus what the requests that finished had reserved.
    """

    tokens: tuple[TokenOut, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0


class Runner(Protocol):
    """Runs model steps. Used from one thread only."""

    def step(self, plan: StepPlan) -> StepResult:
        """Carry out the plan. An exception means that everything the runner held is gone."""
        ...

    def close(self) -> None:
        """Release device state."""
        ...


@dataclass(frozen=True, slots=True)
class Share:
    """What this owner may use, under the plan numbered `epoch`."""

    epoch: int
    max_running_requests: int
    kv_tokens: int
    aux_slots: int
    aux_slots_per_request: int


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    token: int
    logprob: float
    top: tuple[Logprob, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer; the last one has `finish` and `usage`, or `error` instead of an end."""

    ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    usage: Usage | None = None
    error: PomonaError | None = None

    @property
    def last(self) -> bool:
        return self.finish is not None or self.error is not None


@dataclass(frozen=True, slots=True)
class Counters:
    """Since the process started."""

    finished_requests: int = 0
    failed_requests: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """An absolute snapshot of the engine. `stepped_at` is on the engine's clock; bytes are 0 where unknown."""

    epoch: int
    running: int
    waiting: int
    requests: PoolView
    kv_tokens: PoolView
    aux_slots: PoolView
    aux_slots_per_request: int
    counters: Counters
    stepped_at: float
    active_bytes: int = 0
    limit_bytes: int = 0


Sink = Callable[[Delta], None]
Batch = list[tuple[Sink, Delta]]
Clock = Callable[[], float]
