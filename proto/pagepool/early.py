"""The first thing a daemon does. Imports next to nothing, since it comes before the imports that take long."""

from __future__ import annotations

import signal
from types import FrameType


def quit_on_sigterm() -> None:
    """Makes SIGTERM an orderly exit with code 0 from the first moment on, until lifecycle.run takes over."""

    def leave(_signal: int, _frame: FrameType | None) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, leave)
