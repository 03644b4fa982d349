"""`make bench-fp8`: what FP8 blocks cost in accuracy, on the real small model, on the CPU.

The Constitution of the United States goes through inferd's model and CPU kernels, `--chunk` tokens a step. After each
step the sealed blocks that a policy chooses become FP8, so that all later steps attend to those; a step's own tokens
are 16-bit to one another. `half` is every second block (odd indices), `all` every block, but for --keep-first blocks at
the begin (the attention sink) and the --keep-recent newest, and for those whose error is over the --guard.

The native format is bfloat16. The model computes in float32 unless --dtype says otherwise, so that what differs is what
blocks hold: in bfloat16 arithmetic the logits have steps of 0.06 to 0.125, and whatever changes, however little, sets
off rounding that moves tokens by more than FP8 does. The line of every 64th block shows how much of that there is.

With p(t) the log-probability (nats) of text token t, t = 1..T-1, over 16-bit blocks, and p'(t) over the others,

    signed change    mean(p' - p) / mean(|p|), in %; held by its magnitude
    absolute change  mean(|p' - p|) / mean(|p|), in %
    top-1 agreement  share of the tokens before which both runs hold the same token for the likeliest, in %

The exit code is 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from fp8_context import Context, Errors, MakeOps, Policy, Scored, score
from fp8_needle import NUMBER, answer, prompts
from fp8_outliers import Drawn, planting

import cpu
from inferd.model.load import ServedModel
from inferd.text.tokenizer import Tokenizer
from pagekernels.cpu.ops import CpuOps
from pagekernels.layout import Format

TEXT = Path(__file__).parent / "data" / "constitution.txt"
PARTS = ("text", "needle", "outliers")
SHARES = {"half": 2, "all": 1}
"""The policies' `every`."""
FEW, FEW_EVERY = "every 64th", 64
"""So few that what changes is mostly rounding, which any change sets off."""
BOUNDS = {"half": (0.25, 1.5, 97.0), "all": (0.6, 3.0, 94.0)}
"""Of the signed and the absolute change at most, of the agreement at least, all in %."""
LIMITS = (0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.12)
"""What the guard's errors are counted against."""
SIZES = (0, 8, 30, 60, 120, 240)
"""Of outliers, beside normal numbers."""
PLANTED_TOKENS, PLANTED_LAYERS = 2048, slice(0, None, 4)
HARM = 2.0
"""The absolute change with planted outliers and no guard is at least so many times what FP8 costs without them."""


@dataclass(frozen=True, slots=True)
class Change:
    """A run beside the 16-bit one, in %; see the module. `noise` is the standard error of the signed change."""

    signed: float
    noise: float
    absolute: float
    agreement: float


def change(base: Scored, run: Scored) -> Change:
    """What a run says otherwise."""
    off, unit = run.logprobs - base.logprobs, np.abs(base.logprobs).mean() / 100
    noise = off.std() / np.sqrt(len(off)) / unit
    same = 100 * float((base.top == run.top).mean())
    return Change(float(off.mean() / unit), float(noise), float(np.abs(off).mean() / unit), same)


