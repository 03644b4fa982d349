"""The pool drawn as a memory map: one glyph per place of the device, as it physically lies. Pure text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from pagepool.memd.v1.types_pb2 import BLOCK_STATE_CACHED, BLOCK_STATE_QUARANTINED, Block, BlockTable, Pool
from pagepool_client.diagnosis.formats import Places, formats, had_fp8, is_fp8, places_of
from pagepool_client.diagnosis.tiers import HostTier, host_tier, is_below
from pagepool_client.diagnosis.words import size

FREE = "·"
KINDS = {
    "█": ("held", "green", "sealed, in use"),
    "◆": ("shared", "cyan", "sealed, in use by several"),
    "▒": ("filling", "yellow", "in use, written to in part"),
    "▫": ("reserved", "yellow", "in use, not written to yet"),
    "░": ("cached", "blue", "sealed, in use by nobody: can be matched, or evicted"),
    "▚": ("FP8 held", "magenta", "split, with FP8 blocks: at least one of them is in use"),
    "▖": ("FP8 cached", "blue", "split, with FP8 blocks that are in use by nobody"),
    "✗": ("quarantined", "red", "waits for a lost worker's process to end, or moved and is read for a step more"),
    "╌": ("kept back", "dim", "holds nothing, and is kept back to compress into"),
    FREE: ("free", "dim", "holds nothing"),
}
"""Glyph: name, style, meaning. Which places are kept back is not known, only how many: they are drawn as free."""
PRECEDENCE = {FREE: 0, "░": 1, "▖": 1, "✗": 3}
"""Which of several blocks a place is drawn as; whatever is in use has 2."""

Style = Callable[[str, str], str]
"""Puts text into a named style."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A pool with its blocks and tables, read one after the other."""

    pool: Pool
    blocks: Sequence[Block] = field(default_factory=tuple)
    tables: Sequence[BlockTable] = field(default_factory=tuple)


def glyph(block: Block) -> str:
    """How a block is drawn."""
    if block.state == BLOCK_STATE_QUARANTINED:
        return "✗"
    if is_fp8(block.entry):
        return "▖" if block.state == BLOCK_STATE_CACHED else "▚"
    if block.state == BLOCK_STATE_CACHED:
        return "░"
    if not block.sealed:
        return "▒" if block.num_tokens else "▫"
    return "◆" if block.ref_count > 1 else "█"


def draw(snapshot: Snapshot, width: int, style: Style) -> list[str]:
    """Lines: the pool in figures, the map with free rows folded, the legend, and the tables with their blocks."""
    pool = snapshot.pool
    title = f"{style('pool', 'bold')} {pool.epoch:016x} on {pool.device}, {size(pool.slab_bytes)}"
    if not pool.usage.total_blocks:
        return [f"{title}: not cut into blocks yet, since no worker has attached"]
    lines = [f"{title}: {_cut(pool)}", _use(pool)]
    if had_fp8(pool):
        lines.append(_formats(pool))
    if tier := host_tier(pool):
        lines.append(_host(tier, pool))
    cells = _cells(snapshot)
    lines += ["", *_rows(cells, width, style), "", *_legend(cells, pool.usage.kept_blocks, width, style)]
    if snapshot.tables:
        lines += ["", *_tables(snapshot.tables, places_of(pool), style)]
    return lines


def _cells(snapshot: Snapshot) -> list[str]:
    """A glyph for each place; a split one has the glyph of what matters most in it."""
    places, cells = places_of(snapshot.pool), [FREE] * snapshot.pool.usage.total_blocks
    for block in snapshot.blocks:
        drawn, place = glyph(block), None if is_below(block) else places.of(block.entry)
        # The pool may have changed between two of the calls that made the snapshot.
        if place is not None and PRECEDENCE.get(drawn, 2) >= PRECEDENCE.get(cells[place], 2):
            cells[place] = drawn
    return cells


def _cut(pool: Pool) -> str:
    blocks = f"{pool.usage.total_blocks:,} blocks of {pool.block_size} tokens, {size(pool.block_bytes)} each"
    return f"{pool.geometry.model_name}; {blocks}"


