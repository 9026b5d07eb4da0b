from pomona.v1 import telemetry_pb2 as _telemetry_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RegisterRequest(_message.Message):
    __slots__ = ("worker", "address", "memory", "epoch")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    worker: _telemetry_pb2.WorkerIdentity
    address: str
    memory: _telemetry_pb2.MemoryProfile
    epoch: int
    def __init__(self, worker: _Optional[_Union[_telemetry_pb2.WorkerIdentity, _Mapping]] = ..., address: _Optional[str] = ..., memory: _Optional[_Union[_telemetry_pb2.MemoryProfile, _Mapping]] = ..., epoch: _Optional[int] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("worker_id", "lease_s")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    lease_s: float
    def __init__(self, worker_id: _Optional[str] = ..., lease_s: _Optional[float] = ...) -> None: ...

class ReportLoadRequest(_message.Message):
    __slots__ = ("report",)
    REPORT_FIELD_NUMBER: _ClassVar[int]
    report: _telemetry_pb2.LoadReport
    def __init__(self, report: _Optional[_Union[_telemetry_pb2.LoadReport, _Mapping]] = ...) -> None: ...

class ReportLoadResponse(_message.Message):
    __slots__ = ("allocation", "drain")
    ALLOCATION_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    allocation: _telemetry_pb2.Allocation
    drain: bool
    def __init__(self, allocation: _Optional[_Union[_telemetry_pb2.Allocation, _Mapping]] = ..., drain: _Optional[bool] = ...) -> None: ...

class WatchRoutesRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class Route(_message.Message):
    __slots__ = ("worker_id", "worker", "address", "phase", "load", "context_tokens")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    worker: _telemetry_pb2.WorkerIdentity
    address: str
    phase: _telemetry_pb2.OwnerPhase
    load: _telemetry_pb2.LoadReport
    context_tokens: int
    def __init__(self, worker_id: _Optional[str] = ..., worker: _Optional[_Union[_telemetry_pb2.WorkerIdentity, _Mapping]] = ..., address: _Optional[str] = ..., phase: _Optional[_Union[_telemetry_pb2.OwnerPhase, str]] = ..., load: _Optional[_Union[_telemetry_pb2.LoadReport, _Mapping]] = ..., context_tokens: _Optional[int] = ...) -> None: ...

class WatchRoutesResponse(_message.Message):
    __slots__ = ("full", "routes", "removed_worker_ids", "epoch")
    FULL_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    REMOVED_WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    full: bool
    routes: _containers.RepeatedCompositeFieldContainer[Route]
    removed_worker_ids: _containers.RepeatedScalarFieldContainer[str]
    epoch: int
    def __init__(self, full: _Optional[bool] = ..., routes: _Optional[_Iterable[_Union[Route, _Mapping]]] = ..., removed_worker_ids: _Optional[_Iterable[str]] = ..., epoch: _Optional[int] = ...) -> None: ...

class DeregisterRequest(_message.Message):
    __slots__ = ("worker_id", "incarnation", "reason")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    reason: str
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class DeregisterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetClusterRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetClusterResponse(_message.Message):
    __slots__ = ("cluster_json",)
    CLUSTER_JSON_FIELD_NUMBER: _ClassVar[int]
    cluster_json: str
    def __init__(self, cluster_json: _Optional[str] = ...) -> None: ...
