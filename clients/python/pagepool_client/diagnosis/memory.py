"""Rules about memory: why blocks are short, and where slots are lost. Pure; each returns a finding or None."""

from __future__ import annotations

import math

from pagepool.durations import to_seconds
from pagepool.memd.v1.types_pb2 import BLOCK_STATE_CACHED
from pagepool_client.diagnosis.compressing import compress_under_pressure
from pagepool_client.diagnosis.figures import Holder, tail_slots_at
from pagepool_client.diagnosis.findings import Case, Finding, Remedy, Severity
from pagepool_client.diagnosis.sizing import advised_block_size, more_below, more_blocks
from pagepool_client.diagnosis.tiers import is_below
from pagepool_client.diagnosis.words import count, share, span

SMALLER_SIZES = (64, 32, 16, 8)
HEADROOM = 0.9
"""A pool is asked for that what is needed now would fill to this share."""
GROWTH = 1.25
"""The least growth worth a restart."""
SHOWN_HOLDERS = 3
IDLE_S = 60.0
"""A decode step takes milliseconds: a table that nothing touched for a minute belongs to somebody who stopped."""
HEARTBEAT_TIMEOUT_S = 30
"""Three times memd's default."""


def out_of_blocks(case: Case) -> Finding | None:
    """Few blocks can be granted, or requests for some were refused: what holds them, and how many would do."""
    refused, waiting = case.seen.counted("refused_requests"), case.seen.waiting
    if not (case.pressed or refused):
        return None
    title = (
        "is out of blocks"
        if case.severity is Severity.PROBLEM
        else "is nearly full"
        if case.pressed
        else "was out of blocks"
    )
    usage, figures = case.seen.pool.usage, case.figures
    peak = max(pool.usage.held_blocks for pool in (*case.seen.earlier, case.seen.pool))
    needed = needed_blocks(case, peak)
    detail = (
        f"{usage.held_blocks:,} of {count(case.total, 'block')} are held and {figures.available:,} can be granted; "
        f"{count(refused, 'request')} for blocks {'was' if refused == 1 else 'were'} refused "
        f"{case.seen.time_that_counts}, and {count(waiting, 'request waits', 'requests wait')}. "
        f"Sharing saves {count(figures.saved_blocks, 'block')}; a table has {figures.mean_table_blocks:.3g} on average."
    )
    numbers = {
        "total_blocks": case.total,
        "held_blocks": usage.held_blocks,
        "most_held_blocks": peak,
        "available_blocks": figures.available,
        "refused_requests": refused,
        "waiting_requests": waiting,
        "saved_blocks": figures.saved_blocks,
        "mean_table_blocks": figures.mean_table_blocks,
        "needed_blocks": needed,
    }
    return Finding(
        "out_of_blocks",
        case.severity,
        f"The pool {title}",
        detail,
        numbers,
        [*more_blocks(case.seen.pool, needed), *compress_under_pressure(case), *more_below(case)],
        [f"held by {_holder(holder)}" for holder in figures.holders[:SHOWN_HOLDERS]],
    )


def needed_blocks(case: Case, peak: int) -> int:
    """Blocks for `peak` held ones, what is out of use, and a table of average length for each request that waits."""
    waiting = case.seen.waiting * math.ceil(case.figures.mean_table_blocks)
    usage = case.seen.pool.usage
    demand = peak + usage.quarantined_blocks + usage.kept_blocks + waiting
    return max(math.ceil(GROWTH * case.total), math.ceil(demand / HEADROOM))


