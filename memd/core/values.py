"""What goes into the pool and what comes out of it: plain values. Times are seconds; no value refers to live state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from memd.core.operations import ReserveRequest, TableOperation
from memd.core.recodes import Recoded
from pagekernels.layout import Format


class BlockState(IntEnum):
    """What a block's memory is doing; the numbers equal pagepool.memd.v1.BlockState."""

    HELD = 1
    CACHED = 2
    QUARANTINED = 3


class LeaseState(IntEnum):
    """Whether a lease is alive; the numbers equal pagepool.memd.v1.LeaseState."""

    LIVE = 1
    DETACHED = 2
    LOST = 3


class RefusalReason(IntEnum):
    """Why a request was refused; the numbers equal pagepool.memd.v1.RefusalReason."""

    POOL_EXHAUSTED = 1
    REQUEST_TOO_LARGE = 2
    PREFIX_PENDING = 3


@dataclass(frozen=True, slots=True)
class Commit:
    """The worker's word that the KV of these tokens, which follow those already committed, has been written."""

    table_id: int
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class TableRequest:
    """A table to create: match `token_ids` (never the last), pin what is found, add blocks up to `num_blocks` in all.

    Token ids are 32-bit unsigned integers; `packed`, if there is any, is them as blocks keep them. `ref` is the asker's
    own number and comes back in the answer. `arrival` is seconds on the host's monotonic clock, 0 for now. `headroom`
    blocks must be available beside those granted, unless no other worker's table has any. With `resume_table_id` a
    suspended table of a worker's lease gets blocks again, with tokens, salt, priority and arrival of its own.
    `partial`: the asker can copy a block of which only a part matches. `wait_for_prefix`: it would rather be refused
    than compute what another table is about to. `num_yields`: how often it has yielded with tables that ended so.
    `exact`: only exact blocks match, and none of the table is stored lossily while it is there.
    """

    token_ids: Sequence[int]
    num_blocks: int
    salt: bytes = b""
    priority: int = 0
    no_match: bool = False
    ref: int = 0
    packed: bytes = b""
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

    table_id: int
    num_blocks: int
    ref: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """One batch of a worker.

    Commits apply first, then operations in order, then releases and freed blocks of the reserve; then each request is
    granted or refused alone. `acknowledged` is the last Remap of which no step in flight reads the old block any more.
    `recodings` are what has become of Recodes.
    """

    step_id: int
    commits: Sequence[Commit] = ()
    releases: Sequence[int] = ()
    creates: Sequence[TableRequest] = ()
    extends: Sequence[ExtendRequest] = ()
    operations: Sequence[TableOperation] = ()
    frees: Sequence[int] = ()
    reserves: Sequence[ReserveRequest] = ()
    acknowledged: int = 0
    recodings: Sequence[Recoded] = ()


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Granted blocks in token order: ids, and their packed block-table words parallel to them."""

    block_ids: Sequence[int]
    entries: Sequence[int]


@dataclass(frozen=True, slots=True)
class Grant:
    """A granted request. `blocks` are all blocks of a new table, or those added to an extended one or to the reserve.

    For a reserve, `table_id` is the first of its `num_tables` consecutive new table ids. `copy_source` is the entry of
    a block that the worker has to copy into its own at index cached_tokens // block_size before it writes there: the
    last of the cached tokens are its first. It is kept until the worker commits to the table, suspends or releases it.
    """

    ref: int
    table_id: int
    cached_tokens: int
    blocks: BlockRun
    num_tables: int = 0
    copy_source: int | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refused request; nothing was taken. `available_blocks` is the largest num_blocks that could be granted.

    While pins last, no more than total_blocks - pinned_blocks ever can be. `held_blocks` are those that clients' leases
    and lost workers hold, beside what the request would have matched, if they and the pinned ones leave a table that is
    to be created or resumed too few, whoever else gives blocks back; else 0.
    """

    ref: int
    reason: RefusalReason
    available_blocks: int
    total_blocks: int
    pinned_blocks: int = 0
    held_blocks: int = 0


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The answer to a step, in the order that it was served in: what tables cannot go on without first."""

    step_id: int
    grants: Sequence[Grant] = ()
    refusals: Sequence[Refusal] = ()


@dataclass(frozen=True, slots=True)
class PinRequest:
    """A prefix to keep cached for `ttl_s`: with a priority (0 is everybody's, higher goes later), or pinned."""

    token_ids: Sequence[int]
    ttl_s: float
    salt: bytes = b""
    priority: int = 0
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class KeptPrefix:
    """What was found of a prefix: whole blocks, and until when they are kept."""

    num_tokens: int
    num_blocks: int
    until: float


@dataclass(frozen=True, slots=True)
class UnpinnedPrefix:
    """What was found of a prefix, and whether it was kept by these very token ids until now."""

    num_tokens: int
    num_blocks: int
    was_kept: bool


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Bytes that the caller has to copy before it does anything else: packed entries of two blocks of one format."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Holder:
    """One holder of references to a block: a table, or with `table_id` 0 a lease. `worker`: the lease is a worker's."""

    lease_id: int
    table_id: int
    ref_count: int
    worker: bool = False


@dataclass(frozen=True, slots=True)
class BlockView:
    """A block as it was when it was asked for.

    `digest` is empty unless it is sealed; `idle_s` counts from the last grant, match, commit or release. `priority` and
    `pinned` say how it is kept when it is cached, for `kept_s` more. Beside those in `holders` there are so many more.
    `errors` are what it loses, or would lose, as an FP8 block, in K and in V; 0 if it was never tried. `host`: it is in
    the host tier.
    """

    block_id: int
    state: BlockState
    format: Format
    entry: int
    sealed: bool
    exact: bool
    num_tokens: int
    digest: bytes
    holders: Sequence[Holder]
    ref_count: int
    idle_s: float
    priority: int = 0
    pinned: bool = False
    kept_s: float = 0.0
    more_holders: int = 0
    errors: tuple[float, float] = (0.0, 0.0)
    host: bool = False


@dataclass(frozen=True, slots=True)
class TableView:
    """A block table as it was when it was asked for; `token_ids` only from `Pool.table`, else empty.

    A suspended one has no blocks; its tokens are those kept for it.
    """

    table_id: int
    lease_id: int
    holder: str
    blocks: BlockRun
    num_tokens: int
    cached_tokens: int
    token_ids: Sequence[int]
    priority: int
    idle_s: float
    suspended: bool = False


@dataclass(frozen=True, slots=True)
class LeaseView:
    """A lease as it was when it was asked for; `deadline` is on the caller's clock. Workers only have a `lock_file`."""

    lease_id: int
    holder: str
    state: LeaseState
    ttl_s: float
    deadline: float
    lock_file: str
    lost_because: str = ""

    @property
    def is_worker(self) -> bool:
        """Whether it lives by an Attach stream."""
        return bool(self.lock_file)


@dataclass(frozen=True, slots=True)
class Attached:
    """The answer to attach.

    If `reclaimed`, lease and tables are those of before, and a stream that still drives them is to be closed.
    """

    lease: LeaseView
    reclaimed: bool
