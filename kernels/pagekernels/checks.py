"""Shapes, checked once on the host and declaratively, so that kernels may trust them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagekernels.layout import MAX_SLABS, MAX_UNITS, Format, LayerShape, PagedLayout
from pagekernels.ops import Array, AttentionBatch, AttentionParams

ELEMENT = {
    Format.F32: (np.dtype(np.float32),),
    Format.F16: (np.dtype(np.float32), np.dtype(np.uint16)),
    Format.BF16: (np.dtype(np.float32), np.dtype(np.uint16)),
}
"""What a pool of each native format takes and gives: float32, or its own 16-bit pattern. FP8 is never native."""

INT32, INT64, UINT32, FLOAT32 = (np.dtype(t) for t in (np.int32, np.int64, np.uint32, np.float32))


class Room(NamedTuple):
    """Memory that entries may name: slabs of so many units each."""

    num_units: int
    num_slabs: int = 1


def bind(pattern: str, sizes: dict[str, int], **arrays: Array) -> None:
    """Match each array's shape against its part of `pattern` ("T H D, T"), by order; letters bind into `sizes`.

    A part's letter may be "S+1". Raises ValueError naming array, letter, size and the size it must have.
    """
    for part, (name, array) in zip(pattern.split(","), arrays.items(), strict=True):
        letters = part.split()
        shape = array.shape
        if len(shape) != len(letters):
            raise ValueError(f"{name} has shape {shape}, but must be [{', '.join(letters)}]")
        for letter, size in zip(letters, shape, strict=True):
            base, _, plus = letter.partition("+")
            bound = sizes.setdefault(base, size - int(plus or 0)) + int(plus or 0)
            if size != bound:
                raise ValueError(
                    f"{name} has shape {shape}, but must be [{', '.join(letters)}]: {letter} is {bound}, not {size}"
                )


def check_dtype(name: str, array: Array, *allowed: np.dtype[np.generic]) -> None:
    """Raises ValueError unless the array has one of the dtypes."""
    if array.dtype not in allowed:
        raise ValueError(f"{name} is {array.dtype}, but must be {' or '.join(map(str, allowed))}")


def check_layer(layout: PagedLayout, layer: int) -> LayerShape:
    """The layer's shape; raises ValueError unless it exists."""
    if not 0 <= layer < len(layout.layers):
        raise ValueError(f"layer is {layer}, but the layout has {len(layout.layers)} layers")
    return layout.layers[layer]


def check_append(layout: PagedLayout, layer: int, k: Array, v: Array, slots: Array) -> None:
    """Raises ValueError on arguments that PagedOps.append cannot take."""
    shape = check_layer(layout, layer)
    bind("T H D,T H Dv,T", letters(shape), k=k, v=v, slots=slots)
    check_dtype("k", k, *ELEMENT[layout.format])
    check_dtype("v", v, k.dtype)
    check_dtype("slots", slots, INT64)


def check_attend(
    layout: PagedLayout, layer: int, q: Array, out: Array, batch: AttentionBatch, params: AttentionParams
) -> None:
    """Raises ValueError on arguments that PagedOps.attend cannot take."""
    shape = check_layer(layout, layer)
    sizes = letters(shape)
    bind("T Hq D,T Hq Dv", sizes, q=q, out=out)
    bind("S+1,S,S M", sizes, cu_q_lens=batch.cu_q_lens, kv_lens=batch.kv_lens, block_tables=batch.block_tables)
    if sizes["Hq"] % shape.num_kv_heads:
        raise ValueError(f"q has Hq = {sizes['Hq']} heads, but must have a multiple of H = {shape.num_kv_heads}")
    check_dtype("q", q, *ELEMENT[layout.format])
    check_dtype("out", out, q.dtype)
    check_dtype("cu_q_lens", batch.cu_q_lens, INT32)
    check_dtype("kv_lens", batch.kv_lens, INT32)
    check_dtype("block_tables", batch.block_tables, UINT32)
    if params.sinks is not None:
        bind("Hq", sizes, sinks=params.sinks)
        check_dtype("sinks", params.sinks, FLOAT32)
    for name in ("window", "chunk", "softcap"):
        if not getattr(params, name) >= 0:
            raise ValueError(f"{name} is {getattr(params, name)}, but must be 0 (none) or positive")


