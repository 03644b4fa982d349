"""Digests of files and of models, remembered by what the file system says of a file."""

from __future__ import annotations

import hashlib
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model*.bin.index.json")
"""Files that hold weights, in the order in which transformers prefers them."""

_SETTLED_NS = 2_000_000_000
"""A file changed less than this ago may change again within the clock tick of its timestamps: do not remember it."""


def digest(folder: Path, cache: Path) -> bytes:
    """SHA-256, 32 bytes, over the names and contents of a model folder's config and weight files.

    It follows the contents, not the names: weights replaced in place give another digest. `cache` keeps the digests of
    single files, so that a restart needs not read the weights.
    """
    files = sorted({folder / "config.json", *weight_files(folder)})
    total = hashlib.sha256()
    with ThreadPoolExecutor() as threads:  # hashing lets other threads run, and takes a second a gigabyte
        for path, value in zip(files, threads.map(partial(file_digest, cache=cache), files), strict=True):
            total.update(f"{path.name}\0".encode() + value)
    return total.digest()


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a folder, sorted; safetensors if there are any, else PyTorch's."""
    found = [sorted(folder.glob(pattern)) for pattern in WEIGHTS]
    return found[0] + found[1] if found[0] else found[2] + found[3]


def file_digest(path: Path, cache: Path) -> bytes:
    """SHA-256 of a file's content, from the cache if the file has not changed since."""
    path = path.resolve()
    stat = path.stat()
    identity = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev]
    record = cache / "digests" / hashlib.sha256(os.fsencode(path)).hexdigest()
    known = _remembered(record, identity)
    if known is not None:
        return known
    with path.open("rb") as file:
        value = hashlib.file_digest(file, "sha256").digest()
    if time.time_ns() - max(stat.st_mtime_ns, stat.st_ctime_ns) > _SETTLED_NS:
        _remember(record, identity, value)
    return value


def _remembered(record: Path, identity: list[int]) -> bytes | None:
    try:
        known = json.loads(record.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return bytes.fromhex(known["sha256"]) if known["identity"] == identity else None


def _remember(record: Path, identity: list[int], value: bytes) -> None:
    record.parent.mkdir(parents=True, exist_ok=True)
    draft = record.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps({"identity": identity, "sha256": value.hex()}))
    draft.replace(record)
