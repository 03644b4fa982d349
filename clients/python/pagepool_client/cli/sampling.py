"""Flags that say how text is continued, shared by generate and chat but for those of several continuations."""

from __future__ import annotations

import argparse
import time
from typing import Literal

from pagepool.durations import to_seconds
from pagepool.errors import invalid_field
from pagepool.inferd.v1.generation_service_pb2 import FinishReason
from pagepool_client.inference import Generation
from pagepool_client.prompts import Beam, Options

_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop")
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_OTHERS = ("speculate_tokens", "kv_precision", "logprobs", "prompt_logprobs", "n", "best_of")
_NAMES = (*_SAMPLING, *_PENALTIES, *_OTHERS)
_BEAM = ("length_penalty", "early_stopping", "num_return_sequences")
_STOPPING: dict[str, bool | Literal["never"]] = {"heuristic": False, "full": True, "never": "never"}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that become Options; what is not given is the server's own default."""
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens to generate")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default: 1)")
    parser.add_argument("--top-p", type=float, metavar="P", help="only the likeliest tokens up to this probability")
    parser.add_argument("--top-k", type=int, metavar="K", help="only so many of the likeliest tokens; 0 is all")
    parser.add_argument("--min-p", type=float, metavar="P", help="only tokens this likely, relative to the likeliest")
    parser.add_argument("--seed", type=int, metavar="N", help="makes the answer repeatable")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; repeatable")
    parser.add_argument(
        "--speculate-tokens",
        type=int,
        metavar="N",
        help="guess up to N tokens a step from what the text repeats; changes speed only (0: off)",
    )
    parser.add_argument(
        "--kv-precision",
        choices=("exact", "any"),
        help="attend to exact KV only, or also to FP8 (default: the worker's)",
    )
    penalty = parser.add_argument_group("penalties and bias")
    penalty.add_argument("--repetition-penalty", type=float, metavar="R", help="above 1: less of what the text has")
    penalty.add_argument("--presence-penalty", type=float, metavar="P", help="above 0: less of what was generated")
    penalty.add_argument("--frequency-penalty", type=float, metavar="P", help="the same, for each time it was")
    penalty.add_argument(
        "--logit-bias", action="append", type=_bias, metavar="ID=BIAS", help="add to a token's logit; repeatable"
    )


def add_logprobs_flags(parser: argparse.ArgumentParser) -> None:
    """Flags whose answer only events show."""
    parser.add_argument("--logprobs", type=int, metavar="N", help="with --json: each token's, and the N likeliest's")
    parser.add_argument("--prompt-logprobs", type=int, metavar="N", help="with --json: the same for the prompt")


def add_strategy_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that ask for several continuations."""
    several = parser.add_argument_group("several continuations of one prompt, and beam search")
    several.add_argument("--n", type=int, metavar="N", help="so many samples")
    several.add_argument("--best-of", type=int, metavar="N", help="draw so many, and show the --n likeliest of them")
    several.add_argument("--beam-width", type=int, metavar="W", help="search by so many beams instead of sampling")
    several.add_argument("--length-penalty", type=float, metavar="P", help="above 0 favours long ones (default: 1)")
    several.add_argument("--early-stopping", choices=_STOPPING, help="when to stop the search (default: heuristic)")
    several.add_argument("--num-return-sequences", type=int, metavar="N", help="so many of the best (default: 1)")


def beam(args: argparse.Namespace) -> Beam | None:
    """The beam search that was asked for. INVALID_FIELD if there are flags of one without --beam-width."""
    given = {name: value for name in _BEAM if (value := getattr(args, name, None)) is not None}
    width: int | None = getattr(args, "beam_width", None)
    if width is None:
        for name in given:
            limit = "given with --beam-width"
            raise invalid_field(
                f"--{name.replace('_', '-')}", "given without --beam-width", limit, "add --beam-width 4"
            )
        return None
    if "early_stopping" in given:
        given["early_stopping"] = _STOPPING[given["early_stopping"]]
    search: Beam = {"width": width, **given}  # type: ignore[typeddict-item]
    return search


def options(args: argparse.Namespace) -> Options:
    """The options that were given."""
    given = Options()
    for name in _NAMES:
        if (value := getattr(args, name, None)) is not None:
            given[name] = value  # type: ignore[literal-required]
    if args.logit_bias:
        given["logit_bias"] = dict(args.logit_bias)
    if (search := beam(args)) is not None:
        given["beam"] = search
    return given


def _bias(word: str) -> tuple[int, float]:
    token, _, bias = word.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word!r} is not ID=BIAS, such as 42=-100") from None


class Stopwatch:
    """Measures a continuation as its reader sees it."""

    def __init__(self) -> None:
        self._begun = time.monotonic()

    def usage(self, generation: Generation) -> str:
        """One line on what a finished continuation used."""
        finished = generation.finished
        if finished is None:
            return "cancelled"
        used, elapsed = finished.usage, time.monotonic() - self._begun
        decode_s = to_seconds(used.decode_time)
        # The first token comes out of the prefill; the decode time is that of the others.
        rate = f", {(used.generated_tokens - 1) / decode_s:.1f} tokens/s" if decode_s > 0 else ""
        drafts = f", {used.accepted_tokens} of {used.draft_tokens} guesses right" if used.draft_tokens else ""
        lossy = f", {used.lossy_tokens} in FP8 in the end" if used.lossy_tokens else ""
        reason = FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_").lower().replace("_", " ")
        return (
            f"{used.prompt_tokens} prompt tokens, {used.cached_tokens} of them cached{lossy}; "
            f"{used.generated_tokens} generated in {elapsed:.1f} s{rate}{drafts}; ended by {reason}"
        )
