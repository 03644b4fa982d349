"""What decides the bytes of a block and whose KV it is, and how a pool is cut for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pagekernels.layout import LAYOUT_VERSION, MAX_UNITS, Format, LayerShape, PagedLayout
from pagepool.errors import PagepoolError, Reason, invalid_field

DIGEST_BYTES = 32
LAYER_FIELDS = ("num_kv_heads", "head_dim_k", "head_dim_v", "window")


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
        if self.layout_version != LAYOUT_VERSION:
            raise invalid_field("geometry.layout_version", self.layout_version, f"{LAYOUT_VERSION}", "use one version")
        if len(self.model_digest) != DIGEST_BYTES:
            length = f"{len(self.model_digest)} bytes long"
            raise invalid_field("geometry.model_digest", length, f"{DIGEST_BYTES} bytes", "give the SHA-256")
        try:
            return PagedLayout(block_size, self.layers, self.format)
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
