"""A tuning as a table and lines for people, and as one JSON value for machines. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict

from pagepool_client.diagnosis.words import count, share
from pagepool_client.tuning.figures import METRICS, Figures
from pagepool_client.tuning.result import FLAGS, Against, Result
from pagepool_client.tuning.trials import Point

SHOWN = ("throughput", "ttft-p50", "ttft-p99", "itl-p50", "itl-p99")
"""The metrics of the table, whichever count."""


def table(result: Result) -> list[str]:
    """A line for each setting that ran, under a heading: its figures, or what went wrong."""
    names = [*SHOWN, *(["goodput"] if "goodput" in result.metrics else [])]
    heading = ["block", "blocks", "budget", "runs", *(METRICS[name].label for name in names), "difference"]
    rows = [heading, *(_row(result, point, names) for point in result.points)]
    widths = [max(len(row[column]) for row in rows if column < len(row) - 1) for column in range(len(heading) - 1)]
    return [
        "  ".join([*(cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)), row[-1]])
        for row in rows
    ]


def reasons(result: Result) -> list[str]:
    """Why each flag has the value that it has: the values beside it, and the noise."""
    lines = [f"{FLAGS[axis]} {result.value(result.choice.point, axis)}: {_beside(result, axis)}" for axis in range(3)]
    trials = result.trials
    if any(result.differs_elsewhere(point, axis) for axis in range(3) for point in result.line(axis)):
        lines.append("* ran with other values of the other flags only")
    lines.append(
        f"noise: runs of one setting have a standard deviation of {share(math.expm1(trials.noise), 1)}; a difference "
        f"under {share(result.least_difference, 1)} is none"
    )
    took = f"{count(len(result.runs), 'run')}, where trying every setting would take {result.sweep_runs:,}"
    failed = sum(not result.trials.runs(point) for point in result.points)
    return [*lines, f"{took}; {count(failed, 'setting')} failed" if failed else took]


def as_json(result: Result) -> dict[str, object]:
    """All of it. Times are seconds, shares are of 1."""
    chosen = result.grid.setting(result.choice.point)
    return {
        "recommended": asdict(chosen),
        "metrics": list(result.metrics),
        "noise": {
            "standard_deviation": math.expm1(result.trials.noise),
            "degrees_of_freedom": result.trials.freedom,
            "least_difference": result.least_difference,
        },
        "runs": len(result.runs),
        "exhaustive_runs": result.sweep_runs,
        "settings": [_setting_json(result, point) for point in result.points],
    }


def beside(result: Result, point: Point, axis: int) -> str:
    """A setting's difference on the line of an axis; a star says that other flags differ too."""
    return verdict(result.against(point)) + ("*" if result.differs_elsewhere(point, axis) else "")


def verdict(against: Against | None) -> str:
    """A difference in words."""
    if against is None:
        return "failed"
    return "none" if against.none else f"{'+' if against.share > 0 else '-'}{share(abs(against.share), 1)}"


def _row(result: Result, point: Point, names: Sequence[str]) -> list[str]:
    setting, figures = result.grid.setting(point), result.figures(point)
    cells = [f"{setting.block_size}", f"{setting.num_blocks:,}", f"{setting.batch_tokens:,}"]
    if figures is None:
        tried = sum(run.point == point for run in result.runs)
        return [*cells, f"{tried}", *("-" for _ in names), f"failed: {result.trouble(point)}"]
    last = "recommended" if point == result.choice.point else verdict(result.against(point))
    return [*cells, f"{result.trials.runs(point)}", *(_cell(figures, name) for name in names), last]


def _cell(figures: Figures, name: str) -> str:
    value = METRICS[name].value(figures)
    if value is None:
        return "-"
    if METRICS[name].more_is_better:
        return f"{value:.1f}" if value < 1000 else f"{value:,.0f}"
    return f"{1000 * value:.3g} ms" if value < 1 else f"{value:.3g} s"


def _beside(result: Result, axis: int) -> str:
    line = [point for point in result.line(axis) if point != result.choice.point]
    if not line:
        return "no other value ran beside it"
    words = [f"{result.value(point, axis):,}: {beside(result, point, axis)}" for point in line]
    equal = any((against := result.against(point)) is not None and against.none for point in line)
    kept = (
        "nearest to what practitioners advise",
        "the smaller pool serves as well",
        "the smaller budget does as well",
    )
    return f"{', '.join(words)}{'; of equals, ' + kept[axis] if equal else ''}"


def _setting_json(result: Result, point: Point) -> dict[str, object]:
    against = result.against(point)
    runs = [run for run in result.runs if run.point == point]
    return {
        **asdict(result.grid.setting(point)),
        "runs": [{"trouble": run.trouble} if run.figures is None else asdict(run.figures) for run in runs],
        "difference": None if against is None else against.share,
        "within_noise": None if against is None else against.none,
    }
