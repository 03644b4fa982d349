"""The peer: plain transformers on the same folder, dtype and threads, as a process of its own.

Reads one JSON object a line from stdin, {"prompts": [[token ids], ...], "new_tokens": n, "how": word}, and answers one
a line: {"seconds": s, "tokens": generated in all}. Several prompts run as one left-padded batch of `generate`, as its
users do it, or by "how": "generate_batch", its continuous batching.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import torch
import transformers
from transformers import ContinuousBatchingConfig

PAGE_TOKENS, STEP_TOKENS = 256, 512


def main() -> None:
    """Serve measurements until stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(options.folder, dtype=getattr(torch, options.dtype))
    model.eval()
    print(json.dumps({"transformers": transformers.__version__, "torch": torch.__version__}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        way = continuous if job.get("how") == "generate_batch" else measure
        print(json.dumps(way(model, job["prompts"], job["new_tokens"])), flush=True)


def measure(model: Any, prompts: list[list[int]], new_tokens: int) -> dict[str, float]:
    """Time one call of generate, greedy, exactly `new_tokens` for each prompt."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    begin = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "tokens": (out.shape[1] - longest) * len(prompts)}


def continuous(model: Any, prompts: list[list[int]], new_tokens: int) -> dict[str, float]:
    """Time one call of generate_batch, greedy, exactly `new_tokens` for each prompt.

    Its cache is given the blocks that the batch needs without sharing, and its steps STEP_TOKENS. By default it takes
    most of the machine's memory for the cache, and every step masks and reads the whole of it.
    """
    need = sum(-(-(len(prompt) + new_tokens) // PAGE_TOKENS) for prompt in prompts) + len(prompts)
    config = ContinuousBatchingConfig(page_size=PAGE_TOKENS, num_blocks=need, max_batch_tokens=STEP_TOKENS)
    greedy = transformers.GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    begin = time.perf_counter()
    found = model.generate_batch(
        inputs=prompts, generation_config=greedy, continuous_batching_config=config, progress_bar=False
    )
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "tokens": sum(len(each.generated_tokens) for each in found.values())}


if __name__ == "__main__":
    main()
