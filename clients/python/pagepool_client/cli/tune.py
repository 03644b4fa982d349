"""`pagepool tune`: which block size, pool size and batch budget serve a workload best."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from pagepool.errors import PagepoolError, Reason
from pagepool.memd.v1.types_pb2 import Pool
from pagepool_client.cli import tune_flags
from pagepool_client.cli.terminal import Terminal
from pagepool_client.cli.tune_flags import Wanted
from pagepool_client.cli.tune_stand import Load, Place, Stand, load_of
from pagepool_client.diagnosis.words import count, size_flag, span
from pagepool_client.tuning.figures import score
from pagepool_client.tuning.grid import Grid
from pagepool_client.tuning.plot import svg, text_plot
from pagepool_client.tuning.report import as_json, reasons, table
from pagepool_client.tuning.result import Result, Run
from pagepool_client.tuning.sample import longest, sample
from pagepool_client.tuning.search import LEAST_RUNS, Search
from pagepool_client.tuning.trials import Point
from pagepool_client.workload import format as files

FIRST_BLOCK_SIZE, FIRST_BUDGET = 16, 512


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    description = (
        "Replay a workload at daemons of its own with different block sizes, pool sizes and batch budgets, and "
        "recommend --block-size, --max-num-blocks and --max-batch-tokens. It takes at most a quarter of the runs of an "
        "exhaustive sweep. Differences within the noise are called none, and then what practitioners advise wins."
    )
    parser = commands.add_parser("tune", help="find the best sizes for a workload", description=description)
    tune_flags.add(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Search, then print what was found."""
    wanted = tune_flags.checked(args)
    requests = sample(files.read(args.workload), wanted.requests, wanted.within_s)
    place = Place(Path(tempfile.mkdtemp(prefix="pagepool-tune-")), wanted.memd_flags, wanted.inferd_flags)
    terminal.note(f"the daemons' logs: {place.folder}")
    with Stand(place, terminal.status) as stand:
        budgets = wanted.batch_tokens
        pool, model = stand.look(
            nearest(wanted.block_sizes, FIRST_BLOCK_SIZE), nearest(budgets, FIRST_BUDGET) if budgets else None
        )
        tune_flags.require_served(wanted, requests, model.max_context_tokens)
        grid = tune_flags.grid_of(wanted, pool, longest(requests))
        load = load_of(requests, model, wanted)
        result = search(grid, wanted, Measurer(stand, load, grid, wanted, terminal))
    shutil.rmtree(place.folder)  # not after a failure: then the logs are wanted
    if args.plot:
        args.plot.write_text(svg(result, f"pagepool tune: {args.workload.name} on {model.model}"), encoding="utf-8")
    if args.json:
        told = {"model": model.model, "device": pool.device, "workload": str(args.workload), "requests": len(requests)}
        terminal.line(json.dumps({**told, **as_json(result)}, indent=1))
    else:
        terminal.line("\n".join(report(result, pool, terminal)))
    return 0


class Measurer:
    """Runs points, and keeps what came of it in `runs`."""

    def __init__(self, stand: Stand, load: Load, grid: Grid, wanted: Wanted, terminal: Terminal) -> None:
        self._stand, self._load, self._grid, self._wanted, self._terminal = stand, load, grid, wanted, terminal
        self._most = most_runs(grid, wanted)
        self.runs: list[Run] = []

    def measure(self, point: Point) -> float | None:
        """One run: its score, or None if it failed."""
        setting, begun = self._grid.setting(point), time.monotonic()
        self._terminal.status(f"run {len(self.runs) + 1} of at most {self._most}: {setting.flags}")
        try:
            found = self._stand.measure(setting, self._load)
        except PagepoolError as error:
            self._failed(point, error.message)
            return None
        scored = score(found, self._wanted.metrics)
        if scored is None:
            self._failed(point, "no second token came before the cut")
            return None
        self.runs.append(Run(point, found))
        took = time.monotonic() - begun
        self._terminal.note(f"{setting.flags}: {found.throughput:.1f} tokens/s ({span(took)})")
        return scored

    def _failed(self, point: Point, trouble: str) -> None:
        self.runs.append(Run(point, None, trouble))
        self._terminal.note(f"{self._grid.setting(point).flags}: failed: {trouble}")


def search(grid: Grid, wanted: Wanted, measurer: Measurer) -> Result:
    """The result. Raises PagepoolError if no setting served the workload."""
    searcher = Search(grid, most_runs(grid, wanted), measurer.measure)
    choice = searcher.choose()
    if choice is None:
        message = f"no setting served the workload; the first one failed: {measurer.runs[0].trouble}"
        raise PagepoolError(Reason.INTERNAL_ERROR, message)
    return Result(grid, searcher.trials, choice, measurer.runs, wanted.metrics, wanted.runs(grid))


def most_runs(grid: Grid, wanted: Wanted) -> int:
    """A quarter of an exhaustive sweep's runs; a small grid is swept."""
    return max(LEAST_RUNS, wanted.runs(grid) // 4)


def report(result: Result, pool: Pool, terminal: Terminal) -> list[str]:
    """All of it for people."""
    chosen = result.grid.setting(result.choice.point)
    token_bytes = pool.block_bytes / pool.block_size
    bytes_needed = size_flag(round(token_bytes * chosen.block_size * chosen.num_blocks))
    memd = f"--block-size {chosen.block_size} --max-num-blocks {chosen.num_blocks}"
    return [
        *table(result),
        "",
        *text_plot(result, terminal.width),
        "",
        *reasons(result),
        "",
        terminal.styled("recommended", "bold", "green"),
        f"  memd    {memd}    ({count(chosen.num_blocks, 'block')}: {bytes_needed})",
        f"  inferd  --max-batch-tokens {chosen.batch_tokens}",
    ]


def nearest(values: Sequence[int], wanted: int) -> int:
    """The value nearest to what is wanted."""
    return min(values, key=lambda value: abs(value - wanted))
