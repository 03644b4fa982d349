"""A diagnosis as lines for people and as one JSON value for machines. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from pagepool_client.diagnosis.figures import Figures
from pagepool_client.diagnosis.findings import Finding, Severity
from pagepool_client.diagnosis.formats import formats, had_fp8
from pagepool_client.diagnosis.observation import Observation
from pagepool_client.diagnosis.sizing import advised_block_size
from pagepool_client.diagnosis.tiers import found_below, host_tier
from pagepool_client.diagnosis.words import count, share, size, span


def facts(seen: Observation, figures: Figures) -> list[tuple[str, str]]:
    """What the pool is and does now: (word, figures), whether or not something ails it."""
    pool = seen.pool
    name = f"{pool.geometry.model_name}, " if pool.geometry.model_name else ""
    cut = f"{count(pool.usage.total_blocks, 'block')} of {pool.block_size} tokens ({size(pool.block_bytes)} each)"
    lines = [("pool", f"{name}{cut} on {pool.device}, up {span(seen.uptime_s)}")]
    lines.append(("blocks", _usage(seen)))
    if had_fp8(pool):
        lines.append(("formats", _formats(seen)))
    if pool.usage.host_blocks:
        lines.append(("host tier", _host(seen)))
    lines += [("slots", _slots(seen, figures)), ("sharing", _sharing(seen, figures))]
    advised = advised_block_size(pool)
    token = size(pool.block_bytes // pool.block_size)
    advice = "as practitioners advise" if advised == pool.block_size else f"practitioners advise {advised}"
    lines += [("fragments", _fragments(figures)), ("block size", f"{pool.block_size}; {advice} at {token} a token")]
    return [*lines, ("prefixes", _prefixes(seen)), ("queue", _queue(seen))]


def as_json(seen: Observation, figures: Figures | None, findings: Sequence[Finding]) -> dict[str, object]:
    """All of it: pool, figures (None before the pool is cut), workers and findings. Times are seconds."""
    pool = seen.pool
    usage = {name: getattr(pool.usage, name) for name in pool.usage.DESCRIPTOR.fields_by_name}
    counted = {name: seen.counted(name) for name in pool.counters.DESCRIPTOR.fields_by_name}
    described = {"epoch": f"{pool.epoch:016x}", "model": pool.geometry.model_name, "device": pool.device}
    tier = host_tier(pool)
    sizes = {name: getattr(pool, name) for name in ("block_size", "block_bytes", "unit_bytes", "slab_bytes")}
    return {
        "pool": {**described, **sizes, **usage, "uptime_s": seen.uptime_s},
        "counted": {**counted, "watched_s": seen.watched_s if seen.earlier else None},
        "host_tier": None if tier is None else asdict(tier),
        "figures": None if figures is None else asdict(figures),
        "workers": [
            {
                "target": worker.target,
                "trouble": worker.trouble,
                "waiting_requests": worker.model.waiting_requests if worker.model else None,
                "prefix_waiting_requests": worker.model.prefix_waiting_requests if worker.model else None,
                "running_requests": worker.model.running_requests if worker.model else None,
            }
            for worker in seen.workers
        ],
        "healthy": all(finding.severity is not Severity.PROBLEM for finding in findings),
        "findings": [finding.as_json() for finding in findings],
    }


def _usage(seen: Observation) -> str:
    usage = seen.pool.usage
    parts = {
        "held": usage.held_blocks,
        "cached": usage.cached_blocks,
        "quarantined": usage.quarantined_blocks,
        "kept back": usage.kept_blocks,
        "free": usage.free_blocks,
    }
    words = [f"{number:,} {name} ({share(number, usage.total_blocks)})" for name, number in parts.items() if number]
    if usage.pinned_blocks:
        words.append(f"{usage.pinned_blocks:,} of the cached ones pinned")
    if seen.earlier:
        held = [pool.usage.held_blocks for pool in (*seen.earlier, seen.pool)]
        words.append(f"in {span(seen.watched_s)} held went from {held[0]:,} to {held[-1]:,}, at most {max(held):,}")
    return ", ".join(words)


def _formats(seen: Observation) -> str:
    done, undone = seen.counted("compressed_blocks"), seen.counted("decompressed_blocks")
    over = seen.counted("blocks_over_error")
    changed = f"{done:,} compressed, {undone:,} decompressed and {over:,} over the error bound {seen.time_that_counts}"
    return f"{formats(seen.pool).words()}; {changed}"


def _host(seen: Observation) -> str:
    tier = host_tier(seen.pool)
    assert tier is not None
    up, down = seen.counted("promoted_blocks"), seen.counted("demoted_blocks")
    there = found_below(seen.counted("host_hit_tokens"), seen.counted("prefix_hit_tokens"))
    moved = f"{count(up, 'block')} came up and {down:,} went down {seen.time_that_counts}"
    return f"{tier.words()} of {size(tier.bytes)}; {moved}{'; ' if there else ''}{there}"


def _slots(seen: Observation, figures: Figures) -> str:
    size_now, held = seen.pool.block_size, figures.held_blocks
    if not held:
        return "no block is held"
    slots = held * size_now
    reserved, ahead = figures.reserved_blocks * size_now, figures.reserve_blocks * size_now
    return (
        f"{figures.tokens:,} tokens in {slots:,} slots of held blocks ({share(figures.tokens, slots)}); empty: "
        f"{figures.tail_slots:,} in blocks written in part, {reserved:,} in tables ahead of their tokens, "
        f"{ahead:,} in workers' reserves, {slots - figures.tokens - figures.tail_slots - reserved - ahead:,} of leases"
    )


def _sharing(seen: Observation, figures: Figures) -> str:
    tables = len(seen.tables)
    if not tables:
        return "no tables"
    return f"{count(tables, 'table')}; without sharing they would need {count(figures.saved_blocks, 'more block')}"


def _fragments(figures: Figures) -> str:
    if figures.stray_units:
        return f"{count(figures.stray_units, 'unit')} free in places that hold smaller blocks"
    return "none between blocks: any free place fits any block"


def _prefixes(seen: Observation) -> str:
    asked, found = seen.counted("prefix_query_tokens"), seen.counted("prefix_hit_tokens")
    evicted = f"{count(seen.counted('evicted_blocks'), 'block was', 'blocks were')} evicted"
    if not asked:
        return f"no prompt was looked up {seen.time_that_counts}; {evicted}"
    return f"{found:,} of {asked:,} prompt tokens found ({share(found, asked)}) {seen.time_that_counts}; {evicted}"


def _queue(seen: Observation) -> str:
    answered = sum(worker.model is not None for worker in seen.workers)
    refused = f"{count(seen.counted('refused_requests'), 'request')} for blocks refused {seen.time_that_counts}"
    if not answered:
        return f"no worker was found to ask; {refused}"
    prefix = f", {seen.awaiting_prefix:,} more for a prefix that is being computed," if seen.awaiting_prefix else ""
    return f"{seen.running:,} running and {seen.waiting:,} waiting{prefix} at {count(answered, 'worker')}; {refused}"
