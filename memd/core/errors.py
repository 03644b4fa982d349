"""What the core says when it refuses. Every message names the value and the way out."""

from __future__ import annotations

from pagepool.errors import PagepoolError, Reason

RETRY_AFTER_S = 0.5
"""When a retry after POOL_EXHAUSTED makes sense: a generation's blocks come back on this scale."""


class InvariantError(Exception):
    """The pool contradicts itself. A bug, never a user's mistake: the daemon must not go on with such a pool."""


def epoch_mismatch(epoch: int, present: int) -> PagepoolError:
    """An id of another memd life."""
    message = (
        f"epoch is {epoch}, but this memd life is {present}: every id of another life is void; "
        "read GetPool and start anew"
    )
    return PagepoolError(Reason.EPOCH_MISMATCH, message, field="epoch", value=epoch, epoch=present)


def lease_not_found(lease_id: int) -> PagepoolError:
    """No such client lease now."""
    message = f"lease {lease_id} does not exist: it ended, and what it held is freed; create another"
    return PagepoolError(Reason.LEASE_NOT_FOUND, message, lease_id=lease_id)


def lease_is_workers(lease_id: int) -> PagepoolError:
    """A unary command for a worker's lease."""
    message = f"lease {lease_id} is a worker's: only its Attach stream speaks for it; create a lease of your own"
    return PagepoolError(Reason.LEASE_IS_WORKERS, message, lease_id=lease_id)


def lease_limit(limit: int) -> PagepoolError:
    """There would be too many leases of clients."""
    message = (
        f"clients have {limit} leases, the most there may be; release some, wait until one has ended, or hold more "
        "under one lease"
    )
    return PagepoolError(Reason.LEASE_LIMIT, message, limit=limit)


def lease_lost(lease_id: int, why: str) -> PagepoolError:
    """A worker speaks for a lease that it does not have any more."""
    message = f"lease {lease_id} is lost: {why}; stop using the mapping, drop the lock, attach anew"
    return PagepoolError(Reason.LEASE_LOST, message, lease_id=lease_id, why=why)


def lock_file_of_lost(lock_file: str, lease_id: int, why: str) -> PagepoolError:
    """A worker attaches with a lock file that keeps the blocks of a lost lease out of use."""
    message = (
        f"hello.lock_file is {lock_file!r}, the file of lease {lease_id}, which is lost: {why}; what that held comes "
        "back when its lock is free: stop using the mapping, drop the lock, attach anew with a file of another name"
    )
    return PagepoolError(
        Reason.LEASE_LOST, message, field="hello.lock_file", lock_file=lock_file, lease_id=lease_id, why=why
    )


def block_not_found(block_id: int) -> PagepoolError:
    """No such block now."""
    message = f"block {block_id} does not exist: it was freed or evicted, or never existed; nothing was changed"
    return PagepoolError(Reason.BLOCK_NOT_FOUND, message, block_id=block_id)


def block_not_held(block_id: int, lease_id: int, held: int, asked: int) -> PagepoolError:
    """A lease would drop references that it has not."""
    message = (
        f"block {block_id} is held {held} times by lease {lease_id}, but {asked} references were to be dropped; "
        "nothing was freed: free only what your lease holds directly"
    )
    return PagepoolError(
        Reason.BLOCK_NOT_HELD, message, block_id=block_id, lease_id=lease_id, ref_count=held, asked=asked
    )


def too_many_references(block_id: int, lease_id: int, references: int, limit: int) -> PagepoolError:
    """A lease would hold one block too often."""
    message = (
        f"block_ids would give lease {lease_id} {references} references to block {block_id}, but it may have {limit}; "
        "nothing was shared: free some, or share it under another lease"
    )
    metadata = {"value": references, "limit": limit, "block_id": block_id, "lease_id": lease_id}
    return PagepoolError(Reason.INVALID_FIELD, message, field="block_ids", **metadata)


def block_not_sealed(block_id: int) -> PagepoolError:
    """A lease would share what another may still write."""
    message = f"block {block_id} is not sealed: only its own lease can share or copy it; wait until it is full"
    return PagepoolError(Reason.BLOCK_NOT_SEALED, message, block_id=block_id)


def block_unfinished(block_id: int) -> PagepoolError:
    """A block is to be compressed that is still written."""
    message = f"block {block_id} is not sealed: only full blocks are compressed; wait until it is full"
    return PagepoolError(Reason.BLOCK_NOT_SEALED, message, block_id=block_id)


def block_fixed(block_id: int, holder: str) -> PagepoolError:
    """A block is to move that a worker reads which cannot be told."""
    message = (
        f"block {block_id} cannot move: worker {holder!r} has it in a table, and does not take remaps; "
        "nothing was compressed: wait until it has released the table, or attach it anew with takes_remaps"
    )
    return PagepoolError(Reason.BLOCK_FIXED, message, block_id=block_id, holder=holder)


def block_moving(block_id: int) -> PagepoolError:
    """A block is to move that has just been left by tables whose workers may still read it."""
    message = (
        f"block {block_id} cannot move: it is just being stored elsewhere, or tables have another one in its place now "
        "and their workers may still read it; nothing was changed: call again in a moment"
    )
    return PagepoolError(Reason.BLOCK_MOVING, message, block_id=block_id)


