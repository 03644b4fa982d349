"""Why a request gets no blocks, and what its user can do about it. Pure."""

from __future__ import annotations

from inferd.core.limits import Limits
from inferd.core.ports import Refusal
from inferd.core.sequence import Sequence
from pagepool.errors import PagepoolError, Reason, invalid_field

RETRY_PINNED_S = 60.0
"""When a retry makes sense while pins hold blocks: they last from a second to a day."""


RETRY_HELD_S = 30.0
"""When a retry makes sense while others than workers hold blocks: clients' leases last from a second on."""


def why_never(
    sequence: Sequence, block_size: int, refusal: Refusal, *, held_long: bool = False
) -> PagepoolError | None:
    """The error of a request whose table was refused, if the pool can never hold it, or cannot while pins last.

    Or if clients' leases and lost workers leave it too little, and it is `held_long` that they have.
    """
    if refusal.never:
        return too_large(sequence, block_size, refusal.total_blocks)
    if refusal.pending:
        return None
    error = why_cornered(sequence, block_size, refusal)
    return _held(sequence.blocks_needed(block_size), refusal) if held_long and error is None else error


def why_cornered(sequence: Sequence, block_size: int, refusal: Refusal) -> PagepoolError | None:
    """The error of a request that cannot go on while pins last, whoever else gives blocks back."""
    needed, pinned, total = _needed(sequence, block_size), refusal.pinned_blocks, refusal.total_blocks
    return _pinned(needed, pinned, total) if pinned and needed > total - pinned else None


def too_large(sequence: Sequence, block_size: int, total_blocks: int) -> PagepoolError:
    """The error of a request that the whole pool cannot hold."""
    blocks = sequence.blocks_needed(block_size)
    prompt, most = len(sequence.submit.prompt), sequence.submit.max_tokens
    wide = "" if sequence.search is None else f", with {sequence.search.rules.width} beams,"
    message = (
        f"{prompt} prompt tokens and max_tokens {most}{wide} need {blocks} blocks of {block_size} tokens, but the "
        f"whole pool has {total_blocks}; shorten the prompt, lower max_tokens, or give memd a larger --pool-bytes"
    )
    values = {"prompt_tokens": prompt, "max_tokens": most, "num_blocks": blocks, "block_size": block_size}
    return PagepoolError(Reason.REQUEST_TOO_LARGE, message, field="max_tokens", total_blocks=total_blocks, **values)


def queue_full(num_waiting: int, limits: Limits) -> PagepoolError:
    """The error of a request that comes while so many wait."""
    message = f"{num_waiting} requests wait, and --max-queue is {limits.max_queue}; retry later"
    return PagepoolError(Reason.QUEUE_FULL, message, retry_after_s=1.0, waiting=num_waiting, limit=limits.max_queue)


def check_width(sequence: Sequence, limits: Limits) -> None:
    """INVALID_FIELD if its continuations are more than a step of this engine may have sequences."""
    width = 1 + sequence.num_unborn
    if width > limits.max_num_seqs:
        field = "n" if sequence.search is None else "beam.width"
        limit = f"at most this worker's --max-num-seqs ({limits.max_num_seqs}), for all continuations run in each step"
        raise invalid_field(field, width, limit, "lower it (or best_of), or start inferd with a larger --max-num-seqs")


def _pinned(num_blocks: int, pinned: int, total: int) -> PagepoolError:
    message = (
        f"the request needs {num_blocks} blocks, but {pinned} of the pool's {total} are pinned by PinPrefix, so it can "
        "have no more than the others; unpin something (pagepool pin --off), retry when a pin has ended, shorten the "
        "prompt, or lower max_tokens"
    )
    return PagepoolError(
        Reason.POOL_EXHAUSTED,
        message,
        retry_after_s=RETRY_PINNED_S,
        num_blocks=num_blocks,
        pinned_blocks=pinned,
        total_blocks=total,
    )


def _held(num_blocks: int, refusal: Refusal) -> PagepoolError:
    pinned = f", and {refusal.pinned_blocks} are pinned by PinPrefix" if refusal.pinned_blocks else ""
    message = (
        f"the request needs {num_blocks} blocks, but {refusal.held_blocks} of the pool's {refusal.total_blocks} are "
        f"held by clients' leases or by lost workers whose processes have not ended{pinned}, so that too few can come "
        "free; "
        "release those leases and end those processes (pagepool doctor names them), retry later, shorten the "
        "prompt, or lower max_tokens"
    )
    return PagepoolError(
        Reason.POOL_EXHAUSTED,
        message,
        retry_after_s=RETRY_HELD_S,
        num_blocks=num_blocks,
        held_blocks=refusal.held_blocks,
        pinned_blocks=refusal.pinned_blocks,
        total_blocks=refusal.total_blocks,
    )


def _needed(sequence: Sequence, block_size: int) -> int:
    """The blocks that it cannot do without: all that it may need, but once it runs, only the next one."""
    whole = sequence.blocks_needed(block_size)
    if sequence.table is not None:
        return min(len(sequence.table.block_ids) + 1, whole)
    return min(-(-(len(sequence.tokens) + 1) // block_size), whole) if sequence.suspended_id else whole
