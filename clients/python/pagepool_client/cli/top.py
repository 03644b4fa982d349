"""`pagepool top`: pool, workers and block tables, live."""

from __future__ import annotations

import argparse
import sys

from pagepool.errors import Code, PagepoolError, invalid_field
from pagepool_client.cli.keys import quit_key
from pagepool_client.cli.reading import Reader, add_flags
from pagepool_client.cli.terminal import Terminal
from pagepool_client.diagnosis.timeline import Timeline

MIN_INTERVAL_S, MAX_INTERVAL_S = 0.1, 3600.0


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    description = (
        "Show pool, workers and block tables until q or Ctrl-C. Where standard output is no terminal, one picture as "
        "plain text is printed. The first picture has counts since memd's start, later ones have rates."
    )
    parser = commands.add_parser("top", help="show pool, workers and block tables, live", description=description)
    add_flags(parser)
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="time between pictures (1)")
    parser.add_argument("--once", action="store_true", help="print one picture and exit")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Draw until q or Ctrl-C; once if asked to, or where there is no terminal."""
    if not MIN_INTERVAL_S <= args.interval <= MAX_INTERVAL_S:
        limits = f"from {MIN_INTERVAL_S} to {MAX_INTERVAL_S:.0f} seconds"
        raise invalid_field("--interval", args.interval, limits, "draw once a second, say")
    with Reader(args) as reader:
        if args.once or not sys.stdout.isatty():
            _once(reader, terminal)
        else:
            _live(reader, args.interval)
    return 0


def _once(reader: Reader, terminal: Terminal) -> None:
    from rich.console import Console  # here, since no other command needs rich, and a twentieth of a second is felt

    from pagepool_client.cli.top_view import picture

    console = Console(width=terminal.width, highlight=False)
    frame = Timeline().frame(reader.observe(with_blocks=False))
    with console.capture() as captured:
        console.print(picture(frame, console.width))
    terminal.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def _live(reader: Reader, interval_s: float) -> None:
    from rich.console import Console
    from rich.live import Live

    from pagepool_client.cli.top_view import picture

    timeline, trouble = Timeline(), ""
    frame = timeline.frame(reader.observe(with_blocks=False))
    console = Console(highlight=False)
    with quit_key() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(picture(frame, console.width, console.height, trouble), refresh=True)
            try:
                if pressed(interval_s):
                    return
                frame, trouble = timeline.frame(reader.observe(with_blocks=False)), ""
            except KeyboardInterrupt:
                return
            except PagepoolError as error:
                if error.code is not Code.UNAVAILABLE:
                    raise
                trouble = f"{error.message}; trying again"
