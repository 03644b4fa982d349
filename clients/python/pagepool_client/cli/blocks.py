"""`pagepool blocks`: look into the pool."""

from __future__ import annotations

import argparse
import json

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from pagepool_client.cli.block_map import Snapshot, draw
from pagepool_client.cli.places import add_flags, memd_target
from pagepool_client.cli.terminal import Terminal
from pagepool_client.pool import PoolClient

WATCH_INTERVAL_S = 0.25


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser("blocks", help="draw the pool as a map, one glyph per block")
    add_flags(parser, "memd")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--watch", action="store_true", help="draw it again whenever it changes")
    form.add_argument("--json", action="store_true", help="pool, blocks and block tables as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Draw the pool once, or until Ctrl-C."""
    with PoolClient(memd_target(args)) as client:
        if args.json:
            terminal.line(json.dumps(as_json(read(client)), indent=2))
        elif args.watch:
            watch(client, terminal)
        else:
            show(read(client), terminal)
    return 0


def read(client: PoolClient) -> Snapshot:
    """The pool, its blocks and its tables as they are now."""
    return Snapshot(client.pool(), list(client.blocks(page_size=10_000)), list(client.tables()))


def show(snapshot: Snapshot, terminal: Terminal) -> None:
    """Draw a pool."""
    terminal.line("\n".join(draw(snapshot, terminal.width, terminal.styled)))


def watch(client: PoolClient, terminal: Terminal) -> None:
    """Draw the pool after each change, until Ctrl-C."""
    with client.watch(WATCH_INTERVAL_S) as pools:
        try:
            for _ in pools:
                snapshot = read(client)
                terminal.new_page()
                show(snapshot, terminal)
        except KeyboardInterrupt:
            return


def as_json(snapshot: Snapshot) -> dict[str, object]:
    """The snapshot in protobuf's JSON mapping, with the field names of the protos."""
    return {
        "pool": plain(snapshot.pool),
        "blocks": [plain(block) for block in snapshot.blocks],
        "block_tables": [plain(table) for table in snapshot.tables],
    }


def plain(message: Message) -> dict[str, object]:
    """A message as JSON has it."""
    return dict(MessageToDict(message, preserving_proto_field_name=True))
