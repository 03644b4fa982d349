"""`pagepool generate`: continue a text."""

from __future__ import annotations

import argparse
import json
import sys

from pagepool.errors import invalid_field
from pagepool.inferd.v1.generation_service_pb2 import GenerateFinished
from pagepool_client.cli import places
from pagepool_client.cli.blocks import plain
from pagepool_client.cli.sampling import Stopwatch, add_flags, add_logprobs_flags, add_strategy_flags, options
from pagepool_client.cli.terminal import Terminal
from pagepool_client.inference import Generation, InferenceClient


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser("generate", help="continue a text, as it comes")
    places.add_flags(parser, "inferd")
    parser.add_argument("text", help="the prompt; - reads it from standard input")
    parser.add_argument("--chat", action="store_true", help="take the text as a user's message to a chat model")
    parser.add_argument("--json", action="store_true", help="events as JSON, one a line")
    add_flags(parser)
    add_logprobs_flags(parser)
    add_strategy_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Stream the continuation to standard output, and say on standard error what it used."""
    for flag, value in (("--logprobs", args.logprobs), ("--prompt-logprobs", args.prompt_logprobs)):
        if value is not None and not args.json:
            raise invalid_field(flag, "given without --json", "given with it", "add --json, which shows them")
    text = sys.stdin.read() if args.text == "-" else args.text
    with InferenceClient(places.inferd_target(args)) as client:
        watch = Stopwatch()
        with _generation(client, text, args) as generation:
            if args.json:
                _print_events(generation, terminal)
                return 0
            if args.best_of or args.beam_width or (args.n or 1) > 1:
                _print_all(generation, terminal)
            else:
                for piece in generation.pieces():
                    terminal.write(piece)
                terminal.line()
            terminal.note(watch.usage(generation))
    return 0


def _generation(client: InferenceClient, text: str, args: argparse.Namespace) -> Generation:
    if args.chat:
        return client.generate(messages=[{"role": "user", "content": text}], **options(args))
    return client.generate(text, **options(args))


def _print_all(generation: Generation, terminal: Terminal) -> None:
    """Each continuation as soon as it is complete."""
    for event in generation:
        if isinstance(event, GenerateFinished):
            score = f", score {event.score:.4f}" if event.HasField("score") else ""
            terminal.note(f"continuation {event.index}{score}:")
            terminal.line(generation.continuations[event.index].text)


KINDS = {
    f"Generate{name.title().replace('_', '')}": name for name in ("started", "tokens", "finished", "prompt_logprobs")
}
"""What GenerateResponse calls its events."""


def _print_events(generation: Generation, terminal: Terminal) -> None:
    for event in generation:
        kind = KINDS[type(event).__name__]
        terminal.line(json.dumps({kind: plain(event)}, ensure_ascii=False))