class Bench:
    """A served model, its tokenizer, and the flags; `bounds` remembers what is missed."""

    def __init__(self, served: ServedModel, tokenizer: Tokenizer, options: argparse.Namespace) -> None:
        self._served, self._tokenizer, self._options = served, tokenizer, options
        self._text = options.text.read_text(encoding="ascii")
        self._ids = tokenizer.encode(self._text)
        self.bounds = cpu.Bounds()

    def policy(self, every: int, guard: float | None = None) -> Policy:
        """The flags' policy for a share; 0 is none."""
        options = self._options
        guard = options.guard if guard is None else guard
        return Policy(every, options.keep_first, options.keep_recent, guard)

    def context(self, policy: Policy, length: int, make_ops: MakeOps = CpuOps) -> Context:
        """A context of the model."""
        return Context(self._served, policy, length, self._options.block_size, make_ops)

    def text(self) -> None:
        """Log-probabilities of the text over 16-bit, half and all FP8 blocks; the guard's errors."""
        ids, chunk = self._ids[: self._options.tokens], self._options.chunk
        if len(ids) < self._options.tokens:
            raise SystemExit(f"--tokens {self._options.tokens}: the text has {len(ids)}")
        context = self.context(self.policy(0), len(ids))
        base = score(context, ids, chunk)
        print(
            f"\ntext: {len(ids)} tokens, {chunk} a step; 16-bit: mean log-probability {base.logprobs.mean():.4f} nats"
        )
        show_errors(context.blocks.errors(range(context.num_sealed)))
        print(f"    {'':22} {'FP8 blocks':>14} {'kept':>5} {'signed':>18} {'absolute':>9} {'top-1':>8}")
        for name, every in {FEW: FEW_EVERY, **SHARES}.items():
            context = self.context(self.policy(every), len(ids))
            found = change(base, score(context, ids, chunk))
            show_change(name, context, found)
            if name in BOUNDS:
                self._hold(name, found)

    def needle(self) -> None:
        """The answers over 16-bit, half and all FP8 blocks."""
        for length in self._options.needle_tokens:
            for prompt in prompts(self._tokenizer, self._text, length):
                said = {
                    name: answer(self._tokenizer, self.context, self.policy(every), prompt, self._options.chunk)
                    for name, every in {"16-bit": 0, **SHARES}.items()
                }
                found = NUMBER in said["16-bit"] and len(set(said.values())) == 1
                self.bounds.missed += [] if found else [f"needle at {prompt.depth:.0%} of {length}"]
                print(
                    f"\nneedle: {len(prompt.token_ids)} tokens, at {prompt.depth:.0%}: {'met' if found else 'MISSED'}"
                )
                print("\n".join(f"    {name:8} {words}" for name, words in said.items()), flush=True)

    def drawn(self) -> None:
        """Attention over Gaussian keys with outliers."""
        guard = self._options.guard
        print(f"\noutliers in Gaussian keys: attention's error; the guard's bound is {guard}")
        print(f"    {'size':>5} {'|K-K^|/|K|':>10} {'guard: median':>13} {'max':>6} {'16-bit':>7}", end=" ")
        print(f"{'FP8, no guard':>13} {'guarded':>8} {'blocks kept':>12}")
        found = {size: Drawn(size).damage(guard) for size in SIZES}
        for size, each in found.items():
            print(f"    {size:5} {each.plain:10.2%} {np.median(each.guard):13.3f} {each.guard.max():6.3f}", end=" ")
            print(f"{each.native:7.2%} {each.unguarded:13.2%} {each.guarded:8.2%}", end=" ")
            print(f"{each.kept:5} of {len(each.guard)}", flush=True)
        worst, gaussian = found[SIZES[-1]], found[0]
        ratio = worst.guarded / gaussian.unguarded
        print(
            f"    guarded, largest / FP8 without outliers {ratio:.2f} {self.bounds.most('drawn outliers', ratio, 1.0)}"
        )

    def planted(self) -> None:
        """The model with outliers in the keys of some layers, the guard off and on, beside the model without."""
        ids, size = self._ids[:PLANTED_TOKENS], self._options.outliers
        layers = range(len(self._served.geometry.shapes))[PLANTED_LAYERS]
        sick, off, on = planting(layers, size), self.policy(1, float("inf")), self.policy(1)
        print(f"\noutliers of {size} in the keys of {len(layers)} layers, {len(ids)} tokens")
        base = self._scored(ids, self.policy(0))[1]
        runs = {
            "all, no outliers": (off, CpuOps),
            "16-bit, outliers": (self.policy(0), sick),
            "all, no guard": (off, sick),
            "all, guard": (on, sick),
        }
        found = {}
        for name, (policy, make_ops) in runs.items():
            context, run = self._scored(ids, policy, make_ops)
            found[name] = change(base, run).absolute
            show_change(name, context, change(base, run))
        harm = found["all, no guard"] / found["all, no outliers"]
        rest = found["all, guard"] / found["16-bit, outliers"]
        print(f"    absolute: no guard / no outliers {harm:.2f} {self.bounds.least('planted: harm', harm, HARM)}")
        print(f"    absolute: guard / 16-bit {rest:.2f} {self.bounds.most('planted: guard', rest, 1.0)}")

    def _scored(self, ids: Sequence[int], policy: Policy, make_ops: MakeOps = CpuOps) -> tuple[Context, Scored]:
        context = self.context(policy, len(ids), make_ops)
        return context, score(context, ids, self._options.chunk)

    def _hold(self, name: str, found: Change) -> None:
        """Print a run's figures beside their bounds."""
        signed, absolute, agreement = BOUNDS[name]
        hold = self.bounds
        print(f"        signed   {hold.most(f'{name}: signed change', abs(found.signed), signed)}")
        print(f"        absolute {hold.most(f'{name}: absolute change', found.absolute, absolute)}")
        print(f"        top-1    {hold.least(f'{name}: top-1', found.agreement, agreement)}", flush=True)


