"""The pagepool command: which subcommand, and what becomes of an error."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from io import TextIOWrapper
from types import FrameType

from pagepool.errors import PagepoolError
from pagepool_client.cli import blocks, chat, demo, doctor, generate, pin, top, tune, up, workload
from pagepool_client.cli.terminal import EXIT_FAILED, EXIT_INTERRUPTED, Terminal, exit_code


def main(argv: Sequence[str] | None = None) -> int:
    """The console script; its exit code: 0, 1 for a failure, 2 for a wrong command line, 130 after Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a model may say what the locale cannot
    terminal = Terminal()
    args = parser().parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, _interrupt)
    try:
        code: int = args.run(args, terminal)
    except PagepoolError as error:
        terminal.error(error.message)
        return exit_code(error)
    except KeyboardInterrupt:
        terminal.note("")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output is gone; the interpreter must not try to flush it once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    return code


def parser() -> argparse.ArgumentParser:
    """All subcommands."""
    command = argparse.ArgumentParser(prog="pagepool", description="PagedAttention as a service.", allow_abbrev=False)
    command.add_argument("--version", action="version", version=f"pagepool {version('pagepool')}")
    commands = command.add_subparsers(metavar="COMMAND", required=True)
    for module in (up, demo, generate, chat, blocks, pin, top, doctor, workload, tune):
        module.add_parser(commands)
    return command


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
