"""`pagepool doctor`: why blocks are short, or prefixes not found, and what to change."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from pagepool.errors import invalid_field
from pagepool_client.cli.reading import Reader, add_flags
from pagepool_client.cli.terminal import Terminal
from pagepool_client.diagnosis.diagnose import diagnose
from pagepool_client.diagnosis.figures import measure
from pagepool_client.diagnosis.findings import Finding, Remedy, Severity
from pagepool_client.diagnosis.observation import Observation
from pagepool_client.diagnosis.report import as_json, facts
from pagepool_client.diagnosis.words import count

MAX_WATCH_S = 3600.0
LOOKS = {Severity.PROBLEM: "red", Severity.ADVICE: "yellow"}

Style = Callable[[str, str], str]
"""Puts text into a named style."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    description = (
        "Explain an out-of-memory or a low hit rate from the state of the pool: waste inside blocks, fragmentation, "
        "what holds the blocks, and which flag to change to which value. The exit code is 0 whatever is found; --json "
        "says it to machines."
    )
    parser = commands.add_parser(
        "doctor", help="say what ails the pool and which flag to change", description=description
    )
    add_flags(parser)
    parser.add_argument(
        "--over",
        type=float,
        metavar="SECONDS",
        help="watch the pool so long first (default: counters since memd's start)",
    )
    parser.add_argument("--json", action="store_true", help="pool, figures, workers and findings as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Look once, or for a while, and say what was found."""
    if args.over is not None and not 0 < args.over <= MAX_WATCH_S:
        raise invalid_field("--over", args.over, f"above 0 and at most {MAX_WATCH_S:.0f} seconds", "watch for 30, say")
    with Reader(args) as reader:
        if args.over is None:
            seen = reader.observe(with_blocks=True)
        else:
            terminal.status(f"watching the pool at {reader.target} for {args.over:g} s")
            earlier = reader.watch(args.over)
            seen = reader.observe(with_blocks=True)
            earlier = [pool for pool in earlier if pool.epoch == seen.pool.epoch]
            seen = replace(seen, earlier=earlier, watched_s=args.over)
            terminal.clear_status()
    findings = diagnose(seen)
    if args.json:
        figures = measure(seen) if seen.pool.usage.total_blocks else None
        terminal.line(json.dumps(as_json(seen, figures, findings), indent=2))
    else:
        terminal.line("\n".join(page(seen, findings, terminal.width, terminal.styled)))
    return 0


def page(seen: Observation, findings: Sequence[Finding], width: int, style: Style) -> Iterator[str]:
    """Lines: the pool in figures, then each finding with what to change."""
    if seen.pool.usage.total_blocks:
        for word, text in facts(seen, measure(seen)):
            first, *rest = textwrap.wrap(text, width - 12)
            yield f"{style(f'{word:<11}', 'bold')} {first}"
            yield from (f"{'':12}{line}" for line in rest)
        yield ""
    for number, finding in enumerate(findings, 1):
        label = f"{number}. {finding.severity.value}"
        yield f"{style(label, LOOKS[finding.severity])}  {style(finding.title, 'bold')}"
        yield from _body(finding, width, style)
        yield ""
    yield _verdict(findings, style)


def _body(finding: Finding, width: int, style: Style) -> Iterator[str]:
    yield from textwrap.wrap(finding.detail, width, initial_indent="   ", subsequent_indent="   ")
    for line in finding.evidence:
        yield from textwrap.wrap(line, width, initial_indent="   · ", subsequent_indent="     ")
    for remedy in finding.remedies:
        yield f"   → {style(_change(remedy), 'green')}"
        yield from textwrap.wrap(remedy.effect, width, initial_indent="     ", subsequent_indent="     ")


def _change(remedy: Remedy) -> str:
    if remedy.where in {"memd", "inferd"}:
        return f"{remedy.where} {remedy.name} {remedy.value}"
    return f"{remedy.where}: {remedy.name} {remedy.value}"


def _verdict(findings: Sequence[Finding], style: Style) -> str:
    problems = sum(finding.severity is Severity.PROBLEM for finding in findings)
    advice = count(len(findings) - problems, "piece of advice", "pieces of advice")
    if problems:
        return style(f"{count(problems, 'problem')}, {advice}", "red")
    return style(f"healthy, with {advice}" if findings else "healthy: nothing to change", "green")
