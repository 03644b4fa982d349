"""Copies of bytes within a pool's memory."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """A byte of a slab."""

    slab: int
    offset: int


class Run(NamedTuple):
    """So many bytes to be copied from one place to another."""

    source: Place
    target: Place
    size_bytes: int
