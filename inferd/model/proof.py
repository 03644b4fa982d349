"""Proves at load that a model computes over a paged pool what it computes by itself.

A few tokens go through the model twice: whole, with transformers' own eager attention, and in two chunks beside another
sequence, over the NumPy twin of the kernels. State that a model keeps outside attention, a mask that it would have
needed, or a projection wrongly merged make the results differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from inferd.model.attention import PagedAttention, attending
from inferd.model.probe import ModelGeometry, forward
from inferd.model.refusal import refuse
from pagekernels.layout import Format, PagedLayout, pack_entry, slot_mapping
from pagekernels.ops import AttentionBatch
from pagekernels.twin import TwinOps

_TOKENS, _FIRST_CHUNK, _NEIGHBOUR = 20, 9, 5
_BLOCK_SIZE = 8
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Relative distance of two rows of logits that may come from rounding; wrong attention is far beyond it."""


def _ids(count: int, vocab_size: int, seed: int) -> list[int]:
    """Token ids that look random and are always the same."""
    return [(seed + 7919 * (i + 1) ** 2) % vocab_size for i in range(count)]


@torch.inference_mode()
def eager_rows(model: PreTrainedModel) -> torch.Tensor:
    """Logits of the second chunk's rows by the model's own attention; to be called before anything is swapped."""
    implementation = model.config._attn_implementation  # noqa: SLF001 (transformers has no public getter)
    model.set_attn_implementation("eager")
    ids = _ids(_TOKENS, model.config.get_text_config(decoder=True).vocab_size, 1)
    rows = torch.arange(_FIRST_CHUNK, _TOKENS, device=model.device)
    logits = _forward(model, ids, range(_TOKENS), rows)
    model.set_attn_implementation(implementation)
    return logits.float()


@torch.inference_mode()
def paged_rows(model: PreTrainedModel, geometry: ModelGeometry, fmt: Format) -> torch.Tensor:
    """The same rows in two chunks over the twin, packed with a second sequence, in a pool full of NaN."""
    layout = PagedLayout(_BLOCK_SIZE, geometry.shapes, fmt)
    slab = np.full(8 * layout.block_bytes, 0xFF, np.uint8)
    attention = PagedAttention(TwinOps(slab, layout), geometry.layers)
    units = layout.units_per_block
    tables = [[pack_entry(fmt, 0, n * units) for n in blocks] for blocks in ([5, 0, 3], [6, 2, 1])]
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    ids = [_ids(_TOKENS, vocab_size, 1), _ids(_NEIGHBOUR + 1, vocab_size, 2)]
    spans = [[(0, _FIRST_CHUNK), (0, _NEIGHBOUR)], [(_FIRST_CHUNK, _TOKENS), (_NEIGHBOUR, _NEIGHBOUR + 1)]]
    with attending(attention):
        for step in spans:
            slots = [s for t, (a, b) in zip(tables, step, strict=True) for s in slot_mapping(t, a, b, _BLOCK_SIZE)]
            batch = AttentionBatch(
                np.cumsum([0] + [b - a for a, b in step], dtype=np.int32),
                np.array([b for _, b in step], np.int32),
                np.array(tables, np.uint32),
            )
            attention.begin(batch, np.array(slots, np.int64))
            packed = [t for line, (a, b) in zip(ids, step, strict=True) for t in line[a:b]]
            positions = [p for a, b in step for p in range(a, b)]
            rows = torch.arange(step[0][1] - step[0][0], device=model.device)
            logits = _forward(model, packed, positions, rows)
    return logits.float()


def _forward(model: PreTrainedModel, ids: Sequence[int], positions: Sequence[int], rows: torch.Tensor) -> torch.Tensor:
    packed = torch.tensor([list(ids), list(positions)], device=model.device)
    return forward(model, packed[:1], packed[1:], rows)


def check_equal(name: str, expected: torch.Tensor, actual: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise PagepoolError if the rows differ by more than rounding; the median row decides, for a router may flip."""
    distance = ((expected - actual).norm(dim=-1) / expected.norm(dim=-1)).median().item()
    if not distance <= _TOLERANCE[dtype]:
        why = (
            f"over a paged pool its logits differ from its own by {distance:.2g} (limit {_TOLERANCE[dtype]}), "
            "so it keeps state outside attention or needs a mask"
        )
        raise refuse(name, why, "choose a decoder whose only state is the keys and values of its attention layers")
