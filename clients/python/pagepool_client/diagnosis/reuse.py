"""Rules about prefix reuse: why prompts find little of what was computed before. Pure; each returns one or None."""

from __future__ import annotations

from collections.abc import Mapping

from pagepool_client.diagnosis.findings import Case, Finding, Remedy, Severity
from pagepool_client.diagnosis.sizing import advised_block_size, more_below, more_blocks
from pagepool_client.diagnosis.words import count, share, span

ENOUGH_TOKENS = 1_000
"""Fewer asked for say nothing about a hit rate."""
COLD_S = 300.0
"""So long after its start, a pool that found little may just not have seen anything twice."""


def low_hit_rate(case: Case) -> Finding | None:
    """Under a fifth of the prompts' tokens was found: evicted, never sealed, not there yet, or never the same."""
    asked, found = case.seen.counted("prefix_query_tokens"), case.seen.counted("prefix_hit_tokens")
    if asked < ENOUGH_TOKENS or 5 * found >= asked:
        return None
    granted, evicted = case.seen.counted("allocated_blocks"), case.seen.counted("evicted_blocks")
    asked_words = (
        f"{found:,} of {asked:,} prompt tokens ({share(found, asked)}) were found {case.seen.time_that_counts}; "
        f"{evicted:,} of {count(granted, 'granted block')} pushed a cached one out, and "
        f"{count(case.figures.sealed, 'block')} can be found now."
    )
    numbers = {
        "query_tokens": asked,
        "hit_tokens": found,
        "allocated_blocks": granted,
        "evicted_blocks": evicted,
        "sealed_blocks": case.figures.sealed,
    }
    if evicted and 10 * evicted >= granted:
        return _evicted(case, asked_words, numbers)
    if not (case.figures.sealed or evicted):
        return _never_full(case, asked_words, numbers)
    if case.seen.uptime_s < COLD_S:
        return _cold(case, asked_words, numbers)
    return _distinct(case, asked_words, numbers)


def _evicted(case: Case, asked: str, numbers: Mapping[str, int]) -> Finding:
    # At most twice the pool: what was evicted may itself have been evicted before.
    needed = case.total + min(numbers["evicted_blocks"], case.total)
    detail = f"{asked} Prefixes are evicted before somebody asks for them again."
    remedies = [*more_blocks(case.seen.pool, needed), *more_below(case)]
    numbers = {**numbers, "needed_blocks": needed}
    return Finding("prefixes_evicted", Severity.PROBLEM, "Few prefixes are found: evicted", detail, numbers, remedies)


def _never_full(case: Case, asked: str, numbers: Mapping[str, int]) -> Finding:
    now = case.seen.pool.block_size
    detail = f"{asked} No block was ever full, and only full ones can be found: prompts are shorter than {now} tokens."
    if now > 8:
        value, effect = "8", "prompts from 9 tokens on can be found"
        remedy = Remedy("memd", "--block-size", value, effect)
    else:
        remedy = Remedy("request", "text", "longer than 8 tokens", "blocks cannot be smaller: these prompts are cheap")
    return Finding("prompts_too_short", Severity.ADVICE, "No prompt fills a block", detail, numbers, [remedy])


def _cold(case: Case, asked: str, numbers: Mapping[str, int]) -> Finding:
    detail = (
        f"{asked} memd runs for {span(case.seen.uptime_s)}, and nothing of use was evicted: the pool is cold, so each "
        "prefix was computed for the first time."
    )
    effect = "one request of one token for each prompt that users share, before they come: it fills the pool"
    remedy = Remedy("request", "max_tokens", "1", effect)
    return Finding(
        "pool_is_cold", Severity.ADVICE, "Few prefixes are found: the pool is cold", detail, numbers, [remedy]
    )


def _distinct(case: Case, asked: str, numbers: Mapping[str, int]) -> Finding:
    pool, tables = case.seen.pool, [table for table in case.seen.tables if table.block_ids]
    first = len({table.block_ids[0] for table in tables})
    running = (
        f" The {count(len(tables), 'table')} of now begin with {count(first, 'different block')}." if tables else ""
    )
    detail = f"{asked} Little was evicted, so the prompts themselves differ, early on or in their salt.{running}"
    remedies = [
        Remedy(
            "request", "text", "what all share first", "a name, a date or an id at the beginning hides all behind it"
        ),
        Remedy("request", "cache_salt", "one for all who may share", "prefixes of different salts are never shared"),
    ]
    advised = advised_block_size(pool)
    if pool.block_size > advised:
        effect = (
            f"only blocks that are full can be found: of a common prefix, up to {pool.block_size - 1} tokens may be "
            "computed again"
        )
        remedies.append(Remedy("memd", "--block-size", f"{advised}", effect))
    numbers = {**numbers, "tables": len(tables), "first_blocks": first}
    title = "Few prefixes are found: prompts differ"
    return Finding("prompts_differ", Severity.ADVICE, title, detail, numbers, remedies)
