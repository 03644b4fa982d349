"""The picture of `pagepool top`: pool, workers and block tables, as rich draws them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pagepool.durations import to_seconds
from pagepool.inferd.v1.generation_service_pb2 import GetModelResponse
from pagepool.memd.v1.types_pb2 import BlockTable
from pagepool_client.cli.block_map import KINDS
from pagepool_client.diagnosis.figures import available_blocks
from pagepool_client.diagnosis.formats import formats, had_fp8
from pagepool_client.diagnosis.tiers import HostTier, found_below, host_tier
from pagepool_client.diagnosis.timeline import Frame, kinds_of_blocks
from pagepool_client.diagnosis.words import count, share, size, span

LEVELS = "▁▂▃▄▅▆▇█"
GLYPHS = {name: (glyph, look) for glyph, (name, look, _) in KINDS.items()}
WIDE = 100
"""Columns from which there is room for a bar beside each table."""
BAR = 20
LINES_AROUND_TABLES = 6
"""Lines of a picture that are neither the pool's nor a worker's nor a table's, at most."""


def picture(frame: Frame, width: int, height: int | None = None, trouble: str = "") -> RenderableType:
    """The whole picture; with `height`, only as many tables as fit. `trouble` says why it is not of now."""
    parts: list[RenderableType] = [_title(frame, width)]
    if trouble:
        parts.append(Text(trouble, "bold red"))
    if not frame.seen.pool.usage.total_blocks:
        parts.append(Text("not cut into blocks yet, since no worker has attached"))
        return Group(*parts, Text(), _workers(frame))
    lines = [*_pool(frame, width)]
    taken = sum(line.plain.count("\n") + 1 for line in lines) + len(frame.seen.workers) + bool(trouble)
    room = None if height is None else max(height - LINES_AROUND_TABLES - taken, 1)
    parts += [*lines, Text(), _workers(frame), Text()]
    return Group(*parts, *_tables(frame, width, room))


def cells(counts: Mapping[str, int], width: int) -> dict[str, int]:
    """Shares `width` cells out by counts, not all 0: at least one for whatever there is, else in proportion."""
    total = sum(counts.values())
    exact = {name: width * number / total for name, number in counts.items() if number}
    given = {name: max(1, int(part)) for name, part in exact.items()}
    while (over := width - sum(given.values())) != 0:
        step = 1 if over > 0 else -1
        # Whoever is farthest from its exact share gives or gets a cell; nobody gives the last one.
        able = [name for name in given if given[name] + step > 0]
        if not able:
            break  # more kinds than cells
        given[max(able, key=lambda name: step * (exact[name] - given[name]))] += step
    return given


def sparkline(history: Sequence[float], width: int) -> str:
    """The last `width` values, each from 0 to 1, as bars of eight heights; nothing at all is a blank."""
    return "".join(
        LEVELS[min(int(value * len(LEVELS)), len(LEVELS) - 1)] if value else " " for value in history[-width:]
    )


