"""A note of the pool that memd has on a GPU, for the memd after it, whose memory may not be back yet."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class FormerPool:
    """A pool of `size_bytes` on the GPU `uuid`, whose memory may not be back yet."""

    uuid: str
    size_bytes: int


class PoolNote:
    """A file beside memd's socket that is there from the making of a GPU pool until all of its memory is given back.

    So it stays when memd is killed, or when workers keep their mapping after memd's end.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> FormerPool | None:
        """The pool of the memd before; None if there is nothing to wait for."""
        try:
            words = json.loads(self._path.read_text(encoding="utf-8"))
            return FormerPool(str(words["uuid"]), int(words["size_bytes"]))
        except (OSError, ValueError, TypeError, KeyError):  # none, or one that was cut short when its memd was killed
            return None

    def write(self, pool: FormerPool) -> None:
        """From now on there is this pool."""
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(pool)), encoding="utf-8")
        os.replace(fresh, self._path)  # noqa: PTH105  whole or not at all

    def remove(self) -> None:
        """The memory is given back."""
        self._path.unlink(missing_ok=True)
