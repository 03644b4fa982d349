"""Where the command looks for the daemons."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from pagepool_client.channels import default_target, socket_path


def add_flags(parser: argparse.ArgumentParser, daemon: str = "") -> None:
    """Flags that say where the daemons are; with `daemon`, also one for the address of that one alone."""
    default = Path(default_target("memd").removeprefix("unix:")).parent
    parser.add_argument(
        "--socket-dir", type=Path, metavar="DIR", help=f"where memd.sock and inferd.sock are (default: {default})"
    )
    if daemon:
        parser.add_argument(f"--{daemon}", metavar="TARGET", help=f"{daemon}'s own address, unix:PATH or HOST:PORT")


def memd_target(args: argparse.Namespace) -> str:
    """Memd's target."""
    return _target(args.memd, args.socket_dir, "memd")


def inferd_target(args: argparse.Namespace) -> str:
    """Inferd's target."""
    return _target(args.inferd, args.socket_dir, "inferd")


def inferd_targets(args: argparse.Namespace) -> list[str]:
    """The targets of workers, where --inferd may be repeated; the one beside memd's socket if none was given."""
    if args.inferd:
        return list(args.inferd)
    memd = memd_target(args)
    return [f"unix:{socket_path(memd).with_name('inferd.sock')}"] if memd.startswith("unix:") else []


def socket_dir(args: argparse.Namespace) -> Path:
    """The folder of both daemons' sockets."""
    given: Path | None = args.socket_dir
    return given.absolute() if given else Path(default_target("memd").removeprefix("unix:")).parent


def command(args: argparse.Namespace, words: str) -> str:
    """A pagepool command that finds the same daemons as this one."""
    place = f" --socket-dir {shlex.quote(str(args.socket_dir))}" if args.socket_dir else ""
    return f"pagepool {words}{place}"


def _target(given: str | None, folder: Path | None, daemon: str) -> str:
    if given:
        return given
    return f"unix:{folder.absolute() / f'{daemon}.sock'}" if folder else default_target(daemon)
