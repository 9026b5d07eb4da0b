"""The engine's contract: plain values between scheduler, runner and text.

    scheduler.plan()  --StepPlan-->  runner.step()  --StepResult-->  scheduler.commit()

The scheduler touches no device. The runner decides nothing: it starts, cancels and steps what the plan names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from ..errors import PomonaError
from .pools import PoolView


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off.

    `repetition_penalty` counts prompt and answer, the other two the answer only; `logit_bias` is (token id, bias).
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    top_logprobs: int | None = None


class Matcher(Protocol):
    """Where one answer stands in its grammar."""

    def mask(self) -> Any:
        """numpy uint32 [ceil(vocab / 32)]: bit i % 32 of word i // 32 is set where token i may come next."""
        ...

    def accept(self, token: int) -> None:
        """The token was chosen. One that the mask forbids raises ValueError."""
        ...


class Grammar(Protocol):
    """A compiled grammar; immutable, so that many requests may share one."""

    def matcher(self) -> Matcher: ...


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request as tokens. `max_tokens` None means whatever the context window leaves; `prompt_param` is the client's
    own name for the prompt, for errors. `tools_json` (empty: none) makes the text's tool calls be parsed. The last
    `resumed_tokens` of the prompt are the beginning of the answer, said elsewhere."""

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    grammar: Grammar | None = None
    priority: int = 0
    tools_json: str = ""
    keep_reasoning_in_text: bool = False
    prompt_param: str = "prompt"
    resumed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that the pools have room for, with its token limit settled (>= 1). `generated` is what it had said
    when it was preempted: the answer goes on after it."""

    request: EngineRequest
    max_tokens: int
    generated: tuple[int, ...] = ()


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
class Chunk:
    """Compute at most so many prompt tokens of a request in this step.

    Others wait for the first `cut` tokens (0: nobody): state is worth a snapshot there.
    """

    request_id: str
    tokens: int
    cut: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the next step does, in this order: drop `leave` (ended or preempted), shrink the prefix cache to at most
    `cache_tokens` and `cache_slots`, take in `start`, decode every row that is in, compute the chunks of `prefill`.

    Those of `spare`, in order, may have the tokens that the others turn out not to need, since the cache holds them.
    """

    leave: tuple[str, ...] = ()
    start: tuple[Admitted, ...] = ()
    prefill: tuple[Chunk, ...] = ()
    cache_tokens: int = 0
    cache_slots: int = 0
    spare: tuple[Chunk, ...] = ()


@dataclass(frozen=True, slots=True)
class Prefilled:
    """How far a request's prompt is: `position` tokens are in, `cached` of them were reused. A request whose prompt
    is whole has its first token in the same result."""

    request_id: str
    position: int
    cached: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A request that the step could not go on with; everything it held in the runner is gone."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds that the step's decode passes and its prompt chunks took; 0 where there were none.

    `pass_s` is what a pass over the weights takes, as far as that is known.
    """

    decode_s: float = 0.0
    prefill_s: float = 0.0
    pass_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced, how many prompt tokens it computed, and what the prefix cache holds after it.

    The cache holds at most the plan's `cache_tokens` and `cache_slots` plus what the requests that ended in this step
    had reserved.
    """

    tokens: tuple[TokenOut, ...] = ()
    prefilled: tuple[Prefilled, ...] = ()
    failed: tuple[Failed, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cached_slots: int = 0
    times: StepTimes = StepTimes()


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
class ToolCall:
    """A whole call of one tool; `arguments_json` is a JSON object."""

    id: str
    name: str
    arguments_json: str


@dataclass(frozen=True, slots=True)
class Piece:
    """What a token added to an answer's text. `stopped`: a stop string ended the answer."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    stopped: bool = False


class Text(Protocol):
    """The text of one answer as it grows (text.stream.TextStream)."""

    def push(self, token: int) -> Piece: ...

    def finish(self) -> Piece:
        """The answer ended: what was held back."""
        ...


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer; the last one has `finish` and `usage`, or `error` instead of an end."""

    ids: tuple[int, ...] = ()
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
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
    preempted_requests: int = 0


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory as MLX counts it: of the limit, what is in use and what MLX keeps of freed buffers. 0 where unknown."""

    active_bytes: int = 0
    cache_bytes: int = 0
    limit_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """An absolute snapshot of the engine. `stepped_at` is on the engine's clock; bytes are those of MemoryUse."""

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
    cache_bytes: int = 0
    limit_bytes: int = 0


Sink = Callable[[Delta], None]
Batch = list[tuple[Sink, Delta]]
Clock = Callable[[], float]
