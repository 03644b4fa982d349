"""`pagepool up`: memd and inferd in one terminal."""

from __future__ import annotations

import argparse
import time

from pagepool_client.cli.daemons import POLL_S, Daemons
from pagepool_client.cli.places import add_flags, command, socket_dir
from pagepool_client.cli.terminal import Terminal
from pagepool_client.inference import InferenceClient
from pagepool_client.pool import PoolClient

_MEMD_FLAGS = ("pool_bytes", "block_size")
_INFERD_FLAGS = ("model", "dtype", "threads")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    description = (
        "Run memd and inferd until Ctrl-C. Their further settings can be given by environment variables, such as "
        "PAGEPOOL_MEMD_MAX_NUM_BLOCKS or PAGEPOOL_INFERD_MAX_BATCH_TOKENS; memd --help and inferd --help list them."
    )
    parser = commands.add_parser("up", help="run memd and inferd until Ctrl-C", description=description)
    add_flags(parser)
    add_daemon_flags(parser)
    parser.set_defaults(run=run)


def add_daemon_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that are passed on to the daemons; what is not given is their own default."""
    parser.add_argument("--model", metavar="MODEL", help="a hub id, a folder, a GGUF file, or smollm2 (the default)")
    parser.add_argument("--dtype", metavar="DTYPE", help="of weights and pool: float32, bfloat16 or float16")
    parser.add_argument("--threads", metavar="N", help="threads of the engine's arithmetic")
    parser.add_argument("--pool-bytes", metavar="SIZE", help="size of the pool, such as 2GiB")
    parser.add_argument("--block-size", metavar="N", help="token positions in a block (16)")


def daemons(args: argparse.Namespace) -> Daemons:
    """Memd and inferd as the flags say, started."""
    return Daemons(socket_dir(args), _given(args, _MEMD_FLAGS), _given(args, _INFERD_FLAGS))


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Run both until Ctrl-C, or until one of them ends."""
    begun = time.monotonic()
    with daemons(args) as pair:
        try:
            terminal.note(f"logs: {pair.memd.log} and {pair.inferd.log}")
            pair.wait_ready(terminal.status)
            terminal.line(_ready(pair, args, terminal, time.monotonic() - begun))
            while True:
                pair.require_alive()
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            terminal.status("stopping inferd, then memd (Ctrl-C again ends them at once)")
    terminal.note("memd and inferd have stopped")
    return 0


def _ready(pair: Daemons, args: argparse.Namespace, terminal: Terminal, took_s: float) -> str:
    def bold(words: str) -> str:
        return terminal.styled(command(args, words), "bold")

    return "\n".join(
        [
            f"{terminal.styled('pagepool is ready', 'bold', 'green')} after {took_s:.1f} s: {facts(pair)}",
            "",
            "Now, in another terminal:",
            f"  {bold('chat')}",
            f"  {bold('generate --chat')} 'Why is the sky blue?'",
            f"  {bold('blocks --watch')}",
            f"  {bold('top')}",
            "",
            f"memd    {pair.memd.target}",
            f"inferd  {pair.inferd.target}",
            "Ctrl-C stops both.",
        ]
    )


def facts(pair: Daemons) -> str:
    """The model and the pool in one line."""
    with InferenceClient(pair.inferd.target) as inferd, PoolClient(pair.memd.target) as memd:
        model, pool = inferd.model(), memd.pool()
    size = f"{pool.usage.total_blocks:,} blocks of {pool.block_size} tokens"
    return f"{model.model} ({model.architecture}, {model.dtype}) over {size}"


def _given(args: argparse.Namespace, names: tuple[str, ...]) -> list[str]:
    flags = []
    for name in names:
        if (value := getattr(args, name)) is not None:
            flags += [f"--{name.replace('_', '-')}", value]
    return flags
