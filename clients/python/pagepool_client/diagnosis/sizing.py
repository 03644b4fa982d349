"""How large blocks and pool should be: the practitioners' advice, and the flags for more blocks. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from pagepool.memd.v1.types_pb2 import Pool
from pagepool_client.diagnosis.findings import Remedy
from pagepool_client.diagnosis.words import size, size_flag

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
