"""`inferd --print-geometry`: what a model asks of a pool, without a memd."""

from __future__ import annotations

import sys
from pathlib import Path

from google.protobuf import json_format

from inferd.model.digest import digest
from inferd.model.load import load_model
from inferd.model.source import resolve
from pagekernels.layout import MIN_BLOCK_SIZE
from pagepool_client.wire import geometry_message


def geometry_json(model: str, dtype: str, cache: Path) -> str:
    """The model's Geometry as `memd --geometry` reads it. Raises PagepoolError if the model cannot be served."""
    folder = resolve(model, cache, _tell)
    served = load_model(folder, name=model, dtype=dtype, tell=_tell)
    # The geometry says nothing of the block size: that is memd's.
    message = geometry_message(served.layout(MIN_BLOCK_SIZE), digest(folder, cache), model)
    return str(json_format.MessageToJson(message))


def _tell(what: str) -> None:
    sys.stderr.write(f"inferd: {what}\n")
