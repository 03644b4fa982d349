"""The rule about blocks that tables have ahead of their tokens. Pure.

A worker's table begins with the blocks of its prompt and a token more, and grows with its tokens: what it has ahead is
the part of its prompt that is still to be computed, or, after several preemptions, all that it will ever need. A
client's table has what its client asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagepool.memd.v1.types_pb2 import BlockTable
from pagepool_client.diagnosis.findings import Case, Finding, Remedy
from pagepool_client.diagnosis.words import count, share

SPARE_BLOCKS = 2
"""More blocks ahead than this are a prompt's: a table that grows takes one or two."""


def reserved_ahead(case: Case) -> Finding | None:
    """Blocks are short, and a quarter of those held is in tables whose tokens are still to be computed."""
    reserved, held = case.figures.reserved_blocks, case.seen.pool.usage.held_blocks
    if not (case.pressed and reserved) or 4 * reserved < held:
        return None
    size_now = case.seen.pool.block_size
    ahead = {table.table_id: _ahead(table, size_now) for table in case.seen.tables_with_blocks}
    owners = sum(blocks > 0 for blocks in ahead.values()) or 1
    detail = (
        f"{reserved:,} of {count(held, 'held block')} ({share(reserved, held)}) hold no token yet: "
        f"{count(owners, 'table')} {'has' if owners == 1 else 'have'} {reserved / owners:.3g} blocks each for tokens "
        "still to be computed."
    )
    if not (remedies := [*_of_workers(case, ahead), *_of_clients(case, ahead)]):
        return None
    return Finding(
        "reserved_ahead",
        case.severity,
        "Tables hold blocks long before their tokens come",
        detail,
        {"reserved_blocks": reserved, "held_blocks": held, "tables": owners},
        remedies,
    )


def _ahead(table: BlockTable, block_size: int) -> int:
    return len(table.block_ids) - -(-table.num_tokens // block_size)


def _worker_tables(case: Case) -> set[int]:
    return {holder.table_id for holder in case.figures.holders if holder.table_id and holder.worker}


def _of_workers(case: Case, ahead: dict[int, int]) -> Sequence[Remedy]:
    """Prompts that are admitted together and computed one after the other: fewer at once."""
    running = _worker_tables(case)
    begun = [table_id for table_id in running if ahead.get(table_id, 0) > SPARE_BLOCKS]
    fewer = len(running) - len(begun) + 1
    if len(begun) < 2:
        return ()
    later = sum(sorted(ahead[table_id] for table_id in begun)[1:])
    effect = (
        f"instead of the {len(running):,} that run now: prompts are computed one after the other, and those behind "
        f"then wait for their turn without blocks; now {len(begun):,} have some, {count(later, 'block')} too early"
    )
    return [Remedy("inferd", "--max-num-seqs", f"{fewer}", effect)]


def _of_clients(case: Case, ahead: dict[int, int]) -> Sequence[Remedy]:
    """A client's table has what its client asked for, and can be given the rest when it is needed."""
    workers = _worker_tables(case)
    clients = {table_id: blocks for table_id, blocks in ahead.items() if table_id not in workers and blocks}
    if not clients:
        return ()
    table_id = max(clients, key=lambda one: clients[one])
    effect = f"as its tokens come, instead of {count(clients[table_id], 'block')} ahead of them"
    return [Remedy("client", "ExtendBlockTable", f"table_id {table_id}", effect)]
