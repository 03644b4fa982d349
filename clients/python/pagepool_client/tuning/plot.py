"""A tuning as a picture: lines of text for a terminal, and SVG for everything else. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from xml.sax.saxutils import escape

from pagepool_client.tuning.report import beside
from pagepool_client.tuning.result import FLAGS, Result
from pagepool_client.tuning.trials import Point

PANEL, HEIGHT, LEFT, TOP, BOTTOM = 280, 300, 56, 40, 46
_STYLE = (
    "text{font:12px sans-serif;fill:#333}.title{font-weight:bold}.axis{stroke:#bbb}.near{stroke:#2a78d6;stroke-width:2}"
    ".run{fill:#2a78d6;fill-opacity:.35}.mean{fill:#2a78d6}.best{fill:#d1491b}.bestline{stroke:#d1491b;stroke-width:2}"
)


def text_plot(result: Result, width: int) -> list[str]:
    """For each flag a line for each value beside the recommended one: its mean and where that may lie, on one scale."""
    low, high = _range(result)
    room = max(20, min(width, 100) - 34)
    least, most = f"{100 * low:.0f} %", f"{100 * high:.0f} %"
    lines = [f"{'score':>10}  {least}{most.rjust(room - len(least))}  of the recommended"]
    for axis, flag in enumerate(FLAGS):
        lines.append(flag)
        for point in result.line(axis):
            label = f"{result.value(point, axis):>10,}  "
            chosen = point == result.choice.point
            words = "recommended" if chosen else beside(result, point, axis)
            served = result.trials.runs(point) > 0
            drawn = _drawn(result, point, low, high, room) if served else " " * room
            lines.append(f"{label}{drawn}  {words}")
    return lines


def svg(result: Result, title: str) -> str:
    """A panel for each flag: every run, the means, and where they may lie, in per cent of the recommended setting."""
    low, high = _range(result)
    width, bottom = 3 * PANEL + 20, HEIGHT - BOTTOM

    def y(share: float) -> float:
        return TOP + (bottom - TOP) * (high - share) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT}" viewBox="0 0 {width} {HEIGHT}">',
        f'<style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>',
        f'<text class="title" x="{LEFT}" y="20">{escape(title)}: score, of the recommended</text>',
    ]
    for axis, flag in enumerate(FLAGS):
        left = axis * PANEL + LEFT
        parts += _frame(left, [(share, y(share)) for share in _ticks(low, high)], flag)
        line = result.line(axis)
        for index, point in enumerate(line):
            x = left + (PANEL - LEFT) * (index + 0.5) / len(line)
            parts.append(_label(x, f"{result.value(point, axis):,}"))
            parts += _marks(result, point, x, y) if result.trials.runs(point) else [_label(x, "failed", -18)]
    return "\n".join([*parts, "</svg>", ""])


def _relative(result: Result, score: float) -> float:
    return math.exp(score - result.trials.mean(result.choice.point))


def _spread(result: Result, point: Point) -> tuple[float, float, float]:
    """Where the mean may lie at least, the mean, and where it may lie at most, as shares of the recommended one's."""
    mean, margin = result.trials.mean(point), result.margin(point)
    low, middle, high = (_relative(result, score) for score in (mean - margin, mean, mean + margin))
    return low, middle, high


def _range(result: Result) -> tuple[float, float]:
    shown = {point for axis in range(3) for point in result.line(axis) if result.trials.runs(point)}
    spreads = [_spread(result, point) for point in shown]
    scores = [_relative(result, score) for point in shown for score in result.trials.scores(point)]
    low, high = min([*scores, *(low for low, _, _ in spreads)]), max([*scores, *(high for _, _, high in spreads)])
    return low, max(high, low + 0.01)


def _drawn(result: Result, point: Point, low: float, high: float, room: int) -> str:
    places = [round((room - 1) * (share - low) / (high - low)) for share in _spread(result, point)]
    cells = [" "] * room
    cells[places[0] : places[2] + 1] = "─" * (places[2] + 1 - places[0])
    cells[places[1]] = "◆" if point == result.choice.point else "●"
    return "".join(cells)


def _ticks(low: float, high: float) -> list[float]:
    """Three to nine round shares."""
    power = 10 ** math.floor(math.log10((high - low) / 8))
    step = next(power * times for times in (1, 2, 5, 10) if (high - low) / (power * times) <= 8)
    return [step * number for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _frame(left: float, ticks: Sequence[tuple[float, float]], flag: str) -> Iterator[str]:
    right, bottom = left + PANEL - LEFT, HEIGHT - BOTTOM
    for share, height in ticks:
        yield f'<line class="axis" x1="{left}" x2="{right}" y1="{height:.1f}" y2="{height:.1f}"/>'
        yield f'<text x="{left - 6}" y="{height + 4:.1f}" text-anchor="end">{100 * share:.0f} %</text>'
    yield f'<text x="{(left + right) / 2}" y="{bottom + 38}" text-anchor="middle">{flag}</text>'


def _label(x: float, text: str, down: int = 18) -> str:
    return f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + down}" text-anchor="middle">{text}</text>'


def _marks(result: Result, point: Point, x: float, y: Callable[[float], float]) -> Iterator[str]:
    chosen = point == result.choice.point
    low, middle, high = _spread(result, point)
    line, dot = ("bestline", "best") if chosen else ("near", "mean")
    yield f'<line class="{line}" x1="{x:.1f}" x2="{x:.1f}" y1="{y(low):.1f}" y2="{y(high):.1f}"/>'
    for score in result.trials.scores(point):
        yield f'<circle class="run" cx="{x - 9:.1f}" cy="{y(_relative(result, score)):.1f}" r="3"/>'
    yield f'<circle class="{dot}" cx="{x:.1f}" cy="{y(middle):.1f}" r="5"/>'