def check_gather(layout: PagedLayout, layer: int, table: Array, length: int, k: Array, v: Array) -> None:
    """Raises ValueError on arguments that PagedOps.gather cannot take."""
    sizes = letters(check_layer(layout, layer)) | {"length": length}
    bind("H length D,H length Dv,M", sizes, k=k, v=v, table=table)
    check_dtype("k", k, *ELEMENT[layout.format])
    check_dtype("v", v, k.dtype)
    check_dtype("table", table, UINT32)
    if length > sizes["M"] * layout.block_size:
        raise ValueError(f"length is {length}, but the table's {sizes['M']} blocks hold {layout.block_size} each")


def check_copy(sources: Array, targets: Array) -> None:
    """Raises ValueError on arguments that PagedOps.copy_blocks cannot take."""
    bind("N,N", {}, sources=sources, targets=targets)
    check_dtype("sources", sources, UINT32)
    check_dtype("targets", targets, UINT32)


def check_compress(layout: PagedLayout, room: Room, sources: Array, targets: Array) -> None:
    """Raises ValueError on arguments that PagedOps.compress_blocks cannot take on such memory."""
    check_recode((layout.format, Format.FP8_E4M3), room, sources, targets)


def check_decompress(layout: PagedLayout, room: Room, sources: Array, targets: Array) -> None:
    """Raises ValueError on arguments that PagedOps.decompress_blocks cannot take on such memory."""
    check_recode((Format.FP8_E4M3, layout.format), room, sources, targets)


def check_recode(formats: tuple[Format, Format], room: Room, sources: Array, targets: Array) -> None:
    """Raises ValueError unless blocks `sources` of one format can become blocks `targets` of the other in any order."""
    check_copy(sources, targets)
    given, wanted = formats
    read = units_of("sources", sources, given, room)
    written = units_of("targets", targets, wanted, room)
    overlaps = np.isin(written, read).any(axis=1)
    if overlaps.any():
        at = int(overlaps.argmax())
        raise ValueError(f"targets[{at}] is {targets[at]:#010x}, but must not overlap any source")
    once = np.zeros(written.size, np.bool_)
    once[np.unique(written, return_index=True)[1]] = True
    if not once.all():
        at = int(once.argmin()) // wanted.itemsize
        raise ValueError(f"targets[{at}] is {targets[at]:#010x}, but must not overlap another target")


def units_of(name: str, entries: Array, fmt: Format, room: Room) -> npt.NDArray[np.int64]:
    """The units [N, Format.itemsize] of the entries' blocks, each slab's behind those of the one before.

    Raises ValueError unless all are `fmt` and in the memory.
    """
    words = entries.astype(np.int64)
    wrong = words >> 29 != fmt
    if wrong.any():
        at = int(wrong.argmax())
        what = f"format {fmt.value} ({fmt.name}), not {words[at] >> 29}"
        raise ValueError(f"{name}[{at}] is {entries[at]:#010x}, but must be a block of {what}")
    units: npt.NDArray[np.int64] = (words & (MAX_UNITS - 1))[:, None] + np.arange(fmt.itemsize)
    slabs = words >> 26 & (MAX_SLABS - 1)
    outside = (slabs >= room.num_slabs) | (units >= room.num_units).any(axis=1)
    if outside.any():
        at = int(outside.argmax())
        others = "no other slab is" if room.num_slabs == 1 else f"{room.num_slabs} slabs are"
        limit = f"the slab has {room.num_units} units and {others} mapped"
        raise ValueError(f"{name}[{at}] is {entries[at]:#010x}, but {limit}")
    return units + slabs[:, None] * MAX_UNITS


def letters(shape: LayerShape) -> dict[str, int]:
    """The letters that a layer fixes."""
    return {"H": shape.num_kv_heads, "D": shape.head_dim_k, "Dv": shape.head_dim_v}
