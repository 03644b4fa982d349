"""What decides the bytes of a block, and whose KV it is."""

from __future__ import annotations

from dataclasses import dataclass

from pagekernels.layout import LAYOUT_VERSION, Format, LayerShape
from pagepool.errors import PagepoolError, Reason, invalid_field

DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class Geometry:
    """A model's KV geometry and identity. `model_name` is for people: the digest says whose weights they are."""

    layers: tuple[LayerShape, ...]
    format: Format
    key_means: bool
    layout_version: int
    model_digest: bytes
    model_name: str
