import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Format(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FORMAT_UNSPECIFIED: _ClassVar[Format]
    FORMAT_F32: _ClassVar[Format]
    FORMAT_F16: _ClassVar[Format]
    FORMAT_BF16: _ClassVar[Format]
    FORMAT_FP8_E4M3: _ClassVar[Format]

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_DEVICE: _ClassVar[Tier]
    TIER_PEER: _ClassVar[Tier]
    TIER_HOST: _ClassVar[Tier]
    TIER_DISK: _ClassVar[Tier]
    TIER_REMOTE: _ClassVar[Tier]

class BlockState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BLOCK_STATE_UNSPECIFIED: _ClassVar[BlockState]
    BLOCK_STATE_HELD: _ClassVar[BlockState]
    BLOCK_STATE_CACHED: _ClassVar[BlockState]
    BLOCK_STATE_QUARANTINED: _ClassVar[BlockState]

class LeaseState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEASE_STATE_UNSPECIFIED: _ClassVar[LeaseState]
    LEASE_STATE_LIVE: _ClassVar[LeaseState]
    LEASE_STATE_DETACHED: _ClassVar[LeaseState]
    LEASE_STATE_LOST: _ClassVar[LeaseState]
FORMAT_UNSPECIFIED: Format
FORMAT_F32: Format
FORMAT_F16: Format
FORMAT_BF16: Format
FORMAT_FP8_E4M3: Format
TIER_UNSPECIFIED: Tier
TIER_DEVICE: Tier
TIER_PEER: Tier
TIER_HOST: Tier
TIER_DISK: Tier
TIER_REMOTE: Tier
BLOCK_STATE_UNSPECIFIED: BlockState
BLOCK_STATE_HELD: BlockState
BLOCK_STATE_CACHED: BlockState
BLOCK_STATE_QUARANTINED: BlockState
LEASE_STATE_UNSPECIFIED: LeaseState
LEASE_STATE_LIVE: LeaseState
LEASE_STATE_DETACHED: LeaseState
LEASE_STATE_LOST: LeaseState

class LayerGeometry(_message.Message):
    __slots__ = ("num_kv_heads", "head_dim_k", "head_dim_v", "window")
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_K_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_V_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    window: int
    def __init__(self, num_kv_heads: _Optional[int] = ..., head_dim_k: _Optional[int] = ..., head_dim_v: _Optional[int] = ..., window: _Optional[int] = ...) -> None: ...

class Geometry(_message.Message):
    __slots__ = ("layers", "format", "key_means", "layout_version", "model_digest", "model_name")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    KEY_MEANS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedCompositeFieldContainer[LayerGeometry]
    format: Format
    key_means: bool
    layout_version: int
    model_digest: bytes
    model_name: str
    def __init__(self, layers: _Optional[_Iterable[_Union[LayerGeometry, _Mapping]]] = ..., format: _Optional[_Union[Format, str]] = ..., key_means: _Optional[bool] = ..., layout_version: _Optional[int] = ..., model_digest: _Optional[bytes] = ..., model_name: _Optional[str] = ...) -> None: ...

class PoolUsage(_message.Message):
    __slots__ = ("total_blocks", "free_blocks", "held_blocks", "cached_blocks", "quarantined_blocks", "pinned_blocks", "reserve_blocks", "split_blocks", "fp8_blocks", "kept_blocks", "host_blocks", "host_free_blocks", "host_cached_blocks")
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RESERVE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SPLIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FP8_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KEPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOST_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOST_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    total_blocks: int
    free_blocks: int
    held_blocks: int
    cached_blocks: int
    quarantined_blocks: int
    pinned_blocks: int
    reserve_blocks: int
    split_blocks: int
    fp8_blocks: int
    kept_blocks: int
    host_blocks: int
    host_free_blocks: int
    host_cached_blocks: int
    def __init__(self, total_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., held_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., quarantined_blocks: _Optional[int] = ..., pinned_blocks: _Optional[int] = ..., reserve_blocks: _Optional[int] = ..., split_blocks: _Optional[int] = ..., fp8_blocks: _Optional[int] = ..., kept_blocks: _Optional[int] = ..., host_blocks: _Optional[int] = ..., host_free_blocks: _Optional[int] = ..., host_cached_blocks: _Optional[int] = ...) -> None: ...

class PoolCounters(_message.Message):
    __slots__ = ("allocated_blocks", "freed_blocks", "evicted_blocks", "prefix_query_tokens", "prefix_hit_tokens", "refused_requests", "attach_steps", "lost_leases", "merged_blocks", "remaps", "prefix_pending_requests", "compressed_blocks", "decompressed_blocks", "blocks_over_error", "demoted_blocks", "promoted_blocks", "host_hit_tokens")
    ALLOCATED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ATTACH_STEPS_FIELD_NUMBER: _ClassVar[int]
    LOST_LEASES_FIELD_NUMBER: _ClassVar[int]
    MERGED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REMAPS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_PENDING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    COMPRESSED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DECOMPRESSED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_OVER_ERROR_FIELD_NUMBER: _ClassVar[int]
    DEMOTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PROMOTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOST_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    allocated_blocks: int
    freed_blocks: int
    evicted_blocks: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    refused_requests: int
    attach_steps: int
    lost_leases: int
    merged_blocks: int
    remaps: int
    prefix_pending_requests: int
    compressed_blocks: int
    decompressed_blocks: int
    blocks_over_error: int
    demoted_blocks: int
    promoted_blocks: int
    host_hit_tokens: int
    def __init__(self, allocated_blocks: _Optional[int] = ..., freed_blocks: _Optional[int] = ..., evicted_blocks: _Optional[int] = ..., prefix_query_tokens: _Optional[int] = ..., prefix_hit_tokens: _Optional[int] = ..., refused_requests: _Optional[int] = ..., attach_steps: _Optional[int] = ..., lost_leases: _Optional[int] = ..., merged_blocks: _Optional[int] = ..., remaps: _Optional[int] = ..., prefix_pending_requests: _Optional[int] = ..., compressed_blocks: _Optional[int] = ..., decompressed_blocks: _Optional[int] = ..., blocks_over_error: _Optional[int] = ..., demoted_blocks: _Optional[int] = ..., promoted_blocks: _Optional[int] = ..., host_hit_tokens: _Optional[int] = ...) -> None: ...

class CudaDevice(_message.Message):
    __slots__ = ("uuid", "name", "memd_pid")
    UUID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MEMD_PID_FIELD_NUMBER: _ClassVar[int]
    uuid: str
    name: str
    memd_pid: int
    def __init__(self, uuid: _Optional[str] = ..., name: _Optional[str] = ..., memd_pid: _Optional[int] = ...) -> None: ...

class Pool(_message.Message):
    __slots__ = ("epoch", "block_size", "geometry", "unit_bytes", "block_bytes", "slab_bytes", "device", "usage", "counters", "num_leases", "num_block_tables", "start_time", "cuda_device")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    UNIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLAB_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCK_TABLES_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    CUDA_DEVICE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    block_size: int
    geometry: Geometry
    unit_bytes: int
    block_bytes: int
    slab_bytes: int
    device: str
    usage: PoolUsage
    counters: PoolCounters
    num_leases: int
    num_block_tables: int
    start_time: _timestamp_pb2.Timestamp
    cuda_device: CudaDevice
    def __init__(self, epoch: _Optional[int] = ..., block_size: _Optional[int] = ..., geometry: _Optional[_Union[Geometry, _Mapping]] = ..., unit_bytes: _Optional[int] = ..., block_bytes: _Optional[int] = ..., slab_bytes: _Optional[int] = ..., device: _Optional[str] = ..., usage: _Optional[_Union[PoolUsage, _Mapping]] = ..., counters: _Optional[_Union[PoolCounters, _Mapping]] = ..., num_leases: _Optional[int] = ..., num_block_tables: _Optional[int] = ..., start_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., cuda_device: _Optional[_Union[CudaDevice, _Mapping]] = ...) -> None: ...

class BlockHolder(_message.Message):
    __slots__ = ("lease_id", "table_id", "ref_count", "worker")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    REF_COUNT_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    table_id: int
    ref_count: int
    worker: bool
    def __init__(self, lease_id: _Optional[int] = ..., table_id: _Optional[int] = ..., ref_count: _Optional[int] = ..., worker: _Optional[bool] = ...) -> None: ...

class Block(_message.Message):
    __slots__ = ("block_id", "state", "ref_count", "format", "tier", "entry", "sealed", "exact", "num_tokens", "digest", "holders", "idle_time", "priority", "pinned", "kept_for", "more_holders", "k_error", "v_error")
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REF_COUNT_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    IDLE_TIME_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    KEPT_FOR_FIELD_NUMBER: _ClassVar[int]
    MORE_HOLDERS_FIELD_NUMBER: _ClassVar[int]
    K_ERROR_FIELD_NUMBER: _ClassVar[int]
    V_ERROR_FIELD_NUMBER: _ClassVar[int]
    block_id: int
    state: BlockState
    ref_count: int
    format: Format
    tier: Tier
    entry: int
    sealed: bool
    exact: bool
    num_tokens: int
    digest: bytes
    holders: _containers.RepeatedCompositeFieldContainer[BlockHolder]
    idle_time: _duration_pb2.Duration
    priority: int
    pinned: bool
    kept_for: _duration_pb2.Duration
    more_holders: int
    k_error: float
    v_error: float
    def __init__(self, block_id: _Optional[int] = ..., state: _Optional[_Union[BlockState, str]] = ..., ref_count: _Optional[int] = ..., format: _Optional[_Union[Format, str]] = ..., tier: _Optional[_Union[Tier, str]] = ..., entry: _Optional[int] = ..., sealed: _Optional[bool] = ..., exact: _Optional[bool] = ..., num_tokens: _Optional[int] = ..., digest: _Optional[bytes] = ..., holders: _Optional[_Iterable[_Union[BlockHolder, _Mapping]]] = ..., idle_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., priority: _Optional[int] = ..., pinned: _Optional[bool] = ..., kept_for: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., more_holders: _Optional[int] = ..., k_error: _Optional[float] = ..., v_error: _Optional[float] = ...) -> None: ...

class BlockTable(_message.Message):
    __slots__ = ("table_id", "lease_id", "holder", "block_ids", "entries", "num_tokens", "cached_tokens", "token_ids", "priority", "idle_time", "suspended")
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    IDLE_TIME_FIELD_NUMBER: _ClassVar[int]
    SUSPENDED_FIELD_NUMBER: _ClassVar[int]
    table_id: int
    lease_id: int
    holder: str
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    entries: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: int
    cached_tokens: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    priority: int
    idle_time: _duration_pb2.Duration
    suspended: bool
    def __init__(self, table_id: _Optional[int] = ..., lease_id: _Optional[int] = ..., holder: _Optional[str] = ..., block_ids: _Optional[_Iterable[int]] = ..., entries: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., priority: _Optional[int] = ..., idle_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., suspended: _Optional[bool] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("lease_id", "holder", "state", "expire_time", "ttl")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    holder: str
    state: LeaseState
    expire_time: _timestamp_pb2.Timestamp
    ttl: _duration_pb2.Duration
    def __init__(self, lease_id: _Optional[int] = ..., holder: _Optional[str] = ..., state: _Optional[_Union[LeaseState, str]] = ..., expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...