def _use(pool: Pool) -> str:
    usage, counters = pool.usage, pool.counters
    counts = {
        "held": usage.held_blocks,
        "cached": usage.cached_blocks,
        "quarantined": usage.quarantined_blocks,
        "kept back (drawn as free)": usage.kept_blocks,
        "free": usage.free_blocks,
    }
    used = ", ".join(f"{count:,} {word}" for word, count in counts.items() if count)
    asked = counters.prefix_query_tokens
    return f"{used}; prefixes found: {counters.prefix_hit_tokens:,} of {asked:,} tokens" if asked else used


def _formats(pool: Pool) -> str:
    now = formats(pool)
    holes = f"; room for {now.holes:,} more in split places" if now.holes else ""
    return f"{now.words()}{holes}"


def _host(tier: HostTier, pool: Pool) -> str:
    counters = pool.counters
    return f"below: {tier.words()}; {counters.promoted_blocks:,} came up, {counters.demoted_blocks:,} went down"


def _rows(cells: Sequence[str], width: int, style: Style) -> list[str]:
    digits = len(f"{len(cells) - 1}")
    # A power of two keeps a block in its column when the map grows.
    columns = 16
    while columns * 2 + digits + 2 <= width:
        columns *= 2
    rows = [(start, cells[start : start + columns]) for start in range(0, len(cells), columns)]
    lines = []
    for is_free, group in groupby(rows, lambda row: set(row[1]) == {FREE}):
        run = list(group)
        if is_free and len(run) > 2:
            count = sum(len(row) for _, row in run)
            lines.append(style(f"{run[0][0]:>{digits}}  ⋮ {count:,} free blocks", "dim"))
        else:
            lines += [f"{style(f'{start:>{digits}}', 'dim')}  {_row(row, style)}" for start, row in run]
    return lines


def _row(cells: Sequence[str], style: Style) -> str:
    return "".join(style(char * len(list(run)), KINDS[char][1]) for char, run in groupby(cells))


def _legend(cells: Sequence[str], kept: int, width: int, style: Style) -> list[str]:
    present = {char: f"{cells.count(char):,}" for char in KINDS if char in cells}
    digits = max(len(count) for count in present.values())
    lines = []
    for char, count in present.items():
        name, look, meaning = KINDS[char]
        if char == FREE and kept:
            meaning += f"; {kept:,} of these {'is' if kept == 1 else 'are'} kept back to compress into"
        known = f"{count:>{digits}} {name:<11}"
        lines.append(f"{style(char, look)} {known} {meaning}"[: width + len(style("", look))].rstrip())
    return lines


def _tables(tables: Sequence[BlockTable], places: Places, style: Style) -> list[str]:
    lines = []
    for table in tables:
        name = f"{style(f'table {table.table_id}', 'bold')} of {table.holder or f'lease {table.lease_id}'}"
        found = f", {table.cached_tokens:,} of them found" if table.cached_tokens else ""
        where = "suspended" if table.suspended else _where(table, places)
        lines.append(f"{name}: {table.num_tokens:,} tokens{found}, {where}")
    return lines


def _where(table: BlockTable, places: Places) -> str:
    """How many blocks a table has, how many of them are unlike others, and the places of those on the device."""
    here = [place for entry in table.entries if (place := places.of(entry)) is not None]
    counts = {"in FP8": sum(map(is_fp8, table.entries)), "below": len(table.entries) - len(here)}
    unlike = ", ".join(f"{count:,} {word}" for word, count in counts.items() if count)
    blocks = f"{len(table.block_ids):,} blocks{f' ({unlike})' if unlike else ''}"
    return f"{blocks} at {_ranges(here)}" if here else blocks


def _ranges(places: Iterable[int], limit: int = 8) -> str:
    """Places in token order, neighbours joined, and what is in the same place: 0-3, 9, 5."""
    runs: list[list[int]] = []
    for place in places:
        if runs and 0 <= place - runs[-1][1] <= 1:
            runs[-1][1] = place
        else:
            runs.append([place, place])
    shown = [f"{first}-{last}" if last > first else f"{first}" for first, last in runs[:limit]]
    return ", ".join(shown) + (", …" if len(runs) > limit else "")
