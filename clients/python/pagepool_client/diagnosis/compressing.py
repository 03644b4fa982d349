"""Rules about FP8 blocks: what they would free, where they are in vain, and where they leave holes. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pagepool.memd.v1.types_pb2 import BLOCK_STATE_HELD, BLOCK_STATE_QUARANTINED, Block
from pagepool_client.diagnosis.findings import Case, Finding, Remedy, Severity
from pagepool_client.diagnosis.formats import formats, had_fp8, is_fp8, units_per_block
from pagepool_client.diagnosis.tiers import is_below
from pagepool_client.diagnosis.words import count, share, size

KEEP_RECENT = 4
"""Newest full blocks of a table that memd's policies leave alone, unless --fp8-keep-recent says otherwise."""
ENOUGH_TRIED = 50
"""Fewer blocks say nothing about a model."""
NAMED_IDS = 8
SHOWN_BLOCKS = 3


def compressible(case: Case) -> Sequence[Block]:
    """The blocks of the device that a policy of memd could compress now, by rising id.

    The first block of a sequence is only known while a table has it: one that is merely cached may be among these.
    """
    block_size, spared = case.seen.pool.block_size, set[int]()
    for table in case.seen.tables_with_blocks:
        full = table.num_tokens // block_size
        spared.update(table.block_ids[:1], table.block_ids[max(full - KEEP_RECENT, 0) :])
    return [block for block in case.seen.blocks if block.block_id not in spared and _may_be_compressed(block)]


def _may_be_compressed(block: Block) -> bool:
    was_tried = block.k_error or block.v_error
    is_spent = is_below(block) or is_fp8(block.entry) or was_tried
    return block.sealed and block.state != BLOCK_STATE_QUARANTINED and not is_spent


def compress_under_pressure(case: Case) -> Sequence[Remedy]:
    """The flag that makes room by FP8 blocks, where nothing was ever compressed and it frees 5 % of the pool.

    Where something was, either the policy is at work, or what it leaves alone is what it was told to.
    """
    if had_fp8(case.seen.pool):
        return ()
    blocks = compressible(case)
    places = math.ceil(len(blocks) / units_per_block(case.seen.pool))
    freed = len(blocks) - places
    if 20 * freed < case.total:
        return ()
    held = sum(block.state == BLOCK_STATE_HELD for block in blocks)
    effect = (
        f"of the blocks of now, {len(blocks):,} ({held:,} of them in use) would fit in {count(places, 'place')}, which "
        f"frees {freed:,}; it is lossy, and leaves the blocks of requests that want exact KV alone"
    )
    return [Remedy("memd", "--fp8", "pressure", effect)]


def compression_in_vain(case: Case) -> Finding | None:
    """More than a tenth of the blocks that were to become FP8 blocks would have lost too much."""
    compressed, over = case.seen.counted("compressed_blocks"), case.seen.counted("blocks_over_error")
    tried = compressed + over
    if tried < ENOUGH_TRIED or 10 * over <= tried:
        return None
    kept = case.seen.pool.usage.kept_blocks
    detail = (
        f"{over:,} of {tried:,} blocks ({share(over, tried)}) that were to become FP8 blocks "
        f"{case.seen.time_that_counts} would have lost too much and stayed as they are: FP8 saves little with this "
        "model."
    )
    effect = f"workers no longer compute for nothing, and {count(kept, 'place')} kept back can be granted"
    worst = sorted(
        (block for block in case.seen.blocks if not is_fp8(block.entry) and (block.k_error or block.v_error)),
        key=lambda block: -max(block.k_error, block.v_error),
    )
    return Finding(
        "compression_in_vain",
        Severity.ADVICE,
        "Many blocks lose too much as FP8 blocks",
        detail,
        {"compressed_blocks": compressed, "blocks_over_error": over, "kept_blocks": kept},
        [Remedy("memd", "--fp8", "off", effect)],
        [f"block {block.block_id}: {_loss(block)}" for block in worst[:SHOWN_BLOCKS]],
    )


def _loss(block: Block) -> str:
    return f"K would lose {share(block.k_error, 1)}, V {share(block.v_error, 1)}"


def half_empty_places(case: Case) -> Finding | None:
    """Units of split places that hold nothing, where other blocks could be compressed into them."""
    units, now = units_per_block(case.seen.pool), formats(case.seen.pool)
    blocks = compressible(case)
    fitting = min(now.holes, len(blocks))
    if 20 * now.holes <= case.total * units or not fitting:
        return None
    detail = (
        f"{count(now.fp8_blocks, 'FP8 block')} {'lies' if now.fp8_blocks == 1 else 'lie'} in "
        f"{count(now.split_places, 'split place')}, which would hold {now.split_places * units:,}: "
        f"{size(now.holes * case.seen.pool.unit_bytes)} ({share(now.holes, case.total * units)} of the pool) can be "
        "granted to nobody."
    )
    ids = ", ".join(f"{block.block_id}" for block in blocks[: min(fitting, NAMED_IDS)])
    effect = (
        f"fills holes: {count(fitting, 'full block')} of now {'fits' if fitting == 1 else 'fit'} into them, and each "
        "gives a whole place back"
    )
    return Finding(
        "half_empty_places",
        case.severity,
        "Split places are half empty",
        detail,
        {
            "split_blocks": now.split_places,
            "fp8_blocks": now.fp8_blocks,
            "empty_units": now.holes,
            "fitting_blocks": fitting,
        },
        [Remedy("client", "CompressBlocks", f"block_ids {ids}", effect)],
    )
