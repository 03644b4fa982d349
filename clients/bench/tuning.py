"""`make bench-tune`: `pagepool tune` beside an exhaustive sweep, for a workload of short and one of long prompts.

The sweep runs every setting of a small grid, each as often as --repetitions says. Then tune searches the same grid, by
runs of its own, at most a quarter as many. The best of many noisy runs looks better than it is, so at last the
sweep's best and tune's choice run against each other, in turn; that gap is the one that is judged.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import daemons
import random_model

import cpu
from pagepool_client.cli import tune_flags
from pagepool_client.cli.main import parser as command
from pagepool_client.cli.terminal import Terminal
from pagepool_client.cli.tune import Measurer, most_runs, search
from pagepool_client.cli.tune_flags import Wanted
from pagepool_client.cli.tune_stand import Load, Place, Stand, load_of
from pagepool_client.diagnosis.words import share
from pagepool_client.tuning.figures import score
from pagepool_client.tuning.grid import Grid
from pagepool_client.tuning.result import Result
from pagepool_client.tuning.sample import longest, sample
from pagepool_client.tuning.trials import Point, Trials
from pagepool_client.workload.format import WorkloadRequest
from pagepool_client.workload.synthetic import Shape, generate

SHAPES = {
    "short": Shape(requests=48, prompt_mean=24, output_mean=24, spread=0.6, turns=1, systems=2, system_tokens=16),
    "long": Shape(requests=24, prompt_mean=384, output_mean=12, spread=0.4, turns=1, systems=2, system_tokens=64),
}
"""Prompts and answers of either workload; shapes without turns, so that each request has its own prompt."""
BOUND = 0.05
"""The share by which tune's choice may lie under the best."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What all parts work on."""

    stand: Stand
    grid: Grid
    wanted: Wanted
    loads: Mapping[str, Load]


def sweep(bench: Bench) -> dict[str, Trials]:
    """Every setting, by workload. Either workload runs at the same daemons, so that each setting starts them once."""
    found = {name: Trials() for name in bench.loads}
    for number, point in enumerate(bench.grid.points, 1):
        setting = bench.grid.setting(point)
        rates = []
        for name in list(bench.loads) * bench.wanted.repetitions:
            figures = bench.stand.measure(setting, bench.loads[name])
            found[name].add(point, score(figures, bench.wanted.metrics))
            rates.append(f"{name} {figures.throughput:.0f}")
        print(f"    sweep {number:2}: {setting.flags}: tokens/s {', '.join(rates)}", flush=True)
    return found


def duel(bench: Bench, name: str, one: Point, other: Point, rounds: int) -> Trials:
    """Two settings in turn, each twice at a time, since a start takes longer than a run."""
    trials = Trials()
    for number in range(rounds):
        for point in (one, other) if number % 2 else (other, one):
            for _ in range(2):
                figures = bench.stand.measure(bench.grid.setting(point), bench.loads[name])
                trials.add(point, score(figures, bench.wanted.metrics))
    return trials


def compare(bench: Bench, name: str, swept: Trials, rounds: int) -> None:
    """Tune's search for one workload, and how far it comes."""
    measurer = Measurer(bench.stand, bench.loads[name], bench.grid, bench.wanted, Terminal())
    result = search(bench.grid, bench.wanted, measurer)
    best = swept.best()
    assert best is not None
    chosen = result.choice.point
    print(f"\n{name}")
    line("sweep's best", bench.grid.setting(best).flags)
    line("tune's choice", bench.grid.setting(chosen).flags)
    line("runs, sweep and tune", f"{bench.wanted.runs(bench.grid)} and {len(result.runs)}")
    line("noise, sweep and tune", f"{share(swept.noise, 1)} and {share(result.trials.noise, 1)} (standard deviation)")
    if chosen == best:
        line("tune's choice under the best", "0 %, the same setting")
    else:
        line("tune's choice under the best", f"{percent(swept, chosen, best)} by the sweep's own runs")
        trials = duel(bench, name, best, chosen, rounds)
        gap = -math.expm1(trials.mean(chosen) - trials.mean(best))
        sure = "a difference" if trials.differs(chosen, best) else "no difference, by its noise"
        judged = "" if gap <= BOUND else "; MISSED"
        line("    in runs in turn", f"{100 * gap:.1f} % ({sure}; bound: at most {100 * BOUND:.0f} %{judged})")
    line("settings called none by tune", nones(result, swept))


