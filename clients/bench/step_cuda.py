"""One step of a model on the GPU without engine and daemons: decode by batch, and a prefill of 8,192 tokens.

    python clients/bench/step_cuda.py [--eager] [--batches 1,8,32,128]

The model has Qwen2.5-7B's shape and random weights in bfloat16; each sequence has 576 tokens of context.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import pairwise

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from inferd.core.messages import Sampling
from inferd.core.ports import StepInput
from inferd.model.cuda_runner import CudaRunner, DevicePool, RunnerLimits, compiled
from inferd.model.load import ServedModel, prepare
from inferd.sampler import Row
from pagekernels.cuda.device import open_device
from pagekernels.layout import LAYOUT_SWIZZLED, PagedLayout, pack_entry, slot_mapping

CONTEXT, BLOCK, PROMPT = 576, 16, 8192
GREEDY = Sampling(temperature=0)


def model(layers: int) -> ServedModel:
    """Random weights, made on the GPU."""
    config = Qwen2Config(
        hidden_size=3584,
        num_hidden_layers=layers,
        num_attention_heads=28,
        num_key_value_heads=4,
        intermediate_size=18944,
        vocab_size=152064,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        made = AutoModelForCausalLM.from_config(config)
    torch.set_default_dtype(torch.float32)
    return prepare("qwen2.5-7b shape", made)


def decode(batch: int, at: int, *, unknown: bool) -> StepInput:
    """A decode step of so many sequences, each in blocks of its own."""
    per = -(-(CONTEXT + 64) // BLOCK)
    position = CONTEXT - 1 + at
    tables = [TABLES[s * per : (s + 1) * per] for s in range(batch)]
    ids = [-1 - s if unknown else 5 for s in range(batch)]
    slots = [slot_mapping(table, position, position + 1, BLOCK)[0] for table in CACHED.setdefault(batch, tables)]
    ones = [1] * batch
    return StepInput(ids, [position] * batch, slots, ones, [position + 1] * batch, CACHED[batch], list(range(batch)))


TABLES: list[int] = []
CACHED: dict[int, list[list[int]]] = {}


def time_decode(runner: CudaRunner, batch: int, steps: int = 60) -> tuple[float, float]:
    """Median milliseconds between the ends of steps with two in flight, and on the GPU."""
    pending, ends, gpu = None, [], []
    for at in range(steps):
        launched = runner.launch(decode(batch, at, unknown=at > 0), [Row(GREEDY, CONTEXT + at)] * batch)
        if pending is not None:
            pending.tokens()
            ends.append(time.perf_counter())
            gpu.append(pending.forward_s)
        pending = launched
    assert pending is not None
    pending.tokens()
    between = [1e3 * (after - before) for before, after in pairwise(ends[5:])]
    return statistics.median(between), 1e3 * statistics.median(gpu[5:])


def time_prefill(runner: CudaRunner, tokens: int) -> float:
    """Milliseconds of a prompt in one chunk, from launch to its first token."""
    table = TABLES[: -(-tokens // BLOCK)]
    slots = slot_mapping(table, 0, tokens, BLOCK)
    step = StepInput([7] * tokens, list(range(tokens)), slots, [tokens], [tokens], [table], [tokens - 1])
    times = []
    for _ in range(4):
        began = time.perf_counter()
        runner.launch(step, [Row(GREEDY, tokens)]).tokens()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times[1:])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--batches", default="1,8,32,128")
    options = parser.parse_args()
    began = time.perf_counter()
    torch.cuda.init()
    device = open_device(0)
    served = model(options.layers)
    print(f"{torch.cuda.get_device_name()}: model made and proved in {time.perf_counter() - began:.1f} s", flush=True)
    layout = PagedLayout(BLOCK, served.geometry.shapes, served.format, LAYOUT_SWIZZLED)
    blocks = 128 * -(-(CONTEXT + 64) // BLOCK)
    TABLES.extend(pack_entry(served.format, 0, 2 * b) for b in range(blocks))
    slab = torch.zeros(blocks * layout.block_bytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    limits = RunnerLimits(PROMPT, 128, PROMPT + 256, blocks)
    forward = compiled(served, compile_=not options.eager)
    runner = CudaRunner(served, forward, device, DevicePool(slab.data_ptr(), layout), limits)
    runner.capture(lambda line: print(line, flush=True))
    for batch in map(int, options.batches.split(",")):
        wall, gpu = time_decode(runner, batch)
        print(f"decode, batch {batch:4}: {wall:7.3f} ms a step, {gpu:7.3f} ms of it on the GPU", flush=True)
    print(f"prefill of {PROMPT} tokens: {time_prefill(runner, PROMPT):.1f} ms", flush=True)
    runner.close()
    device.close()


if __name__ == "__main__":
    main()