def waste_inside_blocks(case: Case) -> Finding | None:
    """Last blocks that are written to in part: sequences are short for blocks of this size."""
    size_now, figures, tables = case.seen.pool.block_size, case.figures, case.seen.tables_with_blocks
    written = figures.tokens + figures.tail_slots
    matters = 20 * figures.tail_slots >= (written if case.pressed else case.total * size_now)
    if not (figures.tail_slots and matters):
        return None
    waste = {smaller: tail_slots_at(smaller, tables) for smaller in SMALLER_SIZES if smaller < size_now}
    good = [smaller for smaller, slots in waste.items() if 20 * slots <= figures.tokens + slots]
    # The largest that wastes at most 5 %; else the one that wastes least, the larger of equals.
    best = good[0] if good else min(waste, key=lambda smaller: (waste[smaller], -smaller), default=size_now)
    lengths = sorted(table.num_tokens for table in tables if table.num_tokens)
    # Smaller blocks would save less than a quarter of it, or no table has those blocks (any more).
    if best == size_now or 4 * waste[best] > 3 * figures.tail_slots or not lengths:
        return None
    median = lengths[(len(lengths) - 1) // 2]
    detail = (
        f"{figures.tail_slots:,} of {written:,} slots in written blocks ({share(figures.tail_slots, written)}) hold no "
        f"token: half of the {count(len(lengths), 'sequence')} have at most {count(median, 'token')}, and the last "
        f"block of {size_now} of each is empty in part."
    )
    effect = (
        f"{waste[best]:,} slots would be empty ({share(waste[best], figures.tokens + waste[best])}); practice is "
        f"{advised_block_size(case.seen.pool)} for a model of this size"
    )
    numbers = {
        "empty_slots": figures.tail_slots,
        "written_slots": written,
        "median_tokens": median,
        "empty_slots_then": waste[best],
    }
    remedy = Remedy("memd", "--block-size", f"{best}", effect)
    return Finding(
        "waste_inside_blocks", case.severity, "Blocks are large for these sequences", detail, numbers, [remedy]
    )


def held_by_leases(case: Case) -> Finding | None:
    """Blocks that clients hold by AllocateBlocks or ShareBlocks: no table can have them, and nothing evicts them.

    What workers have in reserve is none of it: they need it within a few steps, and give back what they do not need.
    """
    direct = case.figures.direct_blocks
    if not direct or (10 if case.pressed else 2) * direct < case.total:
        return None
    leases = [holder for holder in case.figures.holders if not (holder.table_id or holder.worker)]
    largest = leases[0]
    detail = (
        f"{direct:,} of {count(case.total, 'block')} ({share(direct, case.total)}) are held by "
        f"{count(len(leases), 'lease')} directly, allocated or pinned: they cannot be evicted while the leases live."
    )
    effect = f"gives {count(largest.own_blocks, 'block')} back; the client that renews it does that, or ends"
    return Finding(
        "held_by_leases",
        case.severity,
        "Clients' leases pin a large part of the pool",
        detail,
        {"pinned_blocks": direct, "total_blocks": case.total, "leases": len(leases)},
        [Remedy("client", "ReleaseLease", f"lease_id {largest.lease_id}", effect)],
        [f"held by {_holder(holder)}" for holder in leases[:SHOWN_HOLDERS]],
    )


def pinned_prefixes(case: Case) -> Finding | None:
    """Cached blocks that PinPrefix keeps from being evicted."""
    pinned = case.seen.pool.usage.pinned_blocks
    # memd refuses to pin more than half of a pool: 40 % is near it.
    # A request that waits while blocks are free may need more than pins leave.
    if not pinned or 100 * pinned < (10 if case.pressed or case.seen.waiting else 40) * case.total:
        return None
    cached = [block for block in case.seen.blocks if block.state == BLOCK_STATE_CACHED and not is_below(block)]
    kept = [block for block in cached if block.pinned]
    idle_s = max((to_seconds(block.idle_time) for block in kept), default=0.0)
    detail = (
        f"{pinned:,} of {count(case.total, 'block')} ({share(pinned, case.total)}) are pinned and in nobody's use: "
        f"they cannot be granted until their time ends. The one that was used longest ago waits for {span(idle_s)}."
    )
    effect = "or `pagepool pin --off`: it is evicted like all others; a priority keeps it only while there is room"
    return Finding(
        "pinned_prefixes",
        case.severity,
        "Pinned prefixes keep blocks from running requests",
        detail,
        {"pinned_blocks": pinned, "total_blocks": case.total, "longest_idle_seconds": idle_s},
        [Remedy("client", "UnpinPrefix", f"the prefix that was last used {span(idle_s)} ago", effect)],
    )


def idle_tables(case: Case) -> Finding | None:
    """Tables that nothing has touched for long, though they hold blocks that nothing else does."""
    idle = [one for one in case.figures.holders if one.table_id and one.own_blocks and one.idle_s >= IDLE_S]
    blocks, places = sum(holder.own_blocks for holder in idle), sum(holder.own_places for holder in idle)
    if not idle or (10 if case.pressed else 4) * places < case.total:
        return None
    first = idle[0]
    longest = max(holder.idle_s for holder in idle)
    detail = (
        f"{count(len(idle), 'table')} with {count(blocks, 'block')} of {'its' if len(idle) == 1 else 'their'} own "
        f"({share(places, case.total)} of the pool) {'was' if len(idle) == 1 else 'were'} not touched for "
        f"{span(IDLE_S)} or more, one for {span(longest)}: their requests hang, or their client forgot them."
    )
    what = ("ReleaseBlockTable", f"table_id {first.table_id}")
    if first.worker:
        what = ("cancel", f"the call whose table {first.table_id} is, at {first.name}")
    effect = f"gives {count(first.own_blocks, 'block')} back"
    return Finding(
        "idle_tables",
        case.severity,
        "Tables that nobody uses hold blocks",
        detail,
        {"tables": len(idle), "own_blocks": blocks, "longest_idle_seconds": longest},
        [Remedy("client", *what, effect)],
        [f"held by {_holder(holder)}" for holder in idle[:SHOWN_HOLDERS]],
    )


def lost_workers(case: Case) -> Finding | None:
    """Workers that missed their heartbeats, and what memd cannot give to others until their processes have ended."""
    waiting = max(case.seen.pool.usage.quarantined_blocks - case.seen.moved, 0)
    lost = case.seen.counted("lost_leases")
    if not (waiting or (lost and case.seen.earlier)):  # one that was lost days ago is nobody's trouble any more
        return None
    detail = f"{count(lost, 'lease')} ended without being released {case.seen.time_that_counts}"
    if waiting:
        detail += (
            f"; {count(waiting, 'block')} ({share(waiting, case.total)} of the pool) "
            "stay out of use until the process that could still write them has ended"
        )
    effect = "for workers that were only slow; one that hangs has to be ended, and one that crashed says why in its log"
    return Finding(
        "lost_workers",
        Severity.PROBLEM if waiting else Severity.ADVICE,
        "A worker or client was lost",
        f"{detail}.",
        {"quarantined_blocks": waiting, "lost_leases": lost},
        [Remedy("memd", "--heartbeat-timeout", f"{HEARTBEAT_TIMEOUT_S}s", effect)],
    )


def _holder(holder: Holder) -> str:
    what = f"table {holder.table_id}" if holder.table_id else f"lease {holder.lease_id}"
    if holder.worker and not holder.table_id:
        what = f"the reserve of {what}"
    of = f" of {holder.name}" if holder.name else ""
    stored = f", {count(holder.tokens, 'token')}" if holder.table_id else ""
    blocks = f"{count(holder.blocks, 'block')}, {holder.own_blocks:,} of its own"
    return f"{what}{of}: {blocks}{stored}, idle {span(holder.idle_s)}"
