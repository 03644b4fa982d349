"""`inferd --print-geometry`: what a model asks of a pool, without a memd."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from google.protobuf import json_format

from inferd.device import may_be_cuda
from inferd.model.digest import digest
from inferd.model.load import AUTO_DTYPE, auto_dtype, load_model
from inferd.model.source import resolve
from pagekernels.layout import LAYOUT_LINEAR, LAYOUT_SWIZZLED, MIN_BLOCK_SIZE
from pagepool_client.wire import geometry_message


def geometry_json(model: str, dtype: str, cache: Path, device: str = "cpu") -> str:
    """The model's Geometry as `memd --geometry` reads it. Raises PagepoolError if the model cannot be served.

    `device` is the --device of the worker that will serve it, for the dtype "auto" depends on that. The model itself is
    loaded on the CPU.
    """
    on_gpu = may_be_cuda(device)
    folder = resolve(model, cache, _tell)
    if dtype == AUTO_DTYPE:
        dtype = auto_dtype(model, folder, "cuda" if on_gpu else "cpu")
    served = load_model(folder, name=model, dtype=dtype, tell=_tell)
    # The geometry says nothing of the block size: that is memd's.
    layout = replace(served.layout(MIN_BLOCK_SIZE), version=LAYOUT_SWIZZLED if on_gpu else LAYOUT_LINEAR)
    return str(json_format.MessageToJson(geometry_message(layout, digest(folder, cache), model)))


def _tell(what: str) -> None:
    sys.stderr.write(f"inferd: {what}\n")