def block_wanted_exact(block_id: int, table_id: int) -> PagepoolError:
    """A block is to be stored lossily that a table wants exact."""
    message = (
        f"block {block_id} is in block table {table_id}, whose request wants exact KV; nothing was compressed: wait "
        "until the table is released"
    )
    return PagepoolError(Reason.BLOCK_WANTED_EXACT, message, block_id=block_id, table_id=table_id)


def block_compressed(block_id: int, num_tokens: int, block_size: int) -> PagepoolError:
    """A table is to end within an FP8 block, of which memd cannot copy a part."""
    message = (
        f"num_tokens {num_tokens} lies within block {block_id}, an FP8 block, of which only a worker can copy a part; "
        f"nothing was changed: truncate to a multiple of {block_size}, or call DecompressBlocks first"
    )
    return PagepoolError(Reason.BLOCK_COMPRESSED, message, block_id=block_id, num_tokens=num_tokens)


def fp8_off() -> PagepoolError:
    """A block is to be compressed in a pool without FP8 blocks."""
    message = "--fp8 is off, so every block of this pool stays as it is; start memd with another --fp8"
    return PagepoolError(Reason.COMPRESSION_OFF, message)


def no_worker(why: str = "no worker that can do it is attached") -> PagepoolError:
    """There is nobody to compute, or was not for long enough."""
    message = f"blocks were not stored in another format: {why}; memd computes nothing itself: call again with one"
    return PagepoolError(Reason.NO_WORKER, message, why=why)


def table_not_found(table_id: int) -> PagepoolError:
    """No such table now."""
    message = f"block table {table_id} does not exist: it was released, or never existed; create another"
    return PagepoolError(Reason.TABLE_NOT_FOUND, message, table_id=table_id)


def table_not_held(table_id: int, lease_id: int) -> PagepoolError:
    """A lease would change another's table."""
    message = f"block table {table_id} is not held by lease {lease_id}; use a table of your own lease"
    return PagepoolError(Reason.TABLE_NOT_HELD, message, table_id=table_id, lease_id=lease_id)


def table_limit(lease_id: int, limit: int) -> PagepoolError:
    """A lease would have too many tables."""
    message = f"lease {lease_id} has {limit} block tables, the most there may be; release some, or use another lease"
    return PagepoolError(Reason.TABLE_LIMIT, message, lease_id=lease_id, limit=limit)


def pool_without_geometry() -> PagepoolError:
    """Blocks are asked for before the pool is cut."""
    message = "the pool has no geometry yet: wait until a worker has attached, or start memd with --geometry"
    return PagepoolError(Reason.POOL_WITHOUT_GEOMETRY, message, retry_after_s=RETRY_AFTER_S)


def pool_exhausted(asked: int, available: int, total: int, pinned: int) -> PagepoolError:
    """Too few free and cached blocks; `available` is what could have been asked for, `pinned` what pins hold back."""
    message = (
        f"{asked} blocks were asked for, but only {available} of the pool's {total} can be granted now; "
        "nothing was taken: free something, or retry later"
    )
    if pinned:
        message += f"; {pinned} more are cached, but pinned: UnpinPrefix gives them back"
    return PagepoolError(
        Reason.POOL_EXHAUSTED,
        message,
        retry_after_s=RETRY_AFTER_S,
        asked=asked,
        available=available,
        total=total,
        pinned=pinned,
    )


def request_too_large(field: str, asked: int, total: int) -> PagepoolError:
    """More blocks than the whole pool has."""
    message = f"{field} comes to {asked} blocks, but the whole pool has {total}; ask for fewer, or start memd with more"
    return PagepoolError(Reason.REQUEST_TOO_LARGE, message, field=field, asked=asked, total=total)


def prefix_not_found(num_tokens: int, block_size: int) -> PagepoolError:
    """Nothing of a prefix is in the pool."""
    message = (
        f"the pool has no whole block of {block_size} tokens of this prefix of {num_tokens}: it was never computed "
        "with this salt, or evicted; generate with it once, then say how it shall be kept"
    )
    return PagepoolError(Reason.PREFIX_NOT_FOUND, message, num_tokens=num_tokens, block_size=block_size)


def pin_limit(pinned: int, most: int, total: int) -> PagepoolError:
    """Too much of the pool would be pinned."""
    message = (
        f"{pinned} blocks would be pinned, but at most {most} of the pool's {total} may be; "
        "unpin something, pin a shorter prefix, or give a priority instead"
    )
    return PagepoolError(Reason.PIN_LIMIT, message, pinned=pinned, limit=most, total=total)


def too_many_pins(pins: int, limit: int) -> PagepoolError:
    """Too many prefixes would be kept."""
    message = f"{pins} prefixes are kept, the most there may be; unpin some, or pin what they have in common"
    return PagepoolError(Reason.PIN_LIMIT, message, pins=pins, limit=limit)


def protocol_violation(lease_id: int, what: str, remedy: str) -> PagepoolError:
    """A step that cannot be."""
    message = f"lease {lease_id} is lost: {what}; {remedy}"
    return PagepoolError(Reason.PROTOCOL_VIOLATION, message, lease_id=lease_id, what=what)
