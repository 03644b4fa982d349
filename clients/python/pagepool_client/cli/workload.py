"""`pagepool workload`: make up a workload, or look into one."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from pagepool.errors import invalid_field
from pagepool_client.cli.terminal import Terminal
from pagepool_client.diagnosis.words import count, share, span
from pagepool_client.workload import format as files
from pagepool_client.workload.format import WorkloadRequest
from pagepool_client.workload.synthetic import Shape, generate

LIMITS: dict[str, tuple[float, float, str]] = {
    "requests": (1, 1_000_000, "requests in all"),
    "rate": (1e-3, 1e5, "requests a second, once conversations are under way"),
    "prompt_mean": (1, 1e5, "mean tokens that a user writes in a turn"),
    "output_mean": (1, 1e5, "mean tokens of an answer"),
    "spread": (0, 3, "standard deviation of the logarithm of both lengths"),
    "turns": (1, 1000, "mean turns of a conversation"),
    "pause_s": (1e-3, 1e5, "mean seconds between two turns"),
    "systems": (0, 1_000_000, "different system prompts; 0 for none"),
    "system_tokens": (1, 100_000, "tokens of a system prompt"),
    "max_tokens": (2, files.MAX_TOKENS, "longest prompt and answer together"),
}
"""By field of Shape: the least and the largest value, and what it is."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    description = (
        "Print a workload as JSON Lines, one request a line: conversations with lengths like ShareGPT's, which share "
        "system prompts. Or, with --check, say what is in a file."
    )
    parser = commands.add_parser("workload", help="make up a workload, or check one", description=description)
    parser.add_argument("--check", type=Path, metavar="FILE", help="say what is in this file instead")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="another one gives another workload (0)")
    for one in fields(Shape):
        kind = int if isinstance(one.default, int) else float
        words = f"{LIMITS[one.name][2]} ({one.default})"
        parser.add_argument(_flag(one.name), dest=one.name, type=kind, default=one.default, metavar="N", help=words)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Print a workload, or what is in one."""
    if args.check is not None:
        terminal.line("\n".join(summary(files.read(args.check, "--check"))))
        return 0
    for request in generate(shape(args), args.seed):
        terminal.line(files.line(request))
    return 0


def shape(args: argparse.Namespace) -> Shape:
    """The shape that the flags ask for. Raises INVALID_FIELD, naming the flag."""
    values = {one.name: getattr(args, one.name) for one in fields(Shape)}
    for name, (least, most, _) in LIMITS.items():
        if not least <= values[name] <= most:
            raise invalid_field(_flag(name), values[name], f"from {least:g} to {most:g}", "leave it out for ShareGPT's")
    made = Shape(**values)
    system = made.system_tokens if made.systems else 0
    if made.max_tokens < system + 2:
        limit = f"at least {system + 2}: the system prompt, a token of the user and one of the answer"
        raise invalid_field("--max-tokens", made.max_tokens, limit, "raise it, or shorten --system-tokens")
    return made


def summary(requests: Sequence[WorkloadRequest]) -> list[str]:
    """What a workload, by the time its requests come, is like: lines."""
    prompts = sorted(request.prompt_tokens for request in requests)
    outputs = sorted(request.output_tokens for request in requests)
    lasts_s, shared = requests[-1].at_s, shared_tokens(requests)
    return [
        f"{count(len(requests), 'request')} in {span(lasts_s)}",
        f"prompts  {_lengths(prompts)}",
        f"outputs  {_lengths(outputs)}",
        f"shared   {shared:,} of {sum(prompts):,} prompt tokens came before ({share(shared, sum(prompts))})",
    ]


def shared_tokens(requests: Sequence[WorkloadRequest]) -> int:
    """Prompt tokens that an earlier prompt began with, in this order: what an endless cache of single tokens finds."""
    longest: dict[tuple[files.Piece | str, ...], int] = {}
    found = 0
    for request in requests:
        way: tuple[files.Piece, ...] = ()
        same = True
        for piece in request.prompt:
            known = longest.get((*way, piece.name), 0)
            found += min(known, piece.tokens) if same else 0
            same = same and known >= piece.tokens
            longest[*way, piece.name] = max(known, piece.tokens)
            way = (*way, piece)
    return found


def _lengths(sizes: Sequence[int]) -> str:
    middle, high = sizes[(len(sizes) - 1) // 2], sizes[math.ceil(0.99 * len(sizes)) - 1]
    mean = sum(sizes) / len(sizes)
    return f"{mean:,.1f} tokens on average; half have at most {middle:,}, 99 % {high:,}, all {sizes[-1]:,}"


def _flag(name: str) -> str:
    return f"--{name.removesuffix('_s').replace('_', '-')}"
