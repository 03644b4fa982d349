"""`pagepool chat`: a conversation with the model."""

from __future__ import annotations

import argparse
import contextlib
import sys

from pagepool.errors import Code, PagepoolError
from pagepool_client.cli import places
from pagepool_client.cli.sampling import Stopwatch, add_flags, options
from pagepool_client.cli.terminal import Terminal
from pagepool_client.inference import InferenceClient
from pagepool_client.prompts import Options

HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser("chat", help="talk to the model")
    places.add_flags(parser, "inferd")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told first")
    add_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Talk until /exit or the end of the input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  gives input() its editing and history, where Python has it

    with InferenceClient(places.inferd_target(args)) as client:
        model = client.model()
        terminal.note(f"{model.model} ({model.dtype}); {HELP}")
        Conversation(client, terminal, args.system, options(args)).run()
    return 0


class Conversation:
    """Messages so far. The whole of it is the prompt of each answer: memd finds what it has seen before."""

    def __init__(self, client: InferenceClient, terminal: Terminal, system: str | None, chosen: Options) -> None:
        self._client, self._terminal, self._options = client, terminal, chosen
        self._beginning = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._beginning)

    def run(self) -> None:
        """Read, answer, and again."""
        while (text := self._read()) is not None:
            if text in {"/exit", "/quit"}:
                return
            if text == "/reset":
                self._messages = list(self._beginning)
                self._terminal.note("the conversation is forgotten")
            elif text.startswith("/"):
                self._terminal.note(HELP)
            elif text:
                self._turn(text)

    def _read(self) -> str | None:
        """The next message, or None at the end of the input."""
        while True:
            try:
                return input("> " if sys.stdin.isatty() else "").strip()
            except EOFError:
                self._terminal.line()
                return None
            except KeyboardInterrupt:
                self._terminal.line()
                self._terminal.note(HELP)

    def _turn(self, text: str) -> None:
        """One message and its answer; a failed one leaves the conversation as it was."""
        asked = [*self._messages, {"role": "user", "content": text}]
        try:
            answer = self._answer(asked)
        except PagepoolError as error:
            if error.code is Code.UNAVAILABLE:
                raise
            self._terminal.line()
            self._terminal.error(error.message)
            return
        if answer:
            self._messages = [*asked, {"role": "assistant", "content": answer}]

    def _answer(self, messages: list[dict[str, str]]) -> str:
        """The answer, printed as it comes; what there is of it, if Ctrl-C stops it."""
        pieces: list[str] = []
        watch = Stopwatch()
        with self._client.generate(messages=messages, **self._options) as generation:
            try:
                for piece in generation.pieces():
                    pieces.append(piece)
                    self._terminal.write(piece)
            except KeyboardInterrupt:
                self._terminal.write(" …")
            self._terminal.line()
            self._terminal.note(watch.usage(generation))
        return "".join(pieces)