def nones(result: Result, swept: Trials) -> str:
    """Of the settings in which tune saw no difference to its choice, those in which the sweep saw one."""
    chosen = result.choice.point
    beside = [point for point in result.points if point != chosen]
    none = [point for point in beside if (against := result.against(point)) is not None and against.none]
    seen = sum(swept.differs(point, chosen) for point in none)
    return f"{len(none)} of {len(beside)}; in {seen} of them the sweep saw a difference"


def percent(trials: Trials, point: Point, best: Point) -> str:
    """By how much a setting lies under the best."""
    return f"{-100 * math.expm1(trials.mean(point) - trials.mean(best)):.1f} %"


def line(label: str, text: str) -> None:
    """One figure."""
    print(f"    {label:32} {text}", flush=True)


def workloads(wanted: Wanted) -> Iterator[tuple[str, list[WorkloadRequest]]]:
    """Each by name, as a run replays it."""
    for name, shape in SHAPES.items():
        yield name, sample(list(generate(shape, 0)), wanted.requests, wanted.within_s)


def model_of(options: argparse.Namespace, place: Path) -> str:
    """The model named, or a random one that is small enough for many runs."""
    if options.model:
        return str(options.model)
    folder = place / "model"
    random_model.write_config(folder, "tiny")
    random_model.write_tokenizer(folder, random_model.SHAPES["tiny"]["vocab_size"])
    random_model.write_weights(folder)
    return str(folder)


def parse() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=SHAPES, help="one workload")
    parser.add_argument("--model", help="as inferd takes it (default: a small random one)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", default="1", help="one by default: clients and the front have the other cores")
    parser.add_argument("--block-sizes", default="8,16,32,128")
    parser.add_argument("--pool-shares", default="1,0.25")
    parser.add_argument("--batch-tokens", default="32,128,512")
    parser.add_argument("--pool-bytes", default="8MiB")
    parser.add_argument("--max-num-seqs", default="32")
    parser.add_argument("--repetitions", default="2")
    parser.add_argument("--rounds", type=int, default=2, help="of the runs in turn")
    return parser.parse_args()


def wanted_of(options: argparse.Namespace, model: str) -> Wanted:
    """What `pagepool tune` would be told."""
    words = ["tune", "--workload", "-", "--model", model, "--within", "0", "--requests", "1000"]
    for name in ("dtype", "threads", "block_sizes", "pool_shares", "batch_tokens", "pool_bytes", "max_num_seqs"):
        words += [f"--{name.replace('_', '-')}", getattr(options, name)]
    return tune_flags.checked(command().parse_args([*words, "--repetitions", options.repetitions]))


def run(options: argparse.Namespace, place: Path) -> None:
    """The sweep, then tune, workload by workload."""
    wanted = wanted_of(options, model_of(options, place))
    made = {name: requests for name, requests in workloads(wanted) if options.only in (None, name)}
    with Stand(Place(place / "daemons", wanted.memd_flags, wanted.inferd_flags), lambda _text, _s: None) as stand:
        pool, model = stand.look(wanted.block_sizes[0], None)
        grid = tune_flags.grid_of(wanted, pool, max(map(longest, made.values())))
        loads = {name: load_of(requests, model, wanted) for name, requests in made.items()}
        bench = Bench(stand, grid, wanted, loads)
        print(
            f"{math.prod(grid.sizes)} settings, {wanted.repetitions} runs each; tune may take {most_runs(grid, wanted)}"
        )
        for name, trials in sweep(bench).items():
            compare(bench, name, trials, options.rounds)


def main() -> None:
    """Print all figures."""
    options, begun = parse(), time.monotonic()
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(143))  # the daemons are stopped on the way out
    print(f"{cpu.hardware()}; {options.model or 'a random model of 2 layers'} {options.dtype}", flush=True)
    with daemons.folder() as place:
        run(options, place)
    print(f"\n{time.monotonic() - begun:.0f} s in all")


if __name__ == "__main__":
    main()
