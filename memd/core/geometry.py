"""What decides the bytes of a block and whose KV it is, and how a pool is cut for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pagekernels.layout import LAYOUT_LINEAR, LAYOUT_SWIZZLED, MAX_UNITS, Format, LayerShape, PagedLayout
from pagepool.errors import PagepoolError, Reason, invalid_field

DIGEST_BYTES = 32
LAYER_FIELDS = ("num_kv_heads", "head_dim_k", "head_dim_v", "window")
MEMORY = {LAYOUT_LINEAR: ("shared memory", "cpu"), LAYOUT_SWIZZLED: ("GPU memory", "cuda")}
"""By layout version: the memory whose byte order it is, and the --device of those who use it."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """A model's KV geometry and identity. `model_name` is for people: the digest says whose weights they are."""

    layers: tuple[LayerShape, ...]
    format: Format
    key_means: bool
    layout_version: int
    model_digest: bytes
    model_name: str

    def layout(self, block_size: int) -> PagedLayout:
        """The byte layout of its blocks; INVALID_FIELD if this memd cannot store them."""
        if self.format is Format.FP8_E4M3:
            raise invalid_field("geometry.format", self.format.name, "F32, F16 or BF16", "FP8 blocks are made by memd")
        if self.key_means:
            raise invalid_field("geometry.key_means", "true", "false", "this memd stores no key means")
        if self.layout_version not in MEMORY:
            known = " or ".join(f"{version} ({memory})" for version, (memory, _) in MEMORY.items())
            raise invalid_field("geometry.layout_version", self.layout_version, known, "use one version of pagepool")
        if len(self.model_digest) != DIGEST_BYTES:
            length = f"{len(self.model_digest)} bytes long"
            raise invalid_field("geometry.model_digest", length, f"{DIGEST_BYTES} bytes", "give the SHA-256")
        try:
            return PagedLayout(block_size, self.layers, self.format, self.layout_version)
        except ValueError as error:
            raise PagepoolError(
                Reason.INVALID_FIELD,
                f"geometry is impossible with --block-size {block_size}: {error}; mend the geometry or the flag",
                field="geometry.layers",
                block_size=block_size,
                detail=error,
            ) from error


def cut(layout: PagedLayout, slab_bytes: int, max_num_blocks: int | None) -> int:
    """Blocks of the native format that fit into the slab, at least one; INVALID_FIELD names --pool-bytes else."""
    fitting = min(slab_bytes // layout.block_bytes, MAX_UNITS // layout.units_per_block)
    if fitting == 0:
        raise invalid_field(
            "--pool-bytes",
            slab_bytes,
            f"at least {layout.block_bytes}, the size of one block of this geometry",
            "start memd with a larger pool or a smaller --block-size",
        )
    return fitting if max_num_blocks is None else min(fitting, max_num_blocks)


def require_device(pool_version: int, geometry: Geometry) -> None:
    """DEVICE_MISMATCH if the geometry's byte order is the one of the other kind of memory than the pool's."""
    version = geometry.layout_version
    if version == pool_version or version not in MEMORY:
        return
    (ours, our_flag), (theirs, their_flag) = MEMORY[pool_version], MEMORY[version]
    raise PagepoolError(
        Reason.DEVICE_MISMATCH,
        f"geometry.layout_version is {version}, the byte order of {theirs}, but the pool lies in {ours}, whose is "
        f"{pool_version}; start the worker with --device {our_flag}, or memd with --device {their_flag}",
        field="geometry.layout_version",
        value=version,
        pool_value=pool_version,
        memory=theirs,
        pool_memory=ours,
    )


def require_equal(pool: Geometry, other: Geometry) -> None:
    """GEOMETRY_MISMATCH, naming the first field that differs with both values, unless bytes and weights are the same.

    Names may differ: the same weights in another folder are the same weights.
    """
    for (field, ours), (_, theirs) in zip(_fields(pool), _fields(other), strict=False):
        if ours != theirs:
            raise PagepoolError(
                Reason.GEOMETRY_MISMATCH,
                f"geometry.{field} is {theirs}, but the pool was cut with {ours}{_hint(field, pool, other)}; "
                "use the pool's model, or another memd",
                field=f"geometry.{field}",
                pool_value=ours,
                value=theirs,
                pool_model=pool.model_name,
                model=other.model_name,
            )


def _fields(geometry: Geometry) -> Iterator[tuple[str, object]]:
    yield "format", geometry.format.name
    yield "key_means", geometry.key_means
    yield "layout_version", geometry.layout_version
    yield "layers", len(geometry.layers)
    for index, layer in enumerate(geometry.layers):
        for name in LAYER_FIELDS:
            yield f"layers[{index}].{name}", getattr(layer, name)
    yield "model_digest", geometry.model_digest.hex()


def _hint(field: str, pool: Geometry, other: Geometry) -> str:
    if field != "model_digest":
        return ""
    if pool.model_name == other.model_name:
        return f": other weights, though both are called {pool.model_name!r}"
    return f": other weights ({other.model_name!r}, not {pool.model_name!r})"