def _title(frame: Frame, width: int) -> RenderableType:
    pool = frame.seen.pool
    title = Table.grid(expand=True, padding=(0, 1, 0, 0))
    title.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    name = Path(pool.geometry.model_name).name if pool.geometry.model_name else "no model"
    facts = f"{name} on {pool.device}, {size(pool.slab_bytes)}"
    if pool.usage.total_blocks:
        facts += f": {pool.usage.total_blocks:,} blocks of {pool.block_size} tokens"
    clock = time.strftime("%H:%M:%S", time.localtime(frame.seen.at_s))
    up = f"up {span(frame.seen.uptime_s)}  {clock}" if width >= WIDE else clock
    title.add_column(justify="right", no_wrap=True, width=min(len(up), width // 2))
    title.add_row(Text.assemble(("pagepool top", "bold"), "  ", facts), Text(up, "dim"))
    return title


def _pool(frame: Frame, width: int) -> Iterator[Text]:
    kinds = kinds_of_blocks(frame.seen.pool, frame.use)
    total = frame.seen.pool.usage.total_blocks
    bar = Text("blocks   ", "bold", no_wrap=True)
    for name, length in cells(kinds, width - 9).items():
        glyph, look = GLYPHS[name]
        bar.append(glyph * length, look)
    yield bar
    legend = Text(" " * 9)
    for name, number in kinds.items():
        if number:
            glyph, look = GLYPHS[name]
            entry = Text.assemble((glyph, look), f" {number:,} {name} {share(number, total)}")
            if len(legend.plain.splitlines()[-1]) + len(entry.plain) + 2 > width:
                legend.append("\n" + " " * 9)
            elif legend.plain.strip():
                legend.append("  ")
            legend.append(entry)
    yield legend
    if len(frame.history) > 1:
        yield _labelled("held    ", f"{sparkline(frame.history, width - 15)} {share(frame.history[-1], 1)}", "green")
    yield _labelled("memory  ", _memory(frame))
    if had_fp8(frame.seen.pool):
        yield _labelled("formats ", _formats(frame, width))
    if tier := host_tier(frame.seen.pool):
        yield _labelled("host    ", _host(tier, frame, width))
    yield _labelled("prefixes", _prefixes(frame))
    yield _labelled("queue   ", _queue(frame))


def _labelled(word: str, text: str, look: str = "") -> Text:
    return Text.assemble((f"{word} ", "bold"), (text, look), no_wrap=True, overflow="ellipsis")


def _memory(frame: Frame) -> str:
    use, size_now = frame.use, frame.seen.pool.block_size
    written = (use.distinct - use.reserved) * size_now
    used = f"slots {share(use.tokens, written)} used" if written else "nothing written"
    parts = [used, f"sharing saves {use.saved:,}"]
    usage = frame.seen.pool.usage
    if usage.reserve_blocks:
        parts.append(f"in reserve {usage.reserve_blocks:,}")
    if direct := max(usage.held_blocks - use.places - usage.reserve_blocks, 0):
        parts.append(f"leases hold {direct:,}")
    if pinned := usage.pinned_blocks:
        parts.append(f"pinned {pinned:,}")
    if frame.seen.pool.counters.merged_blocks:
        parts.append(_pace(frame, "merged_blocks", "merged"))
    return ", ".join([*parts, _pace(frame, "allocated_blocks", "granted")])


def _formats(frame: Frame, width: int) -> str:
    counters = frame.seen.pool.counters
    parts = [_pace(frame, "compressed_blocks", "compressed")]
    if counters.decompressed_blocks:
        parts.append(_pace(frame, "decompressed_blocks", "decompressed"))
    if counters.blocks_over_error:
        parts.append(f"{counters.blocks_over_error:,} over the error bound")
    return _folded(formats(frame.seen.pool).words(), ", ".join(parts), width)


def _folded(now: str, lately: str, width: int) -> str:
    """One line where there is room for it, else two."""
    return f"{now}; {lately}" if len(now) + len(lately) + 11 <= width else f"{now}\n{' ' * 9}{lately}"


def _host(tier: HostTier, frame: Frame, width: int) -> str:
    counters, now = frame.seen.pool.counters, f"{tier.words()} of {size(tier.bytes)}"
    parts = [_pace(frame, "demoted_blocks", "down"), _pace(frame, "promoted_blocks", "up")]
    if there := found_below(counters.host_hit_tokens, counters.prefix_hit_tokens):
        found = frame.counted["prefix_hit_tokens"] if frame.elapsed_s else 0
        parts.append(there + (f" ({share(frame.counted['host_hit_tokens'], found)} just now)" if found else ""))
    return _folded(now, ", ".join(parts), width)


def _prefixes(frame: Frame) -> str:
    counters = frame.seen.pool.counters
    asked, found = counters.prefix_query_tokens, counters.prefix_hit_tokens
    ever = f"{share(found, asked)} of {asked:,} prompt tokens found" if asked else "no prompt looked up"
    lately = frame.counted["prefix_query_tokens"] if frame.elapsed_s else 0
    now = f" ({share(frame.counted['prefix_hit_tokens'], lately)} just now)" if lately else ""
    words = f"{ever}{now}, {_pace(frame, 'evicted_blocks', 'evicted')}"
    return f"{words}, {_pace(frame, 'prefix_pending_requests', 'waits')}" if counters.prefix_pending_requests else words


def _queue(frame: Frame) -> str:
    seen, tables = frame.seen, frame.seen.tables_with_blocks
    refused = _pace(frame, "refused_requests", "refused")
    if not any(worker.model for worker in seen.workers):
        return f"no worker to ask; {refused}"
    prefix = f" ({seen.awaiting_prefix:,} for a prefix)" if seen.awaiting_prefix else ""
    words = f"{seen.running:,} running, {seen.waiting + seen.awaiting_prefix:,} waiting{prefix}, {refused}"
    if mean := sum(len(table.block_ids) for table in tables) / len(tables) if tables else 0.0:
        words += f"; room for {int(available_blocks(seen.pool.usage) / mean):,} more of {mean:.3g} blocks each"
    return words


def _pace(frame: Frame, counter: str, word: str) -> str:
    number = frame.counted[counter]
    return f"{number / frame.elapsed_s:,.0f} {word}/s" if frame.elapsed_s else f"{number:,} {word}"


def _columns(names: str, left: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    for index, name in enumerate(names.split()):
        justify = "left" if index < left else "right"
        table.add_column(name.replace("_", " "), justify=justify, no_wrap=True, overflow="ellipsis")  # type: ignore[arg-type]
    return table


def _workers(frame: Frame) -> RenderableType:
    table = _columns("worker model dtype running waiting tokens/s prefill/s step", left=3)
    silent = []
    for worker in frame.seen.workers:
        if worker.model is None:
            words = f"{_short(worker.target)}: {worker.trouble}"
            silent.append(Text(words, "red" if worker.asked_for else "dim", no_wrap=True, overflow="ellipsis"))
        else:
            table.add_row(*_worker(worker.target, worker.model, frame))
    return Group(*([table] if table.rows else []), *silent)


def _worker(target: str, model: GetModelResponse, frame: Frame) -> Sequence[str | Text]:
    attached, rates = model.pool_epoch == frame.seen.pool.epoch, frame.workers.get(target)
    facts = (
        _short(target),
        Path(model.model).name if attached else Text("not attached to this pool", "red"),
        model.dtype,
        f"{model.running_requests:,}",
        Text(f"{model.waiting_requests:,}", "yellow" if model.waiting_requests else ""),
    )
    if rates is None:
        return (*facts, "-", "-", "-")
    step = "-" if rates.step_s is None else _amount(1e3 * rates.step_s) + " ms"
    return (*facts, _amount(rates.generated_per_s), _amount(rates.prefill_per_s), step)


def _short(target: str) -> str:
    return Path(target).stem if target.startswith("unix:") else target


def _amount(number: float) -> str:
    return f"{number:,.1f}" if number < 99.95 else f"{number:,.0f}"


def _tables(frame: Frame, width: int, room: int | None) -> Iterator[RenderableType]:
    tables = sorted(frame.seen.tables, key=lambda table: (-len(table.block_ids), table.table_id))
    if not tables:
        yield Text("no block tables: nothing runs", "dim")
        return
    shown = tables if room is None or len(tables) <= room else tables[: room - 1]
    names = "table holder priority tokens found blocks own idle" + (" share_of_the_pool" if width >= WIDE else "")
    drawn = _columns(names, left=2)
    if width >= WIDE:
        drawn.columns[-1].justify = "left"
    for table in shown:
        drawn.add_row(*_table(table, frame, wide=width >= WIDE))
    yield drawn
    if rest := tables[len(shown) :]:
        blocks = sum(len(table.block_ids) for table in rest)
        yield Text(f"and {count(len(rest), 'more table')} with {count(blocks, 'block')}", "dim")


def _table(table: BlockTable, frame: Frame, *, wide: bool) -> Sequence[str | Text]:
    blocks = len(table.block_ids)
    row: list[str | Text] = [
        f"{table.table_id}",
        table.holder or f"lease {table.lease_id}",
        f"{table.priority}",
        f"{table.num_tokens:,}",
        f"{table.cached_tokens:,}",
        "suspended" if table.suspended else f"{blocks:,}",
        f"{frame.use.own[table.table_id]:,}",
        span(to_seconds(table.idle_time)),
    ]
    if wide:
        total, taken = frame.seen.pool.usage.total_blocks, frame.use.taken[table.table_id]
        row.append(Text("█" * min(round(BAR * taken / total), BAR) + f" {share(taken, total)}", "green"))
    return row
