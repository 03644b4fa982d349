"""`make bench-speculate`: prompt-lookup speculative decoding beside plain decoding, on text that repeats and on other.

One worker serves both sides, which alternate: each request is sent without drafts and then with them (the request's
speculate_tokens), at gRPC streams. The tokens must be the same on both sides.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import daemons
from text import TEXT

import cpu
from pagepool_client import InferenceClient

BOUND = {"repeat": 1.3, "story": 0.95}
"""Tokens a second with drafts over those without, for one stream."""

SUBJECTS = (
    "a lighthouse",
    "two brothers",
    "the last train",
    "a broken clock",
    "winter",
    "an island",
    "a letter",
    "bees",
)


@dataclass(frozen=True, slots=True)
class Kind:
    """Text of one kind: what the user says in the nth request, and how the answer is sampled."""

    name: str
    about: str
    ask: Callable[[int], str]
    temperature: float


def passage(number: int) -> str:
    """A request to copy some lines, other ones each time."""
    lines = TEXT.strip().splitlines()
    return "Repeat this text word for word:\n\n" + "\n".join(islice(cycle(lines), number % len(lines), number + 9))


def story(number: int) -> str:
    """A request for something that has not been there before."""
    return f"Write a long story about {SUBJECTS[number % len(SUBJECTS)]}. Use many different words. Story {number}:"


KINDS = (
    Kind("repeat", "copies lines of its prompt, greedily", passage, 0.0),
    Kind("story", "a story, sampled at temperature 1", story, 1.0),
)


@dataclass(slots=True)
class Side:
    """What one side has generated, request by request, and in which time."""

    tokens: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return sum(map(len, self.tokens)) / self.seconds


def run(
    client: InferenceClient, kind: Kind, numbers: Sequence[int], speculate_tokens: int, options: argparse.Namespace
) -> Side:
    """Requests of a kind as streams, all at once; SystemExit if one falls short."""
    side = Side([[] for _ in numbers])

    def stream(index: int) -> None:
        sampling = {"temperature": kind.temperature, "seed": numbers[index]}
        asked = {"max_tokens": options.new, "ignore_eos": True, "speculate_tokens": speculate_tokens}
        messages = [{"role": "user", "content": kind.ask(numbers[index])}]
        generation = client.generate(messages=messages, **sampling, **asked)
        for event in generation:
            if event.DESCRIPTOR.name == "GenerateTokens":
                side.tokens[index] += event.token_ids
        assert generation.finished is not None
        side.drafted += generation.finished.usage.draft_tokens
        side.accepted += generation.finished.usage.accepted_tokens

    threads = [threading.Thread(target=stream, args=(index,)) for index in range(len(numbers))]
    begin = options.now()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    side.seconds = options.now() - begin
    if short := [len(each) for each in side.tokens if len(each) != options.new]:
        raise SystemExit(f"{len(short)} of {len(numbers)} streams fell short of {options.new} tokens")
    return side


def measure(client: InferenceClient, kind: Kind, streams: int, options: argparse.Namespace) -> None:
    """Both sides of one kind, round by round, and a line of their medians."""
    plain: list[Side] = []
    guessed: list[Side] = []
    for number in range(options.rounds):
        numbers = range(number * streams, (number + 1) * streams)
        run(client, kind, numbers, 0, argparse.Namespace(new=1, now=options.now))  # prompts are in the pool for both
        sides = ((plain, 0), (guessed, options.speculate_tokens))
        for found, tokens in sides if number % 2 else reversed(sides):
            found.append(run(client, kind, numbers, tokens, options))
    ratio = statistics.median(b.rate / a.rate for a, b in zip(plain, guessed, strict=True))
    rates = [statistics.median(each.rate for each in side) for side in (plain, guessed)]
    drafted, accepted = sum(each.drafted for each in guessed), sum(each.accepted for each in guessed)
    generated = sum(len(tokens) for side in guessed for tokens in side.tokens)
    bound = cpu.verdict(ratio, BOUND[kind.name]) if streams == 1 else ""
    print(f"{kind.name:8} {streams:3} {rates[0]:9.1f} {rates[1]:9.1f} {ratio:7.2f}   {bound}")
    print(
        f"    {accepted} of {drafted} drafted tokens right, {accepted / generated:.0%} of {generated} generated",
        end="; ",
    )
    same = [x == y for a, b in zip(plain, guessed, strict=True) for x, y in zip(a.tokens, b.tokens, strict=True)]
    print(f"the same tokens on both sides: {sum(same)} of {len(same)}", flush=True)


def cpu_seconds(worker: int) -> float:
    """CPU time that the engine of a worker's process has used."""
    engine = Path(f"/proc/{worker}/task/{worker}/children").read_text().split()[0]
    fields = Path(f"/proc/{engine}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def parse() -> argparse.Namespace:
    """The flags, checked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="as inferd takes it; a chat model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--spin", choices=("auto", "on", "off"), default="auto", help="as inferd takes it")
    clocks = ("wall", "engine")
    parser.add_argument("--clock", choices=clocks, default="wall", help="engine: its CPU time, on a machine in use")
    parser.add_argument("--speculate-tokens", type=int, default=8)
    parser.add_argument("--new", type=int, default=128, help="tokens generated by each request")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8], help="requests at once")
    options = parser.parse_args()
    if not 1 <= options.speculate_tokens <= 32:
        parser.error(f"--speculate-tokens {options.speculate_tokens}: give from 1 to 32")
    return options


def main() -> None:
    """Print all figures."""
    options = parse()
    print(f"{cpu.hardware()}; {options.model} {options.dtype}, {options.threads} threads, {options.rounds} rounds")
    print(f"up to {options.speculate_tokens} tokens guessed a step; {options.new} tokens a request")
    for kind in KINDS:
        print(f"    {kind.name}: {kind.about}")
    flags = (
        "--model",
        options.model,
        "--dtype",
        options.dtype,
        "--threads",
        str(options.threads),
        "--spin",
        options.spin,
    )
    with (
        daemons.folder() as place,
        daemons.memd(place, "--pool-bytes", "1GiB"),
        daemons.inferd(place, *flags) as (client, child),
    ):
        options.now = time.perf_counter if options.clock == "wall" else partial(cpu_seconds, child.pid)
        unit = "tokens/s" if options.clock == "wall" else "tokens a second of the engine's CPU time"
        print(f"\n{'text':8} streams   plain   guessing   ratio   ({unit})")
        for kind in KINDS:
            for streams in options.streams:
                measure(client, kind, streams, options)


if __name__ == "__main__":
    main()
