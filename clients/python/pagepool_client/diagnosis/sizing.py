"""How large blocks, pool and host tier should be: the practitioners' advice, and the flags for more. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from pagepool.memd.v1.types_pb2 import Pool
from pagepool_client.diagnosis.findings import Case, Remedy
from pagepool_client.diagnosis.tiers import host_tier
from pagepool_client.diagnosis.words import count, size, size_flag

LARGE_TOKEN_BYTES = 256 << 10
"""KV bytes of a token from which a model counts as large: a 70B llama with grouped queries has 320 KiB."""


def advised_block_size(pool: Pool) -> int:
    """What practitioners advise: 8 for the largest models, 16 for others."""
    return 8 if pool.block_bytes >= LARGE_TOKEN_BYTES * pool.block_size else 16


def more_blocks(pool: Pool, needed: int) -> Sequence[Remedy]:
    """Flags of memd for a pool of `needed` blocks: its cap if one is in the way, and bytes where those are too few."""
    total, fitting = pool.usage.total_blocks, pool.slab_bytes // pool.block_bytes
    remedies = []
    if fitting > total:
        effect = f"the pool's {size(pool.slab_bytes)} have room for {fitting:,} blocks, but are cut into {total:,}"
        remedies.append(Remedy("memd", "--max-num-blocks", f"{min(needed, fitting)}", effect))
    if needed > fitting:
        effect = f"room for {needed:,} blocks instead of {total:,}: more users need more blocks"
        if pool.device.startswith("cuda"):
            effect += "; where the GPU has no more, a smaller --reserve-bytes leaves them to the pool"
        remedies.append(Remedy("memd", "--pool-bytes", size_flag(needed * pool.block_bytes), effect))
    return remedies


def more_below(case: Case) -> Sequence[Remedy]:
    """The flag for a host tier, or for a larger one where it is full, if a twentieth of the pool was evicted.

    It is to keep what was evicted, but at most as many blocks as the device has: the same may have been evicted twice.
    """
    evicted, tier = case.seen.counted("evicted_blocks"), host_tier(case.seen.pool)
    if 20 * evicted < case.total or not evicted or (tier and not tier.is_full):
        return ()
    more = min(evicted, case.total)
    places = more + (tier.places if tier else 0)
    kept = "" if more == evicted else f"{more:,} of "
    was = f"room for {kept}the {count(evicted, 'block')} that {'was' if evicted == 1 else 'were'} evicted"
    full = f"{places:,} places instead of {tier.places:,}, which are full: " if tier else ""
    effect = f"{full}{was} {case.seen.time_that_counts}: prompts, and requests that had to yield, find them there"
    return [Remedy("memd", "--host-tier", size_flag(places * case.seen.pool.block_bytes), effect)]
