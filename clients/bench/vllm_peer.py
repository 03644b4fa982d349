"""The peer: vLLM in a process of its own, on the same config with weights of its own; one JSON object a case.

{"case": "start", "version", "import_s", "init_s"}, {"case": "decode", "batch", "ms_per_step"},
{"case": "prefill", "tokens", "s", "least_s", "most_s"}, {"case": "prefix_hit", the same, "cached"}: medians of as many
prompts as --long-prompts says, and their spread. Once started it waits for a line on stdin, so that nothing else is
under way while it measures.

A decode step is what a batch takes with all its tokens less what it takes with one, by their number: scheduling and
sampling included, clients and streaming not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def tell(**what: object) -> None:
    """One case."""
    print(json.dumps(what), flush=True)


def engine(options: argparse.Namespace) -> tuple[Any, dict[str, object]]:
    """An engine as it starts by default, with CUDA graphs for the batches that are measured."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    begin = time.perf_counter()
    import vllm

    imported = time.perf_counter()
    sizes = sorted({*options.batches, 1, 2, 4, 8, 16})
    llm = vllm.LLM(
        model=str(options.folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=max(options.prompt + options.new, options.long) + 64,
        max_num_seqs=max(options.batches),
        gpu_memory_utilization=options.memory,
        enable_prefix_caching=True,
        disable_log_stats=True,
        compilation_config={"cudagraph_capture_sizes": sizes},
    )
    spent = {"import_s": imported - begin, "init_s": time.perf_counter() - imported}
    return llm, {"version": vllm.__version__, **spent}


def runner(llm: Any) -> Callable[[list[list[int]], int], tuple[float, int]]:
    """A function of prompts and new tokens: (seconds, tokens of the first prompt found in the cache)."""
    from vllm import SamplingParams

    def run(prompts: list[list[int]], new_tokens: int) -> tuple[float, int]:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return time.perf_counter() - begin, found[0].num_cached_tokens or 0

    return run


def measure(run: Callable[[list[list[int]], int], tuple[float, int]], options: argparse.Namespace) -> None:
    """All cases, each on prompts of its own."""
    vocab = json.loads((options.folder / "config.json").read_text())["vocab_size"]
    source = random.Random(1)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[source.randrange(1, vocab - 8) for _ in range(length)] for _ in range(count)]

    run(prompts(2, options.prompt), 8)
    for batch in options.batches:
        run(prompts(batch, options.prompt), 8)
        one = statistics.median(run(prompts(batch, options.prompt), 1)[0] for _ in range(options.repeats))
        all_ = statistics.median(run(prompts(batch, options.prompt), options.new)[0] for _ in range(options.repeats))
        tell(case="decode", batch=batch, ms_per_step=(all_ - one) / (options.new - 1) * 1e3)
    run(prompts(1, options.long), 1)
    longs = [prompts(1, options.long) for _ in range(options.long_prompts)]
    tell(case="prefill", tokens=options.long, **spread([run(long, 1)[0] for long in longs]))
    hits = [run(long, 1) for long in longs]
    tell(case="prefix_hit", tokens=options.long, **spread([s for s, _ in hits]), cached=hits[0][1])


def spread(seconds: list[float]) -> dict[str, float]:
    """The median, the least and the most."""
    return {"s": statistics.median(seconds), "least_s": min(seconds), "most_s": max(seconds)}


def main() -> None:
    """Start, measure, end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batches", type=lambda text: [int(word) for word in text.split(",")], default=[1, 8, 32, 128])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--long", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--long-prompts", type=int, default=5)
    parser.add_argument("--memory", type=float, default=0.85)
    options = parser.parse_args()
    llm, started = engine(options)
    tell(case="start", **started)
    sys.stdin.readline()
    measure(runner(llm), options)


if __name__ == "__main__":
    main()
