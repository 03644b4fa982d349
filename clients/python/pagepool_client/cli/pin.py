"""`pagepool pin`: keep a prefix in the pool, or let it go."""

from __future__ import annotations

import argparse
import sys
import time

from pagepool.errors import invalid_field
from pagepool_client.cli import places
from pagepool_client.cli.terminal import Terminal
from pagepool_client.inference import InferenceClient
from pagepool_client.lease_words import Retention
from pagepool_client.pool import PoolClient
from pagepool_client.prompts import valid_text

MOST_TTL_S = 1e9
"""More than memd ever keeps a prefix, and no more than its message can say."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser("pin", help="keep a prefix in the pool for a time, or let it go")
    places.add_flags(parser, "memd")
    parser.add_argument("--inferd", metavar="TARGET", help="inferd's own address, for its tokenizer")
    parser.add_argument("text", nargs="?", help="how the prompts begin; - reads it from standard input")
    parser.add_argument("--table", type=int, metavar="ID", help="what this block table holds, instead of a text")
    parser.add_argument("--special", action="store_true", help="read control tokens in the text as such")
    parser.add_argument("--salt", default="", metavar="TEXT", help="the cache_salt of those requests")
    parser.add_argument("--ttl", type=float, default=3600.0, metavar="S", help="seconds to keep it (default: an hour)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--priority", type=int, metavar="N", help="do not pin it, but evict lower ones first (-100 to 100)"
    )
    how.add_argument("--off", action="store_true", help="let it be evicted like all others")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Say how a prefix is kept, and on standard output how much of it there was."""
    _check(args)
    with PoolClient(places.memd_target(args)) as client:
        token_ids, salt = _token_ids(client, args), args.salt.encode()
        if args.off:
            found = client.unpin_prefix(token_ids, salt=salt)
            size = _size(found.num_tokens, found.num_blocks, token_ids)
            still = "may be evicted like all others, unless kept with a longer or shorter prefix"
            terminal.line(f"{size} {still if found.was_kept else 'were not kept by just these tokens'}")
            return 0
        retention = Retention(args.ttl, pinned=args.priority is None, priority=args.priority or 0)
        kept = client.pin_prefix(token_ids, retention, salt=salt)
        until = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(kept.expire_time.ToSeconds()))
        how = "pinned" if retention.pinned else f"kept with priority {retention.priority}"
        terminal.line(f"{_size(kept.num_tokens, kept.num_blocks, token_ids)} {how} until {until}")
    return 0


def _check(args: argparse.Namespace) -> None:
    """What cannot even be asked; memd says what it does not do."""
    if not 0 <= args.ttl <= MOST_TTL_S:
        limit = f"a number of seconds from 0 to {MOST_TTL_S:.0f}"
        raise invalid_field("--ttl", args.ttl, limit, "pin again before it ends")
    for flag, value, least, most in (
        ("--priority", args.priority, -(2**31), 2**31 - 1),
        ("--table", args.table, 0, 2**64 - 1),
    ):
        if value is not None and not least <= value <= most:
            raise invalid_field(flag, value, f"from {least} to {most}", "correct it")
    valid_text("--salt", args.salt)
    if args.text is not None:
        valid_text("TEXT", args.text)


def _size(num_tokens: int, num_blocks: int, token_ids: list[int]) -> str:
    return f"{num_tokens} of {len(token_ids)} tokens, in {num_blocks} blocks,"


def _token_ids(client: PoolClient, args: argparse.Namespace) -> list[int]:
    if (args.text is None) == (args.table is None):
        given = "given with no TEXT and no --table" if args.text is None else "given with a TEXT and with --table"
        raise invalid_field("the prefix", given, "given by exactly one of them", "say which is meant")
    if args.table is not None:
        return list(client.table(args.table).token_ids)
    text = sys.stdin.read() if args.text == "-" else args.text
    with InferenceClient(places.inferd_target(args)) as inferd:
        answer = inferd.tokenize(text, parse_special_tokens=args.special, add_special_tokens=True)
    return list(answer.token_ids)