def show_errors(errors: Errors) -> None:
    """The guard's errors [N, 2] of all blocks of a text, and how many would be over a bound."""
    for name, column in zip("KV", errors.T, strict=True):
        print(f"    error of {name}, worst of layers and heads: median {np.median(column):.4f}, max {column.max():.4f}")
    over = ", ".join(f"{limit}: {int((errors.max(axis=1) > limit).sum())}" for limit in LIMITS)
    print(f"    of {len(errors)} blocks over a bound of {over}")


def show_change(name: str, context: Context, found: Change) -> None:
    """A line of a table."""
    blocks = context.blocks
    print(f"    {name:22} {blocks.num_fp8:5} of {len(blocks.table):5} {len(blocks.kept):5}", end=" ")
    print(f"{found.signed:+7.3f} +-{found.noise:5.3f} % {found.absolute:7.3f} % {found.agreement:6.2f} %", flush=True)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--model", default="smollm2", help="as inferd takes it")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the arithmetic")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--text", type=Path, default=TEXT, help="plain ASCII, paragraphs apart by an empty line")
    parser.add_argument("--tokens", type=int, default=6656, help="of the text")
    parser.add_argument("--needle-tokens", type=int, nargs="*", default=[512, 2048], help="lengths of haystacks")
    parser.add_argument("--chunk", type=int, default=64, help="tokens a step")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--keep-first", type=int, default=1, help="blocks at the begin that stay 16-bit")
    parser.add_argument("--keep-recent", type=int, default=4, help="newest sealed blocks that do")
    parser.add_argument("--guard", type=float, default=0.12, help="a block with an error over it stays 16-bit")
    parser.add_argument("--outliers", type=float, default=240.0, help="size of those planted in the model's keys")
    return parser.parse_args(words)


def load(options: argparse.Namespace) -> tuple[ServedModel, Tokenizer]:
    """The model as a worker loads it, but with blocks in bfloat16 whatever its dtype, and its tokenizer."""
    import torch
    import transformers

    from inferd.model.load import load_model
    from inferd.model.source import DEFAULT_CACHE, resolve
    from inferd.text.export import export_tokenizer
    from pagekernels.cpu import configure

    torch.set_num_threads(options.threads)
    configure(options.threads)
    transformers.logging.disable_progress_bar()
    with redirect_stdout(sys.stderr):
        folder = resolve(options.model)
        served = load_model(folder, name=options.model, dtype=options.dtype, tell=lambda _: None)
    return replace(served, format=Format.BF16), Tokenizer.load(export_tokenizer(folder, DEFAULT_CACHE.expanduser()))


def run(bench: Bench, only: str | None) -> int:
    """Print all parts, or one; the exit code."""
    parts = {"text": (bench.text,), "needle": (bench.needle,), "outliers": (bench.drawn, bench.planted)}
    for name in PARTS:
        for part in parts[name] if only in (None, name) else ():
            part()
    print(f"\nmissed: {', '.join(bench.bounds.missed) or 'none'}")
    return int(bool(bench.bounds.missed))


def main() -> int:
    """Print all figures; the exit code."""
    options = parse()
    print(f"{cpu.hardware()}; {options.threads} threads", flush=True)
    served, tokenizer = load(options)
    print(
        f"{options.model} in {served.dtype} over {served.format.name} blocks of {options.block_size} tokens;", end=" "
    )
    print(f"the first {options.keep_first} and the newest {options.keep_recent} stay; guard {options.guard}")
    return run(Bench(served, tokenizer, options), options.only)


if __name__ == "__main__":
    sys.exit(main())
