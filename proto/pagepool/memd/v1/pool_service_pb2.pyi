import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from pagepool.memd.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetPoolRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetPoolResponse(_message.Message):
    __slots__ = ("pool",)
    POOL_FIELD_NUMBER: _ClassVar[int]
    pool: _types_pb2.Pool
    def __init__(self, pool: _Optional[_Union[_types_pb2.Pool, _Mapping]] = ...) -> None: ...

class ListBlocksRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "state")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    state: _types_pb2.BlockState
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., state: _Optional[_Union[_types_pb2.BlockState, str]] = ...) -> None: ...

class ListBlocksResponse(_message.Message):
    __slots__ = ("blocks", "next_page_token", "epoch")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[_types_pb2.Block]
    next_page_token: str
    epoch: int
    def __init__(self, blocks: _Optional[_Iterable[_Union[_types_pb2.Block, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class GetBlockRequest(_message.Message):
    __slots__ = ("epoch", "block_id")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    block_id: int
    def __init__(self, epoch: _Optional[int] = ..., block_id: _Optional[int] = ...) -> None: ...

class GetBlockResponse(_message.Message):
    __slots__ = ("block", "epoch")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    block: _types_pb2.Block
    epoch: int
    def __init__(self, block: _Optional[_Union[_types_pb2.Block, _Mapping]] = ..., epoch: _Optional[int] = ...) -> None: ...

class ListBlockTablesRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListBlockTablesResponse(_message.Message):
    __slots__ = ("block_tables", "next_page_token", "epoch")
    BLOCK_TABLES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    block_tables: _containers.RepeatedCompositeFieldContainer[_types_pb2.BlockTable]
    next_page_token: str
    epoch: int
    def __init__(self, block_tables: _Optional[_Iterable[_Union[_types_pb2.BlockTable, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class GetBlockTableRequest(_message.Message):
    __slots__ = ("epoch", "table_id")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    table_id: int
    def __init__(self, epoch: _Optional[int] = ..., table_id: _Optional[int] = ...) -> None: ...

class GetBlockTableResponse(_message.Message):
    __slots__ = ("block_table", "epoch")
    BLOCK_TABLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    block_table: _types_pb2.BlockTable
    epoch: int
    def __init__(self, block_table: _Optional[_Union[_types_pb2.BlockTable, _Mapping]] = ..., epoch: _Optional[int] = ...) -> None: ...

class WatchPoolRequest(_message.Message):
    __slots__ = ("min_interval",)
    MIN_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    min_interval: _duration_pb2.Duration
    def __init__(self, min_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class WatchPoolResponse(_message.Message):
    __slots__ = ("pool",)
    POOL_FIELD_NUMBER: _ClassVar[int]
    pool: _types_pb2.Pool
    def __init__(self, pool: _Optional[_Union[_types_pb2.Pool, _Mapping]] = ...) -> None: ...

class CreateLeaseRequest(_message.Message):
    __slots__ = ("request_id", "ttl", "holder")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    ttl: _duration_pb2.Duration
    holder: str
    def __init__(self, request_id: _Optional[str] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., holder: _Optional[str] = ...) -> None: ...

class CreateLeaseResponse(_message.Message):
    __slots__ = ("lease", "epoch")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    lease: _types_pb2.Lease
    epoch: int
    def __init__(self, lease: _Optional[_Union[_types_pb2.Lease, _Mapping]] = ..., epoch: _Optional[int] = ...) -> None: ...

class RenewLeaseRequest(_message.Message):
    __slots__ = ("epoch", "lease_id")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    lease_id: int
    def __init__(self, epoch: _Optional[int] = ..., lease_id: _Optional[int] = ...) -> None: ...

class RenewLeaseResponse(_message.Message):
    __slots__ = ("lease",)
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lease: _types_pb2.Lease
    def __init__(self, lease: _Optional[_Union[_types_pb2.Lease, _Mapping]] = ...) -> None: ...

class ReleaseLeaseRequest(_message.Message):
    __slots__ = ("epoch", "lease_id")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    lease_id: int
    def __init__(self, epoch: _Optional[int] = ..., lease_id: _Optional[int] = ...) -> None: ...

class ReleaseLeaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AllocateBlocksRequest(_message.Message):
    __slots__ = ("request_id", "epoch", "lease_id", "num_blocks")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    lease_id: int
    num_blocks: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., lease_id: _Optional[int] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class AllocateBlocksResponse(_message.Message):
    __slots__ = ("block_ids", "entries")
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    entries: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, block_ids: _Optional[_Iterable[int]] = ..., entries: _Optional[_Iterable[int]] = ...) -> None: ...

class FreeBlocksRequest(_message.Message):
    __slots__ = ("request_id", "epoch", "lease_id", "block_ids")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    lease_id: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., lease_id: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class FreeBlocksResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ShareBlocksRequest(_message.Message):
    __slots__ = ("request_id", "epoch", "lease_id", "block_ids")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    lease_id: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., lease_id: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ShareBlocksResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CopyBlocksRequest(_message.Message):
    __slots__ = ("request_id", "epoch", "lease_id", "block_ids")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    lease_id: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., lease_id: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class CopyBlocksResponse(_message.Message):
    __slots__ = ("block_ids", "entries")
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    entries: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, block_ids: _Optional[_Iterable[int]] = ..., entries: _Optional[_Iterable[int]] = ...) -> None: ...

class CompressBlocksRequest(_message.Message):
    __slots__ = ("request_id", "epoch", "lease_id", "block_ids")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    lease_id: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., lease_id: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class CompressBlocksResponse(_message.Message):
    __slots__ = ("compressions",)
    COMPRESSIONS_FIELD_NUMBER: _ClassVar[int]
    compressions: _containers.RepeatedCompositeFieldContainer[Compression]
    def __init__(self, compressions: _Optional[_Iterable[_Union[Compression, _Mapping]]] = ...) -> None: ...

class Compression(_message.Message):
    __slots__ = ("block_id", "format", "entry", "k_error", "v_error")
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    K_ERROR_FIELD_NUMBER: _ClassVar[int]
    V_ERROR_FIELD_NUMBER: _ClassVar[int]
    block_id: int
    format: _types_pb2.Format
    entry: int
    k_error: float
    v_error: float
    def __init__(self, block_id: _Optional[int] = ..., format: _Optional[_Union[_types_pb2.Format, str]] = ..., entry: _Optional[int] = ..., k_error: _Optional[float] = ..., v_error: _Optional[float] = ...) -> None: ...

class DecompressBlocksRequest(_message.Message):
    __slots__ = ("request_id", "epoch", "lease_id", "block_ids")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    lease_id: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., lease_id: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DecompressBlocksResponse(_message.Message):
    __slots__ = ("compressions",)
    COMPRESSIONS_FIELD_NUMBER: _ClassVar[int]
    compressions: _containers.RepeatedCompositeFieldContainer[Compression]
    def __init__(self, compressions: _Optional[_Iterable[_Union[Compression, _Mapping]]] = ...) -> None: ...

class CreateBlockTableRequest(_message.Message):
    __slots__ = ("request_id", "epoch", "lease_id", "token_ids", "salt", "priority", "num_blocks", "exact")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    lease_id: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    salt: bytes
    priority: int
    num_blocks: int
    exact: bool
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., lease_id: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., salt: _Optional[bytes] = ..., priority: _Optional[int] = ..., num_blocks: _Optional[int] = ..., exact: _Optional[bool] = ...) -> None: ...

class CreateBlockTableResponse(_message.Message):
    __slots__ = ("block_table",)
    BLOCK_TABLE_FIELD_NUMBER: _ClassVar[int]
    block_table: _types_pb2.BlockTable
    def __init__(self, block_table: _Optional[_Union[_types_pb2.BlockTable, _Mapping]] = ...) -> None: ...

class ExtendBlockTableRequest(_message.Message):
    __slots__ = ("request_id", "epoch", "lease_id", "table_id", "num_blocks")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    lease_id: int
    table_id: int
    num_blocks: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., lease_id: _Optional[int] = ..., table_id: _Optional[int] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class ExtendBlockTableResponse(_message.Message):
    __slots__ = ("block_ids", "entries")
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    entries: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, block_ids: _Optional[_Iterable[int]] = ..., entries: _Optional[_Iterable[int]] = ...) -> None: ...

class ForkBlockTableRequest(_message.Message):
    __slots__ = ("request_id", "epoch", "lease_id", "table_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    lease_id: int
    table_id: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., lease_id: _Optional[int] = ..., table_id: _Optional[int] = ...) -> None: ...

class ForkBlockTableResponse(_message.Message):
    __slots__ = ("block_table",)
    BLOCK_TABLE_FIELD_NUMBER: _ClassVar[int]
    block_table: _types_pb2.BlockTable
    def __init__(self, block_table: _Optional[_Union[_types_pb2.BlockTable, _Mapping]] = ...) -> None: ...

class TruncateBlockTableRequest(_message.Message):
    __slots__ = ("request_id", "epoch", "lease_id", "table_id", "num_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    lease_id: int
    table_id: int
    num_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., lease_id: _Optional[int] = ..., table_id: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class TruncateBlockTableResponse(_message.Message):
    __slots__ = ("block_table",)
    BLOCK_TABLE_FIELD_NUMBER: _ClassVar[int]
    block_table: _types_pb2.BlockTable
    def __init__(self, block_table: _Optional[_Union[_types_pb2.BlockTable, _Mapping]] = ...) -> None: ...

class ReleaseBlockTableRequest(_message.Message):
    __slots__ = ("request_id", "epoch", "lease_id", "table_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TABLE_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    lease_id: int
    table_id: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., lease_id: _Optional[int] = ..., table_id: _Optional[int] = ...) -> None: ...

class ReleaseBlockTableResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PinPrefixRequest(_message.Message):
    __slots__ = ("request_id", "token_ids", "salt", "priority", "pinned", "ttl")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    salt: bytes
    priority: int
    pinned: bool
    ttl: _duration_pb2.Duration
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., salt: _Optional[bytes] = ..., priority: _Optional[int] = ..., pinned: _Optional[bool] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class PinPrefixResponse(_message.Message):
    __slots__ = ("num_tokens", "num_blocks", "expire_time")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    num_blocks: int
    expire_time: _timestamp_pb2.Timestamp
    def __init__(self, num_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class UnpinPrefixRequest(_message.Message):
    __slots__ = ("request_id", "token_ids", "salt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    salt: bytes
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., salt: _Optional[bytes] = ...) -> None: ...

class UnpinPrefixResponse(_message.Message):
    __slots__ = ("num_tokens", "num_blocks", "was_kept")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WAS_KEPT_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    num_blocks: int
    was_kept: bool
    def __init__(self, num_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., was_kept: _Optional[bool] = ...) -> None: ...
