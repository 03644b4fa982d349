"""What a worker and memd tell each other, as plain values. Standard library only.

`inferd.core.ports.KvPool` speaks in them, and `pagepool_client.session.PoolSession` carries them over the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Commit:
    """Tokens of a table whose KV has been written."""

    table_id: int
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class TableRequest:
    """A table to create: match `token_ids`, pin what is found, and add blocks up to `num_blocks` in all.

    Within a priority the earlier `arrival`, in seconds of the host's CLOCK_MONOTONIC, is the more urgent; 0 is when
    memd reads it. `headroom` blocks must be available beside those granted, unless no other worker's table has any.
    With `resume_table_id` a suspended table of the lease gets blocks again: token ids, salt, priority and arrival are
    its own, and `token_ids` stays empty.
    With `partial`, a block of which only a part matches may be granted as a copy: see Grant. With `wait_for_prefix` it
    is refused as `pending` if another table is about to compute much of its prompt. `num_yields` is how often the
    request has yielded with tables that it then released. `exact`: only exact blocks match, and none of the table is
    stored lossily.
    """

    ref: int
    token_ids: Sequence[int]
    num_blocks: int
    salt: bytes = b""
    priority: int = 0
    no_match: bool = False
    arrival: float = 0.0
    headroom: int = 0
    resume_table_id: int = 0
    partial: bool = False
    wait_for_prefix: bool = False
    num_yields: int = 0
    exact: bool = False


@dataclass(frozen=True, slots=True)
class ExtendRequest:
    """Blocks to add at the end of a table; at least 1."""

    ref: int
    table_id: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class ReserveRequest:
    """Blocks and table ids to have ahead, for operations to come.

    `for_table_id` is the table that cannot go on without the blocks; 0 if nobody waits.
    """

    ref: int
    num_blocks: int
    num_tables: int = 0
    for_table_id: int = 0


@dataclass(frozen=True, slots=True)
class Fork:
    """A new table that shares all blocks of another one; its id is one of the reserve."""

    table_id: int
    new_table_id: int


@dataclass(frozen=True, slots=True)
class CopyOnWrite:
    """A table's blocks from `first_index` on are replaced by copies in these blocks of the reserve."""

    table_id: int
    first_index: int
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Take:
    """Blocks of the reserve are added to the end of a table."""

    table_id: int
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Truncate:
    """A table's committed tokens are dropped from a length on.

    `block_id` is a block of the reserve with a copy of the one that the new end lies in, or 0 where none is needed:
    where that one is neither sealed nor another table's too.
    """

    table_id: int
    num_tokens: int
    block_id: int = 0


@dataclass(frozen=True, slots=True)
class Release:
    """A table is released among the operations, not after them."""

    table_id: int


@dataclass(frozen=True, slots=True)
class Suspend:
    """A table's blocks are released; memd keeps its committed tokens and, after them, these, which have no KV yet.

    Until it is resumed by a TableRequest it can only be released.
    """

    table_id: int
    token_ids: Sequence[int]


TableOperation = Fork | CopyOnWrite | Take | Truncate | Release | Suspend


@dataclass(frozen=True, slots=True)
class Step:
    """One batch of words to memd.

    Commits apply first, then operations in order, then releases and freed blocks of the reserve, then the requests one
    by one. `acknowledged` is the last Remap such that no step in flight reads what was replaced any more, nor any copy.
    """

    commits: Sequence[Commit] = ()
    releases: Sequence[int] = ()
    creates: Sequence[TableRequest] = ()
    extends: Sequence[ExtendRequest] = ()
    operations: Sequence[TableOperation] = ()
    frees: Sequence[int] = ()
    reserves: Sequence[ReserveRequest] = ()
    acknowledged: int = 0

    def __bool__(self) -> bool:
        words = (self.commits, self.releases, self.creates, self.extends, self.operations, self.frees, self.reserves)
        return any(words) or self.acknowledged > 0


@dataclass(frozen=True, slots=True)
class Grant:
    """A table was created: its blocks, packed entries in token order, and how many tokens need no computing.

    For an extended table or the reserve, the blocks that were added; for the reserve `table_id` is the first of
    `num_tables` consecutive ids of tables to come. If there is a `copy_source`, a packed entry, that block is to be
    copied to the table's own at index cached_tokens // block_size before anything is written to or read from that: the
    last of the cached tokens are its first.
    """

    ref: int
    table_id: int
    cached_tokens: int
    block_ids: Sequence[int]
    entries: Sequence[int]
    num_tables: int = 0
    copy_source: int | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request was refused; `never` says that the whole pool is too small for it.

    While pins last, no more than total_blocks - pinned_blocks can be had. `held_blocks`, unless 0, are held by clients'
    leases and lost workers, and leave too few: for the request to wait for other workers is in vain.

    `pending`: another table is about to compute what it would find; it is to be asked for again on Capacity.
    """

    ref: int
    never: bool
    available_blocks: int
    total_blocks: int
    pending: bool = False
    pinned_blocks: int = 0
    held_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Capacity:
    """Blocks have become available after a refusal, or what a pending request waits for is there or will not be."""

    available_blocks: int


@dataclass(frozen=True, slots=True)
class Victim:
    """A more urgent table needs the blocks of this one: suspend or release it once no step of it is in flight."""

    table_id: int


@dataclass(frozen=True, slots=True)
class Remap:
    """Block `block_id`, packed as `entry`, replaces `old_block_id` in whatever tables of the worker have that.

    It is at the same index in all of them, in table `table_id` among others when memd said so. To be acknowledged.
    """

    sequence: int
    table_id: int
    index: int
    old_block_id: int
    block_id: int
    entry: int


@dataclass(frozen=True, slots=True)
class Draining:
    """memd will stop: finish or abort, then detach."""

    grace_s: float


@dataclass(frozen=True, slots=True)
class Lost:
    """The lease is gone, and all its tables with it; `message` says why."""

    message: str


PoolEvent = Grant | Refusal | Capacity | Victim | Remap | Draining | Lost


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """The GPU that a pool lies on.

    uuid is "GPU-..." or, for a MIG instance, "MIG-..."; memd_pid is memd's in its own PID namespace, and must not be
    the worker's own.
    """

    uuid: str
    memd_pid: int
    name: str = "GPU"


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """What a worker learns when it attaches.

    The slab is the file slab_paths[0], or, if the pool lies on cuda_device, the allocation behind cuda_handle; then
    host_slab, a file and its bytes, is slab 1, if there is a host tier.
    """

    epoch: int
    lease_id: int
    block_size: int
    num_blocks: int
    unit_bytes: int
    slab_paths: Sequence[str] = field(default_factory=tuple)
    slab_bytes: int = 0
    cuda_device: CudaDevice | None = None
    cuda_handle: bytes = field(default=b"", repr=False)
    host_slab: tuple[str, int] | None = None
