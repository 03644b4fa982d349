"""The flags of `pagepool tune`, checked, and the settings that they span."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pagepool.errors import invalid_field
from pagepool.memd.v1.types_pb2 import Pool
from pagepool_client.diagnosis.sizing import advised_block_size
from pagepool_client.tuning.figures import METRICS, Objective
from pagepool_client.tuning.grid import Grid, pools
from pagepool_client.workload.format import WorkloadRequest

BLOCK_SIZES = (8, 16, 32, 64, 128)
BUDGETS = {"cpu": (128, 256, 512, 1024), "gpu": (1024, 2048, 4096, 8192, 16384)}
OWN_BUDGET = {"cpu": 512, "gpu": 8192}
"""inferd's defaults, from which the search begins."""
N = TypeVar("N", int, float)
MAX_TOKENS, MAX_SECONDS, MAX_REQUESTS = 1 << 20, 86_400.0, 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What the flags ask for."""

    block_sizes: tuple[int, ...]
    pool_shares: tuple[float, ...]
    batch_tokens: tuple[int, ...] | None
    """None: those of the device."""
    requests: int
    within_s: float | None
    cut_s: float | None
    patience_s: float
    repetitions: int
    metrics: tuple[str, ...]
    objective: Objective
    memd_flags: Sequence[str]
    inferd_flags: Sequence[str]

    def runs(self, grid: Grid) -> int:
        """What an exhaustive sweep of the grid takes."""
        return math.prod(grid.sizes) * self.repetitions


def add(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    parser.add_argument("--workload", type=Path, required=True, metavar="FILE", help="as `pagepool workload` writes it")
    parser.add_argument("--model", metavar="MODEL", help="a hub id, a folder, a GGUF file, or smollm2 (the default)")
    parser.add_argument("--dtype", metavar="DTYPE", help="of weights and pool: float32, bfloat16 or float16")
    parser.add_argument("--threads", metavar="N", help="threads of the engine's arithmetic")
    parser.add_argument("--max-num-seqs", metavar="N", help="requests that inferd runs at once")
    parser.add_argument("--pool-bytes", metavar="SIZE", help="memory for the pool, such as 2GiB (default: memd's own)")
    grid = parser.add_argument_group("what is tried")
    grid.add_argument("--block-sizes", default=_list(BLOCK_SIZES), metavar="N,N", help=f"({_list(BLOCK_SIZES)})")
    grid.add_argument("--pool-shares", default="1,0.5,0.25", metavar="X,X", help="of --pool-bytes (1,0.5,0.25)")
    budgets = " or ".join(f"{_list(each)} on a {device.upper()}" for device, each in BUDGETS.items())
    grid.add_argument("--batch-tokens", metavar="N,N", help=f"for --max-batch-tokens ({budgets})")
    runs = parser.add_argument_group("how it is measured")
    runs.add_argument("--requests", type=int, default=32, metavar="N", help="of the workload, in each run (32)")
    runs.add_argument(
        "--within",
        default="5",
        metavar="SECONDS",
        help="all of them come so fast, their pattern kept; own: as written (5)",
    )
    runs.add_argument("--cut", type=float, metavar="SECONDS", help="end each run then (default: when all is answered)")
    runs.add_argument(
        "--patience",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="a run fails if no token comes for so long (120)",
    )
    runs.add_argument(
        "--repetitions", type=int, default=2, metavar="N", help="of a sweep whose runs tune takes a quarter of (2)"
    )
    runs.add_argument(
        "--metric", action="append", choices=METRICS, help="what counts; repeat for several, equally (throughput)"
    )
    runs.add_argument("--slo-first", type=float, metavar="SECONDS", help="for goodput: most to the first token")
    runs.add_argument("--slo-next", type=float, metavar="SECONDS", help="for goodput: most to the next, on average")
    parser.add_argument("--json", action="store_true", help="print one JSON value instead of the table")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the plot into this file too, as SVG")


def checked(args: argparse.Namespace) -> Wanted:
    """Raises INVALID_FIELD, naming the flag."""
    sizes = _numbers("--block-sizes", args.block_sizes, int)
    for size in sizes:
        if size not in BLOCK_SIZES:
            raise invalid_field("--block-sizes", size, "a power of two from 8 to 128", "leave it out")
    shares = _numbers("--pool-shares", args.pool_shares, float)
    for share in shares:
        _within("--pool-shares", share, 0.001, 1.0)
    budgets = None if args.batch_tokens is None else _numbers("--batch-tokens", args.batch_tokens, int)
    for budget in budgets or ():
        _within("--batch-tokens", budget, 1, MAX_TOKENS)
    _within("--requests", args.requests, 1, MAX_REQUESTS)
    _within("--repetitions", args.repetitions, 1, 100)
    for flag in ("--cut", "--patience", "--slo-first", "--slo-next"):
        if (value := getattr(args, flag[2:].replace("-", "_"))) is not None:
            _within(flag, value, 0.001, MAX_SECONDS)
    _writable(args.plot)
    return Wanted(
        block_sizes=sizes,
        pool_shares=shares,
        batch_tokens=budgets,
        requests=args.requests,
        within_s=_within_s(args.within),
        cut_s=args.cut,
        patience_s=args.patience,
        repetitions=args.repetitions,
        metrics=_metrics(args),
        objective=Objective(args.slo_first or math.inf, args.slo_next or math.inf),
        memd_flags=_given(args, "pool_bytes"),
        inferd_flags=_given(args, "model", "dtype", "threads", "max_num_seqs"),
    )


def grid_of(wanted: Wanted, pool: Pool, longest: int) -> Grid:
    """The settings to try for the largest pool that there is. Raises REQUEST_TOO_LARGE if the longest fits none."""
    device = "gpu" if pool.device.startswith("cuda") else "cpu"
    tokens = pool.usage.total_blocks * pool.block_size
    return Grid(
        block_sizes=wanted.block_sizes,
        pool_tokens=pools(wanted.pool_shares, tokens, longest, wanted.block_sizes),
        batch_tokens=wanted.batch_tokens or BUDGETS[device],
        block_size=advised_block_size(pool),
        budget=OWN_BUDGET[device],
    )


def require_served(wanted: Wanted, requests: Sequence[WorkloadRequest], context: int) -> None:
    """Raises INVALID_FIELD if a request is longer than the model's context, or a metric measures nothing."""
    longest = max(one.prompt_tokens + one.output_tokens for one in requests)
    if longest > context:
        limit = f"of requests of at most {context} tokens, the model's context"
        raise invalid_field("--workload", f"with a request of {longest}", limit, "leave longer ones out")
    if max(one.output_tokens for one in requests) < 2 and any(name.startswith("itl") for name in wanted.metrics):
        limit = "one that is measured; every answer of the workload has one token"
        raise invalid_field(
            "--metric", next(n for n in wanted.metrics if n.startswith("itl")), limit, "take another one"
        )


