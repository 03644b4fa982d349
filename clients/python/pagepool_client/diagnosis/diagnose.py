"""From an observation to findings: every rule in turn, problems first. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pagepool_client.diagnosis import ahead, compressing, memory, queueing, reuse, yielding
from pagepool_client.diagnosis.figures import measure
from pagepool_client.diagnosis.findings import Case, Finding, Severity
from pagepool_client.diagnosis.observation import Observation

RULES: Sequence[Callable[[Case], Finding | None]] = (
    memory.out_of_blocks,
    yielding.suspended_tables,
    memory.held_by_leases,
    memory.pinned_prefixes,
    memory.idle_tables,
    memory.lost_workers,
    memory.waste_inside_blocks,
    ahead.reserved_ahead,
    compressing.half_empty_places,
    compressing.compression_in_vain,
    queueing.queue_before_a_pool_with_room,
    reuse.low_hit_rate,
)


def diagnose(seen: Observation) -> list[Finding]:
    """What ails the pool: problems, then advice, each in the order of RULES; nothing for a healthy pool."""
    findings = list(queueing.workers_in_trouble(seen))
    if not seen.pool.usage.total_blocks:
        return [*findings, queueing.pool_without_blocks(seen)]
    case = Case(seen, measure(seen))
    findings += [finding for rule in RULES if (finding := rule(case)) is not None]
    return sorted(findings, key=lambda finding: finding.severity is not Severity.PROBLEM)
