"""`pagepool demo`: everything once, in a place of its own."""

from __future__ import annotations

import argparse
import shutil
import tempfile
import textwrap
import time
from pathlib import Path

from pagepool_client.cli.block_map import Snapshot
from pagepool_client.cli.blocks import read, show
from pagepool_client.cli.daemons import Daemons
from pagepool_client.cli.sampling import Stopwatch
from pagepool_client.cli.terminal import Terminal
from pagepool_client.cli.up import add_daemon_flags, daemons, facts
from pagepool_client.inference import InferenceClient
from pagepool_client.pool import PoolClient

QUESTIONS = (
    "Explain in one sentence what a page table in an operating system is.",
    "And what is a page fault? One sentence, please.",
)
MAX_TOKENS = 96
POOL_BYTES = "128MiB"
SNAPSHOTS_AFTER = (2, 12)  # pieces of an answer: early, for a short one, and in the middle


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser("demo", help="start both daemons, ask two questions, draw the pool, stop")
    add_daemon_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Everything once. The daemons live in a folder of their own, so that running ones are not disturbed."""
    args.pool_bytes = args.pool_bytes or POOL_BYTES
    begun = time.monotonic()
    args.socket_dir = Path(tempfile.mkdtemp(prefix="pagepool-demo-"))
    with daemons(args) as pair:
        pair.wait_ready(terminal.status)
        up = terminal.styled("memd and inferd are up", "bold")
        terminal.line(f"{up} after {time.monotonic() - begun:.0f} s: {facts(pair)}")
        snapshot = _converse(pair, terminal)
        _heading(terminal, "The pool while that second answer was being written (pagepool blocks)")
        show(snapshot, terminal)
        terminal.status("stopping inferd, then memd")
    # Only now: after a failure the logs in it are wanted.
    shutil.rmtree(args.socket_dir)
    _heading(terminal, "Both daemons have stopped. Your turn:")
    terminal.line("  pagepool up      keeps them running and says what to type next")
    terminal.line("  pagepool --help  lists the commands")
    return 0


def _converse(pair: Daemons, terminal: Terminal) -> Snapshot:
    """Ask the questions one after the other; the pool as it was while the last answer was being written."""
    messages: list[dict[str, str]] = []
    with InferenceClient(pair.inferd.target) as inferd, PoolClient(pair.memd.target) as memd:
        snapshot = read(memd)
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            terminal.line(f"\n{terminal.styled('you', 'bold')}    {question}")
            terminal.write(f"{terminal.styled('model', 'bold', 'green')}  ")
            watch, pieces = Stopwatch(), [""]
            with inferd.generate(messages=messages, temperature=0.0, max_tokens=MAX_TOKENS) as generation:
                for piece in generation.pieces():
                    terminal.write(piece)
                    pieces.append(piece)
                    if len(pieces) in SNAPSHOTS_AFTER:
                        snapshot = read(memd)
                terminal.line(terminal.styled(f"\n       {watch.usage(generation)}", "dim"))
            messages.append({"role": "assistant", "content": "".join(pieces)})
    return snapshot


def _heading(terminal: Terminal, text: str) -> None:
    terminal.line()
    terminal.line(terminal.styled("\n".join(textwrap.wrap(text, terminal.width)), "bold"))
