import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from pagepool.memd.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RefusalReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REFUSAL_REASON_UNSPECIFIED: _ClassVar[RefusalReason]
    REFUSAL_REASON_POOL_EXHAUSTED: _ClassVar[RefusalReason]
    REFUSAL_REASON_REQUEST_TOO_LARGE: _ClassVar[RefusalReason]
    REFUSAL_REASON_PREFIX_PENDING: _ClassVar[RefusalReason]
REFUSAL_REASON_UNSPECIFIED: RefusalReason
REFUSAL_REASON_POOL_EXHAUSTED: RefusalReason
REFUSAL_REASON_REQUEST_TOO_LARGE: RefusalReason
REFUSAL_REASON_PREFIX_PENDING: RefusalReason

class AttachRequest(_message.Message):
    __slots__ = ("hello", "heartbeat", "step", "detach")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DETACH_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    heartbeat: Heartbeat
    step: Step
    detach: Detach
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., detach: _Optional[_Union[Detach, _Mapping]] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("welcome", "heartbeat_ack", "step_result", "detach_ack", "capacity", "drain", "victim", "remap", "recode")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_ACK_FIELD_NUMBER: _ClassVar[int]
    STEP_RESULT_FIELD_NUMBER: _ClassVar[int]
    DETACH_ACK_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    VICTIM_FIELD_NUMBER: _ClassVar[int]
    REMAP_FIELD_NUMBER: _ClassVar[int]
    RECODE_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    heartbeat_ack: HeartbeatAck
    step_result: StepResult
    detach_ack: DetachAck
    capacity: Capacity
    drain: Drain
    victim: Victim
    remap: Remap
    recode: Recode
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., heartbeat_ack: _Optional[_Union[HeartbeatAck, _Mapping]] = ..., step_result: _Optional[_Union[StepResult, _Mapping]] = ..., detach_ack: _Optional[_Union[DetachAck, _Mapping]] = ..., capacity: _Optional[_Union[Capacity, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., victim: _Optional[_Union[Victim, _Mapping]] = ..., remap: _Optional[_Union[Remap, _Mapping]] = ..., recode: _Optional[_Union[Recode, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("worker_name", "lock_file", "geometry", "reclaim_epoch", "reclaim_lease_id", "takes_remaps", "takes_recodes")
    WORKER_NAME_FIELD_NUMBER: _ClassVar[int]
    LOCK_FILE_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    RECLAIM_EPOCH_FIELD_NUMBER: _ClassVar[int]
    RECLAIM_LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TAKES_REMAPS_FIELD_NUMBER: _ClassVar[int]
    TAKES_RECODES_FIELD_NUMBER: _ClassVar[int]
    worker_name: str
    lock_file: str
    geometry: _types_pb2.Geometry
    reclaim_epoch: int
    reclaim_lease_id: int
    takes_remaps: bool
    takes_recodes: bool
    def __init__(self, worker_name: _Optional[str] = ..., lock_file: _Optional[str] = ..., geometry: _Optional[_Union[_types_pb2.Geometry, _Mapping]] = ..., reclaim_epoch: _Optional[int] = ..., reclaim_lease_id: _Optional[int] = ..., takes_remaps: _Optional[bool] = ..., takes_recodes: _Optional[bool] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("epoch", "lease_id", "reclaimed", "heartbeat_interval", "heartbeat_timeout", "block_size", "unit_bytes", "num_blocks", "slabs", "fp8")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    RECLAIMED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    UNIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SLABS_FIELD_NUMBER: _ClassVar[int]
    FP8_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    lease_id: int
    reclaimed: bool
    heartbeat_interval: _duration_pb2.Duration
    heartbeat_timeout: _duration_pb2.Duration
    block_size: int
    unit_bytes: int
    num_blocks: int
    slabs: _containers.RepeatedCompositeFieldContainer[Slab]
    fp8: bool
    def __init__(self, epoch: _Optional[int] = ..., lease_id: _Optional[int] = ..., reclaimed: _Optional[bool] = ..., heartbeat_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., heartbeat_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., block_size: _Optional[int] = ..., unit_bytes: _Optional[int] = ..., num_blocks: _Optional[int] = ..., slabs: _Optional[_Iterable[_Union[Slab, _Mapping]]] = ..., fp8: _Optional[bool] = ...) -> None: ...

class Slab(_message.Message):
    __slots__ = ("index", "size_bytes", "shared_memory", "cuda_ipc")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    CUDA_IPC_FIELD_NUMBER: _ClassVar[int]
    index: int
    size_bytes: int
    shared_memory: SharedMemoryHandle
    cuda_ipc: CudaIpcHandle
    def __init__(self, index: _Optional[int] = ..., size_bytes: _Optional[int] = ..., shared_memory: _Optional[_Union[SharedMemoryHandle, _Mapping]] = ..., cuda_ipc: _Optional[_Union[CudaIpcHandle, _Mapping]] = ...) -> None: ...

class SharedMemoryHandle(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class CudaIpcHandle(_message.Message):
    __slots__ = ("handle", "device_uuid", "memd_pid")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    MEMD_PID_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    device_uuid: str
    memd_pid: int
    def __init__(self, handle: _Optional[bytes] = ..., device_uuid: _Optional[str] = ..., memd_pid: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("sequence",)
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    def __init__(self, sequence: _Optional[int] = ...) -> None: ...

class HeartbeatAck(_message.Message):
    __slots__ = ("sequence",)
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    def __init__(self, sequence: _Optional[int] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("step_id", "commits", "release_table_ids", "creates", "extends", "operations", "free_block_ids", "reserves", "acknowledged", "recodings")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_TABLE_IDS_FIELD_NUMBER: _ClassVar[int]
    CREATES_FIELD_NUMBER: _ClassVar[int]
    EXTENDS_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    RESERVES_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    RECODINGS_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    commits: _containers.RepeatedCompositeFieldContainer[Commit]
    release_table_ids: _containers.RepeatedScalarFieldContainer[int]
    creates: _containers.RepeatedCompositeFieldContainer[TableRequest]
    extends: _containers.RepeatedCompositeFieldContainer[ExtendRequest]
    operations: _containers.RepeatedCompositeFieldContainer[TableOperation]
    free_block_ids: _containers.RepeatedScalarFieldContainer[int]
    reserves: _containers.RepeatedCompositeFieldContainer[ReserveRequest]
    acknowledged: int
    recodings: _containers.RepeatedCompositeFieldContainer[Recoded]
    def __init__(self, step_id: _Optional[int] = ..., commits: _Optional[_Iterable[_Union[Commit, _Mapping]]] = ..., release_table_ids: _Optional[_Iterable[int]] = ..., creates: _Optional[_Iterable[_Union[TableRequest, _Mapping]]] = ..., extends: _Optional[_Iterable[_Union[ExtendRequest, _Mapping]]] = ..., operations: _Optional[_Iterable[_Union[TableOperation, _Mapping]]] = ..., free_block_ids: _Optional[_Iterable[int]] = ..., reserves: _Optional[_Iterable[_Union[ReserveRequest, _Mapping]]] = ..., acknowledged: _Optional[int] = ..., recodings: _Optional[_Iterable[_Union[Recoded, _Mapping]]] = ...) -> None: ...

class TableOperation(_message.Message):
    __slots__ = ("fork", "copy_on_write", "take", "truncate", "release_table_id", "suspend")
    FORK_FIELD_NUMBER: _ClassVar[int]
    COPY_ON_WRITE_FIELD_NUMBER: _ClassVar[int]
    TAKE_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    SUSPEND_FIELD_NUMBER: _ClassVar[int]
    fork: Fork
    copy_on_write: CopyOnWrite
    take: Take
    truncate: Truncate
    release_table_id: int
    suspend: Suspend
    def __init__(self, fork: _Optional[_Union[Fork, _Mapping]] = ..., copy_on_write: _Optional[_Union[CopyOnWrite, _Mapping]] = ..., take: _Optional[_Union[Take, _Mapping]] = ..., truncate: _Optional[_Union[Truncate, _Mapping]] = ..., release_table_id: _Optional[int] = ..., suspend: _Optional[_Union[Suspend, _Mapping]] = ...) -> None: ...

class Fork(_message.Message):
    __slots__ = ("table_id", "new_table_id")
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    NEW_TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    table_id: int
    new_table_id: int
    def __init__(self, table_id: _Optional[int] = ..., new_table_id: _Optional[int] = ...) -> None: ...

class CopyOnWrite(_message.Message):
    __slots__ = ("table_id", "first_index", "block_ids")
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    table_id: int
    first_index: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, table_id: _Optional[int] = ..., first_index: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Take(_message.Message):
    __slots__ = ("table_id", "block_ids")
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    table_id: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, table_id: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Truncate(_message.Message):
    __slots__ = ("table_id", "num_tokens", "block_id")
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    table_id: int
    num_tokens: int
    block_id: int
    def __init__(self, table_id: _Optional[int] = ..., num_tokens: _Optional[int] = ..., block_id: _Optional[int] = ...) -> None: ...

class Suspend(_message.Message):
    __slots__ = ("table_id", "token_ids")
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    table_id: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, table_id: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("table_id", "token_ids")
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    table_id: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, table_id: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TableRequest(_message.Message):
    __slots__ = ("ref", "token_ids", "salt", "priority", "num_blocks", "no_match", "packed_token_ids", "arrival", "headroom", "resume_table_id", "wait_for_prefix", "partial", "num_yields", "exact")
    REF_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NO_MATCH_FIELD_NUMBER: _ClassVar[int]
    PACKED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_FIELD_NUMBER: _ClassVar[int]
    HEADROOM_FIELD_NUMBER: _ClassVar[int]
    RESUME_TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_FOR_PREFIX_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    NUM_YIELDS_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    ref: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    salt: bytes
    priority: int
    num_blocks: int
    no_match: bool
    packed_token_ids: bytes
    arrival: float
    headroom: int
    resume_table_id: int
    wait_for_prefix: bool
    partial: bool
    num_yields: int
    exact: bool
    def __init__(self, ref: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., salt: _Optional[bytes] = ..., priority: _Optional[int] = ..., num_blocks: _Optional[int] = ..., no_match: _Optional[bool] = ..., packed_token_ids: _Optional[bytes] = ..., arrival: _Optional[float] = ..., headroom: _Optional[int] = ..., resume_table_id: _Optional[int] = ..., wait_for_prefix: _Optional[bool] = ..., partial: _Optional[bool] = ..., num_yields: _Optional[int] = ..., exact: _Optional[bool] = ...) -> None: ...

class ExtendRequest(_message.Message):
    __slots__ = ("ref", "table_id", "num_blocks")
    REF_FIELD_NUMBER: _ClassVar[int]
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ref: int
    table_id: int
    num_blocks: int
    def __init__(self, ref: _Optional[int] = ..., table_id: _Optional[int] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("ref", "num_blocks", "num_tables", "for_table_id")
    REF_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_TABLES_FIELD_NUMBER: _ClassVar[int]
    FOR_TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    ref: int
    num_blocks: int
    num_tables: int
    for_table_id: int
    def __init__(self, ref: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_tables: _Optional[int] = ..., for_table_id: _Optional[int] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("step_id", "grants", "refusals")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    grants: _containers.RepeatedCompositeFieldContainer[Grant]
    refusals: _containers.RepeatedCompositeFieldContainer[Refusal]
    def __init__(self, step_id: _Optional[int] = ..., grants: _Optional[_Iterable[_Union[Grant, _Mapping]]] = ..., refusals: _Optional[_Iterable[_Union[Refusal, _Mapping]]] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("ref", "table_id", "cached_tokens", "block_ids", "entries", "num_tables", "copy_source")
    REF_FIELD_NUMBER: _ClassVar[int]
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    NUM_TABLES_FIELD_NUMBER: _ClassVar[int]
    COPY_SOURCE_FIELD_NUMBER: _ClassVar[int]
    ref: int
    table_id: int
    cached_tokens: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    entries: _containers.RepeatedScalarFieldContainer[int]
    num_tables: int
    copy_source: int
    def __init__(self, ref: _Optional[int] = ..., table_id: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., entries: _Optional[_Iterable[int]] = ..., num_tables: _Optional[int] = ..., copy_source: _Optional[int] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("ref", "reason", "available_blocks", "total_blocks", "pinned_blocks", "held_blocks")
    REF_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ref: int
    reason: RefusalReason
    available_blocks: int
    total_blocks: int
    pinned_blocks: int
    held_blocks: int
    def __init__(self, ref: _Optional[int] = ..., reason: _Optional[_Union[RefusalReason, str]] = ..., available_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., pinned_blocks: _Optional[int] = ..., held_blocks: _Optional[int] = ...) -> None: ...

class Capacity(_message.Message):
    __slots__ = ("available_blocks",)
    AVAILABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    available_blocks: int
    def __init__(self, available_blocks: _Optional[int] = ...) -> None: ...

class Victim(_message.Message):
    __slots__ = ("table_id",)
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    table_id: int
    def __init__(self, table_id: _Optional[int] = ...) -> None: ...

class Remap(_message.Message):
    __slots__ = ("sequence", "table_id", "index", "block_id", "entry", "old_block_id")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    OLD_BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    table_id: int
    index: int
    block_id: int
    entry: int
    old_block_id: int
    def __init__(self, sequence: _Optional[int] = ..., table_id: _Optional[int] = ..., index: _Optional[int] = ..., block_id: _Optional[int] = ..., entry: _Optional[int] = ..., old_block_id: _Optional[int] = ...) -> None: ...

class Recode(_message.Message):
    __slots__ = ("sequence", "sources", "targets")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    sources: _containers.RepeatedScalarFieldContainer[int]
    targets: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence: _Optional[int] = ..., sources: _Optional[_Iterable[int]] = ..., targets: _Optional[_Iterable[int]] = ...) -> None: ...

class Recoded(_message.Message):
    __slots__ = ("sequence", "errors", "failed")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    errors: _containers.RepeatedScalarFieldContainer[float]
    failed: bool
    def __init__(self, sequence: _Optional[int] = ..., errors: _Optional[_Iterable[float]] = ..., failed: _Optional[bool] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("grace",)
    GRACE_FIELD_NUMBER: _ClassVar[int]
    grace: _duration_pb2.Duration
    def __init__(self, grace: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Detach(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DetachAck(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
