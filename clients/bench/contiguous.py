"""The baseline of `make bench-static`: inferd's model and sampler over a contiguous cache, as a process of its own.

The cache is [layer][K|V][slot, head, max_length, head_dim], one slot for each request. The model is loaded as a worker
loads it, and attention comes through the same interface; only here it is torch's scaled_dot_product_attention over a
slice of the cache: nothing is padded, gathered or copied.

Reads one JSON object a line from stdin, {"requests": [{"prompt", "new_tokens", "seed"}, ...]}, and answers one a line:
{"seconds", "steps", "looks": [[...], ...], "tokens": [[...], ...]}.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import astuple
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from slots import Held, Slots
from torch.nn.functional import scaled_dot_product_attention
from workloads import TEMPERATURE, Look, Request

from inferd.core.messages import Sampling
from inferd.model.attention import attending
from inferd.model.load import ServedModel, load_model
from inferd.model.probe import forward
from inferd.sampler import Row, sample
from pagekernels.cpu import configure
from pagekernels.ops import AttentionParams


class Part(NamedTuple):
    """A sequence in a step: its slot, rows first to last of the step's, KV length, and who sees what (None: all)."""

    slot: int
    first: int
    last: int
    length: int
    mask: torch.Tensor | None


class ContiguousCache:
    """The cache, and attention over it for the model's layers. SystemExit if a layer wants more than plain attention.

    `begin` says what a forward is about; the object then is what inferd.model.attention.attending takes.
    """

    def __init__(self, served: ServedModel, num_slots: int, length: int) -> None:
        self._layers = served.geometry.layers
        for index, layer in self._layers.items():
            if not _plain(layer.params):
                raise SystemExit(f"layer {index} of {served.name} has a window, soft cap or sinks; name a plain model")
        dtype = served.model.dtype
        self._stores = [
            tuple(
                torch.zeros(num_slots, each.num_kv_heads, length, dim, dtype=dtype)
                for dim in (each.head_dim_k, each.head_dim_v)
            )
            for each in served.geometry.shapes
        ]
        self._parts: list[Part] = []
        self._slots = self._positions = torch.empty(0, dtype=torch.long)

    @property
    def nbytes(self) -> int:
        """Bytes of K and V."""
        return sum(tensor.nbytes for store in self._stores for tensor in store)

    def begin(self, chunks: Sequence[tuple[Held, int]], positions: torch.Tensor) -> None:
        """What all layers of the coming forward share."""
        ends = list(accumulate((count for _, count in chunks), initial=0))
        self._positions = positions
        self._slots = torch.repeat_interleave(
            torch.tensor([held.slot for held, _ in chunks]), torch.tensor([count for _, count in chunks])
        )
        self._parts = [
            Part(held.slot, first, last, held.computed + count, _causal(held.computed, count))
            for (held, count), (first, last) in zip(chunks, pairwise(ends), strict=True)
        ]

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        _mask: torch.Tensor | None,
        **_kwargs: Any,
    ) -> torch.Tensor:
        """Attention of one layer; see inferd.model.attention.Attend."""
        layer = self._layers[module.layer_idx]  # type: ignore[index]
        keys, values = self._stores[layer.store]
        if layer.appends:
            keys[self._slots, :, self._positions] = key[0].transpose(0, 1).to(keys.dtype)
            values[self._slots, :, self._positions] = value[0].transpose(0, 1)
        heads, group = keys.shape[1], query.shape[1] // keys.shape[1]
        out = value.new_empty(query.shape[2], query.shape[1], values.shape[3])
        for slot, first, last, length, mask in self._parts:
            # Query heads of one KV head become rows: each K and V is read once, and never repeated in memory.
            q = query[:, :, first:last].reshape(1, heads, group * (last - first), -1).to(keys.dtype)
            k, v = keys[None, slot, :, :length], values[None, slot, :, :length]
            rows = mask if mask is None else mask.repeat(group, 1)
            attended = scaled_dot_product_attention(q, k, v, attn_mask=rows, scale=layer.params.scale)
            out[first:last] = attended.view(heads * group, last - first, -1).transpose(0, 1)
        return out.unsqueeze(0)


def _plain(params: AttentionParams) -> bool:
    return params.sinks is None and not (params.window or params.chunk or params.softcap)


def _causal(first: int, count: int) -> torch.Tensor | None:
    """[count, first + count], True where a token at first + row may look; None if there is one, which sees all."""
    return None if count == 1 else torch.ones(count, first + count, dtype=torch.bool).tril(first)


class Runner:
    """The model over a cache of `num_slots` slots of `length` tokens, `budget` tokens a step."""

    def __init__(self, served: ServedModel, num_slots: int, length: int, budget: int) -> None:
        self.served = served
        self.cache = ContiguousCache(served, num_slots, length)
        self._shape = (num_slots, length, budget)

    def run(self, requests: Sequence[Request]) -> dict[str, Any]:
        """Serve requests that are all there at the begin; the answer to a job."""
        slots = Slots(requests, *self._shape)
        looks: list[Look] = []
        begin = time.perf_counter()
        while chunks := slots.plan():
            looks.append(slots.look(time.perf_counter()))
            slots.collect(chunks, self._step(chunks))
        looks.append(slots.look(time.perf_counter()))
        by_seed = {held.request.seed: held.generated for held in slots.finished}
        return {
            "seconds": looks[-1].at - begin,
            "steps": len(looks) - 1,
            "looks": [astuple(look) for look in looks],
            "tokens": [by_seed[request.seed] for request in requests],
        }

    @torch.inference_mode()
    def _step(self, chunks: Sequence[tuple[Held, int]]) -> list[int]:
        """Compute the chunks; a token for each that has none left to compute."""
        spans = [(held, held.computed, held.computed + count) for held, count in chunks]
        ids = [token for held, first, last in spans for token in held.tokens[first:last]]
        positions = torch.tensor([position for _, first, last in spans for position in range(first, last)])
        ends = list(accumulate(count for _, count in chunks))
        rows, wanted = [], []
        for (held, _, last), end in zip(spans, ends, strict=True):
            if last == len(held.tokens):
                rows.append(Row(Sampling(temperature=TEMPERATURE, seed=held.request.seed), last))
                wanted.append(end - 1)
        self.cache.begin(chunks, positions)
        with attending(self.cache):
            logits = forward(self.served.model, torch.tensor([ids]), positions[None], torch.tensor(wanted).long())
        return sample(logits.float(), rows)


def main() -> None:
    """Serve jobs until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", default="float32")
    for number in ("--threads", "--slots", "--length", "--budget"):
        parser.add_argument(number, type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    configure(options.threads)
    transformers.logging.disable_progress_bar()
    with redirect_stdout(sys.stderr):
        served = load_model(options.folder, dtype=options.dtype, tell=lambda _: None)
        runner = Runner(served, options.slots, options.length, options.budget)
        runner.run([Request([1] * length, 8, 0) for length in (min(options.budget, options.length - 8), *[8] * 9)])
    print(json.dumps({"vocab_size": served.vocab_size, "bytes": runner.cache.nbytes}), flush=True)
    for line in sys.stdin:
        requests = [Request(**each) for each in json.loads(line)["requests"]]
        print(json.dumps(runner.run(requests)), flush=True)


if __name__ == "__main__":
    main()
