"""Waiting at a terminal for a moment, or for the key that ends a display."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager

QUIT = frozenset(b"qQ")


@contextmanager
def quit_key() -> Iterator[Callable[[float], bool]]:
    """Within it, a function waits so many seconds and says whether q was pressed; without a terminal it only waits.

    Keys are not echoed, and Ctrl-C stays KeyboardInterrupt. The terminal is as it was afterwards.
    """
    if not sys.stdin.isatty():
        yield _just_wait
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    try:
        yield lambda seconds: _pressed(terminal, seconds)
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _pressed(terminal: int, seconds: float) -> bool:
    """Waits on whatever else is pressed, so that a leaning elbow costs the daemons nothing; a terminal's end is a q."""
    deadline = time.monotonic() + seconds
    while select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0]:
        keys = os.read(terminal, 64)
        if not keys or QUIT & set(keys):
            return True
    return False


def _just_wait(seconds: float) -> bool:
    time.sleep(seconds)
    return False
