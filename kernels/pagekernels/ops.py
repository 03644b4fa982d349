"""The operations on a paged KV pool, the same on every device.

`twin.py` is the plain NumPy oracle, `cpu/ops.py` the numba implementation; both satisfy `PagedOps`. Arrays are numpy
arrays on the CPU; 16-bit formats travel as uint16 bit patterns (bf16, f16), f32 as float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """What all layers of one step share. See layout.py for the letters.

    cu_q_lens     int32 [S + 1]   start of each sequence's query tokens in the packed T; last element is T
    kv_lens       int32 [S]       tokens to attend to, this step's included; query token i of a sequence with n
                                  query tokens has position kv_len - n + i
    block_tables  uint32 [S, M]   packed entries (layout.pack_entry); those beyond ceil(kv_len / B) may hold anything
    """

    cu_q_lens: npt.NDArray[np.int32]
    kv_lens: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """What may differ from layer to layer.

    scale    factor on q.k before anything else
    window   sliding window: position p sees p - window < j <= p; 0 is full attention
    chunk    chunked attention: p sees j with j // chunk == p // chunk; 0 is none (Llama 4)
    softcap  s = softcap * tanh(s / softcap) on scaled scores; 0 is none (Gemma 2)
    sinks    float32 [Hq] or None: logits that join the softmax's denominator only (GPT-OSS)
    """

    scale: float
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    sinks: npt.NDArray[np.float32] | None = None


class PagedOps(Protocol):
    """Operations on one slab with one layout. `layer` is the index into layout.layers."""

    def append(self, layer: int, k: Array, v: Array, slots: npt.NDArray[np.int64]) -> None:
        """Write k [T, H, D] and v [T, H, Dv] into slots int64 [T]; a negative slot is skipped (padding)."""

    def attend(self, layer: int, q: Array, out: Array, batch: AttentionBatch, params: AttentionParams) -> None:
        """Causal attention of q [T, Hq, D] over the tables into out [T, Hq, Dv]; Hq is a multiple of H.

        Accumulates in float32 with the online softmax (Milakov and Gimelshein, arXiv 1805.02867; running maximum, sum
        and rescale, so blocks may be taken in any split). A sequence without query tokens writes nothing.
        """

    def copy_blocks(self, sources: npt.NDArray[np.uint32], targets: npt.NDArray[np.uint32]) -> None:
        """Copy whole blocks, source entry to target entry of the same format (uint32 [N] each)."""

    def compress_blocks(
        self, sources: npt.NDArray[np.uint32], targets: npt.NDArray[np.uint32]
    ) -> npt.NDArray[np.float32]:
        """Store sealed blocks of the native format (uint32 [N]) as FP8 blocks (uint32 [N]); their errors [N, 2].

        K and V of each (layer, KV head) have a scale of their own, float32: their greatest magnitude / E4M3_MAX, but
        MIN_SCALE at least, and 1 where all are zero. What is stored is the float32 product x * (1 / scale) as E4M3,
        both rounded to nearest, ties to even; to divide each element would take a GPU longer than to move it. Where x
        holds an infinity or a NaN the scale is NaN, and all that is read is NaN.

        The errors, of K and of V, are what decides whether a block may stay compressed: with x^ for x as it will be
        read, Frobenius norms over the block's [B, D], and the worst over the layers and KV heads,

            K:  ||x - x^|| / ||x - mean of x over the tokens||        V:  ||x - x^|| / ||x||

        0 / 0 is 0, and all else over 0, or not finite, is infinity. K's is not ||x - x^|| / ||x||, which does not see
        outliers: channels that are large in every token, as some of Qwen2's keys are, make up the norm, and keep that
        ratio at E4M3's 3 % however large they are. But a channel's mean adds the same to every score, which softmax
        takes out again; what tells tokens apart is how they differ from it, and rounding large channels exceeds that.

        Raises ValueError, and writes nothing, on another format, an entry that leaves the slab, or a target that
        overlaps a source or another target.
        """

    def decompress_blocks(self, sources: npt.NDArray[np.uint32], targets: npt.NDArray[np.uint32]) -> None:
        """Store FP8 blocks (uint32 [N]) as blocks of the native format (uint32 [N]).

        What is stored is the float32 product of scale and element, rounded to nearest, ties to even: not what was
        compressed. Raises ValueError as compress_blocks does.
        """

    def gather(self, layer: int, table: npt.NDArray[np.uint32], length: int, k: Array, v: Array) -> None:
        """Read the first `length` tokens of a table (uint32 [M]) into k [H, length, D] and v [H, length, Dv]."""
