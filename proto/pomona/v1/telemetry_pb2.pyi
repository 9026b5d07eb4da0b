from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OwnerPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OWNER_PHASE_UNSPECIFIED: _ClassVar[OwnerPhase]
    OWNER_PHASE_LOADING: _ClassVar[OwnerPhase]
    OWNER_PHASE_READY: _ClassVar[OwnerPhase]
    OWNER_PHASE_SUSPECT: _ClassVar[OwnerPhase]
    OWNER_PHASE_DRAINING: _ClassVar[OwnerPhase]

class CapacityBound(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CAPACITY_BOUND_UNSPECIFIED: _ClassVar[CapacityBound]
    CAPACITY_BOUND_REQUESTED: _ClassVar[CapacityBound]
    CAPACITY_BOUND_KV: _ClassVar[CapacityBound]
    CAPACITY_BOUND_AUX: _ClassVar[CapacityBound]
OWNER_PHASE_UNSPECIFIED: OwnerPhase
OWNER_PHASE_LOADING: OwnerPhase
OWNER_PHASE_READY: OwnerPhase
OWNER_PHASE_SUSPECT: OwnerPhase
OWNER_PHASE_DRAINING: OwnerPhase
CAPACITY_BOUND_UNSPECIFIED: CapacityBound
CAPACITY_BOUND_REQUESTED: CapacityBound
CAPACITY_BOUND_KV: CapacityBound
CAPACITY_BOUND_AUX: CapacityBound

class WorkerIdentity(_message.Message):
    __slots__ = ("model", "replica", "owner", "incarnation", "host")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    model: str
    replica: int
    owner: int
    incarnation: str
    host: str
    def __init__(self, model: _Optional[str] = ..., replica: _Optional[int] = ..., owner: _Optional[int] = ..., incarnation: _Optional[str] = ..., host: _Optional[str] = ...) -> None: ...

class MemoryProfile(_message.Message):
    __slots__ = ("kv_tokens", "hybrid", "aux_slots", "kv_bytes_per_token", "aux_bytes_per_slot", "weights_bytes", "reserve_bytes", "budget_bytes", "context_tokens")
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HYBRID_FIELD_NUMBER: _ClassVar[int]
    AUX_SLOTS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    AUX_BYTES_PER_SLOT_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESERVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    kv_tokens: int
    hybrid: bool
    aux_slots: int
    kv_bytes_per_token: int
    aux_bytes_per_slot: int
    weights_bytes: int
    reserve_bytes: int
    budget_bytes: int
    context_tokens: int
    def __init__(self, kv_tokens: _Optional[int] = ..., hybrid: _Optional[bool] = ..., aux_slots: _Optional[int] = ..., kv_bytes_per_token: _Optional[int] = ..., aux_bytes_per_slot: _Optional[int] = ..., weights_bytes: _Optional[int] = ..., reserve_bytes: _Optional[int] = ..., budget_bytes: _Optional[int] = ..., context_tokens: _Optional[int] = ...) -> None: ...

class Allocation(_message.Message):
    __slots__ = ("epoch", "max_running_requests", "kv_tokens", "aux_slots", "aux_slots_per_request", "bound")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AUX_SLOTS_FIELD_NUMBER: _ClassVar[int]
    AUX_SLOTS_PER_REQUEST_FIELD_NUMBER: _ClassVar[int]
    BOUND_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    max_running_requests: int
    kv_tokens: int
    aux_slots: int
    aux_slots_per_request: int
    bound: CapacityBound
    def __init__(self, epoch: _Optional[int] = ..., max_running_requests: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., aux_slots: _Optional[int] = ..., aux_slots_per_request: _Optional[int] = ..., bound: _Optional[_Union[CapacityBound, str]] = ...) -> None: ...

class PoolLoad(_message.Message):
    __slots__ = ("capacity", "used", "evictable")
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    EVICTABLE_FIELD_NUMBER: _ClassVar[int]
    capacity: int
    used: int
    evictable: int
    def __init__(self, capacity: _Optional[int] = ..., used: _Optional[int] = ..., evictable: _Optional[int] = ...) -> None: ...

class LoadReport(_message.Message):
    __slots__ = ("worker_id", "incarnation", "epoch", "seq", "step_age_s", "running_requests", "waiting_requests", "max_running_requests", "kv_tokens", "aux_slots", "aux_slots_per_request", "active_bytes", "cache_bytes", "limit_bytes", "finished_requests", "failed_requests", "prompt_tokens", "generation_tokens", "preempted_requests")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    STEP_AGE_S_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AUX_SLOTS_FIELD_NUMBER: _ClassVar[int]
    AUX_SLOTS_PER_REQUEST_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    FINISHED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FAILED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    epoch: int
    seq: int
    step_age_s: float
    running_requests: int
    waiting_requests: int
    max_running_requests: int
    kv_tokens: PoolLoad
    aux_slots: PoolLoad
    aux_slots_per_request: int
    active_bytes: int
    cache_bytes: int
    limit_bytes: int
    finished_requests: int
    failed_requests: int
    prompt_tokens: int
    generation_tokens: int
    preempted_requests: int
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., epoch: _Optional[int] = ..., seq: _Optional[int] = ..., step_age_s: _Optional[float] = ..., running_requests: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., max_running_requests: _Optional[int] = ..., kv_tokens: _Optional[_Union[PoolLoad, _Mapping]] = ..., aux_slots: _Optional[_Union[PoolLoad, _Mapping]] = ..., aux_slots_per_request: _Optional[int] = ..., active_bytes: _Optional[int] = ..., cache_bytes: _Optional[int] = ..., limit_bytes: _Optional[int] = ..., finished_requests: _Optional[int] = ..., failed_requests: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., generation_tokens: _Optional[int] = ..., preempted_requests: _Optional[int] = ...) -> None: ...