def _metrics(args: argparse.Namespace) -> tuple[str, ...]:
    has_objective = args.slo_first is not None or args.slo_next is not None
    names = tuple(dict.fromkeys(args.metric or (["goodput"] if has_objective else ["throughput"])))
    if "goodput" in names and not has_objective:
        limit = "given with --slo-first or --slo-next: goodput counts requests that are served in time"
        raise invalid_field("--metric", "goodput", limit, "give one of them")
    return names


def _within_s(text: str) -> float | None:
    if text == "own":
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= MAX_SECONDS:
        raise invalid_field("--within", text, f"own, or from 0 to {MAX_SECONDS:.0f} seconds", "leave it out for 5")
    return seconds


def _numbers(flag: str, text: str, kind: Callable[[str], N]) -> tuple[N, ...]:
    try:
        found = sorted({kind(word) for word in text.split(",")})
    except ValueError as error:
        raise invalid_field(flag, text, "numbers with commas between them", "correct it") from error
    return tuple(found)


def _within(flag: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise invalid_field(flag, value, f"from {least:g} to {most:g}", "correct it")


def _writable(plot: Path | None) -> None:
    if plot is not None and not (plot.suffix == ".svg" and plot.parent.is_dir()):
        raise invalid_field("--plot", plot, "a file in an existing folder, with a name that ends in .svg", "correct it")


def _given(args: argparse.Namespace, *names: str) -> list[str]:
    pairs = [(f"--{name.replace('_', '-')}", getattr(args, name)) for name in names]
    return [word for flag, value in pairs if value is not None for word in (flag, value)]


def _list(values: Sequence[int]) -> str:
    return ",".join(map(str, values))
