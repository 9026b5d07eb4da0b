"""What the head tells a worker at its start, and what the worker says of its progress."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One rank to start. Sizes are this owner's own unless they say otherwise."""

    model: str
    source: str
    replica: int
    owner: int
    host: str
    bind_host: str
    registry_address: str
    token: str
    # A_i when max_mamba_cache_size is set: paid from memory before KV is.
    aux_slots: int | None = None
    aux_slots_per_request: int = 4
    ranks_on_host: int = 1
    mem_fraction_static: float = 0.8
    mamba_full_memory_ratio: float = 0.9
    max_total_tokens: int | None = None
    context_length: int | None = None
    chunked_prefill_size: int = 512
    max_step_s: float = 0.25
    kv_bits: int | None = None
    max_queued_requests: int = 1024
    prefix_cache: bool = True
    dtype: str = "auto"
    trust_remote_code: bool = False


class Stage(Enum):
    """What a starting worker is doing, in order."""

    STARTING = "starting"
    FETCHING = "downloading"
    CONVERTING = "converting"
    READING = "reading weights"
    MEASURING = "measuring memory"
    REGISTERING = "waiting for its share"
    READY = "ready"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a starting worker is. `done` and `total` are bytes, or 0 where there is nothing to count."""

    stage: Stage = Stage.STARTING
    done: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """Why a worker's run ended. `operator` says that the person at the command line can mend it."""

    reason: str
    operator: bool = False
